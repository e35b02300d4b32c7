#!lua
-- Enter what an idempotency key stands for, unless there is something already.
--
-- KEYS  1 record
-- ARGV  1 the caller's record  2 ms to remember it
-- Answers the record that was there; nil: the caller's is.
local held = redis.call('GET', KEYS[1])
if held then
  return held
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return nil
