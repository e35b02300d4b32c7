#!lua flags=allow-oom
-- Put a live job back that no stream holds, or that is running and pending on nobody: stream or consumer was deleted.
-- Whoever still runs it is fenced.
--
-- KEYS  1 job hash  2 queue stream that it names  3 stats
-- ARGV  1 id  2 the stream's name behind the prefix  3 wake channel  4 lane number
-- Answers 1 put back, 0 nothing to do.
local stream = KEYS[2]
local job = read_job(ARGV[1])
if job and job.status == 'delayed' then
  -- Answers 0 where it is waiting for its time, as it should.
  local start_ms = redis.call('HGET', job.key, 'start_ms') or 0
  local added = redis.call('ZADD', PREFIX .. 'delayed', 'NX', start_ms, job.id)
  keep_until(PREFIX .. 'delayed', job.expires_ms)
  return added
end
if not job or job.stream ~= ARGV[2] or (job.status ~= 'queued' and job.status ~= 'running') then
  return 0
end
if redis.call('EXISTS', stream) == 0 then
  redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
elseif #redis.call('XRANGE', stream, job.entry, job.entry) > 0 then
  -- pcall: a group that was deleted by hand is made again by the next pull.
  local pending = job.status == 'running' and redis.pcall('XPENDING', stream, GROUP, job.entry, job.entry, 1)
  if not pending or pending.err or #pending > 0 then
    return 0
  end
  -- Its consumer was deleted by hand, so nobody would ever miss the one who runs it.
  redis.call('XDEL', stream, job.entry)
end
local entry = add_entry(stream, job)
redis.call('HSET', job.key, 'status', 'queued', 'owner', '', 'epoch', int(job.epoch + 1), 'entry', entry, 'alone', 0)
if job.status == 'running' then
  count('running', job.class, job.bucket, -1, -job.cost)
  count('queued', job.class, job.bucket, 1, job.cost)
end
keep_until(stream, job.expires_ms)
keep_until(KEYS[3], job.expires_ms)
redis.call('PUBLISH', ARGV[3], ARGV[4])
return 1
