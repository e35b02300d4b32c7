#!lua
-- A batch's record becomes another, if it still is as it was read.
--
-- KEYS  1 record  2 counts of all batches
-- ARGV  1 as it was read  2 as it is to be  3 milliseconds until it goes, 0 for never
--       4... a field of the counts, and what it rises by
-- Answers 1, or 0 where somebody else was quicker.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if ARGV[3] == '0' then
  redis.call('SET', KEYS[1], ARGV[2])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
for at = 4, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[2], ARGV[at], ARGV[at + 1])
end
return 1
