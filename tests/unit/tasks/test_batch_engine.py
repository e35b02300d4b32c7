"""A line's run, with stand-ins for queue and gateway: what passes is waited out, what does not is the line's answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.errors import JobLostError
from shared.batch_record import BatchRecord
from shared.errors import JobExpiredError, ModelNotFoundError, OverloadedError, RopewayError, ServiceUnavailableError
from shared.settings import GatewaySettings
from tasks import batch_engine
from tasks.batch_engine import LineRunner

BODY = json.dumps({"model": "m", "prompt": "sesame", "metadata": {"a": "b"}}).encode()


class Preparer:
    """Raises what it is told to, one after the other."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    async def prepare(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        raise self.errors.pop(0)


def runner(preparer: Preparer, *, stopping: bool = False, endpoint: str = "/v1/completions") -> LineRunner:
    batch = BatchRecord(
        id="batch_1", tenant="t", authenticated=True, endpoint=endpoint, input_file="f", created_ms=1, expires_ms=2
    )
    stand_in: Any = object()
    return LineRunner(
        batch, stand_in, stand_in, preparer, stand_in, GatewaySettings(), lambda: stopping  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_engine, "_FIRST_PAUSE_S", 0.001)


async def test_a_fault_of_ours_is_that_lines_500_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    outcome = await runner(Preparer(ZeroDivisionError("sesame"))).run(3, BODY, 60)
    assert outcome is not None and (outcome.status, outcome.done, outcome.job_ids) == (500, False, ())
    assert b"sesame" not in outcome.body and json.loads(outcome.body)["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    "passing", [OverloadedError("the queue is full"), ServiceUnavailableError("Redis is away"), JobLostError("gone")]
)
async def test_what_passes_is_waited_out(passing: RopewayError) -> None:
    preparer = Preparer(passing, passing, ModelNotFoundError("model: no such"))
    outcome = await runner(preparer).run(3, BODY, 60)
    assert preparer.calls == 3 and outcome is not None and outcome.status == 404


async def test_a_job_that_is_lost_again_and_again_is_the_lines_error() -> None:
    preparer = Preparer(*(JobLostError("gone") for _ in range(9)))
    outcome = await runner(preparer).run(3, BODY, 60)
    assert preparer.calls == 3 and outcome is not None and outcome.status >= 500


async def test_a_line_that_waits_is_given_up_once_the_batch_is_stopped() -> None:
    assert await runner(Preparer(OverloadedError("full")), stopping=True).run(3, BODY, 60) is None
    assert await runner(Preparer(JobExpiredError("late"))).run(3, BODY, 60) is None


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("/v1/completions", {"model": "m", "prompt": "x", "stream": True}, "stream"),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user"}], "stream": True}, "stream"),
        ("/v1/responses", {"model": "m", "input": "x", "stream": True}, "stream"),
        ("/v1/responses", {"model": "m", "input": "x", "background": True}, "background"),
        ("/v1/responses", {"model": "m", "input": []}, "input"),
        ("/v1/responses", {"model": "m"}, "input"),
        ("/v1/completions", {"model": "m", "input": "x"}, "prompt"),
    ],
)  # fmt: skip
async def test_a_body_that_does_not_fit_names_its_field(endpoint: str, body: dict[str, Any], param: str) -> None:
    preparer = Preparer()
    outcome = await runner(preparer, endpoint=endpoint).run(0, json.dumps(body).encode(), 60)
    assert outcome is not None and outcome.status == 400 and preparer.calls == 0
    assert json.loads(outcome.body)["error"]["param"] == param


async def test_a_cancelled_run_ends_at_once() -> None:
    waiting = runner(Preparer(*(OverloadedError("full") for _ in range(99)))).run(3, BODY, 60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 0.01)
