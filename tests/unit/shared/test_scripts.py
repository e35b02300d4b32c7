"""Scripts as texts and calls: headers, flags, keys in one slot, answers."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from redis.crc import key_slot

from shared import access, adapter_calls, keys, readings, scripts, webhook_calls
from shared.adapter_record import AdapterRecord
from shared.batch_record import Progress
from shared.batches import advance_call, change_call
from shared.errors import JobError, JobExpiredError, OverloadedError, ProtocolError
from shared.jobs import (
    Ending,
    LaneLimits,
    Lease,
    Lifetime,
    Owned,
    Publication,
    Publish,
    PullBudget,
    PulledJob,
    QueuedLimits,
    RateLimits,
    Submitted,
)
from shared.keys import BUCKETS, CLASSES, GROUP, JobId
from shared.protocol import WIRE_VERSION, Envelope, encode
from shared.sampling import SamplingParams
from shared.webhook_calls import Claimed, OutboxEntry, Patience

NAMES = sorted(
    p.name.removesuffix(".lua") for p in files("shared").joinpath("lua").iterdir() if not p.name.startswith("_")
)
JOB_ID = JobId.new("p", 3)
ENVELOPE = Envelope(id=str(JOB_ID), model="m", prompt_token_ids=[1, 2], sampling=SamplingParams())
OWNED = Owned(str(JOB_ID), 2)
PATIENCE = Patience(60.0, 60.0)
ENTRY = OutboxEntry("p", 3, b"1-0", str(JOB_ID), "completed")
CLAIMED = Claimed(str(JOB_ID), 1, "https://example.test/", "t", "job.completed", b"{}", "")
CALLS = {
    "submit": scripts.submit(ENVELOPE, Lifetime(), LaneLimits()),
    "pull": scripts.pull("p", 3, "o", PullBudget({}, {}, 1), Lease(), b""),
    "publish": scripts.publish(Publish(str(JOB_ID), "o", 2, 1, [b"f"], Ending("completed", b"r"))),
    "renew": scripts.renew("o", OWNED),
    "release": scripts.release("o", OWNED),
    "cancel": scripts.cancel(JOB_ID),
    "delete": scripts.delete(JOB_ID),
    "due": scripts.due("p", 3, 10),
    "bury": scripts.bury("o", OWNED, ProtocolError("x")),
    "forget": scripts.forget("p", 3, "o"),
    "forget_dead": scripts.forget_dead("p", 3, ["o"]),
    "record_write": access.write_call("keys", [("id", b"", b"{}")]),
    "orphan": scripts.orphan("p", 3, "o", 3, charge=True, count=10),
    "join": scripts.join("p", "a", b"c", b"t", ""),
    "heartbeat": scripts.heartbeat("p", "o", b"i", 1000),
    "sweep": scripts.sweep("p", 3, keys.queue("p", 3, "high", 2), "-", 10, 1000),
    "claim": scripts.claim(keys.idempotency("t", "d"), b"r", 60.0),
    "spend": scripts.spend("t", RateLimits(10, 100), 1, 20),
    "enter": scripts.enter("t", QueuedLimits(3, 100), {str(JOB_ID): 20}, 60.0),
    "leave": scripts.leave("t", [str(JOB_ID)]),
    "recount": scripts.recount("p", 3),
    "restore": scripts.restore(JOB_ID, "q:high:2"),
    "adapter_write": adapter_calls.write("a", b"", None, AdapterRecord(name="a", pool="p"), 10),
    "adapter_keep": adapter_calls.keep("a" * 32),
    "adapter_drop": adapter_calls.drop("a" * 32, 1, "delete"),
    "webhook_take": webhook_calls.take(ENTRY, {"url": "u", "body": b"{}"}, 7, PATIENCE),
    "webhook_claim": webhook_calls.claim("p", 3, 10, 30.0, PATIENCE),
    "webhook_done": webhook_calls.done(CLAIMED, "retry", 500, "it answered 500", 5.0, PATIENCE),
    "webhook_again": webhook_calls.again(JOB_ID, PATIENCE),
    "batch_change": change_call("batch_1", b"a", b"b", 0),
    "batch_advance": advance_call("batch_1", "t", Progress(next_line=1, completed=1), "p"),
}


def test_every_script_has_a_call() -> None:
    assert set(CALLS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_header_comes_first_and_has_the_flags(name: str) -> None:
    text = scripts.load(name).text
    first, second = text.split("\n", 2)[:2]
    frees = {"publish", "cancel", "release", "renew", "pull", "bury", "sweep", "recount", "restore", "leave"}
    frees |= {"forget", "forget_dead", "delete", "due", "record_write"}
    frees |= {"webhook_claim", "webhook_done", "orphan"}
    assert first == ("#!lua flags=allow-oom" if name in frees else "#!lua")
    assert second.startswith("-- Put in front of every script")
    assert not re.search(r"'(KEYS|SCAN|FLUSH\w*|EVAL)'", text)


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_declared_and_in_one_slot(name: str) -> None:
    command = CALLS[name].command
    assert command[0] == "EVALSHA" and command[1] == scripts.load(name).sha
    names = command[3 : 3 + command[2]]
    assert len({key_slot(key.encode()) for key in names}) == 1
    documented = re.findall(
        r"(?:^|  )(\d+)(?:\.\.\.)? ", scripts.load(name).text.split("-- KEYS")[1].split("-- ARGV")[0]
    )
    assert int(documented[-1]) <= len(names)


def test_lua_and_python_agree_on_names() -> None:
    prelude = scripts.load("pull").text
    assert f"GROUP = '{GROUP}'" in prelude and f"WIRE_VERSION = {WIRE_VERSION}" in prelude
    assert "CLASSES, BUCKETS = { " + ", ".join(f"'{c}'" for c in CLASSES) + " }, " + str(BUCKETS) in prelude


@pytest.mark.parametrize("kind", [JobExpiredError, JobError])
def test_errors_that_lua_makes_are_those_of_the_tree(kind: type[JobError]) -> None:
    text = scripts.load("pull").text
    assert re.search(rf"type = '{kind.type}',\s+code = '{kind.code}',\s+status = {kind.status}", text)


def test_submit_parses() -> None:
    assert readings.parse_submit([0, 3, 40]) == Submitted(False, 3, 40)
    assert readings.parse_submit([1, 3, 40]) == Submitted(True, 3, 40)
    with pytest.raises(OverloadedError, match="3 jobs with 40 tokens") as caught:
        readings.parse_submit([2, 3, 40])
    assert caught.value.retry_after


def test_pull_parses() -> None:
    broken = str(JobId.new("p", 3)).encode()
    job: list[Any] = [str(JOB_ID).encode(), encode(ENVELOPE), 2, 1, 5, 99, 1500, 1, 0, b"w1", 2500]
    answer = [b"token", [job, [broken, b"junk", 7, 1, 0, 0, 0, 0, 0, b"", 0]], [b"x", b"expired"], [b"y"], 1, 2]
    parsed = readings.parse_pull(answer)
    assert parsed.token == b"token"
    assert parsed.pulled.jobs == [PulledJob(ENVELOPE, 2, 1, 5, 99, 1.5, True, False, "w1", 2.5)]
    assert parsed.pulled.ended == {"x": "expired"} and parsed.pulled.buried == ["y"]
    assert (parsed.pulled.reclaimed, parsed.pulled.alone_waiting) == (1, 2)
    assert [owned for owned, _ in parsed.broken] == [Owned(broken.decode(), 7)]
    assert readings.parse_pull(None).pulled.jobs == []


def test_publications_parse() -> None:
    assert [readings.parse_publication(i) for i in range(3)] == [
        Publication.FINE, Publication.CANCELLED, Publication.FENCED,
    ]  # fmt: skip


def test_cancel_tells_workers_in_msgpack() -> None:
    assert msgspec.msgpack.decode(CALLS["cancel"].command[-1]) == {"op": "cancel", "id": str(JOB_ID)}


def test_malformed_ids_are_refused() -> None:
    for call in (
        lambda: scripts.renew("o", Owned("nonsense", 1)),
        lambda: scripts.publish(Publish("nonsense", "o", 1, 1, [])),
    ):
        with pytest.raises(ProtocolError):
            call()


def test_an_unknown_script() -> None:
    with pytest.raises(FileNotFoundError):
        scripts.load("no_such_script")
