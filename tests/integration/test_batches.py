"""Files and batches through the official client: a real Redis, a gateway, a worker and tasks processes that die."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace
from openai.types import Batch
from openai.types.responses import Response
from prometheus_client.parser import text_string_to_metric_families

from shared import keys
from shared.batches import Batches
from shared.connect import connect
from shared.jobstore import JobStore
from tests.support.adapter_tasks import TasksProcess
from tests.support.redis_server import binary
from tests.support.stack import ROOT, Stack

KEYS = ["key-of-one-tenant", "key-of-another-one"]
MODEL = "parrot"
ENDED = {"failed", "completed", "expired", "cancelled"}
MAX_FILE = 300_000


class System:
    """A stack, and how tasks processes of it are started."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack, self.folder = stack, folder
        self.started: list[TasksProcess] = []

    def tasks(self, **settings: Any) -> TasksProcess:
        """One more tasks process, ready."""
        log = self.folder / f"tasks-{len(self.started)}.log"
        values = {"files_store": str(self.folder / "files"), "adapter_store": str(self.folder / "adapters")}
        process = TasksProcess(self.stack.redis.url, log, **values, **settings)
        self.started.append(process)
        process.wait_ready()
        return process

    def end(self) -> None:
        """Kill them."""
        for process in self.started:
            process.stop(signal.SIGKILL)

    def pending(self) -> int:
        """How many batches have not ended."""
        with self.stack.redis.client() as client:
            return int(client.scard(keys.batches("open")))  # type: ignore[arg-type]

    def ended_jobs(self) -> int:
        """How many jobs have ended, ever."""

        async def ask() -> int:
            connection = connect(self.stack.redis.url)
            try:
                store = JobStore(connection)
                card = await store.get_card(MODEL)
                assert card is not None
                return (await store.pool_load(MODEL, card.lanes)).ended_jobs
            finally:
                await connection.aclose()

        return asyncio.run(ask())

    def jobs(self) -> int:
        """How many jobs Redis holds."""
        with self.stack.redis.client() as client:
            return sum(1 for _ in client.scan_iter("rw:*:job:*", count=1000))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("batches")
    with Stack(redis_kind="redis" if binary("redis") else "valkey", sim_step_ms=2) as stack:
        stack.start_gateway(
            api_keys=KEYS, files_store=str(folder / "files"), max_file_bytes=MAX_FILE, max_body_bytes=64 * 1024
        )
        stack.start_worker("tests.support.parrot_worker")
        stack.wait_ready()
        yield System(stack, folder)


@pytest.fixture
def tasks(system: System) -> Iterator[Callable[..., TasksProcess]]:
    yield system.tasks
    system.end()
    system.started.clear()


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.stack.url}/v1", api_key=KEYS[0], max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def other(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.stack.url}/v1", api_key=KEYS[1], max_retries=0, timeout=60) as client:
        yield client


def chat(custom_id: str, text: str = "the cabins go round", **body: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 60, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def create(client: openai.OpenAI, lines: list[dict[str, Any]], **fields: Any) -> Batch:
    file = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=fields.pop("endpoint", "/v1/chat/completions"),
        completion_window="24h",
        **fields,
    )


def until(
    client: openai.OpenAI,
    batch: Batch,
    reached: Callable[[Batch], bool] = lambda b: b.status in ENDED,
    seconds: float = 120,
) -> Batch:
    """The batch once it has come so far."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        batch = client.batches.retrieve(batch.id)
        if reached(batch):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"not in time: {batch}")


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_answers_each_line(system: System, client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    tasks()
    lines = [chat(f"line-{i}", f"number {i}") for i in range(40)]
    lines[7]["body"]["temperature"] = -1
    lines[9]["body"]["model"] = "nobody"
    batch = create(client, lines, metadata={"who": "me"})
    assert batch.status == "validating" and batch.object == "batch" and batch.metadata == {"who": "me"}
    batch = until(client, batch)
    assert batch.status == "completed" and batch.errors is None
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 40, "completed": 38, "failed": 2}
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at and batch.expires_at
    answers = {line["custom_id"]: line for line in content(client, batch.output_file_id)}
    assert set(answers) == {f"line-{i}" for i in range(40)} - {"line-7", "line-9"}
    for i in set(range(40)) - {7, 9}:
        response = answers[f"line-{i}"]["response"]
        assert response["status_code"] == 200 and answers[f"line-{i}"]["error"] is None
        assert response["body"]["choices"][0]["message"]["content"] == f"number {i}"
        assert response["body"]["usage"]["completion_tokens"] > 0
    errors = {line["custom_id"]: line["response"] for line in content(client, batch.error_file_id)}
    assert errors["line-7"]["status_code"] == 400 and errors["line-7"]["body"]["error"]["param"] == "temperature"
    assert errors["line-9"]["status_code"] == 404 and errors["line-9"]["body"]["error"]["code"] == "model_not_found"
    assert system.jobs() == 0  # results are deleted once they are written
    assert not list((system.folder / "files" / "parts").glob("*"))


def test_completions_with_several_prompts(client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    tasks()
    body = {"model": MODEL, "prompt": ["up", "down"], "max_tokens": 20}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}]
    batch = until(client, create(client, lines, endpoint="/v1/completions"))
    [line] = content(client, batch.output_file_id)
    assert [choice["text"] for choice in line["response"]["body"]["choices"]] == ["up", "down"]


def test_responses(client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    tasks()
    before = client.responses.create(model=MODEL, input="up ")
    bodies: dict[str, dict[str, Any]] = {
        "plain": {"input": "round", "instructions": "go ", "max_output_tokens": 40, "metadata": {"a": "b"}},
        "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "down"}]}]},
        "short": {"input": "the cabins go round", "max_output_tokens": 2},
        "more": {"input": "and down", "previous_response_id": before.id},
        "none": {"input": "x", "previous_response_id": "resp_none"},
        "tools": {"input": "x", "tools": [{"type": "web_search"}]},
        "large": {"input": "x", "max_output_tokens": 10**6},
        "background": {"input": "x", "background": True},
        "stored": {"input": "x", "store": True},
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, **body}}
        for name, body in bodies.items()
    ]
    batch = until(client, create(client, lines, endpoint="/v1/responses"))
    answers = {line["custom_id"]: line["response"] for line in content(client, batch.output_file_id)}
    responses = {name: Response.model_validate(answer["body"]) for name, answer in answers.items()}
    assert {name: response.output_text for name, response in responses.items()} == {
        "plain": "go round", "items": "down", "short": responses["short"].output_text, "more": "up up and down",
    }  # fmt: skip
    assert (responses["plain"].status, responses["plain"].metadata) == ("completed", {"a": "b"})
    assert responses["short"].status == "incomplete" and not responses["plain"].store  # type: ignore[attr-defined]
    errors = {line["custom_id"]: line["response"]["body"]["error"] for line in content(client, batch.error_file_id)}
    assert {name: error["param"] for name, error in errors.items()} == {
        "none": "previous_response_id", "tools": "tools", "large": "max_output_tokens", "background": "background",
        "stored": "store",
    }  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(responses["plain"].id)


def test_metrics_of_batches(client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    process = tasks(batch_window=4)
    assert process.stop() == 0
    process = tasks(batch_window=4)  # what is counted outlives processes
    before = sample(process, "ropeway_batch_lines_total", outcome="completed")
    batch = create(client, [chat(f"line-{i}", "x" * 50) for i in range(100)])

    def seen(wanted: Callable[[float], bool], name: str, **labels: str) -> None:
        limit = time.monotonic() + 60
        while not wanted(sample(process, name, **labels)):
            assert time.monotonic() < limit, name
            time.sleep(0.05)

    seen(lambda value: value >= 1, "ropeway_batches", state="in_progress")
    seen(lambda value: value >= 1, "ropeway_batch_lines_in_flight")
    until(client, batch)
    seen(lambda value: value >= before + 100, "ropeway_batch_lines_total", outcome="completed")
    seen(lambda value: value >= 1, "ropeway_batches_ended_total", status="completed")
    assert sample(process, "ropeway_batch_lines_total", outcome="completed") == before + 100
    seen(lambda value: value == 0, "ropeway_batches", state="in_progress")  # looked at once a round
    seen(lambda value: value == 0, "ropeway_batch_lines_in_flight")


def test_the_example_runs(system: System, tasks: Callable[..., TasksProcess]) -> None:
    tasks()
    command = [sys.executable, str(ROOT / "examples" / "batch_file.py"), "--url", system.stack.url]
    command += ["--api-key", KEYS[0]]
    done = subprocess.run([*command, "--lines", "7"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert set(answers) == {f"question-{number}" for number in range(1, 8)}
    assert answers["question-3"].startswith("A ropeway has 3 cabins")
    [batch] = re.findall(r"batch_[0-9a-f]+", done.stderr.splitlines()[0])
    again = subprocess.run([*command, "--batch", batch], capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 0 and again.stdout == done.stdout


def test_no_prompt_answer_or_key_in_logs_of_batches(
    system: System, client: openai.OpenAI, tasks: Callable[..., TasksProcess]
) -> None:
    process = tasks(log_level="debug")
    word = "sesame"
    lines = [
        chat(f"{word}-good", f"{word} good"),
        chat(f"{word}-bad", f"{word} bad", temperature=word),
        chat(f"{word}-bias", f"{word} bias", logit_bias={word: 1}),
        chat(f"{word}-model", f"{word} model", model=word),
        chat(f"{word}-long", word * 2000),
    ]
    file = client.files.create(file=(f"{word}.jsonl", jsonl(lines)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={word: word}
    )
    batch = until(client, batch)
    assert batch.request_counts is not None and batch.request_counts.failed == 4
    broken = client.files.create(file=(f"{word}.jsonl", f'{{"custom_id": "{word}", {word}\n'.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=broken.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = until(client, batch)
    assert batch.status == "failed" and batch.errors is not None
    assert word not in "".join(fault.message or "" for fault in batch.errors.data or [])
    written = process.log.read_text() + "".join(each.text() for each in system.stack.processes)
    assert word not in written and KEYS[0] not in written


def sample(process: TasksProcess, name: str, **labels: str) -> float:
    """One value of a tasks process's metrics."""
    for family in text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{process.port}/metrics").text):
        for found in family.samples:
            if found.name == name and found.labels == labels:
                return float(found.value)
    raise AssertionError(f"there is no {name} {labels}")


def test_a_faulty_file_fails_with_line_numbers(client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    tasks()
    data = jsonl([chat("a"), chat("a")]) + b"{nonsense\n" + jsonl([chat("b")])
    file = client.files.create(file=("x.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = until(client, batch)
    assert batch.status == "failed" and batch.failed_at and batch.errors is not None and batch.errors.data is not None
    assert [(e.code, e.line) for e in batch.errors.data] == [("duplicate_custom_id", 2), ("invalid_json_line", 3)]
    assert batch.output_file_id is None


def test_killed_again_and_again_each_line_is_answered_once(
    system: System, client: openai.OpenAI, tasks: Callable[..., TasksProcess]
) -> None:
    count, dice, before_all = 400, random.Random(5), system.ended_jobs()
    batch = create(client, [chat(f"line-{i}", f"cabin {i} goes") for i in range(count)])
    for _ in range(3):
        process = tasks(batch_window=16)
        seen = client.batches.retrieve(batch.id).request_counts
        before = seen.completed if seen is not None else 0
        until(client, batch, lambda b, n=before: b.status in ENDED or b.request_counts.completed > n)  # type: ignore
        time.sleep(dice.random())
        process.stop(signal.SIGKILL)
    tasks(batch_window=16)
    batch = until(client, batch)
    assert batch.status == "completed"
    answers = content(client, batch.output_file_id)
    assert Counter(line["custom_id"] for line in answers) == Counter(f"line-{i}" for i in range(count))
    for line in answers:
        number = line["custom_id"].removeprefix("line-")
        assert line["response"]["body"]["choices"][0]["message"]["content"] == f"cabin {number} goes"
    assert content(client, batch.error_file_id) == []
    assert system.ended_jobs() - before_all == count  # no line ran twice


def test_batches_take_turns(client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    both = [create(client, [chat(f"line-{i}", "x" * 50) for i in range(200)]) for _ in range(2)]
    process = tasks(batch_window=8, batch_slice_s=0.2)

    def some(batch: Batch) -> bool:
        assert batch.request_counts is not None
        return batch.request_counts.completed > 0

    until(client, both[1], some)
    assert client.batches.retrieve(both[0].id).status == "in_progress"  # the second one did not wait for its end
    for batch in both:
        batch = until(client, batch)
        assert batch.status == "completed" and len(content(client, batch.output_file_id)) == 200
    assert "batch begun anew" not in process.log.read_text()


def test_cancel_keeps_what_is_done(client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    tasks(batch_window=4)
    batch = create(client, [chat(f"line-{i}", "x" * 50) for i in range(300)])
    until(client, batch, lambda b: b.request_counts is not None and b.request_counts.completed > 0)
    batch = client.batches.cancel(batch.id)
    assert batch.status == "cancelling" and batch.cancelling_at
    batch = until(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.request_counts is not None
    answers = content(client, batch.output_file_id)
    assert 0 < len(answers) < 300 and len(answers) == batch.request_counts.completed
    assert len({line["custom_id"] for line in answers}) == len(answers)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_cancelled_before_anybody_began_it(client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    batch = create(client, [chat("a")])
    client.batches.cancel(batch.id)
    tasks()
    batch = until(client, batch)
    assert batch.status == "cancelled" and batch.output_file_id is None and batch.error_file_id is None


def test_expiry_keeps_what_is_done(system: System, client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    batch = create(client, [chat(f"line-{i}", "x" * 50) for i in range(300)])

    async def shorten() -> None:
        connection = connect(system.stack.redis.url)
        registry = Batches(connection)
        soon = await registry.clock_ms() + 6000
        await registry.change(batch.id, lambda held: replace(held, expires_ms=soon))
        await connection.aclose()

    process = tasks(batch_window=2)
    process.stop(signal.SIGKILL)
    asyncio.run(shorten())
    tasks(batch_window=2)
    batch = until(client, batch)
    assert batch.status == "expired" and batch.expired_at
    answers, errors = content(client, batch.output_file_id), content(client, batch.error_file_id)
    assert Counter(line["custom_id"] for line in answers + errors) == Counter(f"line-{i}" for i in range(300))
    assert errors and {line["error"]["code"] for line in errors} == {"batch_expired"}


def test_another_tenant_sees_nothing(
    client: openai.OpenAI, other: openai.OpenAI, tasks: Callable[..., TasksProcess]
) -> None:
    tasks()
    batch = until(client, create(client, [chat("a")]))
    for file_id in (batch.input_file_id, str(batch.output_file_id)):
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
    for ask in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.BadRequestError, match="input_file_id"):
        other.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    seen = {file.id for file in other.files.list().data} | {found.id for found in other.batches.list().data}
    assert not seen & {batch.id, batch.input_file_id, batch.output_file_id}


def test_files_are_listed_read_and_deleted(client: openai.OpenAI, system: System) -> None:
    made = [client.files.create(file=(f"{i}.jsonl", f"{i}\n".encode()), purpose="batch") for i in range(5)]
    newest = client.files.list(limit=2, purpose="batch")
    assert [file.id for file in newest.data] == [made[4].id, made[3].id] and newest.has_more
    listed = [file.id for file in client.files.list(limit=2) if file.id in {f.id for f in made}]
    assert listed == [file.id for file in reversed(made)]
    first = client.files.retrieve(made[0].id)
    assert (first.filename, first.bytes, first.purpose, first.object) == ("0.jsonl", 2, "batch", "file")
    assert client.files.content(first.id).read() == b"0\n"
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(first.id)
    assert not (system.folder / "files" / "files" / first.id).exists()


def test_an_input_in_use_is_not_deleted(client: openai.OpenAI, tasks: Callable[..., TasksProcess]) -> None:
    batch = create(client, [chat("a")])
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    tasks()
    batch = until(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


def test_uploads_that_are_refused(client: openai.OpenAI, system: System) -> None:
    before = set((system.folder / "files" / "files").glob("*"))
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("x.jsonl", b"x" * (MAX_FILE + 1)), purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x.jsonl", b"x"), purpose="vision")
    url = f"{system.stack.url}/v1/files"
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    assert httpx.post(url, headers=headers, data={"purpose": "batch"}, files={"nofile": b"x"}).status_code == 400
    assert httpx.post(url, headers=headers, json={"purpose": "batch"}).status_code == 400
    assert set((system.folder / "files" / "files").glob("*")) == before


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", "unsupported_parameter"),
        ({"endpoint": "/v1/nonsense"}, "endpoint", None),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
            "output_expires_after",
            "unsupported_parameter",
        ),
        ({"completion_window": "1h"}, "completion_window", None),
        ({"input_file_id": "file-0"}, "input_file_id", None),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", None),
    ],
)
def test_batches_that_are_refused(client: openai.OpenAI, changes: dict[str, Any], param: str, code: str | None) -> None:
    file = client.files.create(file=("x.jsonl", jsonl([chat("a")])), purpose="batch")
    fields = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **changes}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_a_prompt_of_another_tenant_is_not_in_the_cache(
    client: openai.OpenAI, other: openai.OpenAI, tasks: Callable[..., TasksProcess]
) -> None:
    tasks()

    def cached(tenant: openai.OpenAI) -> int:
        batch = until(tenant, create(tenant, [chat("a", "a secret of several whole blocks", max_tokens=1)]))
        [line] = content(tenant, batch.output_file_id)
        return int(line["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(client) == 0 and cached(client) > 0 and cached(other) == 0
