-- Part of pull: which class and which bucket comes next.

local function stream_of(level, bucket)
  return KEYS[4 + (level - 1) * BUCKETS + bucket]
end

-- What a job takes of its bucket's turns: less, the more its tenant weighs.
local function charge_of(job)
  return math.ceil(job.cost / job.weight)
end

local function head_of(level, bucket)
  return head(stream_of(level, bucket), CLASSES[level], tostring(bucket))
end

-- By class: the bucket whose turn it is, the one whose head did not fit at its turn (or -1), and by bucket whether
-- anything is queued and how many tokens it has saved up.
local function read_turns()
  local fields, all = {}, {}
  for _, class in ipairs(CLASSES) do
    fields[#fields + 1] = 'turn:' .. class
    fields[#fields + 1] = 'passed_over:' .. class
    for bucket = 0, BUCKETS - 1 do
      fields[#fields + 1] = 'queued_jobs:' .. class .. ':' .. bucket
      fields[#fields + 1] = 'deficit:' .. class .. ':' .. bucket
    end
  end
  local v = redis.call('HMGET', stats, unpack(fields))
  for level = 1, #CLASSES do
    local base = (level - 1) * (2 * BUCKETS + 2) + 1
    local turns = { turn = tonumber(v[base]) or 0, passed_over = tonumber(v[base + 1]) or -1, open = {}, deficit = {} }
    for bucket = 0, BUCKETS - 1 do
      local queued_here = tonumber(v[base + 2 + 2 * bucket]) or 0
      turns.open[bucket] = queued_here > 0
      turns.any = turns.any or queued_here > 0
      turns.deficit[bucket] = tonumber(v[base + 3 + 2 * bucket]) or 0
    end
    all[level] = turns
  end
  return all
end

local function write_turns(level, turns)
  local class = CLASSES[level]
  local fields = { 'turn:' .. class, turns.turn, 'passed_over:' .. class, turns.passed_over }
  for bucket = 0, BUCKETS - 1 do
    fields[#fields + 1] = 'deficit:' .. class .. ':' .. bucket
    fields[#fields + 1] = int(turns.deficit[bucket])
  end
  redis.call('HSET', stats, unpack(fields))
end

-- Give every waiting bucket as many turns at once as the first of them needs to afford its head.
local function skip_turns(level, turns, stuck)
  local least
  for bucket = 0, BUCKETS - 1 do
    local job = turns.open[bucket] and not stuck[bucket] and head_of(level, bucket)
    if job then
      local need = math.ceil((charge_of(job) - turns.deficit[bucket]) / QUANTUM)
      least = math.min(least or need, need)
    end
  end
  if least and least > 1 then
    for bucket = 0, BUCKETS - 1 do
      if turns.open[bucket] and not stuck[bucket] then
        turns.deficit[bucket] = turns.deficit[bucket] + (least - 1) * QUANTUM
      end
    end
  end
  return least
end

-- One bucket's turn. Answers `spent` when the budget is, `wait` when an old job needs what is left of it, else how many
-- were taken.
local function serve_bucket(level, bucket, turns, stuck, most)
  local stream, taken = stream_of(level, bucket), 0
  local job = head_of(level, bucket)
  if job and not stuck[bucket] and turns.deficit[bucket] < charge_of(job) then
    turns.deficit[bucket] = turns.deficit[bucket] + QUANTUM
  end
  while job and not stuck[bucket] and charge_of(job) <= turns.deficit[bucket] do
    if taken >= most or sequences[level] <= 0 or tokens[level] <= 0 then
      return 'spent'
    end
    if not suits(job) then
      stuck[bucket] = true -- and nothing is kept for it: other buckets' jobs take none of its adapter's places
    elseif not fits(level, job) then
      stuck[bucket] = true
      if job.cost <= max_cost then
        turns.passed_over = bucket
        if waited_ms(job) > PATIENCE_MS then
          return 'wait'
        end
      end
    else
      take(stream, job, false)
      turns.deficit[bucket] = turns.deficit[bucket] - charge_of(job)
      taken = taken + 1
      job = head_of(level, bucket)
    end
  end
  if not job then
    turns.open[bucket], turns.deficit[bucket] = false, 0
  end
  return taken
end

-- Deficit round robin over the buckets of a class (Shreedhar and Varghese, 1995), at most `most` jobs.
-- Answers false if the lower classes must wait.
local function serve_class(level, turns, most)
  local stuck, go_on, left, again = {}, true, most, true
  local late = turns.passed_over
  turns.passed_over = -1
  if turns.open[late] then
    local taken = serve_bucket(level, late, turns, stuck, left)
    if taken == 'wait' then
      write_turns(level, turns)
      return false
    elseif taken == 'spent' then
      again = false
    else
      left = left - taken
    end
  end
  local first = turns.turn
  while again and left > 0 do
    local taken_in_round = 0
    for i = 0, BUCKETS - 1 do
      local bucket = (first + i) % BUCKETS
      if turns.open[bucket] then
        turns.turn = bucket
        local taken = serve_bucket(level, bucket, turns, stuck, left)
        if taken == 'spent' or taken == 'wait' then
          go_on, again = taken ~= 'wait', false
          break
        end
        taken_in_round, left = taken_in_round + taken, left - taken
      end
      turns.turn = (bucket + 1) % BUCKETS
    end
    first = turns.turn
    if again and taken_in_round == 0 then
      again = skip_turns(level, turns, stuck) ~= nil
    end
  end
  write_turns(level, turns)
  return go_on
end

local function oldest_wait_ms(level, turns)
  local oldest = 0
  for bucket = 0, BUCKETS - 1 do
    local job = turns.open[bucket] and head_of(level, bucket)
    if job then
      oldest = math.max(oldest, waited_ms(job))
    end
  end
  return oldest
end

local function serve_classes()
  local all = read_turns()
  local function room(level)
    return all[level].any and not full and sequences[level] > 0 and tokens[level] > 0
  end
  for level = #CLASSES, 2, -1 do
    if room(level) and oldest_wait_ms(level, all[level]) > AGED_MS then
      aged = true
      serve_class(level, all[level], 1)
      aged = false
    end
  end
  for level = 1, #CLASSES do
    if room(level) and not serve_class(level, all[level], math.huge) then
      return
    end
  end
end

