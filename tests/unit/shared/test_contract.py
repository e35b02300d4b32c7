"""The contract as files: complete, the texts that servers get, and a number that follows KEYS and ARGV."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from redis.crc import key_slot
from typer.testing import CliRunner

from ropeway import cli
from shared import keys
from shared.contract import CONTRACT, PINNED, about, describe, export, script_names
from shared.keys import JobId
from shared.protocol import WIRE_VERSION
from shared.scripts import load

#: Of KEYS and ARGV of the scripts that other languages call.
SIGNATURES = "c36b31b2413933d5"


def test_the_number_rises_with_keys_and_arguments() -> None:
    signatures = [
        re.sub(r"\s+", " ", "KEYS" + about(load(name)).split("KEYS")[1].split("Answers")[0]) for name in PINNED
    ]
    digest = hashlib.sha256("\n".join(signatures).encode()).hexdigest()[:16]
    assert digest == SIGNATURES, (
        f"KEYS or ARGV of one of {', '.join(PINNED)} has changed. Where a call that was right is wrong now: raise "
        f"CONTRACT in shared/contract.py, and in examples/direct_redis.mjs. Then put {digest} here."
    )


def test_the_example_is_written_for_it() -> None:
    example = (Path(__file__).parents[3] / "examples" / "direct_redis.mjs").read_text("utf-8")
    assert f'const CONTRACT = "{CONTRACT}";' in example and CONTRACT.startswith(f"{WIRE_VERSION}.")


def test_files_are_what_servers_get(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert export(folder) == export(folder) == len(script_names())
    described = json.loads((folder / "protocol.json").read_text("utf-8"))
    assert described == describe() and set(described["scripts"]) == set(script_names()) >= set(PINNED)
    for name, entry in described["scripts"].items():
        text = (folder / entry["file"]).read_bytes()
        assert hashlib.sha1(text).hexdigest() == entry["sha1"] == load(name).sha
        assert entry["allow_oom"] == text.startswith(b"#!lua flags=allow-oom")
        assert re.search(r"^KEYS  1", entry["about"], re.MULTILINE), name
        assert "Answers" in entry["about"], name
    assert {path.name for path in folder.iterdir()} == {"protocol.json", *(f"{n}.lua" for n in script_names())}


def test_patterns_are_the_names() -> None:
    parts = {
        "pool": "a.b",
        "lane": "3",
        "unique": "0" * 32,
        "class": "high",
        "bucket": "5",
        "tenant": "t",
        "owner": "o",
    }
    made = {
        name: re.sub(r"<(\w+)>", lambda part: parts[part[1]], pattern) for name, pattern in describe()["keys"].items()
    }
    job = JobId("a.b", 3, "0" * 32)
    assert (made["job"], made["events"]) == (keys.job(job), keys.events(job))
    assert made["queue"] == keys.queue("a.b", 3, "high", 5) and made["tenant_jobs"] == keys.tenant_jobs("a.b", 3, "t")
    lane = {"job", "events", "queue", "resume", "stats", "delayed", "tenant_jobs", "expiring", "dead", "outbox"}
    assert len({key_slot(made[name].encode()) for name in lane}) == 1


def test_the_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["protocol", "export", str(tmp_path / "contract")], env={"NO_COLOR": "1"})
    assert done.exit_code == 0 and f"contract {CONTRACT}" in done.output
    assert (tmp_path / "contract" / "submit.lua").exists()


@pytest.mark.parametrize("name", ["a-file", "a-file/below"])
def test_a_folder_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-file").write_text("x")
    done = CliRunner().invoke(cli.app, ["protocol", "export", str(tmp_path / name)], env={"NO_COLOR": "1"})
    assert done.exit_code == 1 and "cannot write into" in done.output and "Traceback" not in done.output
