"""What `POST /v1/jobs` asks for: one job or many, each checked, tokenized and given its lifetime, and none queued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from gateway.admission import Caller, JobOptions
from gateway.preparation import Prepared
from gateway.schemas import (
    MAX_DELAY_S,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    JobRequest,
    JobsRequest,
    check_metadata,
    parse,
)
from gateway.services import Services
from shared.errors import InvalidRequestError, RopewayError, UnsupportedParameterError
from shared.jobs import Lifetime


@dataclass(frozen=True, slots=True)
class Orders:
    """Jobs that may be queued, in the order in which they were asked for.

    Attributes:
        prepared: all of them as if they were prompts of one request.
        lifetimes: of each.
        many: they came as a list, and are answered so.
    """

    prepared: Prepared
    lifetimes: Sequence[Lifetime]
    many: bool

    @property
    def longest_s(self) -> float:
        """Seconds until the last of them and its result are gone, at the most."""
        return max(life.delay_s + life.deadline_s + life.max_run_s + life.retention_s for life in self.lifetimes)


async def prepare(services: Services, caller: Caller, request: JobsRequest) -> Orders:
    """Everything that can refuse a job, before any of them touches the queue.

    Raises:
        InvalidRequestError, ModelNotFoundError: with the field at fault, of several jobs as `jobs[2].body.model`.
        ServiceUnavailableError: Redis is away and a model not known here.
    """
    if request.jobs is None:
        order = parse(JobRequest, request.model_extra or {})
        await _check_callbacks(services, [order.callback_url])
        prepared, lifetime = await _prepare(services, caller, order)
        return Orders(prepared, [lifetime], many=False)
    most = services.settings.max_jobs_per_request
    if not 1 <= len(request.jobs) <= most:
        raise InvalidRequestError(f"jobs: {len(request.jobs)} jobs, from 1 to {most} are allowed", param="jobs")
    if request.model_extra:
        raise InvalidRequestError("jobs: goes with no other field", param="jobs")
    orders = []
    for index, job in enumerate(request.jobs):
        with _inside(f"jobs[{index}]"):
            orders.append(parse(JobRequest, job))
    await _check_callbacks(services, [order.callback_url for order in orders], many=True)
    pairs = await asyncio.gather(*(_at(index, services, caller, order) for index, order in enumerate(orders)))
    shape = replace(pairs[0][0].shape, job_ids=[job_id for prepared, _ in pairs for job_id in prepared.shape.job_ids])
    envelopes = [envelope for prepared, _ in pairs for envelope in prepared.envelopes]
    return Orders(Prepared(envelopes, shape), [lifetime for _, lifetime in pairs], many=True)


async def _at(index: int, services: Services, caller: Caller, order: JobRequest) -> tuple[Prepared, Lifetime]:
    with _inside(f"jobs[{index}]"):
        return await _prepare(services, caller, order)


async def _prepare(services: Services, caller: Caller, order: JobRequest) -> tuple[Prepared, Lifetime]:
    check_metadata(order.metadata)
    policy = await services.policies.of(caller.tenant)
    if order.job_class is not None:
        policy.class_of(order.job_class, "class")
    if order.adapter is not None:
        policy.check_model(order.adapter, "adapter")
    lifetime = _lifetime(services, order)
    with _inside("body"):
        body = _inner(order)
        options = JobOptions(
            job_class=order.job_class or body.job_class,
            flush_ms=_flush_ms(services, order, body),
            metadata=order.metadata if order.metadata is not None else body.metadata or {},
        )
    served = None if order.adapter is None else await services.directory.find_adapter(order.adapter, body.model)
    with _inside("body"):
        prepared = await services.preparer.prepare(body, caller, options, single=True, served=served)
    for envelope in prepared.envelopes:
        envelope.callback_url = order.callback_url
    return prepared, lifetime


async def _check_callbacks(services: Services, urls: Sequence[str | None], *, many: bool = False) -> None:
    """Check each URL once, all at the same time: hosts are looked up for it."""

    async def check(url: str) -> None:
        with _inside(f"jobs[{urls.index(url)}]") if many else nullcontext():
            await services.callbacks.check(url)

    answers = await asyncio.gather(
        *(check(url) for url in dict.fromkeys(urls) if url is not None), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer


def _lifetime(services: Services, order: JobRequest) -> Lifetime:
    settings = services.settings
    if order.retention_s is not None and order.retention_s > settings.max_retention_s:
        raise InvalidRequestError(f"retention_s: at most {settings.max_retention_s:g} is allowed", param="retention_s")
    delay = order.delay_s or 0.0
    if order.not_before is not None:
        if order.delay_s is not None:
            raise InvalidRequestError("not_before: cannot go with delay_s", param="not_before")
        delay = max(0.0, order.not_before - time.time())
        if delay > MAX_DELAY_S:
            raise InvalidRequestError(f"not_before: at most {MAX_DELAY_S:g} seconds from now", param="not_before")
    return Lifetime(
        deadline_s=settings.deadline_s if order.deadline_s is None else order.deadline_s,
        max_run_s=settings.max_run_s,
        retention_s=settings.retention_s if order.retention_s is None else order.retention_s,
        delay_s=delay,
    )


def _inner(order: JobRequest) -> GenerationRequest:
    """The body of the endpoint.

    Raises:
        InvalidRequestError: as of the endpoint.
    """
    if order.kind == "chat":
        return parse(ChatCompletionRequest, order.body)
    body = parse(CompletionRequest, order.body)
    if body.echo:
        raise UnsupportedParameterError("echo: a job does not support it", param="echo")
    return body


def _flush_ms(services: Services, order: JobRequest, body: GenerationRequest) -> int:
    """A job may be watched, so its tokens are published at once, unless it says that nobody does."""
    gathers = body.stream is False or (order.job_class or body.job_class) == "batch"
    return services.settings.flush_ms if gathers else 0


@contextmanager
def _inside(place: str) -> Iterator[None]:
    """Parameters are named as inside of a field."""
    try:
        yield
    except RopewayError as error:
        if error.param is None and not isinstance(error, InvalidRequestError):
            raise
        param = f"{place}.{error.param}" if error.param else place
        raise type(error)(error.message, param=param, code=error.error_code, retry_after=error.retry_after) from None
