#!lua flags=allow-oom
-- A draining worker gives a job back: to the stream that is read before all others, with the attempt refunded.
-- A job whose end was asked for ends here instead.
--
-- KEYS  1 job hash  2 resume stream  3 stats  4 log and channel  5 outbox
-- ARGV  1 id  2 owner  3 epoch  4 wake channel  5 lane number
-- Answers 1 given back (also when it was by an earlier call), 0 no longer the caller's: nothing written.
-- include _give_back.lua
local job = read_job(ARGV[1])
if not job or job.owner ~= ARGV[2] or int(job.epoch) ~= ARGV[3] then
  return 0
end
if job.status ~= 'running' then
  return job.status == 'queued' and 1 or 0
end
if job.cancel then
  end_here(job, 'cancelled', nil)
  return 1
end

job.attempts = math.max(0, job.attempts - 1)
give_back(job, KEYS[2])
redis.call('PUBLISH', ARGV[4], ARGV[5])
return 1
