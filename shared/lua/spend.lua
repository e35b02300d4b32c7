#!lua
-- Take requests and tokens from a tenant's token buckets, both or neither. A bucket holds a minute's worth and fills
-- steadily.
--
-- KEYS  1 buckets
-- ARGV  1 requests and 2 tokens per minute (-1: no limit)  3 requests and 4 tokens to take
-- Answers {1 taken or 0, requests left, tokens left, ms until there is enough, or -1 if there never is}; -1 left: no limit.
local MINUTE_MS = 60000
local now = math.floor(now_us() / 1000)
local limits, wanted = { tonumber(ARGV[1]), tonumber(ARGV[2]) }, { tonumber(ARGV[3]), tonumber(ARGV[4]) }
if not (limits[1] and limits[2] and wanted[1] and wanted[2]) then
  return redis.error_reply('RWARG spend: a number is missing')
end
local fields = { 'requests', 'tokens' }
local stored = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local passed = math.max(0, now - (tonumber(stored[3]) or 0))
local left, wait = {}, 0
for i = 1, 2 do
  local limit = limits[i]
  if limit < 0 then
    left[i] = -1
  else
    left[i] = math.min(limit, (tonumber(stored[i]) or limit) + passed * limit / MINUTE_MS)
    if wanted[i] > limit then
      wait = -1
    elseif wanted[i] > left[i] and wait >= 0 then
      wait = math.max(wait, math.ceil((wanted[i] - left[i]) * MINUTE_MS / limit))
    end
  end
end
if wait == 0 then
  for i = 1, 2 do
    if limits[i] >= 0 then
      left[i] = left[i] - wanted[i]
      redis.call('HSET', KEYS[1], fields[i], string.format('%.6f', left[i]))
    end
  end
  redis.call('HSET', KEYS[1], 'at', int(now))
  redis.call('PEXPIRE', KEYS[1], 2 * MINUTE_MS)
end
return { wait == 0 and 1 or 0, math.floor(left[1]), math.floor(left[2]), wait }
