#!lua flags=allow-oom
-- Queue delayed jobs of a lane whose time has come, also where no worker pulls.
--
-- KEYS  1 stats  2 delayed jobs
-- ARGV  1 most jobs  2 wake channel  3 lane number
-- Answers the ids of those that were queued.
-- include _due.lua
local most = tonumber(ARGV[1])
if not most then
  return redis.error_reply('RWARG due: a number is missing')
end
local started = start_due(now_us(), most)
if #started > 0 then
  redis.call('PUBLISH', ARGV[2], ARGV[3])
end
return started
