#!lua flags=allow-oom
-- Give up a job that its owner cannot even read: a dead letter for an operator, an error for its client.
--
-- KEYS  1 job hash  2 log and channel  3 stats  4 dead letters  5 outbox
-- ARGV  1 id  2 owner  3 epoch  4 reason  5 error message  6 error code
-- Answers 1 buried, 0 no longer the caller's: nothing written.
local job = read_job(ARGV[1])
if not job or job.status ~= 'running' or job.owner ~= ARGV[2] or int(job.epoch) ~= ARGV[3] then
  return 0
end
bury(job, ARGV[4], { message = ARGV[5], type = 'server_error', code = ARGV[6], status = 500 })
return 1
