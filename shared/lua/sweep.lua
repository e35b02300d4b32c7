#!lua flags=allow-oom
-- Look through a page of one queue stream: jobs that are too late or cancelled end here, entries without a job go.
-- A running job is its worker's to end, unless it has outlived its deadline by far.
--
-- KEYS  1 stats  2 queue stream  3 outbox
-- ARGV  1 class  2 bucket, both empty for the resume stream  3 first entry  4 most entries
--       5 ms that a running job may outlive its deadline
-- Answers {entry to go on behind or '', id, status, id, status ...}; status `lost` where there was no job.
-- include _entries.lua
local stream, most, slack = KEYS[2], tonumber(ARGV[4]), tonumber(ARGV[5])
if not (most and slack) then
  return redis.error_reply('RWARG sweep: a number is missing')
end
local class = ARGV[1] ~= '' and ARGV[1] or nil
local bucket = ARGV[2] ~= '' and ARGV[2] or nil
local now_ms = math.floor(now_us() / 1000)
local answer = { '' }

local function note(id, status)
  answer[#answer + 1] = id
  answer[#answer + 1] = status
end

local function is_pending(entry)
  -- pcall: the group may have been deleted by hand.
  local held = redis.pcall('XPENDING', stream, GROUP, entry, entry, 1)
  return not held.err and #held > 0
end

local function look(entry)
  local job = entry.job and read_job(entry.job)
  if not job then
    drop_entry(stream, entry, is_pending(entry.id) and 'running' or 'queued')
    return note(entry.job or '', 'lost')
  end
  local live = job.status == 'queued' or job.status == 'running'
  if not live or job.entry ~= entry.id or PREFIX .. job.stream ~= stream then
    redis.pcall('XACK', stream, GROUP, entry.id)
    redis.call('XDEL', stream, entry.id)
  elseif job.status == 'queued' and job.cancel then
    end_here(job, 'cancelled', nil)
    note(job.id, 'cancelled')
  elseif job.deadline_ms + (job.status == 'running' and slack or 0) <= now_ms then
    end_here(job, 'expired', EXPIRED)
    note(job.id, 'expired')
  end
end

local found = redis.call('XRANGE', stream, ARGV[3], '+', 'COUNT', most)
for _, item in ipairs(found) do
  look(parse(item, class, bucket))
end
if #found == most then
  answer[1] = found[#found][1]
end
return answer
