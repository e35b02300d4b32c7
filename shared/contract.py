"""The wire contract as files, for services in other languages: the scripts as servers get them, and every name.

A client sends the scripts of one export, with KEYS and ARGV in the order that these say. Exports of one wire version
work side by side, as gateways and workers of different releases do: every process brings its own texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from shared import keys, protocol
from shared.jobs import Lifetime
from shared.keys import JobId
from shared.protocol import FINAL_STATUSES, WIRE_VERSION
from shared.scripts import Script, load

#: Wire version, and a number that rises whenever KEYS or ARGV of a script of `PINNED` change so that calls which were
#: right are so no more: whoever calls the scripts compares it with the one that it was written for.
CONTRACT: Final = f"{WIRE_VERSION}.0"
#: Scripts that processes of other languages call: those of submitters, those of workers.
PINNED: Final = (
    "submit", "cancel", "delete", "join", "heartbeat", "pull", "publish", "renew", "release", "bury", "forget",
)  # fmt: skip
#: Name of the description in an exported folder.
DESCRIPTION: Final = "protocol.json"


def script_names() -> list[str]:
    """Names of all scripts, sorted."""
    found = (entry.name for entry in files("shared").joinpath("lua").iterdir())
    return sorted(name.removesuffix(".lua") for name in found if name.endswith(".lua") and not name.startswith("_"))


def about(script: Script) -> str:
    """What a script does, its KEYS, ARGV and answer: the comment at the head of its file."""
    head = files("shared").joinpath("lua").joinpath(f"{script.name}.lua").read_text("utf-8").split("\n")[1:]
    return "\n".join(line.removeprefix("--").removeprefix(" ") for line in _comment(head))


def key_patterns() -> dict[str, str]:
    """Keys and channels of a pool, by what they are; `<...>` stands for what varies."""
    pool, lane = "<pool>", cast(int, "<lane>")
    job = JobId(pool, lane, "<unique>")
    return {
        "job": keys.job(job),
        "events": keys.events(job),
        "queue": keys.queue(pool, lane, "<class>", cast(int, "<bucket>")),
        "resume": keys.resume(pool, lane),
        "stats": keys.stats(pool, lane),
        "delayed": keys.delayed(pool, lane),
        "tenant_jobs": keys.tenant_jobs(pool, lane, "<tenant>"),
        "expiring": keys.expiring(pool, lane),
        "dead": keys.dead(pool, lane),
        "outbox": keys.outbox(pool, lane),
        "last_pull": keys.last_pull(pool, lane, "<owner>"),
        "card": keys.card(pool),
        "tokenizer": keys.tokenizer(pool),
        "workers": keys.workers(pool),
        "worker": keys.worker(pool, "<owner>"),
        "paused": keys.paused(pool),
        "wake": keys.wake(pool),
        "control": keys.control(pool),
        "pools": keys.pools(),
        "adapter_names": keys.adapters("names"),
    }


def describe() -> dict[str, Any]:
    """Everything but the texts of the scripts, as JSON has it."""
    lifetime = Lifetime()
    return {
        "contract": CONTRACT,
        "wire_version": WIRE_VERSION,
        "group": keys.GROUP,
        "classes": list(keys.CLASSES),
        "buckets": keys.BUCKETS,
        "affinity_tokens": keys.AFFINITY_TOKENS,
        "final_statuses": sorted(FINAL_STATUSES),
        "lifetime_ms": {
            "deadline": round(1e3 * lifetime.deadline_s),
            "max_run": round(1e3 * lifetime.max_run_s),
            "retention": round(1e3 * lifetime.retention_s),
        },
        "max_bytes": {
            "envelope": protocol.MAX_ENVELOPE_BYTES,
            "frame": protocol.MAX_FRAME_BYTES,
            "result": protocol.MAX_RESULT_BYTES,
            "tokenizer": protocol.MAX_TOKENIZER_BYTES,
        },
        "keys": key_patterns(),
        "scripts": {name: _entry(load(name)) for name in script_names()},
    }


def export(folder: Path) -> int:
    """Write `protocol.json` and each script as `<name>.lua` into a folder, made where it is missing.

    What is there under these names is replaced, other files are left.

    Returns:
        How many scripts there are.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = script_names()
    for name in names:
        (folder / f"{name}.lua").write_bytes(load(name).text.encode())
    text = msgspec.json.format(msgspec.json.encode(describe()), indent=2)
    (folder / DESCRIPTION).write_bytes(text + b"\n")
    return len(names)


def _entry(script: Script) -> dict[str, Any]:
    return {
        "file": f"{script.name}.lua",
        "sha1": script.sha,
        "allow_oom": "allow-oom" in script.text.partition("\n")[0],
        "about": about(script),
    }


def _comment(lines: list[str]) -> Iterator[str]:
    """Comment lines in front of the first of code or of an include."""
    for line in lines:
        if not line.startswith("--") or re.match(r"-- include ", line):
            return
        yield line
