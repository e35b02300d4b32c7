"""Taking up a job that another worker began: its log becomes the transcript to go on from."""

from __future__ import annotations

from shared.errors import ProtocolError
from shared.jobstore import JobStore
from shared.protocol import Frame, decode
from worker.job import HeldJob

#: Frames per round trip.
_PAGE = 1000


async def read_back(store: JobStore, job: HeldJob) -> None:
    """Fill the transcript and the resumed choices of a pulled job from its log.

    Raises:
        ProtocolError: the log does not decode, has a hole, or its frames contradict each other.
        redis.RedisError: Redis is away.
    """
    job.transcript.clear()
    seq = 0
    while seq < job.last_seq:
        page = await store.read_log(job.id, after_seq=seq, count=_PAGE)
        if not page:
            raise ProtocolError(f"the log ends at frame {seq}, it should reach {job.last_seq}")
        for data in page:
            frame = decode(data, Frame)
            if frame.seq != seq + 1:
                raise ProtocolError(f"frame {frame.seq} follows frame {seq}")
            job.transcript.add(frame.choices, frame.prompt_logprobs)
            seq = frame.seq
    job.taken_tokens = job.transcript.completion_tokens
    job.resumed, job.prompt_logprobs_done = job.transcript.resumed(), job.transcript.prompt_entries
