-- Part of pull: taking back what has been idle past the lease.

-- One entry that has been idle past the lease.
local function reclaim(stream, class, bucket, entry_id)
  local found = redis.call('XRANGE', stream, entry_id, entry_id)[1]
  if not found then
    redis.call('XACK', stream, GROUP, entry_id)
    return
  end
  local entry = parse(found, class, bucket)
  local job = entry.job and read_job(entry.job)
  if not job then
    return drop_entry(stream, entry, 'running')
  end
  if job.status ~= 'running' or job.entry ~= entry_id or PREFIX .. job.stream ~= stream then
    redis.call('XACK', stream, GROUP, entry_id)
    redis.call('XDEL', stream, entry_id)
    return
  end
  if not alive(job) then
    return
  end
  if charge then
    job.deaths = job.deaths + 1
    job.alone_deaths = job.alone_deaths + (job.alone and 1 or 0)
    if job.attempts >= max_attempts and job.alone_deaths >= ALONE_DEATHS then
      bury(job, 'workers died', BURIED)
      note_end(job, 'failed')
      buried[#buried + 1] = job.id
      return
    end
  end
  local admission = admissible(job.deaths)
  if admission == 'no' or not fits(LEVELS[job.class], job) then
    return
  end
  redis.call('XCLAIM', stream, GROUP, owner, 0, entry_id, 'JUSTID')
  job.attempts = job.attempts + (charge and 1 or 0)
  reclaimed = reclaimed + 1
  grant(job, admission == 'alone')
end

-- Whether the caller could take any further job of a dead worker.
local function has_room()
  for level = 1, #CLASSES do
    if not full and sequences[level] > 0 and tokens[level] > 0 then
      return true
    end
  end
  return false
end

-- A page of idle entries at least, so that cancelled and expired ones end; more as long as there is room.
local function reclaim_stream(stream, class, bucket)
  local from = '-'
  if full or redis.call('XLEN', stream) == 0 then
    return
  end
  repeat
    -- pcall: the group may have been deleted by hand. Made again, it has its entries pending on their owners: those of
    -- dead ones are idle one lease later.
    local idle_entries = redis.pcall('XPENDING', stream, GROUP, 'IDLE', lease_ms, from, '+', 64)
    if idle_entries.err then
      head(stream, class, bucket)
      return
    end
    if #idle_entries == 0 then
      return
    end
    for _, pending in ipairs(idle_entries) do
      from = '(' .. pending[1]
      if pending[2] ~= owner and not full then
        reclaim(stream, class, bucket, pending[1])
      end
    end
  until not has_room()
end

local function reclaim_all()
  local fields = {}
  for _, class in ipairs(CLASSES) do
    for bucket = 0, BUCKETS - 1 do
      fields[#fields + 1] = 'running_jobs:' .. class .. ':' .. bucket
    end
  end
  local counts = redis.call('HMGET', stats, unpack(fields))
  reclaim_stream(KEYS[3])
  for i, n in ipairs(counts) do
    if n and tonumber(n) > 0 then
      reclaim_stream(KEYS[3 + i], CLASSES[math.floor((i - 1) / BUCKETS) + 1], tostring((i - 1) % BUCKETS))
    end
  end
end

