"""A whole system whose model says its prompt again, for the official clients: Redis, a gateway with a key, a worker."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.stack import Stack

KEY = "the-key-of-these-tests"
MODEL = "parrot"


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """Several tokens go into a frame, so that tests are quick; most are sent alone."""
    with Stack(clean=True, sim_step_ms=2) as stack:
        stack.start_gateway(api_keys=[KEY])
        stack.start_worker("tests.support.parrot_worker")
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="package")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    """The official client, which tries nothing again: an error is an error."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
