#!lua flags=allow-oom
-- Take deliveries whose time has come, each for one try. Whoever dies at it leaves it to others when the lease is over.
--
-- KEYS  1 due  2 owed  3 undelivered
-- ARGV  1 most deliveries  2 lease in ms  3 ms that the record of one whose time is over is kept
-- Answers {id, attempt, url, tenant, type, body, trace} each, what is missing is false; {id, 0} of one that was given up
-- here, because its time is over.
-- include _webhooks.lua
local most, lease, keep = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if not (most and lease and keep) then
  return redis.error_reply('RWARG webhook_claim: a number is missing')
end
local now, claimed = math.floor(now_us() / 1000), {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', int(now), 'LIMIT', 0, most)) do
  local record = PREFIX .. 'hook:' .. id
  local v = redis.pcall('HMGET', record, 'state', 'attempts', 'until_ms', 'url', 'tenant', 'type', 'body', 'trace')
  if v.err or v[1] ~= 'pending' or not (tonumber(v[2]) and tonumber(v[3]) and v[4] and v[7]) then
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
  elseif tonumber(v[2]) > 0 and tonumber(v[3]) <= now then
    end_delivery(record, id, 'failed', now, keep)
    claimed[#claimed + 1] = { id, 0 }
  else
    redis.call('ZADD', KEYS[1], int(now + lease), id)
    redis.call('HSET', record, 'attempts', int(v[2] + 1), 'last_ms', int(now), 'next_ms', int(now + lease))
    claimed[#claimed + 1] = { id, v[2] + 1, v[4], v[5], v[6], v[7], v[8] }
  end
end
return claimed
