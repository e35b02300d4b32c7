"""How far rounding moves the model's predictions: Ropeway's dtype and transformers' against transformers' float32.

    python -m benchmarks.quality [--json FILE] [--dtype bfloat16]

The project's license in pieces of 256 tokens, one prefill each; at every position the divergence of the whole predicted
distribution from that of float32 (KL, natural logarithm), and whether the likeliest token is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.common import corpus, report
from benchmarks.engines import Engines
from benchmarks.reference import reference_logprobs, reference_model

if TYPE_CHECKING:
    import torch

    from engine.engine import Engine

PIECE = 256


def own_logprobs(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] float32: the log probabilities behind each position, by the engine's own model in one pass."""
    import torch

    from engine.plan import Span
    from engine.sequence import Sequence
    from shared.sampling import SamplingParams

    runner: Any = engine._runner
    blocks = list(range(-(-len(tokens) // runner.block_size)))
    sequence = Sequence("q", 0, SamplingParams(), 0, tokens, len(tokens), len(tokens) + 1, block_table=blocks)
    with torch.inference_mode():
        hidden = runner._forward(runner._batch([Span(sequence, 0, len(tokens), True)]), None)
        logits = runner._model.logits(hidden).values[:, : runner.vocab_size]
        return torch.Tensor(logits.float()).log_softmax(-1)


class Divergence:
    """Sums over positions."""

    def __init__(self) -> None:
        self.kl = 0.0
        self.same = self.positions = 0

    def add(self, found: torch.Tensor, exact: torch.Tensor) -> None:
        """Compare log probabilities, [tokens, vocab] each."""
        self.kl += float((exact.exp() * (exact - found)).sum())
        self.same += int((found.argmax(-1) == exact.argmax(-1)).sum())
        self.positions += len(found)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
) -> None:
    """Measure and print."""
    engine = Engines.load(dtype).make(enable_prefix_caching=False)
    exact, rounded = reference_model("float32"), reference_model(dtype)
    ids = corpus()
    found = {"ropeway": Divergence(), "transformers": Divergence()}
    for first in range(0, len(ids) - PIECE + 1, PIECE):
        piece = ids[first : first + PIECE]
        wanted = reference_logprobs(exact, piece)
        found["ropeway"].add(own_logprobs(engine, piece), wanted)
        found["transformers"].add(reference_logprobs(rounded, piece), wanted)
    figures = {f"kl_{name}": each.kl / each.positions for name, each in found.items()}
    figures |= {f"top1_{name}": each.same / each.positions for name, each in found.items()}
    figures["positions"] = found["ropeway"].positions
    report("quality", figures, dtype=dtype, json_file=json_file)


if __name__ == "__main__":
    typer.run(main)
