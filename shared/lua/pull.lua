#!lua flags=allow-oom
-- A worker takes what it can admit from one lane. allow-oom: when memory is full of queued jobs, only running them
-- frees it.
--
-- KEYS  1 stats  2 record of the caller's last pull  3 resume stream  4... class streams, bucket by bucket
--       28 dead letters  29 outbox
-- ARGV  1 owner  2 token of the last answer that the caller got  3 lease in ms  4 most attempts
--       5 1: take back what is idle past the lease  6 1: and charge it  7 1: the caller holds no job at all
--       8 suspects that it may take  9 largest cost that it can ever hold
--       10 11 12 sequences and 13 14 15 tokens that it can admit, for high, normal, batch
-- Answers nil for an empty lane, else {token, jobs, ended, buried, reclaimed, waiting for an idle worker}:
--   jobs   {id, envelope, epoch, attempts, last seq, deadline in ms, microseconds since submit, suspect, alone} each
--   ended  id, status, id, status ...      buried  ids, which are in `ended` too
local CLASSES, BUCKETS = { 'high', 'normal', 'batch' }, 8
-- Deficit round robin: tokens that a bucket may take more at each of its turns.
local QUANTUM = 1024
-- A job that has waited this long for room is waited for: smaller ones behind it no longer go first.
local PATIENCE_MS = 1000
-- A job of a lower class that has waited this long goes before the higher classes, one in each pull.
local AGED_MS = 30000
-- Deaths of its workers after which a job runs alone, and deaths while alone before it is buried.
local ALONE_AFTER, ALONE_DEATHS = 2, 2
local EXPIRED = {
  message = 'the deadline passed before the job ended', type = 'timeout_error', code = 'deadline_exceeded', status = 504,
}
local BURIED = {
  message = 'the job was given up: its workers died again and again', type = 'server_error', code = 'job_failed',
  status = 500,
}

local stats, record, owner = KEYS[1], KEYS[2], ARGV[1]
local lease_ms, max_attempts, max_cost = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[9])
local may_reclaim, charge, idle = ARGV[5] == '1', ARGV[6] == '1', ARGV[7] == '1'
local suspects = tonumber(ARGV[8])
local sequences = { tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12]) }
local tokens = { tonumber(ARGV[13]), tonumber(ARGV[14]), tonumber(ARGV[15]) }
if #KEYS ~= 29 or #sequences ~= 3 or #tokens ~= 3 or not (lease_ms and max_attempts and max_cost and suspects) then
  return redis.error_reply('RWARG pull: a number is missing')
end

local totals = redis.call('HMGET', stats, 'queued_jobs', 'running_jobs')
local queued, running = tonumber(totals[1]) or 0, tonumber(totals[2]) or 0
if queued <= 0 and running <= 0 then
  return nil
end

local now = now_us()
local now_ms = math.floor(now / 1000)
local token = redis.call('GET', record)
local granted = {}
if token then
  granted = cmsgpack.unpack(token)
  token = table.remove(granted, 1)
else
  token = ''
end
local jobs, ended, buried, reclaimed, alone_waiting, full, last_expiry = {}, {}, {}, 0, 0, false, 0

local function answer_job(job)
  jobs[#jobs + 1] = {
    job.id, redis.call('HGET', job.key, 'env'), job.epoch, job.attempts, job.seq, job.deadline_ms,
    now - job.submitted_us, job.deaths > 0 and 1 or 0, job.alone and 1 or 0,
  }
end

local function answer()
  return { token, jobs, ended, buried, reclaimed, alone_waiting }
end

-- An answer that never arrived: the caller owns jobs that it does not know of. Say it again, and nothing new.
if token ~= ARGV[2] then
  for i = 1, #granted, 2 do
    local job = read_job(granted[i])
    if job and job.status == 'running' and job.owner == owner and job.epoch == granted[i + 1] then
      redis.pcall('XCLAIM', PREFIX .. job.stream, GROUP, owner, 0, job.entry, 'JUSTID')
      answer_job(job)
    end
  end
  if #jobs > 0 then
    return answer()
  end
end

local function note_end(job, status)
  ended[#ended + 1] = job.id
  ended[#ended + 1] = status
end

-- Whether a job can go on; one that was cancelled or is too late ends here.
local function alive(job)
  if job.cancel then
    end_here(job, 'cancelled', nil)
    note_end(job, 'cancelled')
  elseif job.deadline_ms <= now_ms then
    end_here(job, 'expired', EXPIRED)
    note_end(job, 'expired')
  else
    return true
  end
  return false
end

-- An entry that no job stands behind: its hash has expired, or was deleted.
local function drop_entry(stream, entry, state)
  redis.call('XACK', stream, GROUP, entry.id)
  redis.call('XDEL', stream, entry.id)
  if entry.job and entry.class and entry.bucket then
    count(state, entry.class, entry.bucket, -1, -entry.cost)
  end
end

local function fits(level, job)
  if idle and #jobs == 0 and job.cost <= max_cost then
    return true
  end
  return job.cost <= max_cost and job.seqs <= sequences[level] and job.cost <= tokens[level]
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
  return (deaths == 0 or suspects > 0) and 'yes' or 'no'
end

-- Make the job the caller's. Its entry is in the caller's pending list already.
local function grant(job, alone)
  job.epoch, job.alone, job.owner, job.status = job.epoch + 1, alone, owner, 'running'
  redis.call('HSET', job.key, 'status', 'running', 'owner', owner, 'epoch', int(job.epoch),
    'attempts', int(job.attempts), 'deaths', job.deaths, 'alone_deaths', job.alone_deaths, 'alone', alone and 1 or 0)
  redis.call('HSETNX', job.key, 'started_us', int(now))
  if job.deaths > 0 then
    suspects = suspects - 1
  end
  spend(job)
  full = full or alone
  last_expiry = math.max(last_expiry, tonumber(job.expires_ms))
  answer_job(job)
end

-- Reading an entry's fields: `id` and `cost`; in the resume stream `class` and `bucket` too.
local function parse(entry, class, bucket)
  local parsed = { id = entry[1], class = class, bucket = bucket, cost = 0 }
  local fields = entry[2]
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then
      parsed.job = fields[i + 1]
    elseif fields[i] == 'cost' then
      parsed.cost = tonumber(fields[i + 1]) or 0
    elseif fields[i] == 'class' then
      parsed.class = fields[i + 1]
    elseif fields[i] == 'bucket' then
      parsed.bucket = fields[i + 1]
    end
  end
  return parsed
end

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

local function reclaim_stream(stream, class, bucket)
  local from = '-'
  if redis.call('XLEN', stream) == 0 then
    return
  end
  while not full do
    -- pcall: the group may have been deleted by hand; find_head makes it again.
    local idle_entries = redis.pcall('XPENDING', stream, GROUP, 'IDLE', lease_ms, from, '+', 64)
    if idle_entries.err or #idle_entries == 0 then
      return
    end
    for _, pending in ipairs(idle_entries) do
      from = '(' .. pending[1]
      if pending[2] ~= owner and not full then
        reclaim(stream, class, bucket, pending[1])
      end
    end
  end
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
-- nobody's way.
local function serve_resume()
  local stream, first = KEYS[3], nil
  while not full do
    local job = head(stream)
    if not job or job.id == first then
      return
    end
    local admission = admissible(job.deaths)
    if admission == 'no' or job.cost > max_cost then
      first = first or job.id
      redis.call('XDEL', stream, job.entry)
      local entry = redis.call('XADD', stream, '*', 'id', job.id, 'cost', int(job.cost), 'class', job.class,
        'bucket', job.bucket)
      redis.call('HSET', job.key, 'entry', entry)
      heads[stream] = nil
    elseif fits(LEVELS[job.class], job) then
      take(stream, job, admission == 'alone')
    else
      return
    end
  end
end

local function stream_of(level, bucket)
  return KEYS[4 + (level - 1) * BUCKETS + bucket]
end

-- Milliseconds since a job was submitted.
local function waited_ms(job)
  return now_ms - math.floor(job.submitted_us / 1000)
end

-- By class: the bucket whose turn it is, the one whose head did not fit at its turn (or -1), and by bucket whether
-- anything is queued and how many tokens it has saved up.
local function read_turns()
  local fields, all = {}, {}
  for _, class in ipairs(CLASSES) do
    fields[#fields + 1] = 'turn:' .. class
    fields[#fields + 1] = 'passed_over:' .. class
    for bucket = 0, BUCKETS - 1 do
      fields[#fields + 1] = 'queued_jobs:' .. class .. ':' .. bucket
      fields[#fields + 1] = 'deficit:' .. class .. ':' .. bucket
    end
  end
  local v = redis.call('HMGET', stats, unpack(fields))
  for level = 1, #CLASSES do
    local base = (level - 1) * (2 * BUCKETS + 2) + 1
    local turns = { turn = tonumber(v[base]) or 0, passed_over = tonumber(v[base + 1]) or -1, open = {}, deficit = {} }
    for bucket = 0, BUCKETS - 1 do
      local queued_here = tonumber(v[base + 2 + 2 * bucket]) or 0
      turns.open[bucket] = queued_here > 0
      turns.any = turns.any or queued_here > 0
      turns.deficit[bucket] = tonumber(v[base + 3 + 2 * bucket]) or 0
    end
    all[level] = turns
  end
  return all
end

local function write_turns(level, turns)
  local class = CLASSES[level]
  local fields = { 'turn:' .. class, turns.turn, 'passed_over:' .. class, turns.passed_over }
  for bucket = 0, BUCKETS - 1 do
    fields[#fields + 1] = 'deficit:' .. class .. ':' .. bucket
    fields[#fields + 1] = int(turns.deficit[bucket])
  end
  redis.call('HSET', stats, unpack(fields))
end

-- Give every waiting bucket as many turns at once as the first of them needs to afford its head.
local function skip_turns(level, turns, stuck)
  local least
  for bucket = 0, BUCKETS - 1 do
    local job = turns.open[bucket] and not stuck[bucket] and head(stream_of(level, bucket))
    if job then
      local need = math.ceil((job.cost - turns.deficit[bucket]) / QUANTUM)
      least = math.min(least or need, need)
    end
  end
  if least and least > 1 then
    for bucket = 0, BUCKETS - 1 do
      if turns.open[bucket] and not stuck[bucket] then
        turns.deficit[bucket] = turns.deficit[bucket] + (least - 1) * QUANTUM
      end
    end
  end
  return least
end

-- One bucket's turn. Answers `spent` when the budget is, `wait` when an old job needs what is left of it, else how many
-- were taken.
local function serve_bucket(level, bucket, turns, stuck, most)
  local stream, taken = stream_of(level, bucket), 0
  local job = head(stream, CLASSES[level], bucket)
  if job and not stuck[bucket] and turns.deficit[bucket] < job.cost then
    turns.deficit[bucket] = turns.deficit[bucket] + QUANTUM
  end
  while job and not stuck[bucket] and job.cost <= turns.deficit[bucket] do
    if taken >= most or sequences[level] <= 0 or tokens[level] <= 0 then
      return 'spent'
    end
    if not fits(level, job) then
      stuck[bucket] = true
      if job.cost <= max_cost then
        turns.passed_over = bucket
        if waited_ms(job) > PATIENCE_MS then
          return 'wait'
        end
      end
    else
      take(stream, job, false)
      turns.deficit[bucket] = turns.deficit[bucket] - job.cost
      taken = taken + 1
      job = head(stream, CLASSES[level], bucket)
    end
  end
  if not job then
    turns.open[bucket], turns.deficit[bucket] = false, 0
  end
  return taken
end

-- Deficit round robin over the buckets of a class (Shreedhar and Varghese, 1995), at most `most` jobs.
-- Answers false if the lower classes must wait.
local function serve_class(level, turns, most)
  local stuck, go_on, left, again = {}, true, most, true
  local late = turns.passed_over
  turns.passed_over = -1
  if turns.open[late] then
    local taken = serve_bucket(level, late, turns, stuck, left)
    if taken == 'wait' then
      write_turns(level, turns)
      return false
    elseif taken == 'spent' then
      again = false
    else
      left = left - taken
    end
  end
  local first = turns.turn
  while again and left > 0 do
    local taken_in_round = 0
    for i = 0, BUCKETS - 1 do
      local bucket = (first + i) % BUCKETS
      if turns.open[bucket] then
        turns.turn = bucket
        local taken = serve_bucket(level, bucket, turns, stuck, left)
        if taken == 'spent' or taken == 'wait' then
          go_on, again = taken ~= 'wait', false
          break
        end
        taken_in_round, left = taken_in_round + taken, left - taken
      end
      turns.turn = (bucket + 1) % BUCKETS
    end
    first = turns.turn
    if again and taken_in_round == 0 then
      again = skip_turns(level, turns, stuck) ~= nil
    end
  end
  write_turns(level, turns)
  return go_on
end

local function oldest_wait_ms(level, turns)
  local oldest = 0
  for bucket = 0, BUCKETS - 1 do
    local job = turns.open[bucket] and head(stream_of(level, bucket), CLASSES[level], bucket)
    if job then
      oldest = math.max(oldest, waited_ms(job))
    end
  end
  return oldest
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

local function serve_classes()
  local all = read_turns()
  local function room(level)
    return all[level].any and not full and sequences[level] > 0 and tokens[level] > 0
  end
  for level = #CLASSES, 2, -1 do
    if room(level) and oldest_wait_ms(level, all[level]) > AGED_MS then
      aged = true
      serve_class(level, all[level], 1)
      aged = false
    end
  end
  for level = 1, #CLASSES do
    if room(level) and not serve_class(level, all[level], math.huge) then
      return
    end
  end
end

if may_reclaim and running > 0 then
  reclaim_all()
end
if queued > 0 then
  serve_resume()
  serve_classes()
end
if #jobs > 0 then
  token = int(now)
  local grants = { token }
  for _, job in ipairs(jobs) do
    grants[#grants + 1] = job[1]
    grants[#grants + 1] = job[3]
  end
  redis.call('SET', record, cmsgpack.pack(grants), 'PXAT', int(last_expiry))
end
return answer()
