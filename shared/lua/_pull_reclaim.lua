-- Part of pull: taking back what has been idle past the lease.

-- One entry that has been idle past the lease.
local function reclaim(stream, class, bucket, entry_id)
  local job = orphaned(stream, class, bucket, entry_id)
  if not job then
    return
  end
  local admission = admissible(job.deaths)
  if admission == 'no' or not fits(LEVELS[job.class], job) then
    return
  end
  redis.call('XCLAIM', stream, GROUP, owner, 0, entry_id, 'JUSTID')
  job.attempts = job.attempts + (charge and 1 or 0)
  reclaimed = reclaimed + 1
  -- For traces: who is dead can tell nothing of its attempt.
  local taken_us = redis.call('HGET', job.key, 'taken_us')
  if taken_us then
    redis.call('HSET', job.key, 'lost', int(job.epoch + 1) .. ' ' .. job.owner .. ' ' .. taken_us)
  end
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

