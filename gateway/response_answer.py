"""A response, built from the frames of its job: event by event, or whole at the end.

The numbers of events follow from the job's frames alone, so that a stream which is taken up again has the same.
"""

from __future__ import annotations

from typing import Any

from gateway import answers, response_format, wire_format
from gateway.errors import error_of
from gateway.response_format import ResponseShape, State
from shared.errors import ProtocolError
from shared.protocol import ErrorInfo, FinishReason, Frame, JobStatus, Timings, Usage

_FAILED = frozenset({"failed", "expired"})


class ResponseAnswer:
    """Collects the frames of a response's job.

    Args:
        after: events up to this number are left out of the stream.
    """

    candidates = 0

    def __init__(self, shape: ResponseShape, after: int = -1) -> None:
        self._shape, self._after = shape, after
        self._pieces: list[str] = []
        self._tokens, self._number = 0, 0
        self._finish: FinishReason | None = None
        self._status: JobStatus = "running"
        self._item_open, self._ended = False, False
        self.usage = Usage()
        self.timings: Timings | None = None
        self.any_text = False
        self.events = 0
        # Made at once: its events have the first numbers, though it is asked for when others are there.
        body = response_format.response(shape, State("running"))
        self._opening = self._event("response.created", response=body)
        self._opening += self._event("response.in_progress", response=body)

    def opening(self) -> bytes:
        """Events in front of all others."""
        return self._opening

    def add(self, job: int, frame: Frame, *, chunks: bool) -> bytes:
        """Take one frame; answers its events.

        Raises:
            RopewayError: the job ended with an error; what clients may see of it.
            ProtocolError: tokens are missing or come twice.
        """
        events = b""
        for choice in frame.choices:
            if choice.index:
                raise ProtocolError(f"job {self._shape.job_id}: choice {choice.index} of 1")
            if choice.ids and choice.offset != self._tokens:
                raise ProtocolError(f"job {self._shape.job_id}: token {choice.offset} follows {self._tokens}")
            self._tokens += len(choice.ids)
            self._finish = self._finish or choice.finish
            if choice.text:
                self.any_text = True
                self._pieces.append(choice.text)
                if chunks:
                    events += self._open_item() + self._delta(choice.text)
        if frame.last:
            self._ended = True
            self.usage, self.timings = frame.usage or self.usage, frame.timings
            self._status = frame.status or "failed"
            if frame.kind == "error" or self._status in _FAILED:
                info = frame.error or ErrorInfo(message="the job ended without a reason", code="job_failed")
                raise error_of(info, self._shape.job_id)
        return events

    def failure(self, info: ErrorInfo) -> bytes:
        """The end of a stream that failed: of the response, or of this connection alone, while its job may go on."""
        if not self._ended:
            return self._event("error", code=info.code, message=info.message, param=info.param)
        state = self._state("failed", info)
        return self._close_item(state) + self._event(
            "response.failed", response=response_format.response(self._shape, state)
        )

    def closing(self) -> bytes:
        """The end of a stream that went well, or was cancelled."""
        state = self._state(self._status, None)
        events = self._open_item() + self._close_item(state)
        name = "response.completed" if response_format.status_of(state) == "completed" else "response.incomplete"
        return events + self._event(name, response=response_format.response(self._shape, state))

    def whole(self) -> bytes:
        """The response as one JSON object."""
        return wire_format.encode(response_format.response(self._shape, self._state(self._status, None)))

    def _state(self, status: JobStatus, error: ErrorInfo | None) -> State:
        return State(status, "".join(self._pieces), self._finish, self.usage, error, answers.now())

    def _open_item(self) -> bytes:
        if self._item_open:
            return b""
        self._item_open = True
        item = response_format.item(self._shape, State("running"))
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added", **self._place(), part=response_format.part("")
        )

    def _delta(self, text: str) -> bytes:
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _close_item(self, state: State) -> bytes:
        if not self._item_open:
            return b""
        return (
            self._event("response.output_text.done", **self._place(), text=state.text, logprobs=[])
            + self._event("response.content_part.done", **self._place(), part=response_format.part(state.text))
            + self._event("response.output_item.done", output_index=0, item=response_format.item(self._shape, state))
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": response_format.item_id(self._shape), "output_index": 0, "content_index": 0}

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        if number <= self._after:
            return b""
        self.events += 1
        return response_format.event(name, number, **fields)
