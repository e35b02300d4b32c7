#!lua flags=allow-oom
-- Count a lane anew where its counters do not agree with its streams: somebody deleted the one or the other.
--
-- KEYS  1 stats  2 resume stream  3... class streams
-- Answers 1 if it was counted anew.
-- include _entries.lua
local stats, delayed = KEYS[1], PREFIX .. 'delayed'
-- pcall: something else may be there.
local entries = redis.pcall('ZCARD', delayed)
entries = type(entries) == 'number' and entries or 0
for i = 2, #KEYS do
  entries = entries + redis.call('XLEN', KEYS[i])
end
local function is_state(field)
  return string.find(field, '^queued_') or string.find(field, '^running_') or string.find(field, '^delayed_')
end
local old, below = redis.call('HGETALL', stats), false
local counted, pins = 0, 0
for i = 1, #old, 2 do
  local number = tonumber(old[i + 1]) or -1
  if is_state(old[i]) then
    below = below or number < 0
  elseif string.find(old[i], '^a:') then
    below, pins = below or number < 1, pins + number
  end
  if old[i] == 'queued_jobs' or old[i] == 'running_jobs' or old[i] == 'delayed_jobs' then
    counted = counted + number
  end
end
if entries == counted and pins <= counted and not below then
  return 0
end

local counts, expires = {}, 0
local function add(field, amount)
  counts[field] = (counts[field] or 0) + amount
end
for _, field in ipairs(redis.call('HKEYS', stats)) do
  if is_state(field) then
    counts[field] = 0
  elseif string.find(field, '^a:') then
    redis.call('HDEL', stats, field)
  end
end
local function add_job(job)
  local place = ':' .. job.class .. ':' .. job.bucket
  add(job.status .. '_jobs', 1)
  add(job.status .. '_tokens', job.cost)
  add(job.status .. '_jobs' .. place, 1)
  add(job.status .. '_tokens' .. place, job.cost)
  if job.adapter then
    add('a:' .. job.adapter, 1)
  end
  expires = math.max(expires, tonumber(job.expires_ms))
end
local waiting = redis.pcall('ZRANGE', delayed, 0, -1)
for _, id in ipairs(waiting.err and {} or waiting) do
  local job = read_job(id)
  if job and job.status == 'delayed' then
    add_job(job)
  else
    redis.call('ZREM', delayed, id)
  end
end
for i = 2, #KEYS do
  for _, item in ipairs(redis.call('XRANGE', KEYS[i], '-', '+')) do
    local entry = parse(item)
    local job = entry.job and read_job(entry.job)
    if job and job.entry == entry.id and PREFIX .. job.stream == KEYS[i] then
      add_job(job)
    else
      redis.pcall('XACK', KEYS[i], GROUP, entry.id)
      redis.call('XDEL', KEYS[i], entry.id)
    end
  end
end
for field, amount in pairs(counts) do
  redis.call('HSET', stats, field, int(amount))
end
if expires > 0 then
  keep_until(stats, int(expires))
end
return 1
