"""The events of a stored response as a stream that can be taken up anywhere."""

from __future__ import annotations

from gateway import answers
from gateway.job_events import JobEventsResponse
from gateway.response_answer import ResponseAnswer
from gateway.response_format import ResponseShape
from gateway.services import Services
from shared.errors import RopewayError
from shared.protocol import Frame


class ResponseEventsResponse(JobEventsResponse):
    """Events behind a number, made anew from all frames of the job; `after` -1 for all of them."""

    def __init__(self, services: Services, shape: ResponseShape, after: int, reference: str) -> None:
        super().__init__(services, shape.job_id, 0, reference)
        self._answer = ResponseAnswer(shape, after)

    def _opening(self) -> bytes:
        return self._answer.opening()

    def _event(self, frame: Frame) -> bytes:
        try:
            events = self._answer.add(0, frame, chunks=True)
        except RopewayError as error:
            return self._answer.failure(answers.as_error(error, self._reference))
        return events + self._answer.closing() if frame.last else events
