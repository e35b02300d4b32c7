#!lua flags=allow-oom
-- Append frames to a job's log and send them; the last one ends the job. Calling it again is harmless.
-- What is large is not sent: in its place goes an empty message, and who listens reads the log, at a pace of its own.
--
-- KEYS  1 job hash  2 log and channel  3 stats  4 outbox
-- ARGV  1 id  2 owner  3 epoch  4 sequence number of the first frame  5 number of frames  6... frames,
--       then for the last frame of a job: final status, result, and its prompt, cached and completion tokens (without
--       them, those of the result)
-- Answers 0 fine, 1 fine and somebody asked for the job's end, 2 fenced: nothing written.
local SENT_BYTES = 65536

local function used_in(result)
  local read, value = pcall(cmsgpack.unpack, result)
  local usage = read and type(value) == 'table' and type(value.usage) == 'table' and value.usage or {}
  return { usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens }
end

local key, log = KEYS[1], KEYS[2]
local first, frames = tonumber(ARGV[4]), tonumber(ARGV[5])
local status, result = ARGV[6 + frames], ARGV[7 + frames]
local last = first + frames - 1
local held = redis.call('HMGET', key, 'owner', 'epoch', 'status', 'seq', 'cancel', 'expires_ms')
if held[1] ~= ARGV[2] or held[2] ~= ARGV[3] then
  return 2
end
local seq = tonumber(held[4]) or 0
if held[3] ~= 'running' then
  -- A repeat of what ended the job, because its answer was lost, is a success.
  return last <= seq and held[3] ~= 'queued' and 0 or 2
end
if first > seq + 1 then
  return redis.error_reply('RWGAP frame ' .. ARGV[4] .. ' follows frame ' .. int(seq))
end
if status and (frames == 0 or not result) then
  return redis.error_reply('RWARG publish: the end of a job needs a frame and a result')
end

local appended = math.max(0, last - seq)
for n = frames - appended + 1, frames do
  local frame = ARGV[5 + n]
  redis.call('XADD', log, int(first + n - 1) .. '-0', 'f', frame)
  redis.call('PUBLISH', log, #frame <= SENT_BYTES and frame or '')
end
if appended > 0 then
  redis.call('HSET', key, 'seq', int(last))
  -- Not with the first frame alone: somebody may have deleted the log since.
  redis.call('PEXPIREAT', log, held[6], 'NX')
end
if status then
  local n = 8 + frames
  close(read_job(ARGV[1]), status, result, ARGV[n] and { ARGV[n], ARGV[n + 1], ARGV[n + 2] } or used_in(result))
  return 0
end
return held[5] == '1' and 1 or 0
