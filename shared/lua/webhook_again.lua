#!lua
-- Try a delivery anew, from the beginning, whatever became of it.
--
-- KEYS  1 record  2 due  3 owed  4 undelivered
-- ARGV  1 id  2 ms for which it is tried  3 ms that the record is kept behind them
-- Answers 1 done, 0 its body is not kept any more, or never was here.
-- include _webhooks.lua
local try, keep = tonumber(ARGV[2]), tonumber(ARGV[3])
if not (try and keep) then
  return redis.error_reply('RWARG webhook_again: a number is missing')
end
local held = redis.call('HMGET', KEYS[1], 'state', 'body', 'owed_ms')
if not (held[1] and held[2] and tonumber(held[3])) then
  return 0
end
begin_delivery(KEYS[1], ARGV[1], math.floor(now_us() / 1000), held[3], try, keep)
return 1
