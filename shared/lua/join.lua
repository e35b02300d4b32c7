#!lua
-- Write a pool's card, unless there is one: the first writer wins.
--
-- KEYS  1 card hash  2 tokenizer  3 workers
-- ARGV  1 agreement: what all members must have in common, as one text  2 card  3 tokenizer bundle
--       4 agreement of the card that may be replaced, or empty
-- Answers {agreement, card} of the card that holds, and the number of workers that live.
local live = 0
for _, owner in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  live = live + redis.call('EXISTS', PREFIX .. 'worker:' .. owner)
end
local held = redis.call('HMGET', KEYS[1], 'agreement', 'card')
local replace = held[1] and ARGV[4] ~= '' and held[1] == ARGV[4] and live == 0
if not held[1] or replace then
  redis.call('HSET', KEYS[1], 'agreement', ARGV[1], 'card', ARGV[2])
  redis.call('SET', KEYS[2], ARGV[3])
  return { ARGV[1], ARGV[2], live }
end
if held[1] == ARGV[1] and redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('SET', KEYS[2], ARGV[3])
end
return { held[1], held[2], live }
