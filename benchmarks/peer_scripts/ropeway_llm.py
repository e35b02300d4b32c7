"""Ropeway's `LLM.generate`, in the default of a user who names model and dtype; with kernels that are named, if so."""

from __future__ import annotations

from importlib.metadata import version

from line_protocol import answer_generations, claim_stdout, read_prompts, settings

from benchmarks.engine_transformers import run_ropeway
from engine.llm import LLM


def main() -> None:
    """Load, then answer commands."""
    answer, given = claim_stdout(), settings()
    kernels = given.get("cpu_kernels", "auto")
    llm = LLM(given["model"], dtype="bfloat16", max_model_len=1024, enable_prefix_caching=False, cpu_kernels=kernels)

    def generate(prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
        return run_ropeway(llm, prompts, new_tokens), new_tokens * len(prompts)

    ready = {"version": f"ropeway {version('ropeway')}, torch {version('torch')}"}
    answer_generations(answer, ready, read_prompts(given["workload"]), generate)


if __name__ == "__main__":
    main()
