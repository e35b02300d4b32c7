#!lua flags=allow-oom
-- Remove a job with all that is kept of it; one that is delayed or queued ends first, as with `cancel`.
--
-- KEYS  1 job hash  2 log and channel  3 stats  4 outbox  5 dead letters
-- ARGV  1 id
-- Answers the status that it had: of a running one nothing is removed; nil if unknown.
local job = read_job(ARGV[1])
if not job then
  return nil
end
if job.status == 'running' then
  return job.status
end
if job.status == 'queued' or job.status == 'delayed' then
  end_here(job, 'cancelled', nil)
end
local letter = redis.call('HGET', job.key, 'letter')
if letter then
  redis.call('XDEL', KEYS[5], letter)
end
if job.tenant then
  unindex_job(job.id, job.tenant)
end
redis.call('DEL', job.key, KEYS[2])
return job.status
