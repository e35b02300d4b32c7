"""Adapters in a real, if tiny, model: PEFT's own numbers, whatever shares the batch, the cache or the slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from engine.llm import LLM
from engine.outputs import RequestOutput
from ropeway import LoRARequest
from shared.errors import AdapterError, InvalidRequestError, ModelNotFoundError, UnsupportedParameterError
from shared.sampling import SamplingParams
from tests.support.native import load_native
from tests.support.peft_adapters import ATTENTION, edit_tensors, save_adapter
from tests.support.tiny_llama import VOCAB, save_tiny_model

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"r": 8, "use_rslora": True},
    "pattern": {"rank_pattern": {"q_proj": 2, "down_proj": 7}, "alpha_pattern": {"v_proj": 16}},
    "attention": {"target_modules": ATTENTION, "r": 3},
    "one": {"target_modules": ["model.layers.1.mlp.gate_proj"], "r": 1, "lora_alpha": 4},
    "head": {"target_modules": ["lm_head", "k_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "up_proj"]},
}
NAMES = [None, *OPTIONS]


class World:
    """A base model and adapters, as files and in PEFT."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = save_tiny_model(folder / "model")
        self.models: dict[str | None, PreTrainedModel | PeftModel] = {None: self.base}
        for seed, (name, options) in enumerate(OPTIONS.items()):
            self.models[name] = save_adapter(self.base, folder / name, seed, **options)

    def requests(self) -> list[LoRARequest]:
        return [LoRARequest(name, 0, str(self.folder / name)) for name in OPTIONS]

    @torch.no_grad()
    def logprobs(self, name: str | None, tokens: list[int]) -> torch.Tensor:
        """Of the token behind each position, by PEFT."""
        logits = self.models[name](torch.tensor([tokens])).logits[0].log_softmax(-1)
        return logits[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        load_native()
    return str(request.param)


def make(world: World, kernels: str, adapters: list[str] | None = None, **options: Any) -> LLM:
    """With all adapters, or those of these names."""
    settings: dict[str, Any] = {"max_loras": 8, "max_lora_rank": 8, "num_blocks": 200, "block_size": 4}
    llm = LLM(
        str(world.folder / "model"),
        dtype="float32",
        cpu_kernels=kernels,  # type: ignore[arg-type]
        enable_lora=True,
        **(settings | options),
    )
    llm.set_adapters([request for request in world.requests() if adapters is None or request.lora_name in adapters])
    return llm


def prompt(seed: int, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(seed * 31 + i * 7) % VOCAB for i in range(length)]}


def generate(llm: LLM, prompts: list[Any], names: list[str | None], **params: Any) -> list[RequestOutput]:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    return llm.generate(prompts, SamplingParams(**(settings | params)), use_tqdm=False, lora_request=names)


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_logprobs_are_peft_s_in_one_mixed_batch(world: World, kernels: str) -> None:
    llm = make(world, kernels)
    names = NAMES * 2
    prompts = [prompt(seed, 5 + 3 * seed) for seed in range(len(names))]
    different = 0
    for name, output in zip(names, generate(llm, prompts, names, prompt_logprobs=0), strict=True):
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        assert output.prompt_logprobs is not None
        entries = [*output.prompt_logprobs[1:], *(output.outputs[0].logprobs or [])]
        ours = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)])
        torch.testing.assert_close(ours, world.logprobs(name, tokens), rtol=0, atol=1e-3)
        different += name is not None and not torch.allclose(ours, world.logprobs(None, tokens), rtol=0, atol=0.05)
    assert different == 2 * len(OPTIONS)


def test_alone_together_preempted_and_in_turns_are_the_same(world: World, kernels: str) -> None:
    prompts = [prompt(seed, 6 + seed) for seed in range(len(NAMES))]

    def answers(llm: LLM) -> list[list[list[int]]]:
        return ids(generate(llm, prompts, list(NAMES), max_tokens=16))

    wanted = [
        ids(generate(make(world, kernels), [p], [name], max_tokens=16))[0]
        for p, name in zip(prompts, NAMES, strict=True)
    ]
    assert answers(make(world, kernels)) == wanted
    tight = make(world, kernels, num_blocks=24, max_num_seqs=8, enable_prefix_caching=False)
    assert answers(tight) == wanted
    before = tight._engine.stats().preemptions
    assert answers(tight) == wanted  # now all are in memory from the start
    assert tight._engine.stats().preemptions > before
    assert answers(make(world, kernels, max_loras=1, max_cpu_loras=2)) == wanted
    assert answers(make(world, kernels, max_num_batched_tokens=8, max_num_seqs=4)) == wanted


def test_a_prefix_is_shared_within_an_adapter_and_never_between_two(world: World, kernels: str) -> None:
    same = prompt(1, 40)
    cold = {name: ids(generate(make(world, kernels), [same], [name]))[0] for name in NAMES}
    llm = make(world, kernels)
    for name in NAMES * 2:
        output = generate(llm, [same], [name])[0]
        assert [output.outputs[0].token_ids] == cold[name]
        output_again = generate(llm, [same], [name])[0]
        assert output_again.num_cached_tokens == 36
    llm = make(world, kernels)
    firsts = [generate(llm, [same], [name])[0].num_cached_tokens for name in NAMES]
    assert firsts == [0] * len(NAMES)


def test_a_name_that_gets_other_weights_is_another_adapter(world: World, kernels: str) -> None:
    llm = make(world, kernels, max_loras=1)
    same = prompt(2, 20)
    first = ids(generate(llm, [same], ["plain"]))
    replaced = LoRARequest("plain", 0, str(world.folder / "rslora"))
    llm.set_adapters([replaced])
    assert llm.list_adapters() == ["plain"]
    again = generate(llm, [same], ["plain"])
    assert again[0].num_cached_tokens == 0
    assert ids(again) == ids(generate(make(world, kernels), [same], ["rslora"]))
    assert ids(again) != first
    llm.set_adapters(world.requests())
    assert ids(generate(llm, [same], ["plain"])) == first


def test_several_choices_seeds_and_penalties(world: World, kernels: str) -> None:
    params = {"n": 3, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "top_p": 0.9}
    prompts = [prompt(seed, 9) for seed in range(3)]
    names: list[str | None] = ["plain", None, "rslora"]
    together = ids(generate(make(world, kernels), prompts, names, **params))
    for index, name in enumerate(names):
        assert ids(generate(make(world, kernels), [prompts[index]], [name], **params)) == [together[index]]


def test_a_request_that_is_not_registered_before_registers_itself(world: World) -> None:
    llm = make(world, "torch")
    llm.set_adapters([])
    outputs = generate(llm, [prompt(1, 9)] * 2, [world.requests()[0], None])
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids
    assert llm.list_adapters() == ["plain"]
    both = llm.generate(
        [prompt(1, 9)] * 2, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False, lora_request="plain"
    )
    assert both[0].outputs[0].token_ids == both[1].outputs[0].token_ids == outputs[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("adapter", "error", "named"),
    [
        ("nobody", ModelNotFoundError, "lora_request"),
        ("../model", ModelNotFoundError, "lora_request"),
        (LoRARequest("a/../b", 0, "x"), InvalidRequestError, "lora_name"),
        (LoRARequest("", 0, "x"), InvalidRequestError, "lora_name"),
        (LoRARequest("a", 0, ""), InvalidRequestError, "lora_path"),
        (LoRARequest("a", 0, "/nowhere"), InvalidRequestError, "adapter_config.json"),
        (["plain"], InvalidRequestError, "1 for 2 prompts"),
    ],
)
def test_what_is_not_there_is_refused(world: World, adapter: Any, error: type[Exception], named: str) -> None:
    llm = make(world, "torch")
    with pytest.raises(error) as caught:
        llm.generate([prompt(1, 4)] * 2, SamplingParams(max_tokens=2), use_tqdm=False, lora_request=adapter)
    assert named in str(caught.value)
    assert not llm._engine.has_work()


def test_without_adapters_enabled_they_are_refused(world: World) -> None:
    llm = LLM(str(world.folder / "model"), num_blocks=50, cpu_kernels="torch")
    for call in (lambda: llm.set_adapters(world.requests()), lambda: generate(llm, [prompt(1, 4)], ["plain"])):
        with pytest.raises(UnsupportedParameterError, match="enable_lora"):
            call()


def test_an_adapter_of_too_high_a_rank_is_refused_at_once(world: World) -> None:
    llm = make(world, "torch")
    limited = make(world, "torch", adapters=[], max_lora_rank=7)
    requests = {request.lora_name: request for request in world.requests()}
    limited.set_adapters([requests["plain"], requests["pattern"]])
    with pytest.raises(AdapterError, match=r"adapter rslora: r: .*rank is 8, at most 7 is served \(max_lora_rank\)"):
        limited.set_adapters([requests["one"], requests["rslora"]])
    assert limited.list_adapters() == ["pattern", "plain"], "nothing has changed"
    with pytest.raises(AdapterError, match="rank is 8"):
        generate(limited, [prompt(1, 9)], [requests["rslora"]])
    assert ids(generate(limited, [prompt(1, 9)], ["plain"])) == ids(generate(llm, [prompt(1, 9)], ["plain"]))
    with pytest.raises(AdapterError, match=r"rank_pattern: .*rank is 7, at most 6"):
        make(world, "torch", max_lora_rank=6, adapters=["pattern"])


def test_a_pattern_s_rank_counts_only_where_the_adapter_has_such_a_module(world: World, tmp_path: Path) -> None:
    save_adapter(world.base, tmp_path, r=64, rank_pattern={"q_proj": 2, "lm_head": 99}, target_modules=["q_proj"])
    llm = make(world, "torch", max_lora_rank=2, adapters=[])
    llm.set_adapters([LoRARequest("low", 0, str(tmp_path))])
    assert generate(llm, [prompt(1, 9)], ["low"])[0].error is None


def test_weights_that_are_found_damaged_fail_their_requests_alone(world: World, tmp_path: Path) -> None:
    save_adapter(world.base, tmp_path, seed=3)
    edit_tensors(tmp_path, layers__1__mlp__down_proj__lora_B__weight=torch.full((48, 4), torch.nan))
    llm = make(world, "torch")
    outputs = generate(llm, [prompt(1, 9)] * 3, [LoRARequest("damaged", 0, str(tmp_path)), "plain", None])
    assert outputs[0].error is not None and "not a finite number" in outputs[0].error.message
    assert [output.error for output in outputs[1:]] == [None, None]


def test_a_batch_without_adapters_is_the_base_model_bit_for_bit(world: World, kernels: str) -> None:
    plain = LLM(str(world.folder / "model"), dtype="float32", num_blocks=200, block_size=4, cpu_kernels=kernels)  # type: ignore[arg-type]
    llm = make(world, kernels)
    generate(llm, [prompt(3, 9)], ["plain"])
    ours, wanted = (generate(each, [prompt(4, 9)], [None], prompt_logprobs=3)[0] for each in (llm, plain))
    assert ours.prompt_logprobs == wanted.prompt_logprobs
    assert ours.outputs[0].logprobs == wanted.outputs[0].logprobs


def test_the_same_name_twice_changes_nothing(world: World) -> None:
    llm = make(world, "torch")
    before = llm.list_adapters()
    with pytest.raises(InvalidRequestError, match="twice"):
        llm.set_adapters([world.requests()[0], world.requests()[0]])
    assert llm.list_adapters() == before
