"""A service in Node that uses Redis directly: a real Redis, a gateway beside it, a worker with the simulated engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.direct_redis import DirectRedis
from tests.support.redis_server import binary
from tests.support.stack import Stack

PROMPT = "Where does the ropeway go, and why \u00e9 \U0001f6a1?"
ASK = ("--max-tokens", "40", "--seed", "7")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    kind = "redis" if binary("redis") else "valkey"
    with Stack(redis_kind=kind, clean=True, engine="sim", sim_step_ms=20) as stack:
        stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> DirectRedis:
    return DirectRedis(tmp_path_factory.mktemp("direct"))


def answer_of(stack: Stack, prompt: str, **more: Any) -> str:
    """What the gateway answers to the same question."""
    body = {"model": "sim", "messages": [{"role": "user", "content": prompt}], "max_tokens": 40, "seed": 7, **more}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


def job_of(stack: Stack, job_id: str) -> dict[str, Any]:
    return dict(httpx.get(f"{stack.url}/v1/jobs/{job_id}", timeout=60).raise_for_status().json())


@pytest.mark.parametrize("prompt", [PROMPT, "the cabins go round " * 20])
def test_a_job_is_that_of_the_gateway(stack: Stack, direct: DirectRedis, prompt: str) -> None:
    with stack.redis.client() as client:
        client.script_flush()  # the text is sent where the server does not know it
    text, said = direct.run(stack.redis.url, prompt, *ASK)
    assert text == answer_of(stack, prompt)
    assert (said["status"], said["tokens"]) == ("completed", said["usage"]["completion_tokens"])
    assert said["read"]["channel"] == said["frames"] and said["read"]["log"] == 0
    job = job_of(stack, said["id"])
    assert job["status"] == "completed" and job["last_seq"] == said["frames"]


@pytest.mark.parametrize("how", ["--miss-after", "--cut-after"])
def test_what_was_missed_comes_from_the_log(stack: Stack, direct: DirectRedis, how: str) -> None:
    text, said = direct.run(stack.redis.url, PROMPT, *ASK, how, "3")
    assert text == answer_of(stack, PROMPT)
    assert said["read"]["log"] >= 5 and sum(said["read"].values()) == said["frames"]


def test_a_lost_connection_loses_nothing(stack: Stack, direct: DirectRedis) -> None:
    more = ("--max-tokens", "150", "--seed", "7")
    command = direct.command(stack.redis.url, PROMPT, *more)
    with (
        subprocess.Popen(command, cwd=direct.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        stack.redis.client() as client,
    ):
        assert process.stdout is not None
        process.stdout.read1()
        for kind in ("pubsub", "normal"):
            client.client_kill_filter(_type=kind, skipme=True)
        rest, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    said = json.loads(errors.splitlines()[-1])
    assert said["status"] == "completed" and sum(said["read"].values()) == said["frames"]
    assert said["tokens"] == said["usage"]["completion_tokens"] and rest


def test_silence_is_looked_into(stack: Stack, direct: DirectRedis) -> None:
    text, said = direct.run(stack.redis.url, PROMPT, *ASK, "--deaf-after", "3")
    assert text == answer_of(stack, PROMPT)
    assert said["read"]["channel"] >= 3 and said["read"]["log"] >= 5 and sum(said["read"].values()) == said["frames"]


def test_a_job_is_cancelled(stack: Stack, direct: DirectRedis) -> None:
    text, said = direct.run(stack.redis.url, PROMPT, "--max-tokens", "2000", "--seed", "7", "--cancel-after", "4")
    assert said["status"] == "cancelled" and text and said["tokens"] < 2000
    assert job_of(stack, said["id"])["status"] == "cancelled"


def test_rights_of_one_pool_are_enough(stack: Stack, direct: DirectRedis) -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
    [line] = [line.strip() for line in page.splitlines() if line.strip().startswith("ACL SETUSER direct")]
    with stack.redis.client() as client:
        client.execute_command(*line.replace("<pool>", "sim").replace("<password>", "secret").split())
    url = stack.redis.url.replace("redis://", "redis://direct:secret@")
    _, said = direct.run(url, PROMPT, *ASK, "--pool", "sim", "--cancel-after", "4")
    assert said["status"] in ("cancelled", "completed")


def test_a_redis_that_is_not_there_is_not_tried_for_ever(direct: DirectRedis) -> None:
    for url in ("redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock"):
        command = direct.command(url, PROMPT)
        done = subprocess.run(command, cwd=direct.folder, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 1 and "--redis" in done.stderr.splitlines()[-1]


def test_another_contract_is_refused(stack: Stack, direct: DirectRedis) -> None:
    other = direct.folder / "other"
    shutil.copytree(direct.folder / "contract", other)
    description = json.loads((other / "protocol.json").read_text())
    (other / "protocol.json").write_text(json.dumps(description | {"contract": "2.7"}))
    command = direct.command(stack.redis.url, PROMPT, "--contract", "other")
    done = subprocess.run(command, cwd=direct.folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "the contract is 2.7" in done.stderr
