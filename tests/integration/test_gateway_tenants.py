"""Tenants beside each other on one worker, with its real prefix cache: nobody learns what others have asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.admission import Caller, cache_salt
from gateway.keyring import STATIC_SCOPES, StaticKey
from tests.support.stack import Stack
from tests.support.tiny_tokenizer import spell

MODEL = "parrot"
KEYS = ["the-key-of-a", "the-key-of-b"]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(clean=True, sim_step_ms=2) as stack:
        stack.start_gateway(api_keys=KEYS)
        stack.start_worker("tests.support.parrot_worker")
        stack.wait_ready()
        yield stack


def cached(stack: Stack, key: str, path: str, body: dict[str, Any]) -> int:
    """How many tokens of a prompt were found in the cache."""
    headers = {"Authorization": f"Bearer {key}"}
    usage = httpx.post(f"{stack.url}{path}", json=body, headers=headers, timeout=30).raise_for_status().json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_prompt_of_another_tenant_is_not_in_the_cache(stack: Stack, path: str) -> None:
    text = f"{path} a secret of five whole blocks"[4:]
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": spell(text), "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "/v1/responses": {"input": text, "max_output_tokens": 1},
    }[path] | {"model": MODEL}
    a, b = KEYS
    assert cached(stack, a, path, body) == 0
    assert cached(stack, a, path, body) > 0
    assert cached(stack, b, path, body) == 0
    # Not even with the salt that A's requests have, which B cannot know.
    salt = cache_salt(Caller(tenant=StaticKey(a, STATIC_SCOPES).identity.tenant, authenticated=True), None)
    assert cached(stack, b, path, body | {"cache_salt": salt}) == 0
