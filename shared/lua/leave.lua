#!lua flags=allow-oom
-- Count jobs of a tenant as queued no longer.
--
-- KEYS  1 a tenant's queued jobs, see `enter`
-- ARGV  ids
-- Answers {jobs, tokens} that are left.
local key = KEYS[1]
for _, id in ipairs(ARGV) do
  redis.call('HDEL', key, id)
end
-- Counted anew rather than subtracted: what is wrong for any reason is right from here on.
local jobs, tokens = 0, 0
for _, value in ipairs(redis.call('HVALS', key)) do
  local cost = string.match(value, '^(%d+) ')
  if cost then
    jobs, tokens = jobs + 1, tokens + tonumber(cost)
  end
end
if jobs == 0 then
  redis.call('DEL', key)
else
  redis.call('HSET', key, 'tokens', int(tokens))
end
return { jobs, tokens }
