-- Jobs whose worker is gone, for scripts that take them from it. Their variables: now_ms; ended and buried, which are filled;
-- charge, max_attempts.

-- Deaths while alone before a job is buried.
local ALONE_DEATHS = 2
local BURIED = {
  message = 'the job was given up: its workers died again and again', type = 'server_error', code = 'job_failed',
  status = 500,
}

local function note_end(job, status)
  ended[#ended + 1] = job.id
  ended[#ended + 1] = status
end

-- Whether a job can go on; one that was cancelled or is too late ends here.
local function alive(job)
  if job.cancel then
    end_here(job, 'cancelled', nil)
    note_end(job, 'cancelled')
  elseif job.deadline_ms <= now_ms then
    end_here(job, 'expired', EXPIRED)
    note_end(job, 'expired')
  else
    return true
  end
  return false
end

-- The job of an entry that is pending on a worker that is gone, its death charged; nil where it does not go on, and nothing
-- is left to be done.
local function orphaned(stream, class, bucket, entry_id)
  local found = redis.call('XRANGE', stream, entry_id, entry_id)[1]
  if not found then
    redis.call('XACK', stream, GROUP, entry_id)
    return nil
  end
  local entry = parse(found, class, bucket)
  local job = entry.job and read_job(entry.job)
  if not job then
    drop_entry(stream, entry, 'running')
    return nil
  end
  if job.status ~= 'running' or job.entry ~= entry_id or PREFIX .. job.stream ~= stream then
    redis.call('XACK', stream, GROUP, entry_id)
    redis.call('XDEL', stream, entry_id)
    return nil
  end
  if not alive(job) then
    return nil
  end
  if charge then
    job.deaths = job.deaths + 1
    job.alone_deaths = job.alone_deaths + (job.alone and 1 or 0)
    if job.attempts >= max_attempts and job.alone_deaths >= ALONE_DEATHS then
      bury(job, 'workers died', BURIED)
      note_end(job, 'failed')
      buried[#buried + 1] = job.id
      return nil
    end
  end
  return job
end
