-- Deliveries of webhooks, for scripts that move them on: `pending`, then `delivered`, `gone` (the receiver wants no more)
-- or `failed` (the time for it is over).
local DUE, OWED, UNDELIVERED = PREFIX .. 'hooks:due', PREFIX .. 'hooks:owed', PREFIX .. 'hooks:undelivered'
-- How long the record of one that was delivered is kept at least, where the job is gone already.
local SHOWN_MS = 3600 * 1000

-- Try one from now on for so many ms. Ended without success, its record is kept for `keep` ms more.
local function begin_delivery(record, id, now, since, try, keep)
  redis.call('HDEL', record, 'ended_ms', 'last_ms', 'last_status', 'last_error')
  redis.call('HSET', record, 'state', 'pending', 'attempts', 0, 'owed_ms', since, 'next_ms', int(now),
    'until_ms', int(now + try))
  redis.call('PEXPIRE', record, int(try + keep))
  redis.call('ZADD', DUE, int(now), id)
  redis.call('ZADD', OWED, since, id)
  redis.call('ZREM', UNDELIVERED, id)
  keep_until(DUE, int(now + try + keep))
  keep_until(OWED, int(now + try + keep))
end

-- Nobody tries it any more. Of one that was delivered the record stays as long as the job; of others with its body.
local function end_delivery(record, id, state, now, keep)
  redis.call('ZREM', DUE, id)
  redis.call('ZREM', OWED, id)
  if redis.call('HEXISTS', record, 'deleted') == 1 then
    redis.call('DEL', record)
    return
  end
  redis.call('HSET', record, 'state', state, 'ended_ms', int(now))
  redis.call('HDEL', record, 'next_ms')
  local least = now + (state == 'delivered' and SHOWN_MS or keep)
  redis.call('PEXPIREAT', record, int(math.max(least, redis.call('PEXPIRETIME', PREFIX .. 'job:' .. id))))
  if state == 'delivered' then
    redis.call('HDEL', record, 'body', 'brief')
    return
  end
  redis.call('ZADD', UNDELIVERED, int(now), id)
  redis.call('ZREMRANGEBYSCORE', UNDELIVERED, '-inf', int(now - keep))
  keep_until(UNDELIVERED, int(now + keep))
end
