#!lua flags=allow-oom
-- A worker takes what it can admit from one lane; delayed jobs whose time has come are queued first. allow-oom: when memory is full of queued jobs, only running them
-- frees it.
--
-- KEYS  1 stats  2 record of the caller's last pull  3 resume stream  4... class streams, bucket by bucket
--       28 dead letters  29 outbox
-- ARGV  1 owner  2 token of the last answer that the caller got  3 lease in ms  4 most attempts
--       5 1: take back what is idle past the lease  6 1: and charge it  7 1: the caller holds no job at all
--       8 suspects that it may take  9 largest cost that it can ever hold
--       10 11 12 sequences and 13 14 15 tokens that it can admit, for high, normal, batch
--       16 adapters of which it may have jobs beside those that it has  17... those that it has
-- Answers nil for an empty lane, else {token, jobs, ended, buried, reclaimed, waiting for an idle worker}:
--   jobs   {id, envelope, epoch, attempts, last seq, deadline in ms, microseconds since submit, suspect, alone,
--          owner whose it was if it was taken over, microseconds since that one took it or, else, it was last queued} each
--   ended  id, status, id, status ...      buried  ids, which are in `ended` too
local CLASSES, BUCKETS = { 'high', 'normal', 'batch' }, 8
-- Deficit round robin: tokens that a bucket may take more at each of its turns.
local QUANTUM = 1024
-- A job that has waited this long for room is waited for: smaller ones behind it no longer go first.
local PATIENCE_MS = 1000
-- A job of a lower class that has waited this long goes before the higher classes, one in each pull.
local AGED_MS = 30000
-- A job that has waited this long for a worker with a place for its adapter is taken without one, one in each pull: a worker
-- that had a place would have taken it by now.
local ADAPTER_PATIENCE_MS = 500
-- Deaths of its workers after which a job is a suspect and goes out with few others, and those after which it runs alone.
-- One death makes no suspect: when a node is lost, all of its jobs go on at once.
local SUSPECT_AFTER, ALONE_AFTER = 2, 3
-- Delayed jobs whose time has come that one pull puts into their streams.
local DUE = 64

local stats, record, owner = KEYS[1], KEYS[2], ARGV[1]
local lease_ms, max_attempts, max_cost = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[9])
local may_reclaim, charge, idle = ARGV[5] == '1', ARGV[6] == '1', ARGV[7] == '1'
local suspects = tonumber(ARGV[8])
local sequences = { tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12]) }
local tokens = { tonumber(ARGV[13]), tonumber(ARGV[14]), tonumber(ARGV[15]) }
local more_adapters, has_adapter = tonumber(ARGV[16]), {}
for i = 17, #ARGV do
  has_adapter[ARGV[i]] = true
end
if #KEYS ~= 29 or #sequences ~= 3 or #tokens ~= 3
  or not (lease_ms and max_attempts and max_cost and suspects and more_adapters) then
  return redis.error_reply('RWARG pull: a number is missing')
end

local totals = redis.call('HMGET', stats, 'queued_jobs', 'running_jobs', 'delayed_jobs')
local queued, running = tonumber(totals[1]) or 0, tonumber(totals[2]) or 0
local delayed = tonumber(totals[3]) or 0
if queued <= 0 and running <= 0 and delayed <= 0 then
  return nil
end

local now = now_us()
local now_ms = math.floor(now / 1000)
-- pcall: a record that does not read is as none, and is written anew below.
local read, granted = pcall(cmsgpack.unpack, redis.call('GET', record) or '')
if not read or type(granted) ~= 'table' then
  granted = {}
end
local token = table.remove(granted, 1) or ''
local jobs, ended, buried, reclaimed, alone_waiting, full, last_expiry = {}, {}, {}, 0, 0, false, 0

local function answer_job(job)
  local fields = redis.call('HMGET', job.key, 'env', 'lost')
  local epoch, lost_by, since = string.match(fields[2] or '', '^(%d+) (.*) (%d+)$')
  if tonumber(epoch) ~= job.epoch then
    lost_by, since = '', job.waiting_us
    local queued_ms = job.epoch > 1 and tonumber(string.match(job.entry, '^%d+'))
    if queued_ms then
      since = queued_ms * 1000
    end
  end
  jobs[#jobs + 1] = {
    job.id, fields[1], job.epoch, job.attempts, job.seq, job.deadline_ms,
    now - job.waiting_us, job.deaths >= SUSPECT_AFTER and 1 or 0, job.alone and 1 or 0, lost_by, now - since,
  }
end

local function answer()
  return { token, jobs, ended, buried, reclaimed, alone_waiting }
end

-- An answer that never arrived: the caller owns jobs that it does not know of. Say it again, and nothing new.
if token ~= ARGV[2] then
  for i = 1, #granted, 2 do
    local job = read_job(granted[i])
    if job and job.status == 'running' and job.owner == owner and job.epoch == granted[i + 1] then
      redis.pcall('XCLAIM', PREFIX .. job.stream, GROUP, owner, 0, job.entry, 'JUSTID')
      answer_job(job)
    end
  end
  if #jobs > 0 then
    return answer()
  end
end

-- include _entries.lua
-- include _due.lua
-- include _deaths.lua
-- include _pull_take.lua
-- include _pull_reclaim.lua
-- include _pull_fair.lua

if delayed > 0 then
  queued = queued + #start_due(now, DUE)
end
if may_reclaim and running > 0 then
  reclaim_all()
end
if queued > 0 then
  serve_resume()
  serve_classes()
end
if #jobs > 0 then
  token = int(now)
  local grants = { token }
  for _, job in ipairs(jobs) do
    grants[#grants + 1] = job[1]
    grants[#grants + 1] = job[3]
  end
  redis.call('SET', record, cmsgpack.pack(grants), 'PXAT', int(last_expiry))
end
return answer()
