#!lua
-- A piece of a batch's output is written: its lines are done. Only for whoever is at the batch.
--
-- KEYS  1 who is at it  2 progress  3 parts  4 counts of all batches
-- ARGV  1 who calls  2 next line  3 completed lines  4 failed lines  5 name of the part, empty for none
--       6... a field of the counts, and what it rises by
-- Answers 1, or 0 where another one is at it.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
-- The name is drawn anew for each part: where it is there, only the answer of the first call was lost.
if ARGV[5] ~= '' and redis.call('LINDEX', KEYS[3], -1) == ARGV[5] then
  return 1
end
redis.call('HSET', KEYS[2], 'next_line', ARGV[2], 'completed', ARGV[3], 'failed', ARGV[4],
  'seen_completed', ARGV[3], 'seen_failed', ARGV[4], 'deaths', 0)
if ARGV[5] ~= '' then
  redis.call('RPUSH', KEYS[3], ARGV[5])
end
for at = 6, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[4], ARGV[at], ARGV[at + 1])
end
return 1
