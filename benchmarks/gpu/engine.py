"""Whole passes and the whole engine on random weights, against the rates of the memory and of the products.

Decodes are launched kernel by kernel (`eager`) or as recorded graphs (`graph`); the engine then serves requests over
the latter, waiting for each step (`engine`) or ahead of the device (`engine ahead`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.measure import Ceilings, Place, Row
from benchmarks.gpu.serving import SPARE, Serving
from engine.adapters.device import DeviceAdapters
from engine.adapters.targets import targets
from engine.adapters.weights import Adapter, AdapterPart
from engine.device.graphs import CudaGraphs, RecordedCalls
from engine.device.runner import DeviceRunner
from engine.models.config import ModelConfig
from engine.models.llama import LlamaModel
from engine.plan import Span, StepPlan
from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.ops import Ops
from shared.sampling import SamplingParams

BLOCK_SIZE = 16
MODES = ("eager", "graph")
BATCHES, PROMPTS, CONTEXT = (1, 8, 32, 64, 128, 256), (512, 2048, 8192), 1024
STEPS, SERVED_STEPS, PROMPT, RANK, ADAPTERS = 12, 40, 32, 16, 4


@dataclass(frozen=True)
class Model:
    """A shape of the Llama family; attention has 8 KV heads in both."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    dim: int
    vocab: int
    tied: bool
    kv_heads: int = 8

    def config(self) -> ModelConfig:
        return ModelConfig.from_hf(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.dim,
                "max_position_embeddings": 16384,
                "tie_word_embeddings": self.tied,
                "rope_theta": 500000.0,
            }
        )

    @property
    def parameters(self) -> int:
        """Of the matrices that a token is multiplied with."""
        attention = self.hidden * self.dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden


MODELS = {
    "1b": Model("1b", 2048, 8192, 16, 32, 64, 128256, True),
    "8b": Model("8b", 4096, 14336, 32, 32, 128, 128256, False),
}
TINY = Model("tiny", 64, 96, 1, 4, 16, 320, True, kv_heads=2)


def rows(name: str, place: Place, ops: Ops, ceilings: Ceilings) -> Iterator[Row]:
    """All passes of one model."""
    model = TINY if place.tiny else MODELS[name]
    batches, prompts = ((1, 2), (20,)) if place.tiny else (BATCHES, PROMPTS)
    context, steps = place.size(CONTEXT, 18), place.size(STEPS, 1)
    served, begin = place.size(SERVED_STEPS, 2), place.size(PROMPT, 4)
    length = max(context + steps + 3, begin + served + SPARE)
    bench = _Bench(model, place, ops, batches, length, max(batches) * (length + BLOCK_SIZE) + max(prompts))
    for adapters in (0, ADAPTERS):
        some = batches if not adapters else (batches[0], batches[-1])
        for mode in MODES:
            label = f"{name} {mode}{_with(adapters)}"
            for batch in some:
                taken = bench.decode(batch, context, steps, adapters, eager=mode == "eager")
                least = bench.bytes_of_decode(batch, context) / ceilings.bytes_s
                yield _row(name, f"{label}: decode {batch} x {context}", batch, taken, least)
        for prompt in prompts if not adapters else prompts[-1:]:
            taken = bench.prefill(prompt, adapters)
            least = bench.flops_of_prefill(prompt) / ceilings.flops_s
            yield _row(name, f"{name} eager{_with(adapters)}: prefill {prompt}", prompt, taken, least)
    for adapters in (0, ADAPTERS):
        for ahead in (False, True):
            label = f"{name} engine{' ahead' if ahead else ''}{_with(adapters)}"
            some = (batches[0], batches[-1]) if adapters else batches
            serving = bench.serving(max(batches), begin, adapters, ahead=ahead)
            for batch in batches[-1:] if place.tiny else some:
                taken = serving.decode(batch, served)
                least = bench.bytes_of_decode(batch, begin + served // 2) / ceilings.bytes_s
                yield _row(name, f"{label}: decode {batch}", batch, taken, least)
            serving.close()


def _with(adapters: int) -> str:
    return f", {adapters} adapters" if adapters else ""


def _row(section: str, name: str, tokens: int, taken: float, least: float) -> Row:
    figures = {"us": taken * 1e6, "tokens_s": tokens / taken, "share": least / taken}
    return Row(f"engine {section}", name, figures=figures)


class _Bench:
    """A runner over random weights, and a KV cache for so many tokens."""

    def __init__(
        self, model: Model, place: Place, ops: Ops, batches: tuple[int, ...], length: int, tokens: int
    ) -> None:
        self._model, self._place, config = model, place, model.config()
        decoder = LlamaModel(config, _weights(model, place), ops, place.device, place.dtype, 16384)
        self._adapters = DeviceAdapters(config, ops, ADAPTERS, RANK, place.dtype, place.device)
        self._adapters.reserve()
        blocks = -(-tokens // BLOCK_SIZE)
        sampler = Sampler(ops, lambda text: [])
        self._runner = DeviceRunner(decoder, sampler, ops, blocks, BLOCK_SIZE, self._adapters)
        self._blocks = list(range(blocks))
        random.Random(0).shuffle(self._blocks)
        found = [self._adapters.prepare(self._adapter(slot)) for slot in range(ADAPTERS)]
        self._by_name = {adapter.identity: adapter for adapter in found}
        for slot, adapter in enumerate(found):
            self._runner.fill_slot(slot, adapter)
        graphs = CudaGraphs(place.device) if place.device.type == "cuda" else RecordedCalls()
        self._runner.record(batches, length, ADAPTERS, graphs)

    def _adapter(self, slot: int) -> Adapter:
        parts = {
            module: AdapterPart(
                self._place.randn(RANK, target.inputs) * target.inputs**-0.5,
                self._place.randn(target.outputs, RANK) / 100,
            )
            for module, target in targets(self._model.config()).items()
            if target.site not in ("embedding", "lm_head")
        }
        return Adapter(f"{slot:032x}", RANK, parts)

    def _sequences(self, count: int, length: int, room: int, adapters: int) -> list[Sequence]:
        """With random tokens; nothing is computed yet, and the cache holds zeros, which takes as long to read."""
        each = -(-(length + room) // BLOCK_SIZE)
        rng, found = random.Random(count), []
        for index in range(count):
            tokens = [rng.randrange(self._model.vocab) for _ in range(length)]
            table = self._blocks[index * each : (index + 1) * each]
            found.append(
                Sequence(
                    str(index), 0, SamplingParams(temperature=0), 0, tokens, length, length + room, block_table=table,
                    adapter_slot=index % adapters if adapters else -1,
                )
            )  # fmt: skip
        return found

    def serving(self, most: int, prompt: int, adapters: int, *, ahead: bool) -> Serving:
        """An engine over the runner for up to so many requests."""
        self._runner.eager = False
        return Serving(self._runner, self._by_name if adapters else {}, most, prompt, ahead=ahead)

    def decode(self, batch: int, context: int, steps: int, adapters: int, *, eager: bool) -> float:
        """Seconds of a step, the median of so many, with what the host does for it."""
        self._runner.eager = eager
        sequences = self._sequences(batch, context, steps + 3, adapters)
        taken: list[float] = []
        for _ in range(steps + 2):
            spans = [Span(each, len(each.tokens) - 1, 1, sample=True) for each in sequences]
            began = time.perf_counter()
            answers = self._runner.execute(StepPlan(spans, decodes=batch))
            taken.append(time.perf_counter() - began)
            for sequence, answer in zip(sequences, answers, strict=True):
                if answer is None or answer.token_id is None:
                    raise AssertionError("a row of random weights gave no token")
                sequence.tokens.append(answer.token_id)
        return sorted(taken[2:])[len(taken[2:]) // 2]

    def prefill(self, tokens: int, adapters: int) -> float:
        """Seconds of a pass over one prompt, the least of three."""
        taken: list[float] = []
        for _ in range(1 if self._place.tiny else 4):
            (sequence,) = self._sequences(1, tokens, 0, adapters)
            began = time.perf_counter()
            self._runner.execute(StepPlan([Span(sequence, 0, tokens, sample=True)]))
            taken.append(time.perf_counter() - began)
        return min(taken[1:] or taken)

    def bytes_of_decode(self, batch: int, context: int) -> float:
        """That one step must read: all matrices, and the batch's keys and values."""
        model = self._model
        return 2.0 * model.parameters + 4.0 * batch * context * model.layers * model.kv_heads * model.dim

    def flops_of_prefill(self, tokens: int) -> float:
        """Of one prompt; logits are those of its last token alone."""
        model = self._model
        attention = 2.0 * model.layers * model.heads * model.dim * tokens * tokens
        return 2.0 * tokens * (model.parameters - model.vocab * model.hidden) + attention


def _weights(model: Model, place: Place) -> dict[str, torch.Tensor]:
    def matrix(out: int, inputs: int) -> torch.Tensor:
        return place.randn(out, inputs) * inputs**-0.5

    width, kv_width = model.heads * model.dim, model.kv_heads * model.dim
    tensors = {"model.embed_tokens.weight": matrix(model.vocab, model.hidden)}
    for index in range(model.layers):
        name = f"model.layers.{index}"
        for part, out, inputs in (
            ("self_attn.q_proj", width, model.hidden),
            ("self_attn.k_proj", kv_width, model.hidden),
            ("self_attn.v_proj", kv_width, model.hidden),
            ("self_attn.o_proj", model.hidden, width),
            ("mlp.gate_proj", model.inner, model.hidden),
            ("mlp.up_proj", model.inner, model.hidden),
            ("mlp.down_proj", model.hidden, model.inner),
        ):
            tensors[f"{name}.{part}.weight"] = matrix(out, inputs)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{part}.weight"] = torch.ones(model.hidden, device=place.device, dtype=place.dtype)
    tensors["model.norm.weight"] = torch.ones(model.hidden, device=place.device, dtype=place.dtype)
    if not model.tied:
        tensors["lm_head.weight"] = matrix(model.vocab, model.hidden)
    return tensors
