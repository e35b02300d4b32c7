"""`LLM` with passes that begin before the last one's tokens are known, on the runner for a GPU: the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters.request import LoRARequest
from engine.device.memory import DeviceMemoryError, MemoryReading
from engine.device.runner import DeviceRunner
from engine.llm import LLM
from engine.plan import Sampled, StepPlan
from engine.request import DeviceLostError
from shared.sampling import SamplingParams
from tests.support.peft_adapters import save_adapter
from tests.support.tiny_llama import save_tiny_model

GIB = 1024**3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead")
    model = save_tiny_model(path / "model")
    save_adapter(model, path / "adapter")
    return path


def make(folder: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "kernels": "reference", "device": "cpu", "dtype": "float32", "num_blocks": 24, "max_num_seqs": 4,
        "max_num_batched_tokens": 32, "cache_dir": folder / "cache", "seed": 0,
    }  # fmt: skip
    return LLM(str(folder / "model"), **(settings | options))


def answers(llm: LLM, adapter: Path | None) -> list[Any]:
    """Many requests of many kinds in one go: more than fit at once."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "n": 3, "seed": 5},
        {"temperature": 1.0, "top_k": 5, "seed": 6, "max_tokens": 1},
        {"temperature": 0, "repetition_penalty": 1.4, "max_tokens": 5},
        {"temperature": 0.7, "seed": 8, "logprobs": 2, "max_tokens": 4},
        {"temperature": 0, "min_tokens": 6, "stop_token_ids": list(range(0, 90, 2))},
        {"temperature": 0, "stop": ["w4", "w7"]},
        {"temperature": 1.2, "min_p": 0.05, "seed": 10, "prompt_logprobs": 1},
        {"temperature": 0.9, "seed": 11, "ignore_eos": True, "max_tokens": 40},
    ]
    prompts = [
        {"prompt_token_ids": [5 + (11 * n + i) % 80 for i in range(1 + 7 * n % 40)]} for n in range(2 * len(kinds))
    ]
    params = [SamplingParams(**({"max_tokens": 12} | each)) for each in kinds * 2]
    one = None if adapter is None else LoRARequest("one", 1, str(adapter))
    adapted = [one if index % 3 == 1 else None for index in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapted)
    return [
        (
            [(choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason) for choice in output.outputs],
            output.error,
        )
        for output in outputs
    ]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("sizes", [None, [2], []], ids=str)
def test_all_kinds_of_requests_have_the_same_answers(folder: Path, adapters: bool, sizes: list[int] | None) -> None:
    if adapters and sizes == [2]:
        pytest.skip("as without adapters")
    found = []
    for ahead in (False, True):
        llm = make(folder, async_scheduling=ahead, enable_lora=adapters, cudagraph_capture_sizes=sizes)
        assert isinstance(llm._engine._runner, DeviceRunner) == ahead
        found.append(answers(llm, folder / "adapter" if adapters else None))
        stats = llm._engine.stats()
        assert stats.used_blocks == stats.running == stats.waiting == 0
        llm._engine.check()
    assert found[0] == found[1]
    assert all(error is None for _, error in found[0])


def test_a_pass_that_fails_on_its_way_is_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all, then of one request whenever it is in it: that one ends with an error, the others as ever."""
    expected = ids(make(folder), 3)
    llm, once = make(folder, async_scheduling=True), [True]
    launch, execute = DeviceRunner.launch, DeviceRunner.execute

    class Failing:
        def result(self) -> list[Sampled | None]:
            raise RuntimeError("told to fail on its way")

    def launched(self: DeviceRunner, plan: StepPlan) -> Any:
        pending = launch(self, plan)
        if once and plan.decodes:
            once.clear()
            return Failing()
        guilty = any(span.sequence.tokens[:2] == [7, 8] and span.start > 5 for span in plan.spans)
        return Failing() if guilty else pending

    def executed(self: DeviceRunner, plan: StepPlan) -> list[Sampled | None]:
        if any(span.sequence.tokens[:2] == [7, 8] and span.start > 5 for span in plan.spans):
            raise RuntimeError("told to fail")
        return execute(self, plan)

    monkeypatch.setattr(DeviceRunner, "launch", launched)
    monkeypatch.setattr(DeviceRunner, "execute", executed)
    bad = {"prompt_token_ids": [7, 8, 9, 10]}
    prompts = [*prompts_of(2), bad, *prompts_of(3)[2:]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    assert outputs[2].error is not None
    assert [list(outputs[index].outputs[0].token_ids) for index in (0, 1, 3)] == expected
    assert len(outputs[2].outputs[0].token_ids) == 3


@pytest.mark.parametrize("where", ["DeviceRunner._launch", "Download.wait", "ModelRunner.execute"])
def test_a_lost_device_ends_the_step_and_blames_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    llm = make(folder, async_scheduling=True)
    module = {
        "Download": "engine.device.staging",
        "DeviceRunner": "engine.device.runner",
        "ModelRunner": "engine.runner",
    }

    def lost(*_: Any) -> None:
        raise torch.AcceleratorError("told to")

    monkeypatch.setattr(f"{module[where.partition('.')[0]]}.{where}", lost)
    params = SamplingParams(max_tokens=4, logprobs=1 if where == "ModelRunner.execute" else None)
    with pytest.raises(DeviceLostError, match="told to"):
        llm.generate(prompts_of(2), params, use_tqdm=False)


def prompts_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": list(range(20 + n, 30 + 2 * n))} for n in range(count)]


def ids(llm: LLM, count: int) -> list[list[int]]:
    outputs = llm.generate(prompts_of(count), SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_eager_and_few_sizes_are_as_told(folder: Path) -> None:
    def recorded(**options: Any) -> Any:
        graphs = make(folder, async_scheduling=True, **options)._engine._runner._graphs  # type: ignore[attr-defined]
        return None if graphs is None else graphs.sizes

    assert recorded() == [1, 2, 4]
    assert recorded(cudagraph_capture_sizes=[3, 1, 9]) == [1, 3]
    assert recorded(enforce_eager=True) is None
    assert recorded(max_num_seqs=6, max_num_batched_tokens=32) == [1, 2, 4, 6]


class StubMemory:
    """A device of 4 GiB where a pass peaks at so much."""

    def __init__(self, peak: int, free: int = 3 * GIB) -> None:
        self.started = 0
        self._reading = MemoryReading(4 * GIB, free, reserved=GIB // 2, peak=peak)

    def start(self) -> None:
        self.started += 1

    def read(self) -> MemoryReading:
        return self._reading


def test_the_cache_has_what_the_largest_pass_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, passes = StubMemory(peak=GIB), []
    execute = DeviceRunner.execute

    def executed(self: DeviceRunner, plan: StepPlan) -> list[Sampled | None]:
        passes.append((len(plan.spans), plan.tokens, all(span.sample for span in plan.spans)))
        return execute(self, plan)

    monkeypatch.setattr("engine.build.device_memory", lambda _: memory)
    monkeypatch.setattr(DeviceRunner, "execute", executed)
    options: dict[str, Any] = {"async_scheduling": True, "num_blocks": None, "max_num_seqs": 4000, "max_model_len": 250}
    llm = make(folder, max_num_batched_tokens=4100, cudagraph_capture_sizes=[1], **options)
    assert memory.started == 1
    assert passes == [(4000, 4100, True)]
    block = 2 * 3 * 2 * 8 * 4 * 16  # keys and values, layers, KV heads, dimensions, bytes, tokens
    own = (4100 // 16 + 4000 + 1) * block
    left = int(4 * GIB * 0.9) - (GIB - own) - GIB // 2  # half a GiB has neither this process nor nobody
    assert llm._engine.stats().total_blocks == min(left // block, 4000 * 16)
    less = make(folder, max_num_batched_tokens=4100, cudagraph_capture_sizes=[1], gpu_memory_utilization=0.4, **options)
    assert less._engine.stats().total_blocks == (int(4 * GIB * 0.4) - (GIB - own) - GIB // 2) // block
    for name, count in (("num_gpu_blocks_override", 77), ("num_blocks", 78)):
        again = make(folder, **(options | {"max_num_seqs": 4, name: count}))
        assert again._engine.stats().total_blocks == count
    assert memory.started == 2


def test_no_room_says_how_much_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.device_memory", lambda _: StubMemory(peak=4 * GIB, free=GIB // 2))
    with pytest.raises(DeviceMemoryError, match=r"3\.00 GiB.*3\.40 GiB are missing.*Raise gpu_memory_utilization"):
        make(folder, async_scheduling=True, num_blocks=None, enable_prefix_caching=False)

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("told to")

    monkeypatch.setattr(DeviceRunner, "execute", out_of_memory)
    with pytest.raises(DeviceMemoryError, match="lower max_num_batched_tokens or max_num_seqs"):
        make(folder, async_scheduling=True, num_blocks=None)
    monkeypatch.setattr(DeviceRunner, "record", out_of_memory)
    with pytest.raises(DeviceMemoryError, match="enforce_eager"):
        make(folder, async_scheduling=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization must be in"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization must be in"),
        ({"num_blocks": 3, "num_gpu_blocks_override": 3}, "another name of num_blocks"),
        ({"num_blocks": None, "num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1"),
        ({"cudagraph_capture_sizes": [4, 0]}, "cudagraph_capture_sizes must be at least 1, not 0"),
    ],
)
def test_settings_out_of_bounds_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(folder, **options)
