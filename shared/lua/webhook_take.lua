#!lua
-- Take an ended job's webhook over from the outbox: from now on it is tried, and the job is kept no longer than was
-- asked for. Whoever comes second changes nothing.
--
-- KEYS  1 job hash  2 outbox  3 record  4 due  5 owed  6 undelivered
-- ARGV  1 entry of the outbox  2 id  3 `1` where it is sent once more  4 ms for which it is tried  5 ms that the record
--       is kept behind them  6 when the job ended, Unix ms  7... fields of the record and their values
-- Answers 1 taken, 0 it was already.
-- include _webhooks.lua
local try, keep = tonumber(ARGV[4]), tonumber(ARGV[5])
if not (try and keep and tonumber(ARGV[6])) then
  return redis.error_reply('RWARG webhook_take: a number is missing')
end
local again = ARGV[3] == '1'
if redis.call('XDEL', KEYS[2], ARGV[1]) == 0 then
  return 0
end
if not again and redis.call('EXISTS', KEYS[3]) == 1 then
  return 0
end
redis.call('HSET', KEYS[3], unpack(ARGV, 7))
begin_delivery(KEYS[3], ARGV[2], math.floor(now_us() / 1000), ARGV[6], try, keep)
-- pcall: what somebody else wrote there is no reason to lose the webhook.
local job = redis.pcall('HMGET', KEYS[1], 'finished_us', 'retention_ms', 'tenant')
if not again and not job.err and tonumber(job[1]) and tonumber(job[2]) then
  local expires_ms = int(math.floor(job[1] / 1000) + job[2])
  redis.call('HDEL', KEYS[1], 'owed')
  redis.call('PEXPIREAT', KEYS[1], expires_ms)
  if job[3] then
    index_job(ARGV[2], job[3], expires_ms)
  end
end
return 1
