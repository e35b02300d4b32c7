-- Part of pull: what may be taken, and how. Its variables are those of pull.lua.

local function fits(level, job)
  if idle and #jobs == 0 and job.cost <= max_cost then
    return true
  end
  return job.cost <= max_cost and job.seqs <= sequences[level] and job.cost <= tokens[level]
end

-- Milliseconds since a job was submitted, or its time came.
local function waited_ms(job)
  return now_ms - math.floor(job.waiting_us / 1000)
end

-- Whether the caller has a place for the job's adapter.
local function suits(job)
  if not job.adapter or has_adapter[job.adapter] or more_adapters > 0 or (idle and #jobs == 0) then
    return true
  end
  return more_adapters == 0 and waited_ms(job) > ADAPTER_PATIENCE_MS
end

local LEVELS = { high = 1, normal = 2, batch = 3 }
-- Set while jobs are taken that have waited so long that they go before the higher classes.
local aged = false

-- What is admitted in one class is no longer free for it and for those below. A job that goes before its turn counts for
-- all classes: else a higher one would take its place at once.
local function spend(job)
  for i = aged and 1 or LEVELS[job.class], #CLASSES do
    sequences[i] = sequences[i] - job.seqs
    tokens[i] = tokens[i] - job.cost
  end
end

-- Whether suspicion lets the caller have a job now: `yes`, `alone`, or `no`.
local function admissible(deaths)
  if deaths >= ALONE_AFTER then
    if idle and #jobs == 0 then
      return 'alone'
    end
    alone_waiting = alone_waiting + 1
    return 'no'
  end
  return (deaths < SUSPECT_AFTER or suspects > 0) and 'yes' or 'no'
end

-- Make the job the caller's. Its entry is in the caller's pending list already.
local function grant(job, alone)
  job.epoch, job.alone, job.owner, job.status = job.epoch + 1, alone, owner, 'running'
  redis.call('HSET', job.key, 'status', 'running', 'owner', owner, 'epoch', int(job.epoch),
    'attempts', int(job.attempts), 'deaths', job.deaths, 'alone_deaths', job.alone_deaths, 'alone', alone and 1 or 0,
    'taken_us', int(now))
  redis.call('HSETNX', job.key, 'started_us', int(now))
  if job.deaths >= SUSPECT_AFTER then
    suspects = suspects - 1
  end
  if job.adapter and not has_adapter[job.adapter] then
    has_adapter[job.adapter], more_adapters = true, more_adapters - 1
  end
  spend(job)
  full = full or alone
  last_expiry = math.max(last_expiry, tonumber(job.expires_ms))
  answer_job(job)
end

-- The first undelivered entry of each stream that was looked at: `false` where there is none.
local heads, delivered = {}, {}

local function find_head(stream, class, bucket)
  if redis.call('XLEN', stream) == 0 then
    return false
  end
  if not delivered[stream] then
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
      local fields = {}
      for i = 1, #group, 2 do
        fields[group[i]] = group[i + 1]
      end
      if fields.name == GROUP then
        delivered[stream] = fields['last-delivered-id']
      end
    end
    if not delivered[stream] then
      redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
      delivered[stream] = '0-0'
    end
  end
  while true do
    local found = redis.call('XRANGE', stream, '(' .. delivered[stream], '+', 'COUNT', 1)[1]
    if not found then
      return false
    end
    local entry = parse(found, class, bucket)
    local job = entry.job and read_job(entry.job)
    if not job then
      drop_entry(stream, entry, 'queued')
    elseif job.entry ~= entry.id or PREFIX .. job.stream ~= stream then
      redis.call('XDEL', stream, entry.id)
    elseif job.status == 'running' then
      -- The group was lost and made again: the entry belongs in its owner's pending list.
      redis.call('XREADGROUP', 'GROUP', GROUP, job.owner, 'COUNT', 1, 'STREAMS', stream, '>')
      delivered[stream] = entry.id
    elseif alive(job) then
      return job
    end
  end
end

local function head(stream, class, bucket)
  if heads[stream] == nil then
    heads[stream] = find_head(stream, class, bucket)
  end
  return heads[stream]
end

-- Take a stream's head: it is the first undelivered entry, so that is what XREADGROUP gives.
local function take(stream, job, alone)
  redis.call('XREADGROUP', 'GROUP', GROUP, owner, 'COUNT', 1, 'STREAMS', stream, '>')
  delivered[stream], heads[stream] = job.entry, nil
  count('queued', job.class, job.bucket, -1, -job.cost)
  count('running', job.class, job.bucket, 1, job.cost)
  job.attempts = job.attempts + 1
  grant(job, alone)
end

-- Jobs that were given back go first. One that this caller may not have now goes to the end, so that it is in
-- nobody's way; a few in each pull.
local function serve_resume()
  local stream, first, put_back = KEYS[3], nil, 0
  while not full and put_back < 16 do
    local job = head(stream)
    if not job or job.id == first then
      return
    end
    local admission = admissible(job.deaths)
    if admission == 'no' or job.cost > max_cost then
      first, put_back = first or job.id, put_back + 1
      redis.call('XDEL', stream, job.entry)
      redis.call('HSET', job.key, 'entry', add_entry(stream, job))
      heads[stream] = nil
    elseif fits(LEVELS[job.class], job) then
      take(stream, job, admission == 'alone')
    else
      return
    end
  end
end
