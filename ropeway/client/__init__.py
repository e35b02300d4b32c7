"""Client of a Ropeway gateway, sync and async. Needs httpx and nothing else of Ropeway.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit("Why do cable cars not fall?", model="smollm2-135m-instruct", max_tokens=64)
        for event in client.events(job.id):     # survives lost connections, no gap and no repeat
            print(event.text(), end="")

Errors: `APIError` for what the gateway refuses, `httpx.TransportError` where it cannot be reached.
"""

from __future__ import annotations

from ropeway.client._adapters import Adapter
from ropeway.client._async import AsyncClient
from ropeway.client._core import DEFAULT_URL, APIError, Event, Job
from ropeway.client._sync import Client

__all__ = ["DEFAULT_URL", "APIError", "Adapter", "AsyncClient", "Client", "Event", "Job"]
