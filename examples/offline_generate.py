"""Batch generation without Redis or HTTP: the same engine, called directly.

Run: .venv/bin/python examples/offline_generate.py [MODEL]
"""

from __future__ import annotations

import sys

from ropeway import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model)
    prompts = ["A ropeway is", "The capital of Switzerland is", "Steel cables are made of"]
    for output in llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0)):
        print(f"{output.prompt!r}: {output.outputs[0].text!r}")

    question = [{"role": "user", "content": "Why does a ropeway's cable never stop?"}]
    (answer,) = llm.chat([question], SamplingParams(max_tokens=48, temperature=0.7, seed=1))
    print(answer.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
