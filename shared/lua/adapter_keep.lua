#!lua
-- Somebody is about to put a content into the store: it is kept for as long as one that a name has just left.
--
-- KEYS  1 contents that no name points to  2 mark of one that is being deleted
-- ARGV  1 identity
-- Answers 1, or 0 while it is being deleted: try again.
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
redis.call('ZADD', KEYS[1], int(math.floor(now_us() / 1000)), ARGV[1])
return 1
