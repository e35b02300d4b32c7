"""`ropeway serve`, `submit` and `demo` as a user runs them: real processes, a simulated engine in place of a model."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import openai
import psutil
import pytest

from ropeway.client import AsyncClient, Client

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLI = [sys.executable, "-m", "ropeway"]
#: No settings of the developer's own reach the processes.
ENV = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWAY_")}


class Serve:
    """A running `ropeway serve`."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self.data_dir = data_dir
        # A file: a pipe that nobody reads fills up, and then the logs of requests hold up the gateway.
        self._errors = data_dir.with_name(f"errors-{secrets.token_hex(4)}")
        with self._errors.open("w") as errors:
            self.process = self._started(data_dir, arguments, errors)
        self.url = self._await_url()
        self.children: dict[str, psutil.Process] = {}
        wait_until(self._has_tasks)

    @staticmethod
    def _started(data_dir: Path, arguments: Sequence[str], errors: IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*CLI, "serve", "--engine", "sim", "--sim-step-ms", "2", "--port", "0", "--health-port", "0",
             "--data-dir", str(data_dir), "--files-store", str(data_dir / "files"),
             "--adapter-store", str(data_dir / "adapters"), *arguments],
            env=ENV | {"COLUMNS": "200"}, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip

    def _has_tasks(self) -> bool:
        """Whether the last of the children has begun."""
        self.children = {self._name(child): child for child in psutil.Process(self.process.pid).children()}
        return "tasks" in self.children

    def _await_url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"on (http://\S+)", line):
                return found.group(1)
        code, errors = self.ended()
        raise AssertionError(f"serve ended with code {code}: {errors}")

    def ended(self, seconds: float = 120) -> tuple[int, str]:
        """Wait for its end; answers exit code and standard error."""
        self.process.communicate(timeout=seconds)
        return self.process.returncode, self._errors.read_text()

    @staticmethod
    def _name(child: psutil.Process) -> str:
        words = child.cmdline()
        return "redis" if "valkey" in words[0] else words[words.index("ropeway") + 1]

    def worker(self) -> psutil.Process | None:
        """The worker that runs now."""
        return self.child("worker")

    def child(self, name: str) -> psutil.Process | None:
        """A child that runs now."""
        for child in psutil.Process(self.process.pid).children():
            try:
                if self._name(child) == name:
                    return child
            except (psutil.Error, IndexError, ValueError):  # ended, or not yet what it becomes
                continue
        return None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; answers exit code and standard error."""
        self.process.send_signal(number)
        return self.ended()

    def all_ended(self) -> bool:
        _, alive = psutil.wait_procs(list(self.children.values()), timeout=60)
        return not alive

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop()
        assert self.process.stdout is not None
        self.process.stdout.close()


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], env=ENV | environment, capture_output=True, text=True, timeout=120, check=False
    )


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    served = Serve(tmp_path_factory.mktemp("data"))
    yield served
    served.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Starts a server of the test's own."""
    started: list[Serve] = []

    def start(*arguments: str) -> Serve:
        started.append(Serve(tmp_path / "data", *arguments))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as client:
        yield client


QUESTION = [{"role": "user", "content": "What is a ropeway?"}]


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="sim", messages=QUESTION, max_tokens=12, seed=1, extra_body={"ignore_eos": True}
    )
    stream = client.chat.completions.create(
        model="sim", messages=QUESTION, max_tokens=12, seed=1, extra_body={"ignore_eos": True}, stream=True
    )
    chunks = list(stream)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == streamed != ""
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 12


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="sim", prompt=["one", "two two"], max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text for choice in answer.choices)


def test_a_batch_is_run(client: openai.OpenAI) -> None:
    body = {"model": "sim", "messages": QUESTION, "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("input.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None and json.loads(client.files.content(output).text)["custom_id"] == "a"


def test_errors_are_those_of_the_openai_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="sim", messages=QUESTION, top_p=2.0)
    assert wrong.value.param == "top_p"


def test_submit_prints_the_answer_alone(serve: Serve, client: openai.OpenAI) -> None:
    arguments = ["submit", "What is a ropeway?", "--url", serve.url, "--max-tokens", "8", "--seed", "1"]
    expected = client.chat.completions.create(model="sim", messages=QUESTION, max_tokens=8, seed=1)
    for more in ([], ["--stream"], ["--model", "sim"]):
        done = cli(*arguments, *more)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{expected.choices[0].message.content}\n"


def test_submit_without_waiting_prints_an_id_that_leads_to_the_job(serve: Serve) -> None:
    done = cli("submit", "hi", "--url", serve.url, "--no-wait", "--max-tokens", "3")
    job_id = done.stdout.strip()
    assert done.returncode == 0 and done.stdout == f"{job_id}\n"
    with Client(serve.url) as client:
        job = client.wait(job_id, timeout=60)
        assert job.status == "completed" and job.text
        events = list(client.events(job_id))
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert "".join(event.text() for event in events) == job.text
        assert [event.seq for event in client.events(job_id, after=2)] == [event.seq for event in events[2:]]


def test_submit_as_json(serve: Serve) -> None:
    job = json.loads(cli("submit", "hi", "--url", serve.url, "--json", "--max-tokens", "3").stdout)
    assert job["status"] == "completed" and job["usage"]["completion_tokens"] == 3
    lines = cli("submit", "hi", "--url", serve.url, "--json", "--stream", "--max-tokens", "3").stdout.splitlines()
    assert json.loads(lines[-1])["kind"] == "done"


def test_what_submit_cannot_do_is_said_in_one_line(serve: Serve) -> None:
    refused = cli("submit", "hi", "--url", serve.url, "--temperature", "-1")
    unknown = cli("submit", "hi", "--url", serve.url, "--model", "no-such")
    unreachable = cli("submit", "hi", ROPEWAY_URL="http://127.0.0.1:9")
    for done, word in ((refused, "temperature"), (unknown, "model"), (unreachable, "cannot reach")):
        assert done.returncode == 1 and done.stdout == ""
        assert word in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_job_can_be_cancelled_while_it_runs(serve: Serve) -> None:
    with Client(serve.url) as client:
        job = client.submit("hi", model="sim", max_tokens=4000, ignore_eos=True)
        events = client.events(job.id)
        assert next(event for event in events if event.text())
        client.cancel(job.id)
        assert list(events)[-1].last
        assert client.wait(job.id, timeout=60).status == "cancelled"


async def test_the_async_client_does_the_same(serve: Serve) -> None:
    async with AsyncClient(serve.url) as client:
        assert await client.models() == ["sim"]
        job = await client.submit("hi", model="sim", max_tokens=5)
        text = "".join([event.text() async for event in client.events(job.id)])
        assert (await client.wait(job.id, timeout=60)).text == text
        chunks = [c async for c in client.stream_chat(QUESTION, model="sim", max_tokens=5, seed=1)]
        whole = await client.chat(QUESTION, model="sim", max_tokens=5, seed=1)
    streamed = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert streamed == whole["choices"][0]["message"]["content"]


def test_the_examples_run(serve: Serve) -> None:
    for name, said in (("openai_client.py", "error:   top_p"), ("ropeway_client.py", "completed: sim.")):
        command = [sys.executable, str(EXAMPLES / name), serve.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    if shutil.which("curl") is not None:
        ropeway = str(Path(sys.executable).with_name("ropeway"))
        command = [str(EXAMPLES / "resume_stream.sh"), serve.url]
        done = subprocess.run(command, env=ENV | {"ROPEWAY": ropeway}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "cut after event 8\nresumed with event 9," in done.stdout


def test_a_second_server_on_the_same_folder_is_refused(serve: Serve) -> None:
    done = cli("serve", "--engine", "sim", "--port", "0", "--health-port", "0", "--data-dir", str(serve.data_dir))
    assert done.returncode == 1
    assert (
        done.stderr.split()
        == f"ropeway: the data folder {serve.data_dir} is in use by process {serve.process.pid}".split()
    )


def test_a_signal_ends_everything_and_jobs_are_kept(start: Callable[..., Serve]) -> None:
    job = None
    for number in (signal.SIGTERM, signal.SIGINT):
        served = start()
        assert set(served.children) == {"redis", "gateway", "worker", "tasks"}
        with Client(served.url) as client:
            if job is not None:
                assert client.get(job.id).text == job.text
            job = client.wait(client.submit("hi", model="sim", max_tokens=3).id, timeout=60)
        code, errors = served.stop(number)
        assert code == 0 and number.name in errors and "Traceback" not in errors
        assert served.all_ended()


def test_a_stream_goes_on_as_soon_as_its_killed_worker_is_replaced(start: Callable[..., Serve]) -> None:
    """It need not wait for the dead worker's lease, which is longer than this test may last."""
    served = start("--lease-s", "600", "--step-timeout-s", "600")
    with Client(served.url) as client:
        job = client.submit("hi", model="sim", max_tokens=3000, ignore_eos=True, seed=1)
        events = client.events(job.id)
        seen = [next(event for event in events if event.text())]
        workers = [served.children["worker"]]
        for attempts in (2, 3):
            workers[-1].kill()
            wait_until(lambda attempts=attempts: client.get(job.id).data["attempts"] == attempts)
            worker = served.worker()
            assert worker is not None
            workers.append(worker)
        seen += events
        assert [event.seq for event in seen] == list(range(seen[0].seq, seen[-1].seq + 1))
        job = client.wait(job.id, timeout=120)
        assert job.status == "completed" and job.data["attempts"] == 3
    assert len({worker.pid for worker in workers}) == 3


def test_a_stream_goes_on_after_redis_was_killed(start: Callable[..., Serve]) -> None:
    served = start()
    with Client(served.url) as client:
        kept = client.wait(client.submit("hi", model="sim", max_tokens=3).id, timeout=60)
        whole = client.wait(client.submit("hi", model="sim", max_tokens=1500, ignore_eos=True, seed=1).id, timeout=120)
        job = client.submit("hi", model="sim", max_tokens=1500, ignore_eos=True, seed=1)
        events = client.events(job.id)
        seen = [next(event for event in events if event.text())]
        served.children["redis"].kill()
        seen += events
        assert [event.seq for event in seen] == list(range(seen[0].seq, seen[-1].seq + 1))
        job = client.wait(job.id, timeout=120)
        assert job.status == "completed" and job.data["attempts"] == 1 and job.text == whole.text
        assert client.get(kept.id).text == kept.text
    code, errors = served.stop()
    assert code == 0 and "Redis ended by SIGKILL, starting it again" in errors and "Traceback" not in errors
    assert served.all_ended()


def test_without_its_gateway_the_whole_ends(start: Callable[..., Serve]) -> None:
    served = start()
    served.children["gateway"].kill()
    code, errors = served.ended()
    assert code == 137 and "gateway ended by SIGKILL" in errors
    assert served.all_ended()


def test_a_redis_that_does_not_come_up_again_ends_the_whole(start: Callable[..., Serve]) -> None:
    served = start("--grace-s", "600")  # for which nobody waits
    with Client(served.url) as client:
        client.submit("hi", model="sim", max_tokens=4000, ignore_eos=True)
        (served.data_dir / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense")
        served.children["redis"].kill()
        code, errors = served.ended()
    assert code == 1 and "Redis has ended and does not come up again: embedded Redis" in errors
    assert "MANIFEST" in errors and "Traceback" not in errors
    assert served.all_ended()


def test_commands_of_operators_find_the_redis_of_serve(serve: Serve, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "ropeway").mkdir(parents=True)
    (home / "ropeway" / "redis").symlink_to(serve.data_dir)
    for arguments in (["pool", "list", "--json"], ["dead", "list", "--json"]):
        done = cli(*arguments, XDG_DATA_HOME=str(home))
        assert done.returncode == 0 and f"unix://{serve.data_dir}/redis.sock" in done.stderr
        assert [pool["name"] for pool in json.loads(done.stdout)] == (["sim"] if arguments[0] == "pool" else [])
    other = cli("pool", "list", "--redis", "redis://127.0.0.1:9/0", XDG_DATA_HOME=str(home))
    assert other.returncode == 1 and "unix://DIR/redis.sock" in other.stderr
    nothing = cli("pool", "list", XDG_DATA_HOME=str(tmp_path), ROPEWAY_REDIS_URL="redis://127.0.0.1:9/0")
    assert nothing.returncode == 1 and "127.0.0.1:9" in nothing.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_supervisor_leaves_nothing_running(start: Callable[..., Serve]) -> None:
    served = start("--grace-s", "0")
    served.process.kill()
    served.process.wait()
    assert served.all_ended()


def test_wrong_settings_end_before_anything_starts(tmp_path: Path) -> None:
    done = cli("serve", "--max-num-seqs", "0", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2 and "--max-num-seqs" in done.stderr
    assert not (tmp_path / "data" / "redis.sock").exists()


@pytest.mark.parametrize("option", ["--port", "--health-port"])
def test_a_port_that_is_taken_is_named(serve: Serve, tmp_path: Path, option: str) -> None:
    port = serve.url.rpartition(":")[2]
    arguments = ["--engine", "sim", "--port", "0", "--health-port", "0", option, port, "--data-dir", str(tmp_path)]
    done = cli("serve", *arguments)
    assert done.returncode == 1
    assert "cannot listen on" in done.stderr and f"port {port}" in done.stderr and f"({option} takes" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_part_that_cannot_start_ends_the_whole(start: Callable[..., Serve]) -> None:
    with pytest.raises(AssertionError, match="worker ended with code"):
        start("--pool", "not a name!")


def test_demo_shows_answer_and_figures_and_leaves_nothing() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = cli(
        "demo",
        "--engine",
        "sim",
        "--prompt",
        "Why [/b] :cat:?",
        "--max-tokens",
        "20",
        ROPEWAY_REDIS_URL="redis://127.0.0.1:9",
    )
    assert done.returncode == 0, done.stderr
    for word in (
        "Why [/b] :cat:?",
        "completed",
        "queue time",
        "time to first token",
        "tokens per second",
        "prompt tokens",
    ):
        assert word in done.stdout
    blocks = re.search(r"KV blocks used\W+(\d+)", done.stdout)
    assert blocks is not None and int(blocks.group(1)) > 0
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def test_a_demo_that_fails_says_why() -> None:
    done = cli("demo", "--engine", "sim", "--pool", "not a name!")
    assert done.returncode != 0 and "worker ended with code" in done.stderr
