#!lua
-- Accept a job, or say why not. The same id again changes nothing. One with a delay waits beside the queue until its
-- time comes; its deadline counts from then.
--
-- KEYS  1 job hash  2 queue stream  3 stats  4 delayed jobs  5 the tenant's index  6 index by expiry
-- ARGV  1 id  2 envelope  3 class  4 bucket  5 cost in tokens  6 sequences  7 prompt tokens
--       8 deadline, 9 longest run past it, 10 retention, all in ms from now
--       11 most queued jobs, 12 most queued tokens of the lane (-1: no limit)
--       13 1 if a webhook is owed  14 wake channel  15 lane number  16 identity of the adapter, or empty
--       17 ms until it may start (0: now)  18 tenant  19 what lists show of it  20 the submitter's own, kept with it
--       21 `<key>|<model>` under which its usage counts, or empty  22 days that usage is kept  23 weight of its tenant; these
--       three may be left out
-- Answers {code, queued jobs, queued tokens}, delayed ones among them; code 0 accepted, 1 known already, 2 a limit is
-- reached: nothing written.
local key, stream, stats = KEYS[1], KEYS[2], KEYS[3]
local cost, deadline, run, retention = tonumber(ARGV[5]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local max_jobs, max_tokens = tonumber(ARGV[11]), tonumber(ARGV[12])
local delay, tenant = tonumber(ARGV[17]), ARGV[18]
if not (cost and deadline and run and retention and max_jobs and max_tokens and delay and tonumber(ARGV[6])
  and tonumber(ARGV[7])) then
  return redis.error_reply('RWARG submit: a number is missing')
end
if not string.match(stream, ':q:' .. ARGV[3] .. ':' .. ARGV[4] .. '$') then
  return redis.error_reply('RWARG submit: the stream is not that of the class and bucket')
end

-- A few jobs whose hashes have expired leave the index with each one that comes.
local function drop_expired(now_ms)
  local found = redis.pcall('ZRANGEBYSCORE', KEYS[6], '-inf', int(now_ms), 'LIMIT', 0, 4)
  for _, member in ipairs(found.err and {} or found) do
    unindex_job(string.sub(member, 1, 32), string.sub(member, 34))
  end
end

local load = redis.call('HMGET', stats, 'queued_jobs', 'queued_tokens', 'delayed_jobs', 'delayed_tokens')
local jobs = (tonumber(load[1]) or 0) + (tonumber(load[3]) or 0)
local tokens = (tonumber(load[2]) or 0) + (tonumber(load[4]) or 0)
if redis.call('EXISTS', key) == 1 then
  -- A write all the same, so that a WAIT behind this call covers what the first one wrote over another connection.
  local status = redis.pcall('HGET', key, 'status')
  if type(status) == 'string' then
    redis.call('HSET', key, 'status', status)
  end
  return { 1, jobs, tokens }
end
if (max_jobs >= 0 and jobs + 1 > max_jobs) or (max_tokens >= 0 and tokens + cost > max_tokens) then
  return { 2, jobs, tokens }
end

local now = now_us()
local start_ms = math.floor(now / 1000) + delay
local deadline_ms = start_ms + deadline
local expires_ms = int(deadline_ms + run + retention)
local adapter = ARGV[16] ~= '' and ARGV[16] or nil
local pinned = adapter and { 'adapter', adapter } or {}
local status, entry = 'queued', ''
if delay > 0 then
  status = 'delayed'
  redis.call('ZADD', KEYS[4], int(start_ms), ARGV[1])
  keep_until(KEYS[4], expires_ms)
  redis.call('HSET', key, 'start_ms', int(start_ms))
else
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
  entry = redis.call('XADD', stream, '*', 'id', ARGV[1], 'cost', ARGV[5], unpack(pinned))
  keep_until(stream, expires_ms)
end
redis.call('HSET', key, 'env', ARGV[2], 'status', status, 'owner', '', 'epoch', 0, 'attempts', 0,
  'stream', string.sub(stream, #PREFIX + 1), 'entry', entry, 'class', ARGV[3], 'bucket', ARGV[4], 'cost', ARGV[5],
  'seqs', ARGV[6], 'prompt', ARGV[7], 'seq', 0, 'callback', ARGV[13], 'deadline_ms', int(deadline_ms),
  'expires_ms', expires_ms, 'retention_ms', ARGV[10], 'submitted_us', int(now), 'tenant', tenant, 'head', ARGV[19],
  unpack(pinned))
if ARGV[20] ~= '' then
  redis.call('HSET', key, 'attachment', ARGV[20])
end
if (ARGV[21] or '') ~= '' then
  redis.call('HSET', key, 'account', ARGV[21], 'usage_days', ARGV[22] or '0')
end
if (ARGV[23] or '1') ~= '1' then
  redis.call('HSET', key, 'weight', ARGV[23])
end
redis.call('PEXPIREAT', key, expires_ms)
local first = redis.call('EXISTS', stats) == 0
count(status, ARGV[3], ARGV[4], 1, cost)
pin(adapter, 1)
index_job(ARGV[1], tenant, expires_ms)
drop_expired(math.floor(now / 1000))
if first then
  redis.call('PEXPIREAT', stats, expires_ms)
end
keep_until(stats, expires_ms)
if status == 'queued' then
  redis.call('PUBLISH', ARGV[14], ARGV[15])
end
return { 0, jobs + 1, tokens + cost }
