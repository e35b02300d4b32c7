#!lua flags=allow-oom
-- Reset the idle time of a job's entry, if the job is still the caller's. JUSTID: the delivery count does not rise.
--
-- KEYS  1 job hash
-- ARGV  1 owner  2 epoch
-- Answers 0 fine, 1 fine and somebody asked for the job's end, 2 fenced.
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'status', 'cancel', 'stream', 'entry')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] or held[3] ~= 'running' then
  return 2
end
-- pcall: a stream or group that was deleted by hand is no reason to fence the owner. FORCE: nor is a consumer.
redis.pcall('XCLAIM', PREFIX .. held[5], GROUP, ARGV[1], 0, held[6], 'FORCE', 'JUSTID')
return held[4] == '1' and 1 or 0
