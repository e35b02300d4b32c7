"""The process of a task: it inherits nothing that could hold it up, and one that hangs is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from shared.batch_record import BatchRecord, FileRecord
from shared.batches import Batches, new_batch_id, new_file_id
from shared.connect import connect, connect_sync
from shared.file_store import FileStore
from shared.task_queue import QUEUE, TaskQueue
from tests.support.adapter_tasks import tasks

#: A tasks process in which another thread is importing, for ever, what a batch's task needs.
IMPORTING = """
import importlib, sys, threading
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from tasks.main import run

begun = threading.Event()

class Slow(MetaPathFinder, Loader):
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self) if name == "gateway.errors" else None

    def exec_module(self, module):
        begun.set()
        threading.Event().wait()

sys.meta_path.insert(0, Slow())
threading.Thread(target=importlib.import_module, args=("gateway.errors",), daemon=True).start()
begun.wait()
sys.exit(run())
"""
#: A tasks process whose first task has a process that gives one sign of life and then hangs.
HANGING = """
import sys
from tasks import horse, main
from tasks.rq_worker import TaskWorker

main._MONITOR_S = 1
start, good, bound = TaskWorker.fork_work_horse, horse._PROGRAM, TaskWorker.silent_s
hanging = ["import os, time; os.write(0, b'.'); time.sleep(1000)"]

def fork_work_horse(self, job, queue):
    self.silent_s = 3.0 if hanging else bound
    horse._PROGRAM = hanging.pop() if hanging else good
    start(self, job, queue)

TaskWorker.fork_work_horse = fork_work_horse
sys.exit(main.run())
"""
#: Seconds that a batch has to end; seconds after which a batch is expired by itself.
PATIENCE_S, LATE_MS = 120.0, 3_600_000


@pytest.fixture
async def batches(valkey_url: str) -> AsyncIterator[Batches]:
    client = connect(valkey_url)
    yield Batches(client)
    await client.aclose()


async def submit(batches: Batches, redis_url: str, store: Path) -> str:
    """Queue a batch whose file has no line that reads: it ends when somebody has looked at it."""
    now, files = await batches.clock_ms(), FileStore(str(store))
    file = FileRecord(
        id=new_file_id(), tenant="t", filename="x", purpose="batch", bytes=3, created_ms=now, expires_ms=now + LATE_MS
    )
    with files.create(file.id) as stream:
        stream.write(b"no\n")
    await batches.add_file(file)
    record = BatchRecord(
        id=new_batch_id(), tenant="t", authenticated=True, endpoint="/v1/completions", input_file=file.id,
        created_ms=now, expires_ms=now + LATE_MS,
    )  # fmt: skip
    await batches.add_batch(record)
    queue = TaskQueue(redis_url, 1800)
    await asyncio.to_thread(queue.run_batch, record.id, 0)
    queue.close()
    return record.id


async def ended(batches: Batches, batch: str) -> BatchRecord:
    async with asyncio.timeout(PATIENCE_S):
        while not (record := await batches.batch(batch)).ended:
            await asyncio.sleep(0.05)
    return record


async def test_a_task_does_not_wait_for_what_a_thread_of_its_parent_is_at(
    batches: Batches, valkey_url: str, tmp_path: Path
) -> None:
    with tasks(valkey_url, tmp_path, program=IMPORTING, files_store=str(tmp_path / "files")):
        batch = await submit(batches, valkey_url, tmp_path / "files")
        record = await ended(batches, batch)
    assert record.status == "failed" and record.faults[0].line == 1


async def test_a_task_whose_process_hangs_is_begun_anew(batches: Batches, valkey_url: str, tmp_path: Path) -> None:
    with tasks(valkey_url, tmp_path, program=HANGING, files_store=str(tmp_path / "files")) as process:
        batch = await submit(batches, valkey_url, tmp_path / "files")
        record = await ended(batches, batch)
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            metrics = (await http.get(f"http://127.0.0.1:{process.port}/metrics")).text
        with connect_sync(valkey_url) as client:
            assert client.llen(f"rq:queue:{QUEUE}:intermediate") == 0, "it does not seem to wait to be begun"
    assert record.status == "failed" and record.faults[0].line == 1
    assert "ropeway_tasks_hung_total 1.0" in metrics
    assert "no sign of life" in process.log.read_text()
