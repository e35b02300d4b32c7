#!lua
-- Change what a name stands for, if it still stands for what the caller has read.
--
-- KEYS  1 names  2 names that drain  3 contents that no name points to  4 revision
-- ARGV  1 name  2 record as it was read, or empty  3 new record, or empty for none
--       4 record that drains from now on, or empty, and 5 its field
--       6 content that the name leaves, 7 content that it gets, or empty
--       8 most names  9 control channel of the pool  10 message for it
-- Answers 1 done, 0 the record is another one by now, 2 there are too many names: nothing written.
local names, draining, unused = KEYS[1], KEYS[2], KEYS[3]
local most = tonumber(ARGV[8])
if not most then
  return redis.error_reply('RWARG adapter_write: a number is missing')
end
local held = redis.call('HGET', names, ARGV[1]) or ''
if held ~= ARGV[2] then
  return held == ARGV[3] and 1 or 0 -- the second time, because the first answer was lost
end
if held == '' and ARGV[3] ~= '' and redis.call('HLEN', names) >= most then
  return 2
end
if ARGV[3] == '' then
  redis.call('HDEL', names, ARGV[1])
else
  redis.call('HSET', names, ARGV[1], ARGV[3])
end
if ARGV[4] ~= '' then
  redis.call('HSET', draining, ARGV[5], ARGV[4])
end
if ARGV[6] ~= '' and ARGV[6] ~= ARGV[7] then
  redis.call('ZADD', unused, int(math.floor(now_us() / 1000)), ARGV[6])
end
if ARGV[7] ~= '' then
  redis.call('ZREM', unused, ARGV[7])
end
redis.call('INCR', KEYS[4])
redis.call('PUBLISH', ARGV[9], ARGV[10])
return 1
