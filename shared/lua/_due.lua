-- Delayed jobs whose time has come, for scripts that put them into their streams.

-- Queue at most so many of them, the earliest first; answers their ids.
local function start_due(now, most)
  local delayed, started = PREFIX .. 'delayed', {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', delayed, '-inf', int(math.floor(now / 1000)), 'LIMIT', 0, most)) do
    local job = read_job(id)
    redis.call('ZREM', delayed, id)
    -- Where the hash is gone the counters are wrong, which a recount mends.
    if job and job.status == 'delayed' then
      local stream = PREFIX .. job.stream
      if redis.call('EXISTS', stream) == 0 then
        redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
      end
      redis.call('HSET', job.key, 'status', 'queued', 'entry', add_entry(stream, job), 'due_us', int(now))
      count('delayed', job.class, job.bucket, -1, -job.cost)
      count('queued', job.class, job.bucket, 1, job.cost)
      keep_until(stream, job.expires_ms)
      started[#started + 1] = id
    end
  end
  return started
end
