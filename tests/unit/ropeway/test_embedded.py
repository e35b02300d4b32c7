"""The embedded server: a real one."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from ropeway.embedded import EmbeddedRedis, EmbeddedRedisError, default_data_dir, serving_url
from ropeway.leash import leashed


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def config(client: redis.Redis, name: str) -> object:
    return client.config_get(name)[name]


def test_data_survives_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    for expected in (None, b"1"):
        with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:
            assert client.get("k") == expected
            client.set("k", "1")
            assert config(client, "appendonly") == "yes"
            assert config(client, "maxmemory-policy") == "noeviction"
            assert config(client, "port") == "0", "no TCP port may be open"
            assert client.info()["process_id"] == server.pid
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o700
        assert server.pid is None and not server.socket_path.exists()


def test_data_survives_a_kill_of_the_server(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("k", "1")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.poll() is not None)
        assert server.poll() == -signal.SIGKILL
    assert server.socket_path.exists() is False
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("k") == b"1"


async def test_a_killed_server_is_started_again_on_its_data(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert server.restartable
        for count in range(1, 3):
            assert client.incr("k") == count
            first = server.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: server.poll() is not None)
            await server.restart()
            assert server.poll() is None and server.pid != first
        assert client.get("k") == b"2"
        with pytest.raises(EmbeddedRedisError, match="in use"):
            EmbeddedRedis(tmp_path).start()
    assert not (tmp_path / "redis.sock").exists()


async def test_a_server_that_does_not_come_up_again_says_why(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.poll() is not None)
        (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense")
        with pytest.raises(EmbeddedRedisError, match="ended with code 1: ") as caught:
            await server.restart()
        assert "MANIFEST" in str(caught.value) and str(caught.value).count("overcommit must") <= 1


def test_a_temporary_server_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        assert not server.restartable
        folder = server.data_dir
        assert folder.is_dir()
    assert not folder.exists()
    server.stop()


def test_a_second_server_on_one_folder_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with pytest.raises(EmbeddedRedisError, match=f"in use by process {os.getpid()}"):
            EmbeddedRedis(tmp_path).start()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping(), "the first must not suffer"


def test_a_stale_socket_and_lock_are_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "redis.sock").write_text("")
    (tmp_path / "lock").write_text("999999999")
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        short = server.socket_path.parent
        assert len(str(server.socket_path)) < 100
        assert stat.S_IMODE(short.stat().st_mode) == 0o700
        assert serving_url(folder) == server.url
    assert not short.exists() and list(folder.glob("*.sock")) == []


def test_others_find_the_server_of_a_folder(tmp_path: Path) -> None:
    assert serving_url(tmp_path / "nowhere") is None and serving_url(tmp_path) is None
    with EmbeddedRedis(tmp_path) as server:
        assert serving_url(tmp_path) == server.url
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.poll() is not None)
        assert serving_url(tmp_path) is None


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("a file where a folder belongs")
    with pytest.raises(EmbeddedRedisError, match="appendonlydir"):
        EmbeddedRedis(tmp_path).start()
    (tmp_path / "appendonlydir").unlink()
    with EmbeddedRedis(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedRedisError, match="file"):
        EmbeddedRedis(tmp_path / "file" / "sub").start()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_it_ends_with_a_killed_owner_and_the_folder_is_free_again(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ropeway.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        with redis.Redis(unix_socket_path=str(tmp_path / "redis.sock")) as client:
            client.set("k", "1")
        owner.kill()
    # At once, while the old server may still be writing: the lock is waited for.
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert ended(pid)
        assert client.get("k") == b"1"


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_leashed_command_ends_if_its_parent_is_gone_already() -> None:
    command = leashed([sys.executable, "-c", "print('ran')"])
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == "ran\n"
    command[command.index(str(os.getpid()))] = "1"
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (1, "")


def test_where_data_lies_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "ropeway" / "redis"
    monkeypatch.setenv("XDG_DATA_HOME", "relative/paths/count/for/nothing")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".local" / "share" / "ropeway" / "redis"
