#!lua flags=allow-oom
-- Delete the consumers of workers that are gone from every stream of a lane, where nothing is pending on them. One of a
-- worker that lives all the same comes back with its next read.
--
-- KEYS  1... queue streams of the lane
-- ARGV  owners that live
-- Answers how many were deleted.
local live, deleted = {}, 0
for _, owner in ipairs(ARGV) do
  live[owner] = true
end
for _, stream in ipairs(KEYS) do
  -- pcall: the stream may not be there, or its group may have been deleted by hand.
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, GROUP)
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    local fields = {}
    for i = 1, #consumer, 2 do
      fields[consumer[i]] = consumer[i + 1]
    end
    if fields.pending == 0 and not live[fields.name] then
      redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, fields.name)
      deleted = deleted + 1
    end
  end
end
return deleted
