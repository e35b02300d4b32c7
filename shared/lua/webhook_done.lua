#!lua flags=allow-oom
-- Say how one try of a delivery ended.
--
-- KEYS  1 record  2 due  3 owed  4 undelivered
-- ARGV  1 id  2 attempt, as it was claimed  3 `delivered`, `gone`, `retry`, or `later`: it was not tried after all
--       4 status of the answer, or empty  5 what went wrong, or empty  6 ms until the next try
--       7 ms that the record of one that is given up is kept
-- Answers its state after the call; nil where it is gone, or another try is under way.
-- include _webhooks.lua
local delay, keep = tonumber(ARGV[6]), tonumber(ARGV[7])
if not (delay and keep) then
  return redis.error_reply('RWARG webhook_done: a number is missing')
end
local held = redis.call('HMGET', KEYS[1], 'state', 'attempts', 'until_ms')
if held[1] ~= 'pending' or held[2] ~= ARGV[2] then
  return nil
end
local now = math.floor(now_us() / 1000)
if ARGV[3] == 'later' then
  redis.call('HSET', KEYS[1], 'attempts', int(held[2] - 1), 'next_ms', int(now + delay))
  redis.call('ZADD', KEYS[2], int(now + delay), ARGV[1])
  return 'pending'
end
redis.call('HSET', KEYS[1], 'last_status', ARGV[4], 'last_error', ARGV[5])
local state = ARGV[3]
if state == 'retry' then
  state = now + delay <= tonumber(held[3]) and 'pending' or 'failed'
end
if state == 'pending' then
  redis.call('HSET', KEYS[1], 'next_ms', int(now + delay))
  redis.call('ZADD', KEYS[2], int(now + delay), ARGV[1])
else
  end_delivery(KEYS[1], ARGV[1], state, now, keep)
end
return state
