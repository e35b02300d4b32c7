#!lua flags=allow-oom
-- End a delayed or queued job here and now; flag a running one and tell its worker.
--
-- KEYS  1 job hash  2 log and channel  3 stats  4 outbox
-- ARGV  1 id  2 control channel  3 message for it
-- Answers the status after the call: `cancelled`, `running` (flagged), or how the job had ended; nil if unknown.
local job = read_job(ARGV[1])
if not job then
  return nil
end
if job.status == 'queued' or job.status == 'delayed' then
  end_here(job, 'cancelled', nil)
  return 'cancelled'
end
if job.status == 'running' then
  redis.call('HSET', job.key, 'cancel', 1)
  redis.call('PUBLISH', ARGV[2], ARGV[3])
end
return job.status
