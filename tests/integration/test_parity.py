"""Greedy tokens of the real model against transformers on the same weights, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.llm import LLM
from engine.loading.resolve import load
from shared.sampling import SamplingParams

MODEL = "smollm2-135m-instruct"
TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about snow.",
    "Count from one to ten in words.",
    "Explain what a ropeway is to a child.",
    "List 12 prime numbers: 2, 3, 5,",
    "Translate 'good morning' into German, Spanish and Italian.",
]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    """transformers' model with the weights that the engine reads from the GGUF file."""
    checkpoint = load(MODEL)
    config = LlamaConfig(**{key: value for key, value in checkpoint.config.items() if key != "architectures"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(checkpoint.tensors, strict=False, assign=True)
    model.tie_weights()
    # Made on the meta device, the table of frequencies has no values yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    """20 prompts of 5 to 200 tokens: questions in chat form, and runs of prose."""
    tokenizer = load(MODEL).bundle.tokenizer
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prose = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text("utf-8")).ids
    lengths = [5, 15, 16, 17, 31, 32, 33, 64, 80, 96, 111, 128, 150, 200]
    ids = [tokenizer.encode(chat).ids for chat in chats]
    ids += [prose[150 * i : 150 * i + length] for i, length in enumerate(lengths)]
    return [{"prompt_token_ids": each} for each in ids]


@pytest.fixture(scope="module")
def batched(prompts: list[dict[str, Any]]) -> list[list[int]]:
    """All 20 in one batch, prompts whole."""
    return generate(engine(), prompts)


def engine(**options: Any) -> LLM:
    return LLM(MODEL, dtype="float32", max_model_len=512, **({"enable_prefix_caching": False} | options))


def generate(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def test_tokens_are_those_that_transformers_chooses(
    reference: LlamaForCausalLM, prompts: list[dict[str, Any]], batched: list[list[int]]
) -> None:
    """One pass of transformers over prompt and answer: at every position its arg-max must be the answer's next token,
    which is to say that it would have generated the same."""
    assert len(prompts) >= 20
    for prompt, tokens in zip(prompts, batched, strict=True):
        ids = prompt["prompt_token_ids"]
        assert len(tokens) == TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + tokens])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == tokens


def test_transformers_generate_agrees(
    reference: LlamaForCausalLM, prompts: list[dict[str, Any]], batched: list[list[int]]
) -> None:
    """The same for one prompt by `generate` itself."""
    ids = prompts[0]["prompt_token_ids"]
    with torch.inference_mode():
        found = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert found[0, len(ids) :].tolist() == batched[0]


@pytest.mark.timeout(1200)
def test_alone_as_in_the_batch(prompts: list[dict[str, Any]], batched: list[list[int]]) -> None:
    assert generate(engine(max_num_seqs=1), prompts) == batched


def test_chunked_prefill(prompts: list[dict[str, Any]], batched: list[list[int]]) -> None:
    assert generate(engine(max_num_seqs=20, max_num_batched_tokens=37), prompts) == batched


def test_prefix_caching_cold_and_warm(prompts: list[dict[str, Any]], batched: list[list[int]]) -> None:
    llm = engine(enable_prefix_caching=True)
    assert generate(llm, prompts) == batched
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == batched
    assert sum(output.num_cached_tokens for output in outputs) > 500


def test_scarce_blocks_preempt_and_recompute(prompts: list[dict[str, Any]], batched: list[list[int]]) -> None:
    llm = engine(num_blocks=40)
    assert generate(llm, prompts) == batched
