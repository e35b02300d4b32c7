"""Attempts at jobs as spans. They are made when something is over, from times that are known anyway: nothing is done
for them while the engine steps."""

from __future__ import annotations

from shared.protocol import Usage
from shared.trace_context import Trace, trace_id
from shared.tracing import OFF, Attribute, Moment, Tracing
from worker.job import HeldJob
from worker.outbox import Outbox

#: How an attempt ends that did not end its job, beside the statuses of jobs.
FENCED, RELEASED, LOST = "fenced", "released", "lost"
#: Ends that are nobody's wish.
_FAILURES = frozenset({"failed", "expired", FENCED, LOST})
_OPERATIONS = {"chat": "chat", "completion": "text_completion"}


class JobTraces:
    """Tells of this worker's jobs. From any thread.

    Args:
        owner: this worker.
        pool: whose jobs they are.
    """

    def __init__(self, tracing: Tracing = OFF, owner: str = "", pool: str = "") -> None:
        self._tracing, self._owner, self._pool = tracing, owner, pool

    def taken(self, job: HeldJob) -> None:
        """A job was pulled: tell of its wait, or of the attempt of a worker that can tell nothing any more."""
        if not self._tracing.on:
            return
        taken_ns, since_ns = job.pulled_ns, job.pulled_ns - round(job.since_ms * 1e6)
        if job.lost_by:
            self._attempt(job, (since_ns, taken_ns), job.epoch - 1, job.lost_by, LOST, {})
            return
        attributes: dict[str, Attribute] = {
            "messaging.system": "redis",
            "messaging.operation.name": "pull",
            "messaging.operation.type": "receive",
            "messaging.destination.name": self._pool,
            "messaging.message.id": job.id,
            "ropeway.worker.id": self._owner,
            "ropeway.attempt.epoch": job.epoch,
        }
        queue = self._tracing.record("queue", job.trace, since_ns, taken_ns, kind="consumer", attributes=attributes)
        if trace_id(job.trace) is None:  # whoever submitted it makes no traces
            job.trace = queue

    def over(self, job: HeldJob, outcome: str, box: Outbox | None) -> None:
        """A job has left this worker.

        Args:
            outcome: the status that the job ended with, or how else the attempt did.
            box: None where nothing was done for it.
        """
        if not self._tracing.on:
            return
        facts: dict[str, Attribute] = {}
        if box is not None:
            facts = self._ending(job, box) if box.ending is not None else {}
            facts["ropeway.attempt.output_tokens"] = job.transcript.completion_tokens - job.taken_tokens
        times = (job.pulled_ns, job.unix_ns(job.over_at))
        attempt = self._attempt(job, times, job.epoch, self._owner, outcome, facts, box)
        if box is not None and box.began is not None:
            self._phases(job, box, attempt)

    def _attempt(
        self,
        job: HeldJob,
        times: tuple[int, int],
        epoch: int,
        owner: str,
        outcome: str,
        facts: dict[str, Attribute],
        box: Outbox | None = None,
    ) -> Trace:
        envelope = job.envelope
        attributes: dict[str, Attribute] = {
            **_request(job),
            "gen_ai.operation.name": _OPERATIONS[envelope.kind],
            "gen_ai.provider.name": "ropeway",
            "gen_ai.request.temperature": envelope.sampling.temperature,
            "gen_ai.request.top_p": envelope.sampling.top_p,
            "gen_ai.request.id": job.id,
            "gen_ai.request.n": envelope.sampling.n,
            "ropeway.pool": self._pool,
            "ropeway.job.id": job.id,
            "ropeway.job.class": envelope.job_class,
            "ropeway.worker.id": owner,
            "ropeway.attempt.epoch": epoch,
            "ropeway.attempt.outcome": outcome,
            **facts,
        }
        if envelope.adapter is not None:
            attributes["ropeway.adapter"] = envelope.adapter
        failed = outcome if outcome in _FAILURES else None
        moments: list[Moment] = []
        if box is not None:
            failed = box.failure or failed
            moments = [Moment("preempted", job.unix_ns(at), {"ropeway.preemptions": n}) for at, n in box.preempted]
        return self._tracing.record(
            "attempt", job.trace, *times, kind="consumer", attributes=attributes, moments=moments, failed=failed
        )

    def _phases(self, job: HeldJob, box: Outbox, attempt: Trace) -> None:
        assert box.began is not None
        last = box.last if box.last is not None else job.over_at
        first = last if box.first_token is None else box.first_token
        began_ns, first_ns, last_ns = (job.unix_ns(at) for at in (box.began, first, last))
        request, prompt = _request(job), len(job.envelope.prompt_token_ids)
        facts: dict[str, Attribute] = {**request, "ropeway.prefill.tokens": prompt + job.taken_tokens}
        self._tracing.record("prefill", attempt, began_ns, first_ns, attributes=facts)
        if box.first_token is not None:
            tokens = job.transcript.completion_tokens - job.taken_tokens
            facts = {**request, "ropeway.decode.tokens": tokens}
            self._tracing.record("decode", attempt, first_ns, last_ns, attributes=facts)

    @staticmethod
    def _ending(job: HeldJob, box: Outbox) -> dict[str, Attribute]:
        """Of the attempt that ended a job: usage, and seconds as vLLM has them, from the submit on."""
        usage, timings = box.summary
        queue, first, run = (ms / 1e3 for ms in (timings.queue_ms, timings.first_token_ms, timings.run_ms))
        facts: dict[str, Attribute] = {
            **_usage(usage),
            "gen_ai.latency.time_in_queue": queue,
            "gen_ai.latency.e2e": queue + run,
            "gen_ai.latency.time_in_model_inference": run,
            "ropeway.kv_blocks": timings.blocks,
        }
        if finishes := [finish for finish in job.transcript.finishes if finish is not None]:
            facts["gen_ai.response.finish_reasons"] = finishes
        if usage.completion_tokens > 0:
            facts |= {
                "gen_ai.latency.time_to_first_token": queue + first,
                "gen_ai.latency.time_in_model_prefill": first,
                "gen_ai.latency.time_in_model_decode": run - first,
            }
        return facts


def _request(job: HeldJob) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {"gen_ai.request.model": job.envelope.model}
    if job.envelope.sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = job.envelope.sampling.max_tokens
    return attributes


def _usage(usage: Usage) -> dict[str, Attribute]:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
