"""The client for asyncio. What the methods do is written at `Client`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from ropeway.client import _adapters, _core
from ropeway.client._adapters import Adapter
from ropeway.client._core import APIError, Event, Job, JobClass, Prompt

T = TypeVar("T")


class AsyncClient:
    """Talks to one gateway; belongs to one event loop."""

    def __init__(
        self,
        base_url: str = _core.DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare; nothing is sent yet. `timeout` is in seconds, per wait for a connection or for bytes."""
        self._http = httpx.AsyncClient(**_core.client_options(base_url, api_key, timeout), transport=transport)

    async def models(self) -> list[str]:
        """Names of the models that are served."""
        return await self._run(_core.models())

    async def submit(
        self,
        prompt: Prompt,
        *,
        model: str,
        raw: bool = False,
        job_class: JobClass | None = None,
        deadline_s: float | None = None,
        delay_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        callback_url: str | None = None,
        **parameters: Any,
    ) -> Job:
        """Queue a job."""
        order = _core.submit(prompt, model, raw, job_class, deadline_s, delay_s, metadata, callback_url, parameters)
        return await self._run(order)

    async def get(self, job_id: str) -> Job:
        """A job as it is now."""
        return await self._run(_core.get(job_id))

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """A job once it has ended."""
        return await self._run(_core.wait(job_id, timeout))

    async def cancel(self, job_id: str) -> Job:
        """Ask for a job's end."""
        return await self._run(_core.cancel(job_id))

    async def events(self, job_id: str, *, after: int = 0, patience_s: float = 60.0) -> AsyncIterator[Event]:
        """A job's events up to its last, over lost connections too."""
        feed = _core.EventFeed(job_id, after, patience_s)
        while True:
            failure: Exception | None = None
            try:
                async with self._open(feed.call()) as response:
                    async for chunk in response.aiter_bytes():
                        for event in feed.feed(chunk):
                            yield event
                        if feed.ended:
                            return
            except (httpx.TransportError, APIError) as error:
                failure = error
            await asyncio.sleep(feed.failed(failure))

    async def chat(self, messages: Sequence[Mapping[str, Any]], *, model: str, **parameters: Any) -> dict[str, Any]:
        """A chat completion, as of the OpenAI API."""
        return await self._run(_core.chat(messages, model, parameters))

    async def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str, **parameters: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a chat completion, as of the OpenAI API."""
        feed = _core.ChatFeed()
        async with self._open(_core.chat_call(messages, model, parameters, stream=True)) as response:
            async for piece in response.aiter_bytes():
                for chunk in feed.feed(piece):
                    yield chunk
                if feed.ended:
                    return
        raise httpx.RemoteProtocolError("the server closed the stream before its end")

    async def adapters(self) -> list[Adapter]:
        """All LoRA adapters that the gateway knows, those too whose load failed or whose last jobs are running."""
        return await self._run(_adapters.adapters())

    async def adapter(self, name: str) -> Adapter:
        """One LoRA adapter."""
        return await self._run(_adapters.adapter(name))

    async def load_adapter(
        self,
        name: str,
        source: str | Path,
        *,
        base_model: str | None = None,
        replace: bool = False,
        pin: bool = False,
        wait_s: float = 600.0,
    ) -> Adapter:
        """Load a LoRA adapter, so that requests may name it as their model. Needs an administrator's key.

        Args:
            name: of the adapter.
            source: a `Path` is a folder on this machine, whose files are uploaded; a text is a folder that the server
                may read, or `owner/name` or `hf:owner/name@revision` of the Hugging Face hub.
            base_model: may be left out where one model serves adapters.
            replace: also where the name stands for another adapter; jobs under way keep that.
            pin: keep it in the memory of all workers.
            wait_s: seconds to wait for the load's end; 0: it is under way when this answers.
        """
        return await self._run(_adapters.load_adapter(name, source, base_model, replace, pin, wait_s))

    async def unload_adapter(self, name: str) -> int:
        """Unload a LoRA adapter: at once for new jobs. Answers how many jobs go on with it."""
        return await self._run(_adapters.unload_adapter(name))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, operation: _core.Operation[T]) -> T:
        try:
            call = next(operation)
            while True:
                call = operation.send(await self._http.send(call.request(self._http)))
        except StopIteration as stop:
            result: T = stop.value
            return result

    @contextlib.asynccontextmanager
    async def _open(self, call: _core.Call) -> AsyncIterator[httpx.Response]:
        """A response whose body is still to come; an error's body is read and raised."""
        response = await self._http.send(call.request(self._http), stream=True)
        try:
            if not response.is_success:
                await response.aread()
            yield _core.checked(response)
        finally:
            await response.aclose()
