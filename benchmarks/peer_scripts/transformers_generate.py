"""transformers' `generate` over one batch, padded on the left."""

from __future__ import annotations

import torch
import transformers
from line_protocol import answer_generations, claim_stdout, read_prompts, settings

from benchmarks.engine_transformers import run_reference
from benchmarks.reference import reference_model


def main() -> None:
    """Load, then answer commands."""
    answer, given = claim_stdout(), settings()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(given["threads"])
    model = reference_model("bfloat16", given["model"])
    ready = {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "weight_bytes": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
    }

    def generate(prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
        return run_reference(model, prompts, new_tokens), new_tokens * len(prompts)

    answer_generations(answer, ready, read_prompts(given["workload"]), generate)


if __name__ == "__main__":
    main()
