#!lua flags=allow-oom
-- Remove a job with all that is kept of it; one that is delayed or queued ends first, as with `cancel`.
--
-- A webhook that is not delivered yet is sent without the job's content.
--
-- KEYS  1 job hash  2 log and channel  3 stats  4 outbox  5 dead letters  6 record of its webhook  7 undelivered webhooks
-- ARGV  1 id
-- Answers the status that it had: of a running one nothing is removed; nil if unknown.

-- Leave of a webhook what its receiver has to know: that the job has ended.
local function strip_webhook(job)
  local v = redis.call('HMGET', job.key, 'owed', 'status', 'head', 'submitted_us', 'finished_us')
  if v[1] and redis.call('XDEL', KEYS[4], v[1]) == 1 then
    redis.call('XADD', KEYS[4], '*', 'id', job.id, 'status', v[2], 'deleted', '1', 'head', v[3] or '', 'class', job.class,
      'tenant', job.tenant or '', 'submitted_us', v[4] or '', 'finished_us', v[5] or '')
    return
  end
  local record = redis.call('HMGET', KEYS[6], 'state', 'brief')
  if record[1] == 'pending' and record[2] then
    redis.call('HSET', KEYS[6], 'body', record[2], 'deleted', '1')
  else
    redis.call('DEL', KEYS[6])
    redis.call('ZREM', KEYS[7], job.id)
  end
end

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
if job.callback then
  strip_webhook(job)
end
if job.tenant then
  unindex_job(job.id, job.tenant)
end
redis.call('DEL', job.key, KEYS[2])
return job.status
