#!lua
-- Whether a content may be deleted that no name has pointed to since a time; if so it is marked as being deleted.
--
-- KEYS  1 contents that no name points to  2 mark of one that is being deleted
-- ARGV  1 identity  2 since when, as it was read  3 `delete`, `deleted`, or `used`: a name does point to it
--       4 ms that the deletion may take
-- Answers 1 done, 0 it has changed since.
local since = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not since or tonumber(since) ~= tonumber(ARGV[2]) then
  return 0
end
if ARGV[3] == 'delete' then
  redis.call('SET', KEYS[2], '1', 'PX', ARGV[4])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
end
return 1
