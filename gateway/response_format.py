"""Shapes of the Responses API, and how a job becomes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from gateway import wire_format
from gateway.response_requests import Asked
from shared.errors import JobNotFoundError
from shared.keys import JobId
from shared.protocol import ErrorInfo, FinishReason, JobStatus, Usage
from shared.sampling import SamplingParams

PREFIX: Final = "resp_"
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_STATUSES: Final[dict[JobStatus, ResponseStatus]] = {
    "delayed": "queued",
    "queued": "queued",
    "running": "in_progress",
    "completed": "completed",
    "failed": "failed",
    "expired": "failed",
    "cancelled": "cancelled",
}


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What of a response does not change while it is made.

    Attributes:
        model: the name that the client asked for.
        created: Unix seconds.
    """

    job_id: str
    model: str
    created: int
    asked: Asked
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class State:
    """What of a response changes; `finish` is that of its choice."""

    status: JobStatus
    text: str = ""
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: ErrorInfo | None = None
    finished: int | None = None


def job_of(response_id: str) -> str:
    """The job behind a response.

    Raises:
        JobNotFoundError: it is not a response's id.
    """
    job_id = response_id.removeprefix(PREFIX)
    if job_id == response_id or JobId.match(job_id) is None:
        raise JobNotFoundError("no response has this id", param="response_id")
    return job_id


def status_of(state: State) -> ResponseStatus:
    """A job's status in the words of this API."""
    if state.status == "completed" and state.finish == "length":
        return "incomplete"
    return _STATUSES[state.status]


def item_id(shape: ResponseShape) -> str:
    """The id of the one item of the output."""
    return f"msg_{shape.job_id}"


def part(text: str) -> dict[str, Any]:
    """The one part of the message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item(shape: ResponseShape, state: State) -> dict[str, Any]:
    """The message, as far as it is there."""
    status = status_of(state)
    done = (
        "in_progress" if status in ("queued", "in_progress") else "completed" if status == "completed" else "incomplete"
    )
    return {
        "type": "message",
        "id": item_id(shape),
        "status": done,
        "role": "assistant",
        "content": [part(state.text)] if done != "in_progress" else [],
    }


def response(shape: ResponseShape, state: State) -> dict[str, Any]:
    """The whole object."""
    asked, sampling, status = shape.asked, shape.sampling, status_of(state)
    over = status not in ("queued", "in_progress")
    return {
        "id": PREFIX + shape.job_id,
        "object": "response",
        "created_at": shape.created,
        "completed_at": state.finished if status == "completed" else None,
        "status": status,
        "background": asked.background,
        "error": None if state.error is None else {"code": "server_error", "message": state.error.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata,
        "model": shape.model,
        "output": [item(shape, state)] if over and (state.text or state.error is None) else [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": wire_format.tier_of(asked.service_tier) if asked.service_tier else None,
        "store": asked.store,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None if state.usage is None else _usage(state.usage),
        "user": asked.user,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def input_items(shape: ResponseShape) -> list[dict[str, Any]]:
    """The messages that came with a response's own request, in their order."""
    asked = shape.asked
    turns = asked.conversation[len(asked.conversation) - asked.own :]
    return [
        {
            "type": "message",
            "id": f"msg_{shape.job_id}_{index}",
            "status": "completed",
            "role": turn.role,
            "content": [{"type": "output_text" if turn.role == "assistant" else "input_text", "text": turn.content}
                        | ({"annotations": []} if turn.role == "assistant" else {})],
        }
        for index, turn in enumerate(turns)
    ]  # fmt: skip


def event(name: str, number: int, **fields: Any) -> bytes:
    """One server-sent event of a stream."""
    data = msgspec.json.encode({"type": name, "sequence_number": number, **fields})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
