"""The client over blocking connections."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from ropeway.client import _adapters, _core
from ropeway.client._adapters import Adapter
from ropeway.client._core import APIError, Event, Job, JobClass, Prompt

T = TypeVar("T")


class Client:
    """Talks to one gateway. Safe to share between threads."""

    def __init__(
        self,
        base_url: str = _core.DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Prepare; nothing is sent yet. `timeout` is in seconds, per wait for a connection or for bytes."""
        self._http = httpx.Client(**_core.client_options(base_url, api_key, timeout), transport=transport)

    def models(self) -> list[str]:
        """Names of the models that are served."""
        return self._run(_core.models())

    def submit(
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
        """Queue a job; it goes on whether or not anyone listens.

        Args:
            prompt: a question, or the messages of a conversation.
            model: a model of `models()`.
            raw: the prompt is text to be continued, no chat template is put around it.
            job_class: which jobs come first.
            deadline_s: seconds until it must have ended, counted from when it may start.
            delay_s: seconds until it may start.
            metadata: echoed with the job.
            callback_url: told, as a webhook, when the job has ended.
            parameters: further fields of the request body: `max_tokens`, `temperature`, `seed` ...
        """
        return self._run(
            _core.submit(prompt, model, raw, job_class, deadline_s, delay_s, metadata, callback_url, parameters)
        )

    def get(self, job_id: str) -> Job:
        """A job as it is now."""
        return self._run(_core.get(job_id))

    def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """A job once it has ended, in whatever way; TimeoutError where it does not within the time-out in seconds."""
        return self._run(_core.wait(job_id, timeout))

    def cancel(self, job_id: str) -> Job:
        """Ask for a job's end. Of one that has ended nothing changes."""
        return self._run(_core.cancel(job_id))

    def events(self, job_id: str, *, after: int = 0, patience_s: float = 60.0) -> Iterator[Event]:
        """A job's events up to its last, over lost connections too.

        Args:
            job_id: whose events.
            after: the last sequence number already seen; 0 for all.
            patience_s: how long to go on trying to reconnect without one new event.
        """
        feed = _core.EventFeed(job_id, after, patience_s)
        while True:
            failure: Exception | None = None
            try:
                with self._open(feed.call()) as response:
                    for chunk in response.iter_bytes():
                        yield from feed.feed(chunk)
                        if feed.ended:
                            return
            except (httpx.TransportError, APIError) as error:
                failure = error
            time.sleep(feed.failed(failure))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, model: str, **parameters: Any) -> dict[str, Any]:
        """A chat completion, as of the OpenAI API."""
        return self._run(_core.chat(messages, model, parameters))

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str, **parameters: Any
    ) -> Iterator[dict[str, Any]]:
        """The chunks of a chat completion, as of the OpenAI API. Leaving the iteration cancels it."""
        feed = _core.ChatFeed()
        with self._open(_core.chat_call(messages, model, parameters, stream=True)) as response:
            for chunk in response.iter_bytes():
                yield from feed.feed(chunk)
                if feed.ended:
                    return
        raise httpx.RemoteProtocolError("the server closed the stream before its end")

    def adapters(self) -> list[Adapter]:
        """All LoRA adapters that the gateway knows, those too whose load failed or whose last jobs are running."""
        return self._run(_adapters.adapters())

    def adapter(self, name: str) -> Adapter:
        """One LoRA adapter."""
        return self._run(_adapters.adapter(name))

    def load_adapter(
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
        return self._run(_adapters.load_adapter(name, source, base_model, replace, pin, wait_s))

    def unload_adapter(self, name: str) -> int:
        """Unload a LoRA adapter: at once for new jobs. Answers how many jobs go on with it."""
        return self._run(_adapters.unload_adapter(name))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, operation: _core.Operation[T]) -> T:
        try:
            call = next(operation)
            while True:
                call = operation.send(self._http.send(call.request(self._http)))
        except StopIteration as stop:
            result: T = stop.value
            return result

    @contextlib.contextmanager
    def _open(self, call: _core.Call) -> Iterator[httpx.Response]:
        """A response whose body is still to come; an error's body is read and raised."""
        response = self._http.send(call.request(self._http), stream=True)
        try:
            if not response.is_success:
                response.read()
            yield _core.checked(response)
        finally:
            response.close()
