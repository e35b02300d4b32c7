"""What the client does, without doing any I/O: requests to make, answers to read, when to try again.

An operation is a generator that yields a `Call`, is sent the response and returns the result; a stream is an object
that makes calls and is fed bytes. The sync and the async client only carry these over the network.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Generator, Mapping, Sequence
from typing import IO, Any, Final, Literal, TypeVar
from urllib.parse import quote

import httpx

from ropeway.client._sse import ServerSentEvent, SseDecoder

T = TypeVar("T")
Json = dict[str, Any]
#: A question, or the messages of a conversation.
Prompt = str | Sequence[Mapping[str, Any]]
JobClass = Literal["high", "normal", "batch"]

DEFAULT_URL: Final = "http://127.0.0.1:8000"

FINAL_STATUSES: Final = frozenset({"completed", "failed", "cancelled", "expired"})

#: Answers that may be different a moment later. 0: an error inside a stream.
_TRANSIENT: Final = frozenset({0, 429, 500, 502, 503, 504})
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
#: Seconds asked for in one `?wait=`; the gateway may answer sooner.
_WAIT_S = 25.0
#: Added to a wait for the way there and back.
_SLACK_S = 15.0


class APIError(Exception):
    """The gateway refused, or a job failed. The attributes are those of the OpenAI error body.

    Attributes:
        status: HTTP status, 0 where the error came inside a stream.
        retry_after: seconds after which a retry makes sense, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        type: str = "server_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @classmethod
    def from_body(cls, body: object, *, status: int = 0, retry_after: float | None = None) -> APIError:
        """Out of `{"error": {...}}`, the inner object, or anything else."""
        inner = body.get("error", body) if isinstance(body, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("message"), str):
            return cls(f"the server answered {status}", status=status, retry_after=retry_after)
        return cls(
            inner["message"],
            status=status,
            type=str(inner.get("type") or "server_error"),
            code=inner.get("code"),
            param=inner.get("param"),
            retry_after=retry_after,
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as the gateway shows it; `data` is the whole answer."""

    id: str
    status: str
    data: Json

    @property
    def ended(self) -> bool:
        """Whether its status is final."""
        return self.status in FINAL_STATUSES

    @property
    def text(self) -> str:
        """Text of the first choice, empty while there is none."""
        return next(iter(self.texts), "")

    @property
    def texts(self) -> list[str]:
        """Text of each choice, in order."""
        choices = (self.data.get("result") or {}).get("choices") or []
        return [str((c.get("message") or {}).get("content") or c.get("text") or "") for c in choices]

    @property
    def error(self) -> APIError | None:
        """Why it failed, or None."""
        body = self.data.get("error")
        return None if body is None else APIError.from_body(body)


@dataclasses.dataclass(frozen=True)
class Event:
    """One event of a job. `seq` starts at 1 and has no holes; after `done` or `error` comes nothing."""

    seq: int
    kind: str
    data: Json

    @property
    def last(self) -> bool:
        """Whether no event follows."""
        return self.kind in ("done", "error")

    def text(self, index: int = 0) -> str:
        """What it adds to the text of one choice."""
        return "".join(c.get("text", "") for c in self.data.get("choices", ()) if c.get("index", 0) == index)


@dataclasses.dataclass(frozen=True)
class Call:
    """One HTTP request. `read_s` is how long the server may stay silent; None: as the client is set.

    With `files` the body is a form: of them, by name with a name of its own, and of `form`.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    json: Json | None = None
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read_s: float | None = None
    form: Mapping[str, str] | None = None
    files: Mapping[str, tuple[str, IO[bytes]]] | None = None

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request, with the client's base URL, headers and time-outs."""
        timeout = http.timeout if self.read_s is None else httpx.Timeout(http.timeout.connect, read=self.read_s)
        return http.build_request(
            self.method,
            self.path,
            json=self.json,
            data=self.form,
            files=self.files,
            params=self.params,
            headers=self.headers,
            timeout=timeout,
        )


Operation = Generator[Call, httpx.Response, T]


def client_options(base_url: str, api_key: str | None, timeout: float) -> Json:
    """Arguments of `httpx.Client` and `httpx.AsyncClient`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"base_url": base_url, "headers": headers, "timeout": httpx.Timeout(timeout, pool=None)}


def checked(response: httpx.Response) -> httpx.Response:
    """The response, if it is a success; its body must have been read.

    Raises:
        APIError: with the status and what the body says.
    """
    if response.is_success:
        return response
    try:
        body: object = response.json()
    except ValueError:
        body = None
    after = response.headers.get("retry-after", "")
    retry_after = float(after) if after.replace(".", "", 1).isdecimal() else None
    raise APIError.from_body(body, status=response.status_code, retry_after=retry_after)


def models() -> Operation[list[str]]:
    """Names of the models that are served."""
    response = checked((yield Call("GET", "/v1/models")))
    return [str(model["id"]) for model in response.json()["data"]]


def submit(
    prompt: Prompt,
    model: str,
    raw: bool,
    job_class: JobClass | None,
    deadline_s: float | None,
    delay_s: float | None,
    metadata: Mapping[str, str] | None,
    callback_url: str | None,
    parameters: Mapping[str, Any],
) -> Operation[Job]:
    """A new job."""
    body: Json = {**parameters, "model": model}
    if raw:
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    content: Json = {"kind": "completion" if raw else "chat", "body": body}
    optional: Json = {"class": job_class, "deadline_s": deadline_s, "delay_s": delay_s, "metadata": metadata}
    optional["callback_url"] = callback_url
    content |= {name: value for name, value in optional.items() if value is not None}
    return _job(checked((yield Call("POST", "/v1/jobs", json=content))))


def get(job_id: str) -> Operation[Job]:
    """A job as it is now."""
    return _job(checked((yield Call("GET", _job_path(job_id)))))


def wait(job_id: str, timeout: float | None) -> Operation[Job]:
    """A job once it has ended.

    Raises:
        TimeoutError: it had not ended within the time-out.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _WAIT_S if deadline is None else min(_WAIT_S, max(0.0, deadline - time.monotonic()))
        call = Call("GET", _job_path(job_id), params={"wait": f"{left:.3f}"}, read_s=left + _SLACK_S)
        job = _job(checked((yield call)))
        if job.ended:
            return job
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"job {job_id} had not ended after {timeout:g} s, it is {job.status}")


def cancel(job_id: str) -> Operation[Job]:
    """Ask for a job's end; a running one ends within a step or two."""
    return _job(checked((yield Call("POST", _job_path(job_id, "/cancel")))))


def chat(messages: Sequence[Mapping[str, Any]], model: str, parameters: Mapping[str, Any]) -> Operation[Json]:
    """A whole chat completion, as of the OpenAI API."""
    response: Json = checked((yield chat_call(messages, model, parameters, stream=False))).json()
    return response


def chat_call(
    messages: Sequence[Mapping[str, Any]], model: str, parameters: Mapping[str, Any], *, stream: bool
) -> Call:
    """The request of a chat completion."""
    body = {**parameters, "model": model, "messages": [dict(message) for message in messages], "stream": stream}
    return Call("POST", "/v1/chat/completions", json=body)


class EventFeed:
    """The events of one job over as many connections as it takes.

    Each connection goes on after the last event that was delivered, so there is no gap and no repeat.
    """

    def __init__(self, job_id: str, after: int, patience_s: float) -> None:
        """Prepare.

        Args:
            job_id: whose events.
            after: the last sequence number that is not wanted any more.
            patience_s: how long to go on trying without one new event before the last failure is raised.
        """
        self._path = _job_path(job_id, "/events")
        self._after = after
        self._patience_s = patience_s
        self._decoder = SseDecoder()
        self._failing_since: float | None = None
        self._delay = _FIRST_DELAY_S
        self.ended = False

    def call(self) -> Call:
        """The request of the next connection."""
        self._decoder = SseDecoder()
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(self._after)} if self._after else {})
        return Call("GET", self._path, headers=headers)

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that these bytes complete, those left out that were delivered before."""
        events = []
        for raw in self._decoder.feed(chunk):
            event = _event(raw)
            if event is None or event.seq <= self._after:
                continue
            self._after, self._failing_since, self._delay = event.seq, None, _FIRST_DELAY_S
            self.ended = self.ended or event.last
            events.append(event)
        return events

    def failed(self, error: Exception | None) -> float:
        """A connection ended before the last event did; answers the seconds until the next try.

        Args:
            error: why, or None where the server closed it in order.

        Raises:
            Exception: the error itself, where another try makes no sense or patience is at an end.
        """
        error = error or httpx.RemoteProtocolError("the server closed the stream before its last event")
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        hopeless = isinstance(error, APIError) and error.status not in _TRANSIENT
        if hopeless or now - self._failing_since > self._patience_s:
            raise error
        delay, self._delay = self._delay, min(2 * self._delay, _LONGEST_DELAY_S)
        return max(delay, (error.retry_after or 0.0) if isinstance(error, APIError) else 0.0)


class ChatFeed:
    """The chunks of one streamed chat completion."""

    def __init__(self) -> None:
        self._decoder = SseDecoder()
        self.ended = False

    def feed(self, chunk: bytes) -> list[Json]:
        """The chunks that these bytes complete.

        Raises:
            APIError: the server reported an error inside the stream.
        """
        chunks = []
        for raw in self._decoder.feed(chunk):
            if raw.data == "[DONE]":
                self.ended = True
                break
            data = json.loads(raw.data)
            if "error" in data:
                raise APIError.from_body(data)
            chunks.append(data)
        return chunks


def _job_path(job_id: str, suffix: str = "") -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}{suffix}"


def _job(response: httpx.Response) -> Job:
    data = response.json()
    return Job(str(data["id"]), str(data["status"]), data)


def _event(raw: ServerSentEvent) -> Event | None:
    """The event of a job; None for one without a sequence number.

    Raises:
        APIError: the gateway had to end this connection.
    """
    data = json.loads(raw.data)
    if "seq" not in data:
        if "error" in data:
            raise APIError.from_body(data)
        return None
    return Event(int(data["seq"]), str(data["kind"]), data)
