#!lua flags=allow-oom
-- Change records of API keys or of tenants, all or none, and tell gateways. allow-oom: a key can be revoked in full memory.
--
-- KEYS  1 records by name
-- ARGV  1 channel  2 message for it  3... of each record: name, as it was read, as it is to be (each empty for none)
-- Answers 1 done, 0 one of them is another one by now: nothing written.
local key = KEYS[1]
if #ARGV < 5 or #ARGV % 3 ~= 2 then
  return redis.error_reply('RWARG record_write: a record is not whole')
end
for i = 3, #ARGV, 3 do
  if (redis.call('HGET', key, ARGV[i]) or '') ~= ARGV[i + 1] then
    return 0
  end
end
for i = 3, #ARGV, 3 do
  if ARGV[i + 2] == '' then
    redis.call('HDEL', key, ARGV[i])
  else
    redis.call('HSET', key, ARGV[i], ARGV[i + 2])
  end
end
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 1
