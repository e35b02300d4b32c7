"""The runner for a GPU, on a CPU: recorded decodes, tokens that stay on the device, and a host that never waits.

On the references, and with `make kernels` on Triton's kernels in the interpreter; what it answers is what the plain
runner does.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters.device import DeviceAdapters
from engine.adapters.targets import targets
from engine.adapters.weights import Adapter, AdapterPart
from engine.device.capture_sizes import capture_sizes, padded_size
from engine.device.graphs import Call, RecordedCalls
from engine.device.runner import DeviceRunner
from engine.device.staging import Staging
from engine.loading.resolve import load
from engine.models.config import ModelConfig
from engine.models.registry import model_class
from engine.plan import Sampled, Span, StepPlan
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.ops import ops_for
from shared.errors import EngineError
from shared.sampling import SamplingParams
from tests.support.no_sync import HostSyncError, no_host_sync
from tests.support.tiny_llama import VOCAB, save_tiny_model

BLOCK, BLOCKS, CONTEXT, SLOTS, RANK = 16, 40, 96, 2, 4
CPU = torch.device("cpu")


class WatchedCalls(RecordedCalls):
    """Remembers what was replayed; on demand leaves out every replay."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self.broken = False

    def capture(self, call: Call) -> Call:
        recorded = super().capture(call)

        def replay() -> None:
            self.replays += 1
            if not self.broken:
                recorded()

        return replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_model(path)
    return path


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.kernels)])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: type[ModelRunner], folder: Path, kernels: str, *, adapters: bool = False) -> ModelRunner:
    ops = ops_for("cpu", kernels=kernels)  # type: ignore[arg-type]
    checkpoint = load(str(folder), folder / "cache")
    config = ModelConfig.from_hf(checkpoint.config)
    model = model_class("LlamaForCausalLM")(config, checkpoint.tensors, ops, CPU, torch.float32, 256)
    slots = DeviceAdapters(config, ops, SLOTS, RANK, torch.float32, CPU) if adapters else None
    return kind(model, Sampler(ops, lambda text: []), ops, BLOCKS, BLOCK, slots)


def adapter(config: ModelConfig, seed: int, sites: tuple[str, ...]) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    parts = {
        module: AdapterPart(
            torch.randn(RANK, target.inputs, generator=generator),
            torch.randn(target.outputs, RANK, generator=generator) / 4,
        )
        for module, target in targets(config).items()
        if target.site in sites
    }
    return Adapter(f"{seed:032x}", RANK, parts)


def fill(runner: ModelRunner, slot: int, seed: int, *sites: str) -> None:
    slots = runner._adapters
    assert slots is not None
    runner.fill_slot(slot, slots.prepare(adapter(runner._model.config, seed, sites)))


def sequence(seed: int, length: int, blocks: list[int], slot: int = -1, **options: Any) -> Sequence:
    tokens = [(seed * 31 + i * 7) % VOCAB for i in range(length)]
    options.setdefault("temperature", 0.0)
    return Sequence(
        str(seed), 0, SamplingParams(**options), seed, tokens, length, CONTEXT, block_table=blocks, adapter_slot=slot
    )


def sequences(lengths: list[int], seed: int = 0, *, slots: bool = False, drawn: bool = False) -> list[Sequence]:
    """Each with blocks for its whole context, in a random order."""
    rng, each = random.Random(seed), CONTEXT // BLOCK
    blocks = list(range(BLOCKS))
    rng.shuffle(blocks)
    found = []
    for index, length in enumerate(lengths):
        options: dict[str, Any] = {}
        if drawn and index % 3:
            options = {
                "temperature": rng.choice((0.5, 1.0)),
                "top_p": rng.choice((1.0, 0.8)),
                "top_k": rng.choice((0, 9)),
            }
        mine = blocks[index * each : (index + 1) * each]
        found.append(sequence(index, length, mine, index % (SLOTS + 1) - 1 if slots else -1, **options))
    return found


def prefill(found: list[Sequence]) -> StepPlan:
    return StepPlan([Span(each, 0, len(each.tokens), sample=True) for each in found])


def decode(found: list[Sequence], ahead: int = 0) -> StepPlan:
    return StepPlan([Span(each, len(each.tokens) - 1 + ahead, 1, sample=True) for each in found], decodes=len(found))


def ids(answers: list[Sampled | None]) -> list[int]:
    found = [answer.token_id for answer in answers if answer is not None and answer.error is None]
    assert None not in found
    assert len(found) == len(answers)
    return found  # type: ignore[return-value]


def generate(runner: ModelRunner, found: list[Sequence], steps: int) -> list[list[int]]:
    """Step by step."""
    plan = prefill(found)
    for _ in range(steps):
        for each, token in zip(found, ids(runner.execute(plan)), strict=True):
            each.tokens.append(token)
        plan = decode(found)
    return [each.tokens[each.prompt_len :] for each in found]


def generate_ahead(runner: DeviceRunner, found: list[Sequence], steps: int) -> list[list[int]]:
    """Each pass begins before the tokens of the last are known; the device part never makes the host wait."""
    with no_host_sync():
        under_way = runner.launch(prefill(found))
    for step in range(steps):
        following = None
        if step + 1 < steps:
            # In another order, so that tokens must find their rows.
            plan = decode(found[::-1] if step % 2 else found, ahead=1)
            with no_host_sync():
                following = runner.launch(plan)
        answered = found if step == 0 or step % 2 else found[::-1]
        for each, token in zip(answered, ids(under_way.result()), strict=True):
            each.tokens.append(token)
        if following is not None:
            under_way = following
    return [each.tokens[each.prompt_len :] for each in found]


def recorded(
    folder: Path, kernels: str, sizes: list[int], *, adapters: bool = False
) -> tuple[DeviceRunner, WatchedCalls]:
    runner, calls = make(DeviceRunner, folder, kernels, adapters=adapters), WatchedCalls()
    assert isinstance(runner, DeviceRunner)
    if adapters:
        assert runner._adapters is not None
        runner._adapters.reserve()
    runner.record(sizes, CONTEXT, SLOTS, calls)
    return runner, calls


LENGTHS = [1, 16, 17, 40, 5]


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [8], [2]], ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_those_of_the_plain_runner(folder: Path, kernels: str, sizes: list[int], ahead: bool) -> None:
    expected = generate(make(ModelRunner, folder, kernels), sequences(LENGTHS, drawn=True), 4)
    runner, calls = recorded(folder, kernels, sizes)
    run = generate_ahead if ahead else generate
    assert run(runner, sequences(LENGTHS, drawn=True), 4) == expected  # type: ignore[operator]
    assert calls.replays == (3 if sizes[-1] >= len(LENGTHS) else 0)
    # A smaller batch, padded over what the last one has left; other sequences in other blocks.
    few = [9, 33, 2]
    again = generate(make(ModelRunner, folder, kernels), sequences(few, 5, drawn=True), 3)
    assert run(runner, sequences(few, 5, drawn=True), 3) == again  # type: ignore[operator]


def test_a_replay_that_does_nothing_is_seen(folder: Path) -> None:
    expected = generate(make(ModelRunner, folder, "reference"), sequences(LENGTHS), 4)
    runner, calls = recorded(folder, "reference", [8])
    calls.broken = True
    assert generate(runner, sequences(LENGTHS), 4) != expected


def test_adapters_within_recorded_passes(folder: Path, kernels: str) -> None:
    """Of each row its own; also when a slot is filled anew, and when an adapter changes layers that none did before."""
    plain = make(ModelRunner, folder, kernels, adapters=True)
    runner, calls = recorded(folder, kernels, [1, 8], adapters=True)
    captured = calls.captures
    seen = []
    for round_, sites in enumerate((("qkv", "down"), ("attention_out", "gated"), ("qkv", "embedding", "lm_head"))):
        for each in (plain, runner):
            fill(each, 0, 10 + round_, *sites)
            fill(each, 1, 20, "qkv", "gated")
        expected = generate(plain, sequences(LENGTHS, slots=True), 3)
        assert generate_ahead(runner, sequences(LENGTHS, slots=True), 3) == expected
        seen.append(expected)
    assert calls.captures > captured
    base = generate(plain, sequences(LENGTHS), 3)
    assert generate(runner, sequences(LENGTHS), 3) == base
    assert seen[0] != seen[1] != seen[2] != base


def test_all_sizes_are_recorded_at_the_start_and_none_later(folder: Path) -> None:
    runner, calls = recorded(folder, "reference", [1, 2, 4], adapters=True)
    assert calls.captures == 3 * 2
    fill(runner, 0, 1, "qkv", "attention_out", "gated", "down")
    generate(runner, sequences([3, 4, 5], slots=True), 3)
    assert calls.captures == 3 * 2


def test_padding_touches_nothing_but_the_null_block(folder: Path, kernels: str) -> None:
    runner, _ = recorded(folder, kernels, [8])
    found = sequences([5, 7, 9])
    generate(runner, found, 2)
    used = {block for each in found for block in each.block_table[:1]}
    written = runner._cache.abs().sum((0, 2, 3, 4, 5)).nonzero().flatten().tolist()
    assert set(written) == used | {BLOCKS}


def test_rows_that_need_the_host_have_it(folder: Path, kernels: str) -> None:
    """Penalties and log probabilities over the recorded pass."""
    found = {}
    for kind in (ModelRunner, DeviceRunner):
        runner = make(kind, folder, kernels) if kind is ModelRunner else recorded(folder, kernels, [4])[0]
        mine = sequences([4, 20])
        mine[1].params = SamplingParams(temperature=0, repetition_penalty=1.5, logprobs=1)
        plan, entries = prefill(mine), []
        for _ in range(3):
            answers = runner.execute(plan)
            for each, token in zip(mine, ids(answers), strict=True):
                each.tokens.append(token)
            assert answers[1] is not None
            assert answers[1].logprob is not None
            entries.append(round(answers[1].logprob.logprob, 4))
            plan = decode(mine)
        found[kind] = [each.tokens for each in mine], entries
    assert found[ModelRunner] == found[DeviceRunner]
    assert not recorded(folder, kernels, [4])[0].launches(plan)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_a_row_that_fails_fails_alone_also_when_the_next_pass_is_under_way(folder: Path, kernels: str) -> None:
    expected = generate(make(ModelRunner, folder, kernels), sequences([5, 6]), 3)
    runner, _ = recorded(folder, kernels, [1, 2, 4])
    bad, good, late = sequences([8, 5, 6])
    good.seed = 0
    good.tokens, late.tokens = sequences([5, 6])[0].tokens, sequences([5, 6])[1].tokens
    good.prompt_len, late.prompt_len = 5, 6
    first = runner.launch(prefill([bad, good]))
    for each, token in zip([bad, good], ids(first.result()), strict=True):
        each.tokens.append(token)
    runner._cache[:, bad.block_table[0]] = float("nan")
    second = runner.launch(decode([bad, good]))
    # The bad one is aborted meanwhile, and its block goes to another, before anybody knows.
    late.block_table = [bad.block_table[0], *late.block_table[1:]]
    third = runner.launch(StepPlan([*decode([bad, good], ahead=1).spans, *prefill([late]).spans], decodes=2))
    failed, fine = second.result()
    assert failed is not None
    assert failed.error is not None
    assert fine is not None
    _, again, other = third.result()
    assert again is not None
    assert other is not None
    assert [good.tokens[-1], fine.token_id, again.token_id] == expected[0]
    assert other.token_id == expected[1][0]


def test_a_token_that_is_nowhere_is_an_error(folder: Path) -> None:
    runner, _ = recorded(folder, "reference", [4])
    found = sequences([5, 6])
    runner.launch(prefill(found[:1]))
    with pytest.raises(EngineError, match="neither known nor under way"):
        runner.launch(decode(found, ahead=1))


def test_the_guard_sees_what_waits() -> None:
    x = torch.arange(4)
    for wait in (
        lambda: x.sum().item(), x.tolist, lambda: x.nonzero(), lambda: x[x > 1], lambda: bool(x[0]), lambda: x.cpu(),
        lambda: torch.tensor([1]), lambda: torch.where(x > 1), lambda: float(x[1]), x.numpy,
    ):  # fmt: skip
        with pytest.raises(HostSyncError), no_host_sync():
            wait()
    with no_host_sync():
        torch.where(x > 1, x, 0).index_select(0, x)


def test_sizes() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(300)[-5:] == [248, 256, 272, 288, 300]
    assert capture_sizes(64, [8, 100, 2, 8]) == [2, 8]
    assert capture_sizes(4, []) == []
    assert [padded_size([2, 8], rows) for rows in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, None]


def test_staging_packs_what_fits_and_grows() -> None:
    import numpy as np

    staging = Staging(CPU, words=4)
    for _ in range(5):
        staging.begin()
        whole, halves, late = np.arange(3), np.array([[0.5], [1.5]]), np.array([9])
        found = [staging.put(whole), staging.put(halves), staging.put(late)]
        staging.send()
        assert [each.tolist() for each in found] == [[0, 1, 2], [[0.5], [1.5]], [9]]
    assert len(staging._target) == 8
    kept = found[0]
    staging.begin()
    staging.put(np.array([7, 7, 7]))
    assert kept.tolist() == [0, 1, 2]
    staging.send()
    assert kept.tolist() == [7, 7, 7]
