"""What commands send to a gateway, and how what they show reads on terminals of any width."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from ropeway import cli, console
from ropeway.client import Client
from ropeway.options import env_name
from shared.settings import GatewaySettings, WorkerSettings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the developer's own."""
    for name in {*GatewaySettings.model_fields, *WorkerSettings.model_fields, "url", "api_key"}:
        monkeypatch.delenv(f"ROPEWAY_{name.upper()}", raising=False)


def run(*arguments: str, columns: int = 200) -> Result:
    return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": str(columns), "NO_COLOR": "1"})


def test_options_of_a_job_stand_beside_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(202, json={"id": "j", "status": "queued"})

    made = functools.partial(Client, transport=httpx.MockTransport(handler))
    monkeypatch.setattr("ropeway.submit.Client", made)
    given = ["--class", "batch", "--delay", "5", "--deadline", "60", "--max-tokens", "3", "--field", "n=2"]
    given += ["--callback-url", "https://hooks.test/"]
    assert run("submit", "hi", "--model", "m", "--no-wait", *given).output == "j\n"
    run("submit", "hi", "--model", "m", "--no-wait", "--raw", "--field", 'class="high"', "--field", "delay_s=0")
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "m", "max_tokens": 3, "n": 2}
    hook = "https://hooks.test/"
    assert sent == [
        {"kind": "chat", "class": "batch", "delay_s": 5, "deadline_s": 60, "callback_url": hook, "body": chat},
        {"kind": "completion", "class": "high", "delay_s": 0, "body": {"prompt": "hi", "model": "m"}},
    ]


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("adapters/sqll", 1, ["there is a folder adapters here, but none adapters/sqll", "hf:adapters/sqll"]),
        ("./sqll", 1, ["./sqll is no folder here"]),
        ("sqll", 1, ["sqll is no folder here"]),
        ("org/sqll", 1, ["org/sqll is no folder here, and not to be had from the hub: lora_path: no such repository"]),
        ("hf:org/sqll", 1, ["ropeway: lora_path: no such repository"]),
    ],
)
def test_a_mistyped_folder_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, code: int, words: list[str]
) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        error = {"message": "lora_path: no such repository", "code": "invalid_adapter", "param": None}
        return httpx.Response(400, json={"error": error})

    (tmp_path / "adapters").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ropeway.adapters.Client", functools.partial(Client, transport=httpx.MockTransport(refuse)))
    done = run("adapters", "load", "x", source)
    assert done.exit_code == code
    assert all(word in done.stderr.splitlines()[-1] for word in words), done.stderr


@pytest.mark.parametrize("columns", [60, 80, 119])
def test_settings_on_a_narrow_terminal_are_lines_and_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    url = "redis://a-host-with-a-name-that-is-rather-long.example.internal:6379/0?health_check_interval=10"
    monkeypatch.setenv("ROPEWAY_REDIS_URL", url)
    monkeypatch.setenv("ROPEWAY_PORT", "9123")
    lines = run("config", columns=columns).stdout.splitlines()
    assert f"ROPEWAY_REDIS_URL={url}  (default: redis://127.0.0.1:6379/0)" in lines
    assert "ROPEWAY_PORT=9123  (default: 8000)" in lines and "ROPEWAY_HOST=127.0.0.1" in lines
    assert not any("│" in line or "…" in line for line in lines)
    assert all(len(line) <= columns for line in lines if line.startswith(" "))
    names = {env_name(cls, name) for cls in (GatewaySettings, WorkerSettings) for name in cls.model_fields}
    assert names <= {line.partition("=")[0] for line in lines}
    assert any(line.startswith("ropeway worker") for line in lines)


def test_adapters_are_a_table_where_it_fits_and_lines_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapter(name: str, state: str, error: str | None) -> dict[str, Any]:
        data = {"id": name, "base_model": "smollm2-135m-instruct", "state": state, "error": error, "version": 2}
        return data | {"rank": 16, "bytes": 9_800_000, "in_flight": 3, "pinned": True}

    found = [adapter("organisation-name/adapter-number-1", "registered", None)]

    def shown(columns: int) -> str:
        made = functools.partial(Client, transport=httpx.MockTransport(lambda _: httpx.Response(200, json=answer)))
        monkeypatch.setattr("ropeway.adapters.Client", made)
        return run("adapters", "list", columns=columns).stdout

    answer = {"data": found}
    narrow = shown(80)
    assert narrow.splitlines() == [
        "organisation-name/adapter-number-1 (pinned)",
        "    base model: smollm2-135m-instruct; state: registered; version: 2; rank: 16;",
        "    MB: 9.8; in flight: 3",
    ]
    wide = shown(160)
    assert "organisation-name/adapter-number-1 (pinned)" in wide and "│ registered │" in wide
    assert "error" not in wide
    found.append(adapter("x", "failed", "r: the adapter's rank is 64, at most 16 is served (max_lora_rank)"))
    assert "rank is 64, at most" in shown(160) and "│" in shown(160)
    assert all(len(line) <= 80 for line in shown(80).splitlines())
    assert "state: failed" in shown(80) and "(max_lora_rank)" in shown(80)


@pytest.mark.parametrize("prose", [False, True])
@pytest.mark.parametrize("width", [30, 80, 106, 107, 148, 149, 200])
def test_rows_are_shown_whole_at_every_width(width: int, prose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(console, "out", Console(width=width, file=file, highlight=False))
    name, host = "a-pool-with-a-name.15.01a22d1d94b8c2c2", "hooks.example.internal:8443"
    why = "it answered 503 [/] and then nothing for as long as anybody waited"
    console.show_rows(
        ("job", "state", "host", "why"), [(name, "owed", host, why), ("j", "", "", "")], "none", prose=prose
    )
    shown = file.getvalue()
    table = "│" in shown
    assert table == (width >= (107 if prose else 149))
    assert name in shown and host in shown and "…" not in shown
    said = " ".join(shown.replace("│", " ").replace(host, "").split())
    assert all(word in said for word in why.split())
    console.show_rows(("job",), [], "none are owed")
    assert file.getvalue().endswith("none are owed\n")
