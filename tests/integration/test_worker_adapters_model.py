"""Workers with a real, if tiny, model and adapters of PEFT: each answer is that of its adapter computed alone, cold.

In deterministic mode, so that every token must be the same.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.llm import LLM
from ropeway import LoRARequest
from shared.lora.files import content_identity
from shared.protocol import Envelope
from tests.support.native import load_native
from tests.support.peft_adapters import ATTENTION, save_adapter
from tests.support.tiny_llama import VOCAB, save_tiny_model
from tests.support.worker_harness import LANES, Follower, Harness, harness, job

ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 8},
    "b": {"target_modules": ATTENTION, "r": 3},
    "c": {"target_modules": ["lm_head", "up_proj"]},
    "d": {"use_rslora": True},
}


class World:
    """A base model, a store with adapters, and what each of them says alone."""

    def __init__(self, folder: Path) -> None:
        self.model, self.store = folder / "model", folder / "store"
        base = save_tiny_model(self.model)
        self.identities: dict[str, str] = {}
        for seed, (name, options) in enumerate(ADAPTERS.items()):
            save_adapter(base, folder / name, seed, **options)
            self.identities[name] = content_identity(folder / name)
            shutil.copytree(folder / name, self.store / self.identities[name])
        self._llm = LLM(
            str(self.model),
            dtype="float32",
            deterministic=True,
            enable_prefix_caching=False,
            enable_lora=True,
            num_blocks=100,
            block_size=4,
        )

    def job(self, number: int, adapter: str | None, **fields: Any) -> Envelope:
        envelope = job(number, adapter=None if adapter is None else self.identities[adapter], **fields)
        envelope.prompt_token_ids = [3 + token % (VOCAB - 3) for token in envelope.prompt_token_ids]
        return envelope

    def alone(self, envelope: Envelope) -> list[list[int]]:
        """Tokens of each choice."""
        identity = envelope.adapter_identity
        adapter = None if identity is None else LoRARequest("x", 1, str(self.store / identity))
        prompt = {"prompt_token_ids": envelope.prompt_token_ids}
        output = self._llm.generate(prompt, envelope.sampling, use_tqdm=False, lora_request=adapter)[0]
        assert output.error is None
        return [list(choice.token_ids) for choice in output.outputs]

    def worker(self, **settings: object) -> dict[str, Any]:
        return {
            "engine": "auto", "model": self.model, "dtype": "float32", "deterministic": True, "threads": 1,
            "enable_lora": True, "adapter_store": self.store, "max_loras": 2, "num_blocks": 300, "block_size": 4,
            "lease_s": 2.0, **settings,
        }  # fmt: skip

    async def completed(self, h: Harness, envelope: Envelope, follower: Follower) -> int:
        """The answer is that of its adapter alone; how much of the prompt was found in the prefix cache."""
        frames = await follower.end()
        assert frames[-1].status == "completed", frames[-1].error
        result = await h.result(envelope.id)
        assert [choice.token_ids for choice in result.choices] == self.alone(envelope)
        return result.usage.cached_tokens


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    load_native()
    return World(tmp_path_factory.mktemp("world"))


async def test_the_prefix_cache_keeps_adapters_and_base_apart(valkey_url: str, world: World) -> None:
    """Also where the slot changes hands between any two of them, and where a name stands for other content."""
    async with harness(valkey_url) as h:
        await h.worker(**world.worker(max_loras=1))
        cached = []
        for adapter in (None, "a", "b", None, "a", "b", "a"):
            envelope = world.job(1, adapter, prompt=40, max_tokens=12)
            envelope.adapter = None if adapter is None else "one name"
            cached.append(await world.completed(h, envelope, await h.submit(envelope)))
        assert cached[:3] == [0, 0, 0]
        assert min(cached[3:]) >= 36
        assert len({str(world.alone(world.job(1, x, prompt=40, max_tokens=12))) for x in (None, "a", "b")}) == 3


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_mixed_batch_with_preemption_and_several_choices(valkey_url: str, world: World, ahead: bool) -> None:
    """Jobs of a higher class take blocks and slots from the others, which go on later; in step, and ahead of it."""
    async with harness(valkey_url) as h:
        await h.worker(**world.worker(num_blocks=60, max_num_seqs=12, async_scheduling=ahead))
        names = [*ADAPTERS, None]
        low = [
            world.job(n, names[n % 5], lane=n % LANES, job_class="batch", n=1 + n % 2, prompt=6 + n, max_tokens=40)
            for n in range(5)
        ]
        followers = [await h.submit(envelope) for envelope in low]
        await followers[0].tokens(3)
        high = [
            world.job(n, names[n % 5], lane=n % LANES, job_class="high", n=1 + n % 3, prompt=6 + n, max_tokens=30)
            for n in range(10, 20)
        ]
        followers += [await h.submit(envelope) for envelope in high]
        for envelope, follower in zip([*low, *high], followers, strict=True):
            await world.completed(h, envelope, follower)
        results = [await h.result(envelope.id) for envelope in low]
        assert sum(result.timings.preemptions for result in results) > 0


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", ["reloaded", "unloaded"])
async def test_kill_9_in_the_middle_of_a_stream(valkey_url: str, world: World, meanwhile: str) -> None:
    """The other worker goes on with the content that the job was submitted with, whatever the name has become."""
    async with harness(valkey_url) as h:
        await h.name_adapter("sql", world.identities["a"])
        first = await h.worker(**world.worker())
        envelope = world.job(1, "a", n=2, max_tokens=150)
        others = [world.job(n, ["b", None][n % 2], lane=n % LANES, max_tokens=100) for n in range(2, 6)]
        followers = [await h.submit(each) for each in (envelope, *others)]
        second = await h.worker(ready=False, **world.worker())
        await followers[0].tokens(20)
        if meanwhile == "reloaded":
            await h.name_adapter("sql", world.identities["d"])
        else:
            await h.unname_adapter("sql")
        first.signal(signal.SIGKILL)
        await second.event("taken up", job_id=envelope.id)
        for each, follower in zip((envelope, *others), followers, strict=True):
            await world.completed(h, each, follower)


@pytest.mark.slow
async def test_a_drain_in_the_middle_of_streams(valkey_url: str, world: World) -> None:
    async with harness(valkey_url) as h:
        first = await h.worker(**world.worker(grace_s=0))
        jobs = [world.job(n, [*ADAPTERS, None][n % 5], lane=n % LANES, max_tokens=120) for n in range(8)]
        followers = [await h.submit(envelope) for envelope in jobs]
        await asyncio.gather(followers[0].tokens(10), h.worker(**world.worker()))
        first.signal(signal.SIGTERM)
        assert await first.wait() == 0
        for envelope, follower in zip(jobs, followers, strict=True):
            await world.completed(h, envelope, follower)


async def test_what_the_settings_cannot_have_is_said_by_name(valkey_url: str, world: World) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(ready=False, **world.worker(cpu_kernels="torch"))
        line = await worker.event("no engine can be made of these settings")
        assert "enable_lora" in line["reason"]
        assert await worker.wait() == 78
        worker = await h.worker(ready=False, **world.worker(max_cpu_loras=1))
        line = await worker.event("no engine can be made of these settings")
        assert "max_cpu_loras (1)" in line["reason"]


async def test_an_adapter_that_does_not_fit_this_model_fails_alone(valkey_url: str, world: World) -> None:
    async with harness(valkey_url) as h:
        await h.worker(**world.worker(max_lora_rank=4))
        wide, fine = world.job(1, "a"), world.job(2, "b")
        followers = [await h.submit(envelope) for envelope in (wide, fine)]
        frames = await followers[0].end()
        assert frames[-1].error is not None
        assert (frames[-1].error.code, frames[-1].error.status) == ("invalid_adapter", 400)
        assert "rank is 8" in frames[-1].error.message
        await world.completed(h, fine, followers[1])
