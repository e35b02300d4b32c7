-- Put in front of every script, behind its `#!lua` line.
--
-- Names that are known before the call come in KEYS. Names that depend on data (`job:<id>`, `ev:<id>`, the stream that
-- holds a job's entry) are made here from the prefix of KEYS[1]: all of them carry the same hash tag, so they are in the
-- same slot, and a script never leaves it.
local PREFIX = string.match(KEYS[1], '^rw:{[^}]+}:')
local GROUP = 'workers'
local WIRE_VERSION = 1

-- Microseconds of Redis's clock.
local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A number as Redis stores it: digits only, also above 1e15.
local function int(number)
  return string.format('%.0f', number)
end

-- Expiry (Unix ms) of a key that many jobs share: it may rise, never fall.
local function keep_until(key, expires_ms)
  if redis.call('PEXPIREAT', key, expires_ms, 'GT') == 0 then
    redis.call('PEXPIREAT', key, expires_ms, 'NX')
  end
end

-- Expiry of counters that were made by something else than a submit, because somebody deleted those before.
local STRAY_MS = 24 * 3600 * 1000

-- Add to the exact counters of a state, `delayed`, `queued` or `running`: in total, and by class and bucket.
local function count(state, class, bucket, jobs, tokens)
  local stats, place = PREFIX .. 'stats', ':' .. class .. ':' .. bucket
  tokens = int(tokens + 0) -- never "-0", which HINCRBY refuses
  redis.call('HINCRBY', stats, state .. '_jobs', jobs)
  redis.call('HINCRBY', stats, state .. '_tokens', tokens)
  redis.call('HINCRBY', stats, state .. '_jobs' .. place, jobs)
  redis.call('HINCRBY', stats, state .. '_tokens' .. place, tokens)
  redis.call('PEXPIRE', stats, STRAY_MS, 'NX')
end

-- Count jobs, delayed, queued or running, that pin an adapter's content; the counter is gone at 0. `adapter` nil: the base model.
local function pin(adapter, jobs)
  local stats = PREFIX .. 'stats'
  if adapter and redis.call('HINCRBY', stats, 'a:' .. adapter, jobs) <= 0 then
    redis.call('HDEL', stats, 'a:' .. adapter)
  end
end

local IS_CLASS = { high = true, normal = true, batch = true }

-- A tenant's share of the queue; 1 where nothing, or nonsense, is said.
local function weight_of(text)
  local weight = tonumber(text or 1) or 1
  return weight >= 0.01 and weight <= 100 and weight or 1
end

-- Days that usage is kept.
local function days_of(text)
  local days = tonumber(text or 0) or 0
  return days >= 0 and days <= 3650 and days or 0
end

-- The job's fields as a table, without envelope and result; nil if there is no such job, or something else in its place.
local function read_job(id)
  local key = PREFIX .. 'job:' .. id
  local v = redis.pcall('HMGET', key, 'status', 'owner', 'epoch', 'attempts', 'stream', 'entry', 'cancel', 'class',
    'bucket', 'cost', 'seqs', 'prompt', 'seq', 'callback', 'deaths', 'alone_deaths', 'alone', 'deadline_ms',
    'expires_ms', 'retention_ms', 'submitted_us', 'adapter', 'due_us', 'tenant', 'weight', 'account', 'usage_days')
  if v.err or not (v[1] and v[5] and v[6] and IS_CLASS[v[8]] and tonumber(v[9]) and tonumber(v[19] or v[18])) then
    return nil
  end
  return {
    id = id, key = key, status = v[1], owner = v[2], epoch = tonumber(v[3]) or 0, attempts = tonumber(v[4]) or 0,
    stream = v[5], entry = v[6], cancel = v[7] == '1', class = v[8], bucket = v[9], cost = tonumber(v[10]) or 0,
    seqs = tonumber(v[11]) or 1, prompt = tonumber(v[12]) or 0, seq = tonumber(v[13]) or 0, callback = v[14] == '1',
    deaths = tonumber(v[15]) or 0, alone_deaths = tonumber(v[16]) or 0, alone = v[17] == '1',
    deadline_ms = tonumber(v[18]) or 0, expires_ms = v[19] or v[18], retention_ms = v[20] or '0',
    adapter = v[22] or nil, tenant = v[24] or nil, weight = weight_of(v[25]), account = v[26] or nil,
    usage_days = days_of(v[27]),
    -- Since when it waits for a worker: of a job that was delayed, since its time came.
    waiting_us = tonumber(v[23] or v[21]) or 0,
  }
end

-- Put a job into a stream once more, behind all others; answers the entry's id.
local function add_entry(stream, job)
  return redis.call('XADD', stream, '*', 'id', job.id, 'cost', int(job.cost), 'class', job.class, 'bucket', job.bucket,
    unpack(job.adapter and { 'adapter', job.adapter } or {}))
end

-- Acknowledged and deleted together, so that the streams hold exactly what is queued or running.
local function remove_entry(stream, entry)
  redis.call('XACK', PREFIX .. stream, GROUP, entry)
  redis.call('XDEL', PREFIX .. stream, entry)
end

-- The lane's index of jobs: by tenant in the order of their ids, and by when their hashes expire. Members begin with the
-- last part of the id, which sorts by time.
local function index_job(id, tenant, expires_ms)
  local unique, index, expiring = string.sub(id, -32), PREFIX .. 'jobs:' .. tenant, PREFIX .. 'expiring'
  -- pcall: what somebody else wrote there hides jobs from lists, and stops none.
  redis.pcall('ZADD', index, 0, unique)
  redis.pcall('ZADD', expiring, expires_ms, unique .. ':' .. tenant)
  keep_until(index, expires_ms)
  keep_until(expiring, expires_ms)
end

local function unindex_job(id, tenant)
  redis.pcall('ZREM', PREFIX .. 'jobs:' .. tenant, string.sub(id, -32))
  redis.pcall('ZREM', PREFIX .. 'expiring', string.sub(id, -32) .. ':' .. tenant)
end

local DAY_MS = 24 * 3600 * 1000

-- Count what a job has used, by its tenant, key, model and day. In the step that ends it, which is one: so once, whoever
-- dies. `used` are prompt, cached and completion tokens.
local function add_usage(job, now_ms, used)
  if not (job.account and job.tenant) then
    return
  end
  local day = math.floor(now_ms / DAY_MS)
  local tenants = PREFIX .. 'usage:' .. int(day)
  local usage, expires_ms = tenants .. ':' .. job.tenant, int((day + 1 + job.usage_days) * DAY_MS)
  -- pcall: what somebody else wrote there must not keep a job from ending.
  redis.pcall('SADD', tenants, job.tenant)
  redis.pcall('HINCRBY', usage, job.account .. '|requests', 1)
  for i, field in ipairs({ '|prompt', '|cached', '|completion' }) do
    redis.pcall('HINCRBY', usage, job.account .. field, int(math.max(0, tonumber(used[i]) or 0)))
  end
  keep_until(tenants, expires_ms)
  keep_until(usage, expires_ms)
end

-- How long a job that has ended is kept at least until somebody has taken its webhook over.
local OWED_MS = 24 * 3600 * 1000

-- Enter an ended job that owes a webhook into the outbox; answers when the job expires, unless it is taken over before.
local function owe(job, status, now_ms)
  local outbox, expires_ms = PREFIX .. 'outbox', now_ms + math.max(tonumber(job.retention_ms), OWED_MS)
  local entry = redis.pcall('XADD', outbox, '*', 'id', job.id, 'status', status)
  if entry.err then
    -- What is there was not written here, so it is no outbox.
    redis.call('DEL', outbox)
    entry = redis.call('XADD', outbox, '*', 'id', job.id, 'status', status)
  end
  redis.call('HSET', job.key, 'owed', entry)
  keep_until(outbox, int(expires_ms))
  return expires_ms
end

-- The end of a job that is delayed, queued or running: entry, counters, result, usage, expiry, outbox.
local function close(job, status, result, used)
  if job.status == 'delayed' then
    redis.pcall('ZREM', PREFIX .. 'delayed', job.id)
  else
    remove_entry(job.stream, job.entry)
  end
  count(job.status, job.class, job.bucket, -1, -job.cost)
  pin(job.adapter, -1)
  redis.call('HINCRBY', PREFIX .. 'stats', 'ended_jobs', 1)
  redis.call('HINCRBY', PREFIX .. 'stats', 'ended_tokens', int(job.cost))
  local now = now_us()
  redis.call('HSET', job.key, 'status', status, 'result', result, 'finished_us', int(now))
  local expires_ms = math.floor(now / 1000) + job.retention_ms
  redis.call('PEXPIRE', PREFIX .. 'ev:' .. job.id, job.retention_ms)
  if job.callback then
    expires_ms = owe(job, status, math.floor(now / 1000))
  end
  redis.call('PEXPIREAT', job.key, int(expires_ms))
  if job.tenant then
    index_job(job.id, job.tenant, int(expires_ms))
  end
  add_usage(job, math.floor(now / 1000), used)
end

local function add_frame(choices, frame)
  for _, delta in ipairs(frame.choices or {}) do
    local choice = choices[(delta.index or 0) + 1]
    if choice then
      for _, token in ipairs(delta.ids or {}) do
        choice.token_ids[#choice.token_ids + 1] = token
      end
      choice.pieces[#choice.pieces + 1] = type(delta.text) == 'string' and delta.text or ''
      choice.finish_reason = choice.finish_reason or delta.finish
      choice.stop_reason = choice.stop_reason or delta.stop
    end
  end
end

-- One choice per sequence as far as it was published. Log probabilities stay in the log.
local function published(job)
  local choices = {}
  for i = 1, job.seqs do
    choices[i] = { index = i - 1, token_ids = {}, pieces = {} }
  end
  local log = redis.pcall('XRANGE', PREFIX .. 'ev:' .. job.id, '-', '+')
  for _, entry in ipairs(log.err and {} or log) do
    -- Frames of nothing but a prompt's log probabilities can be many and large: they are not even decoded.
    if string.find(entry[2][2], 'choices', 1, true) then
      local read, frame = pcall(cmsgpack.unpack, entry[2][2])
      -- pcall: a frame that somebody else wrote may be of any shape; what it says is left out.
      pcall(add_frame, choices, read and type(frame) == 'table' and frame or {})
    end
  end
  return choices
end

-- End a job here, with no worker: last frame, result, and whatever `close` does. The fence rises, so that an owner that
-- is still about can publish nothing more. `failure` is nil for a cancelled job.
local function end_here(job, status, failure)
  local epoch, seq, tokens = job.epoch + 1, job.seq + 1, 0
  local choices, open = published(job), {}
  for _, choice in ipairs(choices) do
    choice.text = table.concat(choice.pieces)
    choice.pieces = nil
    tokens = tokens + #choice.token_ids
    if not choice.finish_reason then
      choice.finish_reason = failure and 'error' or 'abort'
      open[#open + 1] = { index = choice.index, offset = #choice.token_ids, finish = choice.finish_reason }
    end
  end
  local usage = { prompt_tokens = job.prompt, completion_tokens = tokens, cached_tokens = 0 }
  local frame = cmsgpack.pack({
    v = WIRE_VERSION, seq = seq, epoch = epoch, kind = failure and 'error' or 'done', status = status, usage = usage,
    choices = open, error = failure,
  })
  local result = cmsgpack.pack({
    v = WIRE_VERSION, id = job.id, status = status, choices = choices, usage = usage, error = failure,
  })
  local log = PREFIX .. 'ev:' .. job.id
  if redis.pcall('XADD', log, int(seq) .. '-0', 'f', frame).err then
    -- What is there was not written here, so it is not the job's log.
    redis.call('DEL', log)
    redis.call('XADD', log, int(seq) .. '-0', 'f', frame)
  end
  redis.call('PUBLISH', log, frame)
  redis.call('HSET', job.key, 'seq', seq, 'epoch', epoch, 'owner', '')
  -- Of a prompt that no worker has begun, nothing was computed.
  close(job, status, result, { job.seq > 0 and job.prompt or 0, 0, tokens })
end

-- Keep a job that is given up for an operator, envelope and all, and end it with an error.
local function bury(job, reason, failure)
  local letter = redis.call('XADD', PREFIX .. 'dead', 'MAXLEN', '~', 10000, '*', 'id', job.id, 'reason', reason,
    'attempts', job.attempts, 'error', cmsgpack.pack(failure), 'env', redis.call('HGET', job.key, 'env') or '')
  redis.call('HSET', job.key, 'letter', letter)
  end_here(job, 'failed', failure)
end
