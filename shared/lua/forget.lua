#!lua flags=allow-oom
-- Delete a worker's consumer from every stream of a lane on which nothing of it is pending:
-- XGROUP DELCONSUMER drops what is pending, and with it jobs.
--
-- KEYS  1 record of its last pull  2... queue streams of the lane
-- ARGV  1 owner
-- Answers on how many streams something is still pending.
local pending = 0
for i = 2, #KEYS do
  local stream = KEYS[i]
  if redis.call('EXISTS', stream) == 1 then
    -- pcall: a stream whose group was deleted by hand has nothing to forget.
    local held = redis.pcall('XPENDING', stream, GROUP, '-', '+', 1, ARGV[1])
    if not held.err then
      if #held > 0 then
        pending = pending + 1
      else
        redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, ARGV[1])
      end
    end
  end
end
if pending == 0 then
  redis.call('DEL', KEYS[1])
end
return pending
