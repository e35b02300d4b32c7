"""Logits of checkpoints in Hugging Face form against transformers, for every variant of the family that is served."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.batch import CacheLayout, build_batch
from engine.loading.resolve import load
from engine.models.config import ModelConfig
from engine.models.registry import CausalLM, model_class
from engine.plan import Span
from engine.sequence import Sequence
from kernels.ops import Ops, ops_for
from shared.sampling import SamplingParams
from tests.support.native import load_native
from tests.support.tiny_llama import VOCAB, save_tiny_model

BLOCK = 4
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "head_dim": ("llama", {"head_dim": 16}),
    "no grouping": ("llama", {"num_key_value_heads": 6}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "rope theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}}),
    "rope dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 2.0}}),
    "rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "rope yarn": ("llama", {"rope_parameters": YARN}),
    "rope yarn mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}}),
    "rope yarn untruncated": ("llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
}


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """The operations for a CPU, of torch and native."""
    native = request.param == "native"
    if native:
        load_native()
    return ops_for("cpu", native=native)


def load_model(folder: Path, cache: Path, dtype: torch.dtype, ops: Ops) -> CausalLM:
    checkpoint = load(str(folder), cache)
    config = ModelConfig.from_hf(checkpoint.config)
    return model_class(config.architecture)(config, checkpoint.tensors, ops, CPU, dtype, 256)


@torch.inference_mode()
def paged_logits(model: CausalLM, prompts: list[list[int]], cuts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every position of each prompt, computed in mixed batches: `cuts[i]` ends the spans of prompt `i`."""
    config = model.config
    tables, blocks = [], 0
    for prompt in prompts:
        need = -(-len(prompt) // BLOCK)
        tables.append(list(range(blocks, blocks + need))[::-1])
        blocks += need
    cache = torch.zeros(
        config.num_hidden_layers, blocks + 1, BLOCK, 2, config.num_key_value_heads, config.head_dim, dtype=model.dtype
    )
    layout = CacheLayout(BLOCK, blocks, config.num_key_value_heads, model.dtype, CPU)
    sequences = [
        Sequence(str(i), 0, SamplingParams(), 0, prompt, len(prompt), 512, block_table=table)
        for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(max(len(cut) for cut in cuts)):
        spans, owners = [], []
        for i, cut in enumerate(cuts):
            if step < len(cut):
                start = cut[step - 1] if step else 0
                spans.append(Span(sequences[i], start, cut[step] - start, sample=False))
                owners.append(i)
        batch = build_batch(spans, layout)
        hidden = model.forward(batch.tokens, batch.positions, cache, batch.attention)
        logits = model.logits(hidden).values[:, : config.vocab_size]
        parts = logits.split([spans[index].count for index in batch.order])
        for index, part in zip(batch.order, parts, strict=True):
            found[owners[index]].append(part)
    return [torch.cat(parts) for parts in found]


def random_work(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 3, 40, 97, 8)]
    cuts = []
    for prompt in prompts:
        inner = sorted(rng.sample(range(1, len(prompt)), min(len(prompt) - 1, 4)))
        # The last tokens come one by one, as in decoding.
        tail = range(max(1, len(prompt) - 3), len(prompt) + 1)
        cuts.append(sorted({*inner, *tail}))
    return prompts, cuts


def reference_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].float()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, ops: Ops, tmp_path: Path) -> None:
    kind, options = VARIANTS[variant]
    reference = save_tiny_model(tmp_path / "model", kind, **options)
    model = load_model(tmp_path / "model", tmp_path / "cache", torch.float32, ops)
    prompts, cuts = random_work(1)
    for prompt, actual in zip(prompts, paged_logits(model, prompts, cuts), strict=True):
        expected = reference_logits(reference, prompt)
        assert torch.allclose(actual, expected, atol=2e-4, rtol=1e-4), float((actual - expected).abs().max())


def test_sharded_checkpoint(ops: Ops, tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path / "model", shard_size="40KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    model = load_model(tmp_path / "model", tmp_path / "cache", torch.float32, ops)
    prompts, cuts = random_work(2)
    for prompt, actual in zip(prompts, paged_logits(model, prompts, cuts), strict=True):
        assert torch.allclose(actual, reference_logits(reference, prompt), atol=2e-4, rtol=1e-4)


def test_bfloat16_is_as_close_as_transformers_in_bfloat16(ops: Ops, tmp_path: Path) -> None:
    wide = save_tiny_model(tmp_path / "model")
    model = load_model(tmp_path / "model", tmp_path / "cache", torch.bfloat16, ops)
    prompts, cuts = random_work(3)
    exact = [reference_logits(wide, prompt) for prompt in prompts]
    narrow = wide.to(torch.bfloat16)
    ours = theirs = 0.0
    for prompt, actual, expected in zip(prompts, paged_logits(model, prompts, cuts), exact, strict=True):
        ours += float((actual - expected).square().sum())
        theirs += float((reference_logits(narrow, prompt) - expected).square().sum())
    assert ours <= 1.5 * theirs


def test_chunks_and_single_tokens_give_what_one_pass_gives(ops: Ops, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    model = load_model(tmp_path / "model", tmp_path / "cache", torch.float32, ops)
    prompts, cuts = random_work(4)
    whole = paged_logits(model, prompts, [[len(prompt)] for prompt in prompts])
    for one, cut in zip(whole, paged_logits(model, prompts, cuts), strict=True):
        assert torch.allclose(one, cut, atol=1e-4)
