-- Entries of the queue streams, for scripts that read them.

local EXPIRED = {
  message = 'the deadline passed before the job ended', type = 'timeout_error', code = 'deadline_exceeded', status = 504,
}

-- Reading an entry's fields: `id` and `cost`, `adapter` where the job has one; in the resume stream `class` and `bucket`
-- too.
local function parse(entry, class, bucket)
  local parsed = { id = entry[1], class = class, bucket = bucket, cost = 0 }
  local fields = entry[2]
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then
      parsed.job = fields[i + 1]
    elseif fields[i] == 'cost' then
      parsed.cost = tonumber(fields[i + 1]) or 0
    elseif fields[i] == 'class' then
      parsed.class = fields[i + 1]
    elseif fields[i] == 'bucket' then
      parsed.bucket = fields[i + 1]
    elseif fields[i] == 'adapter' then
      parsed.adapter = fields[i + 1]
    end
  end
  return parsed
end

-- An entry that no job stands behind: its hash has expired, or was deleted.
local function drop_entry(stream, entry, state)
  redis.call('XACK', stream, GROUP, entry.id)
  redis.call('XDEL', stream, entry.id)
  if entry.job and entry.class and entry.bucket then
    count(state, entry.class, entry.bucket, -1, -entry.cost)
    pin(entry.adapter, -1)
  end
end

