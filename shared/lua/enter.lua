#!lua
-- Count jobs of a tenant as queued, all of them or none. One that is counted already is not counted again.
--
-- KEYS  1 a tenant's queued jobs: by id its cost and when it was entered, and `tokens`, the sum of costs
-- ARGV  1 most jobs and 2 most tokens (-1: no limit)  3 ms after which all is forgotten  4... id and cost of each job
-- Answers {1 counted or 0, jobs, tokens}.
local key, most_jobs, most_tokens = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
if not (most_jobs and most_tokens and tonumber(ARGV[3])) then
  return redis.error_reply('RWARG enter: a number is missing')
end
local now = int(math.floor(now_us() / 1000))
local tokens = tonumber(redis.call('HGET', key, 'tokens')) or 0
local jobs = math.max(0, redis.call('HLEN', key) - redis.call('HEXISTS', key, 'tokens'))
local fresh, added = {}, 0
for i = 4, #ARGV, 2 do
  if redis.call('HEXISTS', key, ARGV[i]) == 0 then
    fresh[#fresh + 1] = ARGV[i]
    fresh[#fresh + 1] = ARGV[i + 1] .. ' ' .. now
    added = added + tonumber(ARGV[i + 1])
  end
end
local all_jobs, all_tokens = jobs + #fresh / 2, tokens + added
if #fresh > 0 and ((most_jobs >= 0 and all_jobs > most_jobs) or (most_tokens >= 0 and all_tokens > most_tokens)) then
  return { 0, jobs, tokens }
end
for i = 1, #fresh, 2 do
  redis.call('HSET', key, fresh[i], fresh[i + 1])
end
if #fresh > 0 then
  redis.call('HSET', key, 'tokens', int(all_tokens))
  redis.call('PEXPIRE', key, ARGV[3])
end
return { 1, all_jobs, all_tokens }
