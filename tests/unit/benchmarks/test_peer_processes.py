"""Peers as processes: the line protocol, what is held still, llama.cpp's tables, and the streams' client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.peer_contenders import LlamaCpp, Scripted, Work, executable, vllm_environment
from benchmarks.peer_http import run_streams
from benchmarks.peer_process import SCRIPTS, Child, PeerError, ScriptChild, environment

_ENGINE = """
import os, sys
from line_protocol import answer_generations, claim_stdout, read_prompts, settings

answer, given = claim_stdout(), settings()
print("noise of a library")
os.system("echo noise of its child")

def generate(prompts, new_tokens):
    print("more noise")
    if given.get("dies"):
        sys.exit("the model is on fire")
    return 0.25 * new_tokens * len(prompts), new_tokens * len(prompts) - given.get("short", 0)

answer_generations(answer, {"version": "fake 1"}, read_prompts(given["workload"]), generate)
"""

_WORK = Work([[1, 2, 3], [4, 5, 6, 7, 8]], new_tokens=4, single=1)


def fake_engine(folder: Path, **settings: object) -> ScriptChild:
    script, workload = folder / "fake.py", folder / "workload.json"
    script.write_text(_ENGINE)
    workload.write_text(json.dumps(_WORK.prompts))
    given = {"workload": str(workload), **settings}
    return ScriptChild("fake", str(script.with_suffix("")), given, python=sys.executable, PYTHONPATH=str(SCRIPTS))


def test_what_libraries_print_does_not_reach_the_answers(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as child:
        contender = Scripted("fake", child, _WORK)
        assert contender.version == "fake 1"
        assert contender.batch() == 2.0
        assert contender.single() == (0.25, 0.75)
        assert "noise of a library" in child.log_tail()
        assert "noise of its child" in child.log_tail()


def test_an_engine_that_ends_early_is_an_error(tmp_path: Path) -> None:
    with fake_engine(tmp_path, short=1) as child, pytest.raises(PeerError, match=r"7 tokens came out, not 8"):
        child.ask({"prompts": [0, 1], "new_tokens": 4})


def test_a_dead_engine_says_why(tmp_path: Path) -> None:
    with fake_engine(tmp_path, dies=True) as child, pytest.raises(PeerError, match="the model is on fire"):
        child.ask({"prompts": [0], "new_tokens": 1})


def test_an_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(PeerError, match=r"missing\.py"):
        ScriptChild("fake", missing, {}, python=sys.executable)


def test_a_group_is_held_still_and_ended_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import os, time; from pathlib import Path; p = os.fork(); p and Path({str(file)!r}).write_text(str(p))"
    child = Child("parent", [sys.executable, "-c", f"{code}; time.sleep(600)"], environment())
    with child:
        _until(lambda: file.is_file() and file.read_text() != "")
        grandchild = psutil.Process(int(file.read_text()))
        child.hold()
        _until(lambda: grandchild.status() == psutil.STATUS_STOPPED)
        child.go_on()
        _until(lambda: grandchild.status() == psutil.STATUS_SLEEPING)
        child.hold()
    assert child.popen.poll() is not None
    _until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


def test_a_child_does_not_inherit_what_the_engine_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment().keys()
    assert environment({"A": "b"})["A"] == "b"


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


_BENCH = """#!{python}
import json, sys
from pathlib import Path
args = sys.argv[1:]
with open({calls!r}, "a") as file:
    file.write(json.dumps([Path(sys.argv[0]).name, *args]) + "\\n")
if "-npl" in args:
    print("main: n_kv_max = 24\\n\\n" + json.dumps({{"pp": 4, "tg": 4, "pl": 2, "t": 1.5, "speed": 10}}))
else:
    print(json.dumps({{"build_number": 7, "build_commit": "abc", "avg_ts": 50.0 if "-d" not in args else 12.0}}))
"""


def test_llamacpp_is_given_the_same_volume(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    for name in ("llama-bench", "llama-batched-bench"):
        script = tmp_path / name
        script.write_text(_BENCH.format(python=sys.executable, calls=str(calls)))
        script.chmod(0o755)
    llama = LlamaCpp(tmp_path / "llama-bench", tmp_path / "m.gguf", _WORK, threads=2)
    llama.warm_up()
    assert llama.version == "llama.cpp build 7 (abc)"
    assert llama.batch() == 1.5
    assert llama.single() == (pytest.approx(5 / 50), pytest.approx(3 / 12))
    _, batch, prefill, decode = (json.loads(line) for line in calls.read_text().splitlines())
    pairs = dict(zip(batch[1::2], batch[2::2], strict=True))
    assert batch[0] == "llama-batched-bench"
    assert {key: pairs[key] for key in ("-npp", "-ntg", "-npl", "-c")} == {
        "-npp": "4",
        "-ntg": "4",
        "-npl": "2",
        "-c": "16",
    }
    assert prefill[-4:] == ["-p", "5", "-n", "0"]
    assert decode[-6:] == ["-p", "0", "-n", "3", "-d", "5"]


def test_llamacpp_needs_both_benchmarks(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="llama-batched-bench"):
        LlamaCpp(tmp_path / "llama-bench", tmp_path / "m.gguf", _WORK, threads=2)


def test_vllm_preloads_what_lies_in_its_environment(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    found = vllm_environment(str(tmp_path / "bin" / "python"), 1)
    assert found["LD_PRELOAD"].split(":")[0] == str(tmp_path / "lib" / "libiomp5.so")
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))


def test_a_path_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "python"
    plain.touch()
    with pytest.raises(ValueError, match="not an executable"):
        executable(str(plain))
    link = tmp_path / "linked"
    link.symlink_to(sys.executable)
    assert executable(str(link)) == str(link)


class _Server:
    """An OpenAI server that answers every request with the same bytes, in two pieces."""

    model = "fake"

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.port = 0
        self.bodies: list[dict[str, object]] = []

    def go_on(self) -> None:
        """It runs."""

    def hold(self) -> None:
        """It is not held."""

    @contextmanager
    def running(self) -> Iterator[_Server]:
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        middle = len(self._answer) // 2
        writer.write(self._answer[:middle])
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(self._answer[middle:])
        writer.close()
        await writer.wait_closed()


def _events(tokens: int) -> bytes:
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})
    return f'HTTP/1.1 200 OK\r\n\r\ndata: {{"choices":[]}}\n\ndata: {usage}\n\ndata: [DONE]\n\n'.encode()


def test_all_prompts_are_streamed_and_their_tokens_counted() -> None:
    with _Server(_events(4)).running() as server:
        seconds, firsts = run_streams(server, _WORK.prompts, 4)
    assert sorted(body["prompt"] for body in server.bodies) == _WORK.prompts  # type: ignore[type-var]
    assert all(body["stream"] and body["ignore_eos"] and body["max_tokens"] == 4 for body in server.bodies)
    assert len(firsts) == 2
    assert all(0 < first <= seconds for first in firsts)


@pytest.mark.parametrize(
    "answer",
    [_events(3), _events(4).replace(b"data: [DONE]", b""), b'HTTP/1.1 429 No\r\n\r\n{"error": "busy"}'],
    ids=["short", "cut", "refused"],
)
def test_a_stream_that_is_not_whole_is_an_error(answer: bytes) -> None:
    with _Server(answer).running() as server, pytest.raises(RuntimeError, match="did not give 4 tokens"):
        run_streams(server, _WORK.prompts[:1], 4)
