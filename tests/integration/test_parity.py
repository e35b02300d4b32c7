"""Greedy tokens of the real model against transformers on the same weights, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.common import MODEL
from benchmarks.parity import parity_prompts
from engine.llm import LLM
from engine.loading.resolve import load_tokenizer
from shared.sampling import SamplingParams

TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("two_threads")]


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    """20 prompts of 5 to 200 tokens: questions in chat form, and runs of prose."""
    return [{"prompt_token_ids": each} for each in parity_prompts(load_tokenizer(MODEL).tokenizer)]


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
