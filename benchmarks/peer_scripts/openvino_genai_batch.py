"""OpenVINO GenAI's continuous batching. Runs under the Python of its own environment."""

from __future__ import annotations

import time

import numpy as np
import openvino as ov
import openvino_genai as og
from line_protocol import answer_generations, claim_stdout, read_prompts, settings


def main() -> None:
    """Load, then answer commands."""
    answer, given = claim_stdout(), settings()
    scheduler = og.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2, 512, 64
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    properties = {"INFERENCE_NUM_THREADS": given["threads"]}
    pipeline = og.ContinuousBatchingPipeline(given["model"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
        config = og.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        start = time.perf_counter()
        results = pipeline.generate(inputs, [config] * len(inputs))
        seconds = time.perf_counter() - start
        return seconds, sum(len(result.m_generation_ids[0]) for result in results)

    versions = f"openvino-genai {og.__version__}, openvino {ov.__version__}"
    answer_generations(answer, {"version": versions}, read_prompts(given["workload"]), generate)


if __name__ == "__main__":
    main()
