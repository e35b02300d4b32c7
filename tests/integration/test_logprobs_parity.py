"""Log probabilities of the real model against transformers on the same weights, in float32."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from benchmarks.parity import CANDIDATES, Parity, measure, parity_prompts
from engine.llm import LLM

#: What float32 leaves of rounding is some 1e-4.
CLOSE = 1e-3
NEW_TOKENS = 24

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("two_threads")]


def parity(reference: LlamaForCausalLM, count: int = 10, new_tokens: int = NEW_TOKENS, **options: int) -> Parity:
    llm = LLM("smollm2-135m-instruct", dtype="float32", max_model_len=512, enable_prefix_caching=False, **options)
    prompts = parity_prompts(llm.get_tokenizer())[4 : 4 + count]
    found = measure(llm, reference, prompts, new_tokens)
    assert found.values >= CANDIDATES * (sum(map(len, prompts)) - count + count * new_tokens)
    return found


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 10, "max_num_batched_tokens": 37}], ids=["whole", "chunks"])
def test_log_probabilities_are_those_of_transformers(reference: LlamaForCausalLM, options: dict[str, int]) -> None:
    found = parity(reference, **options)
    assert found.agreed == found.greedy == 5 * NEW_TOKENS
    assert max(found.sampled, found.candidates, found.prompt) < CLOSE


def test_the_comparison_sees_a_difference(reference: LlamaForCausalLM) -> None:
    """With a norm that is scaled by 5 % nothing is close."""
    weight = reference.model.norm.weight.data
    kept = weight.clone()
    weight.mul_(1.05)
    try:
        found = parity(reference, 2, 4)
    finally:
        weight.copy_(kept)
    assert min(found.sampled, found.candidates, found.prompt) > 10 * CLOSE
