"""How a gateway's process ends."""

from __future__ import annotations

import signal
import time

import httpx
import pytest

from tests.support.stack import Stack


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_gateway_that_is_told_to_end_ends_with_code_0(number: signal.Signals) -> None:
    with Stack() as stack:
        gateway = stack.start_gateway()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if httpx.get(f"{stack.url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        assert gateway.stop(number) == 0, gateway.text()
        assert "Traceback" not in gateway.text()
