#!lua
-- A worker's sign of life: its hash with an expiry, its place among the workers by Redis's clock.
--
-- KEYS  1 worker hash  2 workers
-- ARGV  1 owner  2 info  3 ms without a heartbeat after which a worker counts as gone
-- Answers the owners that live, sorted.
local now_ms, ttl = math.floor(now_us() / 1000), tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'info', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[2], int(now_ms), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(' .. int(now_ms - ttl))
redis.call('PEXPIRE', KEYS[2], ARGV[3])
local owners = redis.call('ZRANGE', KEYS[2], 0, -1)
table.sort(owners)
return owners
