"""What a gateway says of a request in its trace, beside the request itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.disconnect import ClientGoneError
from gateway.following import Follower
from shared.keys import JobId
from shared.protocol import Envelope
from shared.trace_context import Trace
from shared.tracing import Attribute, Span, Tracing


@dataclass(slots=True)
class Sent:
    """What has been sent to a client so far: bytes of the body, and frames of jobs that it was made of."""

    body_bytes: int = 0
    frames: int = 0


@contextmanager
def submitting(tracing: Tracing, envelopes: Sequence[Envelope]) -> Iterator[None]:
    """A span of queueing jobs. It becomes the parent of what workers tell of them: it is what their envelopes carry."""
    if not tracing.on:
        yield
        return
    pool = JobId.parse(envelopes[0].id).pool
    attributes: dict[str, Attribute] = {
        "messaging.system": "redis",
        "messaging.operation.name": "submit",
        "messaging.operation.type": "send",
        "messaging.destination.name": pool,
        "messaging.batch.message_count": len(envelopes),
        "messaging.message.id": envelopes[0].id,
        "ropeway.job.class": envelopes[0].job_class,
    }
    with tracing.span(f"submit {pool}", envelopes[0].trace, kind="producer", attributes=attributes) as span:
        for envelope in envelopes:
            envelope.trace = dict(span.trace)
        yield


@contextmanager
def answering(
    tracing: Tracing, name: str, parent: Trace, follower: Follower, links: Sequence[Trace] = ()
) -> Iterator[Sent]:
    """A span of an answer on its way to a client, from the first look for a frame to the last byte."""
    sent = Sent()
    if not tracing.on:
        yield sent
        return
    span = tracing.span(name, parent, links=links)
    try:
        yield sent
    except ClientGoneError:
        span.set({"ropeway.client.gone": True})
        raise
    except BaseException as error:
        span.failed(type(error).__name__)
        raise
    finally:
        _describe(span, follower, sent)
        span.end()


def _describe(span: Span, follower: Follower, sent: Sent) -> None:
    if not span.recording:
        return
    tracks = follower.tracks
    span.set(
        {
            "ropeway.job.id": tracks[0].job_id,
            "ropeway.jobs": len(tracks),
            "ropeway.job.status": tracks[0].status,
            "ropeway.stream.frames": sent.frames,
            "ropeway.stream.bytes": sent.body_bytes,
            "ropeway.stream.last_event": tracks[0].seq,
            "ropeway.stream.log_reads": sum(track.log_reads for track in tracks),
            "ropeway.stream.overflows": sum(track.overflows for track in tracks),
        }
    )


def described(route: str | None, status: int, job_id: str | None, path: str) -> dict[str, Attribute]:
    """Of a request that is over, after the conventions for servers of HTTP. No query: it may hold a token."""
    attributes: dict[str, Attribute] = {"http.response.status_code": status}
    if route is not None:
        attributes |= {"http.route": route, "url.path": path}
    if job_id is not None:
        attributes["ropeway.job.id"] = job_id
    return attributes
