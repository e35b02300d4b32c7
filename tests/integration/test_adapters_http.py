"""Adapters over HTTP: loaded by a tasks process, named by requests, pinned by jobs, unloaded."""

from __future__ import annotations

import asyncio
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis.asyncio

from shared import keys
from shared.adapter_record import PendingLoad
from shared.errors import ServiceUnavailableError
from shared.jobs import Publication
from shared.protocol import WorkerInfo
from tests.integration.gateway_harness import Gateway, chat, completion, running, serve
from tests.support.adapter_tasks import TARGETS, A, B, tasks, write_adapter, write_tensors
from tests.unit.gateway import support

MODEL = support.MODEL


@pytest.fixture(scope="module")
def place(valkey_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One tasks process for all tests; that Redis is emptied between them is nothing to it."""
    folder = tmp_path_factory.mktemp("adapters")
    with tasks(valkey_server.url, folder):
        yield folder


@pytest.fixture
def folder(place: Path, valkey_url: str) -> Path:
    """Where adapters may be loaded from; empty."""
    for path in [*(place / "roots").iterdir(), *(place / "store").glob("[0-9a-f]*"), *place.glob("*outside*")]:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    (place / "roots-too").unlink(missing_ok=True)
    return place


@pytest.fixture
async def gateway(folder: Path, valkey_url: str) -> AsyncIterator[Gateway]:
    settings: dict[str, Any] = {"adapter_store": str(folder / "store")}
    async with serve(valkey_url, card=support.card(max_lora_rank=16), **settings) as gateway:
        await gateway.store.put_targets(MODEL, TARGETS)
        yield gateway


def source(folder: Path, name: str = "one", value: float = 1.0, **more: Any) -> str:
    return str(write_adapter(folder / "roots" / name, value, **more))


async def load(gateway: Gateway, name: str, path: str, **more: Any) -> httpx.Response:
    return await gateway.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


async def loaded(gateway: Gateway, name: str, path: str, **more: Any) -> str:
    """Load and answer the identity."""
    answer = await load(gateway, name, path, **more)
    assert answer.status_code == 200, answer.text
    return str((await gateway.http.get(f"/v1/adapters/{name}")).json()["identity"])


async def asked(gateway: Gateway, model: str, **more: Any) -> tuple[Any, Any]:
    """The answer to a chat, and the envelope that the worker got."""
    request = asyncio.create_task(gateway.http.post("/v1/chat/completions", json={**chat(), "model": model, **more}))
    job = await gateway.worker.pull()
    await job.answer("fine")
    answer = await request
    assert answer.status_code == 200, answer.text
    return answer.json(), job.job.envelope


async def test_a_loaded_adapter_is_named_by_requests_and_pinned_by_jobs(gateway: Gateway, folder: Path) -> None:
    answer = await load(gateway, "sql", source(folder))
    assert answer.text == "Success: LoRA adapter 'sql' added successfully."
    shown = (await gateway.http.get("/v1/adapters/sql")).json()
    assert (shown["state"], shown["base_model"], shown["rank"], shown["version"]) == ("registered", MODEL, 4, 1)
    assert (folder / "store" / shown["identity"] / "adapter_config.json").is_file()
    body, envelope = await asked(gateway, "sql")
    assert body["model"] == "sql"
    assert (envelope.model, envelope.adapter, envelope.adapter_identity) == ("sql", "sql", shown["identity"])
    assert envelope.id.startswith(f"{MODEL}.")
    body, envelope = await asked(gateway, MODEL)
    assert (body["model"], envelope.adapter, envelope.adapter_identity) == (MODEL, None, None)
    request = asyncio.create_task(gateway.http.post("/v1/completions", json=completion(model="sql")))
    job = await gateway.worker.pull()
    await job.answer("fine")
    assert (await request).json()["model"] == "sql" and job.job.envelope.adapter_identity == shown["identity"]


async def test_models_are_listed_with_their_parents(gateway: Gateway, folder: Path) -> None:
    await loaded(gateway, "org/sql", source(folder))
    models = (await gateway.http.get("/v1/models")).json()["data"]
    assert [(m["id"], m["root"], m["parent"]) for m in models] == [(MODEL, MODEL, None), ("org/sql", "org/sql", MODEL)]
    assert all(m["object"] == "model" and m["owned_by"] == "ropeway" and m["created"] > 0 for m in models)
    for path in ("org/sql", "org%2Fsql", "org%2fsql"):
        assert (await gateway.http.get(f"/v1/models/{path}")).json() == models[1]
        assert (await gateway.http.get(f"/v1/adapters/{path}")).json()["id"] == "org/sql"
    assert (await gateway.http.get(f"/v1/models/{MODEL}")).json() == models[0]


@pytest.mark.parametrize(
    "name",
    [
        *("no-such", "sq", "SQL", "sql ", "../../etc", "/abs", "a/../../b", "%2e%2e", "..", ".", "sql\x00", "sql/"),
        *("a" * 300, "sql\n", "org//sql", "ſql", "upload:" + "0" * 32),
    ],
    ids=repr,
)
async def test_an_unknown_name_is_404_and_never_the_base(gateway: Gateway, folder: Path, name: str) -> None:
    await loaded(gateway, "sql", source(folder))
    for path, body in (("/v1/chat/completions", chat(model=name)), ("/v1/completions", completion(model=name))):
        answer = await gateway.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), answer.text
    job = {"kind": "chat", "body": chat(model=name)}
    answer = await gateway.http.post("/v1/jobs", json=job)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "body.model")
    assert await gateway.worker.queued() == 0
    answer = await gateway.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == "lora_name"


@pytest.mark.parametrize("path", ["sql%00", "x%0a"])
async def test_a_name_holds_no_control_characters(gateway: Gateway, path: str) -> None:
    for base in ("/v1/adapters/", "/v1/models/"):
        answer = await gateway.http.get(base + path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert (await gateway.http.delete("/v1/adapters/" + path)).status_code == 400


@pytest.mark.parametrize("path", ["..%2f..%2fetc", "%2e%2e", "%252e%252e", "a%2f..%2fb", "%2fabs"])
async def test_a_path_is_no_name(gateway: Gateway, path: str) -> None:
    for base in ("/v1/adapters/", "/v1/models/"):
        answer = await gateway.http.get(base + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), answer.text
    assert (await gateway.http.delete("/v1/adapters/" + path)).status_code == 404


@pytest.mark.parametrize("name", ["../../etc", "/abs", "a/../../b", "%2e%2e", "a\x00", "", "a/b/c", "a b", "é", MODEL])
async def test_what_is_no_name_is_not_loaded(gateway: Gateway, folder: Path, name: str) -> None:
    answer = await load(gateway, name, source(folder))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_name", answer.text
    assert (await gateway.http.get("/v1/adapters")).json()["data"] == []


async def test_names_that_look_alike_are_different_adapters(gateway: Gateway, folder: Path) -> None:
    identities = {}
    for number, name in enumerate(("a/b", "a-b", "a.b")):
        identities[name] = await loaded(gateway, name, source(folder, f"s{number}", number + 1.0))
    assert len(set(identities.values())) == 3
    for name, identity in identities.items():
        assert (await asked(gateway, name))[1].adapter_identity == identity


async def test_jobs_may_name_an_adapter_beside_their_model(gateway: Gateway, folder: Path) -> None:
    identity = await loaded(gateway, "sql", source(folder))
    order = {"kind": "chat", "body": chat(), "adapter": "sql"}
    answer = (await gateway.http.post("/v1/jobs", json=order)).json()
    assert (answer["model"], answer["adapter"]) == (MODEL, "sql")
    job = await gateway.worker.pull()
    assert (job.job.envelope.adapter, job.job.envelope.adapter_identity) == ("sql", identity)
    await job.answer("fine")
    assert (await gateway.http.get(f"/v1/jobs/{answer['id']}")).json()["adapter"] == "sql"
    for wrong, status, param in (
        (order | {"adapter": "sqll"}, 404, "adapter"),
        (order | {"body": chat(model="sql")}, 400, "adapter"),
        ({"kind": "chat", "body": chat(adapter="sql")}, 400, "body.adapter"),
        ({"jobs": [order, order | {"adapter": "sqll"}]}, 404, "jobs[1].adapter"),
    ):
        answer = await gateway.http.post("/v1/jobs", json=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    for path, body in (("/v1/chat/completions", chat(adapter="sql")), ("/v1/completions", completion(adapter="sql"))):
        answer = await gateway.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter")
    assert await gateway.worker.queued() == 0


async def test_a_reload_is_for_new_jobs_and_old_ones_keep_their_content(gateway: Gateway, folder: Path) -> None:
    first = await loaded(gateway, "sql", source(folder, value=1.0))
    order = {"kind": "chat", "body": chat(model="sql")}
    await gateway.http.post("/v1/jobs", json=order)
    again = await load(gateway, "sql", source(folder, value=2.0))
    assert again.status_code == 400 and "already been loaded" in again.json()["error"]["message"]
    second = await loaded(gateway, "sql", source(folder, value=2.0), load_inplace=True)
    assert first != second
    await gateway.http.post("/v1/jobs", json=order)
    jobs = [await gateway.worker.pull(), await gateway.worker.pull()]
    assert sorted(job.job.envelope.adapter_identity or "" for job in jobs) == sorted([first, second])
    assert (folder / "store" / first).is_dir(), "what jobs pin stays in the store"
    for job in jobs:
        await job.answer("fine")


async def test_a_reload_that_fails_keeps_the_old(gateway: Gateway, folder: Path) -> None:
    identity = await loaded(gateway, "sql", source(folder))
    broken = source(folder, "broken", rank=64)
    answer = await load(gateway, "sql", broken, load_inplace=True)
    assert answer.status_code == 400 and "max_lora_rank" in answer.json()["error"]["message"]
    shown = (await gateway.http.get("/v1/adapters/sql")).json()
    assert (shown["state"], shown["identity"], shown["version"]) == ("registered", identity, 1)
    assert "rank is 64, at most 16" in shown["error"]
    assert (await asked(gateway, "sql"))[1].adapter_identity == identity


async def test_a_first_load_that_fails_says_why_to_whoever_asks(gateway: Gateway, folder: Path) -> None:
    answer = await load(gateway, "sql", source(folder, rank=64))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_adapter")
    shown = (await gateway.http.get("/v1/adapters/sql")).json()
    assert (shown["state"], shown["identity"]) == ("failed", None)
    answer = await gateway.http.post("/v1/chat/completions", json=chat(model="sql"))
    assert answer.status_code == 404 and "rank is 64" in answer.json()["error"]["message"]
    assert [m["id"] for m in (await gateway.http.get("/v1/models")).json()["data"]] == [MODEL]
    await loaded(gateway, "sql", source(folder))
    answer = await gateway.http.delete("/v1/adapters/sql")
    assert answer.json() == {"id": "sql", "object": "adapter", "deleted": True, "in_flight": 0}


def no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def truncated(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def huge_header(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes((2**60).to_bytes(8, "little") + bytes(100))


def garbage(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 10)


def half_missing(folder: Path) -> None:
    write_tensors(folder, {A: np.ones((4, 8))})


def wrong_shape(folder: Path) -> None:
    write_tensors(folder, {A: np.ones((4, 9)), B: np.ones((6, 4))})


def not_finite(folder: Path) -> None:
    write_tensors(folder, {A: np.full((4, 8), np.nan), B: np.ones((6, 4))})


def unknown_module(folder: Path) -> None:
    write_adapter(folder, target_modules=None)
    write_tensors(
        folder, {A.replace("q_proj", "x_proj"): np.ones((4, 8)), B.replace("q_proj", "x_proj"): np.ones((6, 4))}
    )


def resized_embedding(folder: Path) -> None:
    write_adapter(folder, target_modules=None)
    copy = "base_model.model.model.embed_tokens.base_layer.weight"
    write_tensors(folder, {A: np.ones((4, 8)), B: np.ones((6, 4)), copy: np.ones((401, 8))})


def linked_file(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to("/etc/hostname")


def config(**fields: Any) -> Any:
    def spoil(folder: Path) -> None:
        write_adapter(folder, **fields)

    spoil.__name__ = next(iter(fields))
    return spoil


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (config(rank=64), "max_lora_rank"),
        (config(modules_to_save=["lm_head"]), "modules_to_save"),
        (config(use_dora=True), "use_dora"),
        (config(bias="all"), "bias"),
        (config(peft_type="LOHA"), "peft_type"),
        (no_weights, "adapter_model.safetensors"),
        (no_config, "adapter_config.json"),
        (pickled, "adapter_model.bin"),
        (truncated, "adapter_model.safetensors"),
        (huge_header, "adapter_model.safetensors"),
        (garbage, "adapter_model.safetensors"),
        (half_missing, "one of lora_A and lora_B is missing"),
        (wrong_shape, "[4, 8] is needed"),
        (not_finite, "finite"),
        (unknown_module, "no such module"),
        (resized_embedding, "embed_tokens"),
        (linked_file, "adapter_roots"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_what_cannot_be_served_is_refused_at_load_by_name(
    gateway: Gateway, folder: Path, spoil: Any, named: str
) -> None:
    path = source(folder)
    spoil(Path(path))
    answer = await load(gateway, "sql", path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_adapter"), answer.text
    assert named in error["message"] and str(folder) not in error["message"]
    assert not list((folder / "store").glob("[0-9a-f]*")), "nothing of it is kept"


async def test_only_allowed_folders_are_read(gateway: Gateway, folder: Path) -> None:
    outside = write_adapter(folder / "outside")
    (folder / "roots" / "link").symlink_to(outside)
    (folder / "roots-too").symlink_to(outside)
    (folder / "roots" / "loop").symlink_to(folder / "roots" / "loop")
    for path in (
        outside,
        folder / "roots" / "link",
        folder / "roots" / ".." / "outside",
        folder / "roots-too",
        "/",
        "/etc",
    ):
        answer = await load(gateway, "sql", str(path))
        assert answer.status_code == 400 and "adapter_roots" in answer.json()["error"]["message"], answer.text
    answer = await load(gateway, "sql", str(folder / "roots" / "absent"))
    assert answer.status_code == 400 and "no such folder" in answer.json()["error"]["message"]
    for path in ("", "x", "../x", "./x", "~/x", "http://h/x", "s3://b/x", "file:///x", "https:owner/name", "a/../b",
                 "hf:../x", "upload:" + "0" * 32, "/a\x00b", "owner/name@../x"):  # fmt: skip
        answer = await load(gateway, "sql", path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path"), path


async def test_unloading_is_at_once_for_new_jobs_and_never_for_old_ones(gateway: Gateway, folder: Path) -> None:
    identity = await loaded(gateway, "sql", source(folder))
    order = {"kind": "chat", "body": chat(model="sql")}
    for _ in range(2):
        await gateway.http.post("/v1/jobs", json=order)
    running_job = await gateway.worker.pull()
    answer = await gateway.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert answer.text == "Success: LoRA adapter 'sql' removed successfully."
    assert (await gateway.http.post("/v1/jobs", json=order)).status_code == 404
    assert (await gateway.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 404
    shown = (await gateway.http.get("/v1/adapters/sql")).json()
    assert (shown["state"], shown["in_flight"], shown["identity"]) == ("draining", 2, identity)
    assert [a["state"] for a in (await gateway.http.get("/v1/adapters")).json()["data"]] == ["draining"]
    await running_job.answer("fine")
    assert (await gateway.http.get("/v1/adapters/sql")).json()["in_flight"] == 1
    await (await gateway.worker.pull()).answer("fine")
    assert (await gateway.http.get("/v1/adapters/sql")).status_code == 404
    assert (await gateway.http.get("/v1/adapters")).json()["data"] == []


@pytest.mark.parametrize("state", ["refused", "queued", "running"])
async def test_a_client_that_goes_away_in_any_state_leaves_the_adapter_free(
    gateway: Gateway, folder: Path, state: str
) -> None:
    await loaded(gateway, "sql", source(folder))
    if state == "refused":
        answer = await gateway.http.post("/v1/chat/completions", json=chat(model="sql", max_tokens=10**6))
        assert answer.status_code == 400
    else:
        request = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=chat(model="sql")))
        async with asyncio.timeout(60):
            while not await gateway.worker.queued():
                await asyncio.sleep(0.01)
        job = None if state == "queued" else await gateway.worker.pull()
        assert (await gateway.http.get("/v1/adapters/sql")).json()["in_flight"] == 1
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        if job is not None:
            async with asyncio.timeout(60):
                while await job.say("more") is not Publication.CANCELLED:
                    await asyncio.sleep(0.01)
            await job.finish(status="cancelled")
    async with asyncio.timeout(60):
        while (await gateway.http.get("/v1/adapters/sql")).json()["in_flight"]:
            await asyncio.sleep(0.01)
    assert (await gateway.http.delete("/v1/adapters/sql")).json()["in_flight"] == 0
    assert (await gateway.http.get("/v1/adapters")).json()["data"] == []


async def test_a_draining_name_can_be_loaded_again(gateway: Gateway, folder: Path) -> None:
    await loaded(gateway, "sql", source(folder))
    await gateway.http.post("/v1/jobs", json={"kind": "chat", "body": chat(model="sql")})
    await gateway.http.delete("/v1/adapters/sql")
    second = await loaded(gateway, "sql", source(folder, value=3.0))
    adapters = (await gateway.http.get("/v1/adapters")).json()["data"]
    assert [(a["id"], a["identity"], a["state"]) for a in adapters] == [("sql", second, "registered")]
    await (await gateway.worker.pull()).answer("fine")


async def test_no_gateway_serves_an_old_content(gateway: Gateway, folder: Path) -> None:
    store = {"adapter_store": str(folder / "store")}
    async with running(gateway.redis_url, **store) as (url, _), httpx.AsyncClient(base_url=url) as other:
        for value in range(1, 6):
            path = source(folder, value=float(value))
            identity = await loaded(gateway, "sql", path, load_inplace=True)
            for http in (gateway.http, other):
                answer = await http.post("/v1/jobs", json={"kind": "chat", "body": chat(model="sql")})
                assert answer.status_code == 202
                job = await gateway.worker.pull()
                assert job.job.envelope.adapter_identity == identity
                await job.answer("fine")
        await other.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (await gateway.http.post("/v1/chat/completions", json=chat(model="sql"))).status_code == 404


async def test_fifty_loads_of_one_name_are_one(gateway: Gateway, folder: Path) -> None:
    path = source(folder)
    answers = await asyncio.gather(*(load(gateway, "sql", path, load_inplace=True) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    shown = (await gateway.http.get("/v1/adapters/sql")).json()
    assert shown["state"] == "registered" and shown["version"] <= 3, "who asked while one was under way joined it"
    assert len(list((folder / "store").glob("[0-9a-f]*"))) == 1


async def test_states_come_from_workers(gateway: Gateway, folder: Path) -> None:
    identity = await loaded(gateway, "sql", source(folder))
    for entry, state in (
        ({"adapters_loading": [identity]}, "loading"),
        ({"adapters_in_memory": [identity]}, "resident"),
        ({"adapters": [identity]}, "resident"),
        ({"adapters_failed": {identity: "the disk is gone"}}, "failed"),
        ({}, "registered"),
    ):
        await gateway.store.heartbeat(MODEL, WorkerInfo(owner="w1", **entry), 15_000)
        shown = (await gateway.http.get("/v1/adapters/sql")).json()
        assert shown["state"] == state
        assert shown["error"] == ("the disk is gone" if state == "failed" else None)


async def test_a_load_that_is_tried_again_says_why(gateway: Gateway) -> None:
    adapters = gateway.services.adapters._adapters
    async with asyncio.timeout(60):  # Redis was emptied since the tasks process last said that it is there
        while not await adapters.any_tasks():
            await asyncio.sleep(0.05)
    record, *_ = await adapters.begin("sql", MODEL, PendingLoad(version=0, source="hf:org/sql"), replace=False)
    await adapters.loading("sql", 1, 600)  # somebody is at it, for all that the tasks process knows
    await adapters.put_off("sql", 1, "lora_path: the hub is not available")
    await adapters.put_off("sql", 2, "another load's")
    shown = (await gateway.http.get("/v1/adapters/sql")).json()
    assert shown["state"] == "loading"
    assert shown["error"] == "lora_path: the hub is not available; it is tried again"
    with pytest.raises(ServiceUnavailableError, match="has not ended yet: lora_path: the hub is not available; it is"):
        await gateway.services.adapters.wait(record, 0)
    await adapters.remove("sql")


async def test_a_reload_is_not_blamed_for_what_a_worker_could_not_read_before(gateway: Gateway, folder: Path) -> None:
    """The same content again, since its files were damaged: the worker has not tried it since."""
    path = source(folder)
    identity = await loaded(gateway, "sql", path)
    now = await gateway.store.now_ms(MODEL)

    async def seen(failed_ms: int) -> Any:
        info = WorkerInfo(owner="w1", adapters_failed={identity: "damaged"}, adapters_failed_ms={identity: failed_ms})
        await gateway.store.heartbeat(MODEL, info, 15_000)
        return (await gateway.http.get("/v1/adapters/sql")).json()

    assert (await seen(now))["state"] == "failed"
    assert await loaded(gateway, "sql", path, load_inplace=True) == identity
    shown = await seen(now)
    assert (shown["state"], shown["error"]) == ("registered", None)
    shown = await seen(now + 600_000)
    assert (shown["state"], shown["error"]) == ("failed", "damaged"), "it is no better"


async def test_the_command_that_loads_ends_with_the_load(gateway: Gateway, folder: Path) -> None:
    """And says by its exit code how."""
    good, bad = source(folder), source(folder, "bad", rank=64)

    async def load_by_command(name: str, path: str, *more: str) -> tuple[int | None, str, str]:
        command = [sys.executable, "-m", "ropeway", "adapters", "load", name, path, "--url", gateway.url, *more]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        out, err = await asyncio.wait_for(process.communicate(), 90)
        return process.returncode, out.decode(), err.decode()

    assert await load_by_command("sql", good) == (0, "sql is registered (version 1)\n", "")
    for more in ((), ("--json",), ("--on-server",)):
        code, out, err = await load_by_command("bad", bad, *more)
        assert (code, out) == (1, "") and "rank is 64" in err
    code, out, err = await load_by_command("sql", bad, "--replace")
    assert (code, out) == (1, "") and "rank is 64" in err
    identity = (await gateway.http.get("/v1/adapters/sql")).json()["identity"]
    await gateway.store.heartbeat(MODEL, WorkerInfo(owner="w1", adapters_failed={identity: "the disk is gone"}), 15_000)
    code, out, err = await load_by_command("sql", good, "--replace")
    assert (code, out, err) == (1, "", "ropeway: sql could not be loaded: the disk is gone\n")


async def test_loading_may_be_waited_for_or_not(gateway: Gateway, folder: Path) -> None:
    body = {"lora_name": "sql", "lora_path": source(folder), "pin": True}
    answer = await gateway.http.post("/v1/adapters", json=body)
    assert answer.status_code in (200, 202) and answer.headers["location"] == "/v1/adapters/sql"
    assert answer.json()["pinned"] is True and answer.json()["source"] == body["lora_path"]
    answer = await gateway.http.post("/v1/adapters?wait=20", json=body | {"lora_name": "other"})
    assert (answer.status_code, answer.json()["state"]) == (200, "registered")


@pytest.mark.parametrize(
    ("rank", "named"),
    [(0, "serves no adapters now"), (2, "serves ranks up to 2 now"), (None, "tiny, is not served now")],
)
async def test_an_adapter_that_no_worker_would_serve_is_refused_and_waits_for_none(
    gateway: Gateway, folder: Path, rank: int | None, named: str
) -> None:
    """Its pool was started anew with other settings, or is gone."""
    await loaded(gateway, "sql", source(folder))
    if rank is None:
        assert isinstance(gateway.store._redis, redis.asyncio.Redis)
        await gateway.store._redis.delete(keys.card(MODEL))
    else:
        await gateway.store.put_card(support.card(max_lora_rank=rank), support.bundle())
    await gateway.services.catalogue.refresh()
    for path, body, param in (
        ("/v1/chat/completions", chat(model="sql"), "model"),
        ("/v1/completions", completion(model="sql"), "model"),
        ("/v1/jobs", {"kind": "chat", "body": chat(model="sql")}, "body.model"),
        ("/v1/jobs", {"kind": "chat", "body": chat(), "adapter": "sql"}, "adapter"),
    ):
        answer = await gateway.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", param), answer.text
        assert named in error["message"]
    listed = [model["id"] for model in (await gateway.http.get("/v1/models")).json()["data"]]
    assert listed == ([] if rank is None else [MODEL])
    assert await gateway.worker.queued() == 0


async def test_which_pool_must_be_said_where_there_are_several(gateway: Gateway, folder: Path) -> None:
    other = support.card(pool="other", max_lora_rank=8)
    await gateway.store.put_card(other, support.bundle())
    await gateway.services.catalogue.refresh()
    answer = await load(gateway, "sql", source(folder))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "base_model")
    assert "other, tiny" in answer.json()["error"]["message"]
    await loaded(gateway, "sql", source(folder), base_model=MODEL)
    answer = await load(gateway, "sql", source(folder), base_model="other", load_inplace=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "base_model")
