#!lua flags=allow-oom
-- A worker is dead, and somebody knows it who need not wait for its lease: what it held of a lane is queued again at once,
-- before all others. As where a lease runs out its death is charged, and the fence rises: should it live all the same, it
-- can publish nothing more of these jobs.
--
-- KEYS  1 stats  2 record of its last pull  3 resume stream  4... class streams, bucket by bucket
--       28 dead letters  29 outbox
-- ARGV  1 owner  2 most attempts  3 1: charge its death  4 most entries of each stream  5 wake channel  6 lane number
-- Answers {1 if entries are left, jobs queued again, ended, buried}, the last two as `pull` does.
local CLASSES, BUCKETS = { 'high', 'normal', 'batch' }, 8
local owner, max_attempts, charge, most = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
if #KEYS ~= 29 or not (max_attempts and most) then
  return redis.error_reply('RWARG orphan: a number is missing')
end
local now_ms = math.floor(now_us() / 1000)
local ended, buried, given_back, left = {}, {}, 0, 0

-- include _entries.lua
-- include _deaths.lua
-- include _give_back.lua

local function give_back_all(stream, class, bucket)
  -- pcall: the stream may not be there, or its group may have been deleted by hand.
  local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', most, owner)
  for _, entry in ipairs(pending.err and {} or pending) do
    local job = orphaned(stream, class, bucket, entry[1])
    if job then
      give_back(job, KEYS[3])
      redis.call('HSET', job.key, 'owner', '', 'epoch', int(job.epoch + 1), 'deaths', job.deaths,
        'alone_deaths', job.alone_deaths)
      given_back = given_back + 1
    end
  end
  left = (not pending.err and #pending == most) and 1 or left
end

give_back_all(KEYS[3])
for i = 1, #CLASSES * BUCKETS do
  give_back_all(KEYS[3 + i], CLASSES[math.floor((i - 1) / BUCKETS) + 1], tostring((i - 1) % BUCKETS))
end
if left == 0 then
  redis.call('DEL', KEYS[2])
end
if given_back > 0 then
  redis.call('PUBLISH', ARGV[5], ARGV[6])
end
return { left, given_back, ended, buried }
