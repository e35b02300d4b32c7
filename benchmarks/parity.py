"""Tokens and log probabilities against transformers on the same weights.

    python -m benchmarks.parity [--quick] [--json FILE] [--dtype float32]

20 prompts of 5 to 200 tokens, questions in chat form and runs of prose, 64 new tokens each: the first half greedy, the
others drawn. transformers passes once over each prompt with its answer. Greedy tokens are compared with its arg-max;
the log probabilities of the tokens, of the 5 likeliest candidates and of the prompt with its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.common import MODEL, report
from benchmarks.reference import reference_logprobs, reference_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engine.llm import LLM
    from engine.outputs import Logprob, RequestOutput

NEW_TOKENS = 64
CANDIDATES = 5
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about snow.",
    "Count from one to ten in words.",
    "Explain what a ropeway is to a child.",
    "List 12 prime numbers: 2, 3, 5,",
    "Translate 'good morning' into German, Spanish and Italian.",
)
LENGTHS = (5, 15, 16, 17, 31, 32, 33, 64, 80, 96, 111, 128, 150, 200)


@dataclass
class Parity:
    """What was found over some answers. Differences are the largest ones, of natural logarithms.

    Attributes:
        greedy: tokens of greedy answers that were compared, and `agreed` those that transformers chooses too.
        sampled, candidates, prompt: of the answers' tokens, of their candidates, and of the prompts with candidates.
        values: how many log probabilities were compared.
    """

    greedy: int = 0
    agreed: int = 0
    sampled: float = 0.0
    candidates: float = 0.0
    prompt: float = 0.0
    values: int = 0

    def add(self, output: RequestOutput, expected: Any, *, greedy: bool) -> None:
        """Compare one answer; `expected` are transformers' log probabilities behind each position."""
        prompt, choice = output.prompt_token_ids, output.outputs[0]
        assert choice.logprobs is not None
        assert output.prompt_logprobs is not None
        if greedy:
            self.greedy += len(choice.token_ids)
            own = expected[len(prompt) - 1 : -1].argmax(-1).tolist()
            self.agreed += sum(a == b for a, b in zip(own, choice.token_ids, strict=True))
        for position, (token, found) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True), len(prompt) - 1):
            self.sampled = max(self.sampled, self._difference({token: found[token]}, expected[position]))
            self.candidates = max(self.candidates, self._difference(found, expected[position]))
        for position, found in enumerate(output.prompt_logprobs[1:]):
            assert found is not None
            self.prompt = max(self.prompt, self._difference(found, expected[position]))

    def _difference(self, found: dict[int, Logprob], expected: Any) -> float:
        self.values += len(found)
        return max(abs(entry.logprob - float(expected[token])) for token, entry in found.items())


def parity_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """20 prompts of 5 to 200 tokens."""
    prose = tokenizer.encode((Path(__file__).parents[1] / "LICENSE").read_text("utf-8")).ids
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = [list(tokenizer.encode(chat).ids) for chat in chats]
    return prompts + [prose[150 * i : 150 * i + length] for i, length in enumerate(LENGTHS)]


def measure(llm: LLM, model: Any, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> Parity:
    """Answers of the engine, all in one batch, against passes of transformers."""
    from shared.sampling import SamplingParams

    params = [
        SamplingParams(
            temperature=0 if index < len(prompts) // 2 else 1,
            seed=index,
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=CANDIDATES,
            prompt_logprobs=CANDIDATES,
        )
        for index in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = Parity()
    for output, each in zip(outputs, params, strict=True):
        if output.error is not None:
            raise output.error
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        found.add(output, reference_logprobs(model, tokens), greedy=each.greedy)
    return found


def main(
    quick: Annotated[bool, typer.Option(help="6 prompts, 16 tokens each")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; both by default")] = None,
) -> None:
    """Measure and print."""
    from engine.llm import LLM

    figures: dict[str, float] = {}
    for kind in ("float32", "bfloat16") if dtype is None else (dtype,):
        llm = LLM(MODEL, dtype=kind, max_model_len=512, enable_prefix_caching=False)  # type: ignore[arg-type]
        prompts = parity_prompts(llm.get_tokenizer())
        found = measure(llm, reference_model(kind), prompts[4:10] if quick else prompts, 16 if quick else NEW_TOKENS)
        figures |= {
            f"{kind}_greedy_agreement": found.agreed / found.greedy,
            f"{kind}_sampled_max_diff": found.sampled,
            f"{kind}_candidates_max_diff": found.candidates,
            f"{kind}_prompt_max_diff": found.prompt,
            f"{kind}_values": float(found.values),
        }
    report("parity", figures, dtype=dtype or "float32 and bfloat16", json_file=json_file)


if __name__ == "__main__":
    typer.run(main)
