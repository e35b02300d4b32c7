-- Giving a running job back, for scripts that do.

-- Queue a running job in the stream that is read before all others.
local function give_back(job, resume)
  -- First, because it fails where somebody else has written into the counters: nothing else is changed then.
  count('running', job.class, job.bucket, -1, -job.cost)
  count('queued', job.class, job.bucket, 1, job.cost)
  if redis.call('EXISTS', resume) == 0 then
    redis.call('XGROUP', 'CREATE', resume, GROUP, '0', 'MKSTREAM')
  end
  remove_entry(job.stream, job.entry)
  local entry = add_entry(resume, job)
  redis.call('HSET', job.key, 'status', 'queued', 'stream', string.sub(resume, #PREFIX + 1), 'entry', entry,
    'attempts', int(job.attempts), 'alone', 0)
  keep_until(resume, job.expires_ms)
end
