"""Ropeway's own client: a job whose events survive lost connections, and many jobs at once with asyncio.

Run `make serve` in another terminal, then: .venv/bin/python examples/ropeway_client.py [URL]
"""

from __future__ import annotations

import asyncio
import sys

from ropeway.client import AsyncClient, Client


def one(url: str) -> None:
    with Client(url) as client:
        model = client.models()[0]
        job = client.submit("Tell me about cable cars.", model=model, max_tokens=60)
        # Reconnects by itself and goes on after the last event received.
        for event in client.events(job.id):
            print(event.text(), end="", flush=True)
        print(f"\n{client.wait(job.id).status}: {job.id}\n")


async def many(url: str) -> None:
    async with AsyncClient(url) as client:
        model = (await client.models())[0]
        prompts = [f"Name {count} mountains." for count in ("two", "three", "four")]
        jobs = [await client.submit(prompt, model=model, max_tokens=24, job_class="batch") for prompt in prompts]
        for prompt, job in zip(prompts, await asyncio.gather(*(client.wait(job.id) for job in jobs)), strict=True):
            print(f"{prompt} {job.text!r}")


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    one(address)
    asyncio.run(many(address))
