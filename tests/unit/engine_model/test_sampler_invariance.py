"""A row's token and log probabilities are the same, bit for bit, alone and among any other rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.logprobs import score
from engine.plan import Sampled
from engine.request import LogprobEntry
from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.ops import ops_for
from shared.sampling import SamplingParams

VOCABULARIES = [7, 256, 1000, 49152, 50257]
WORDS = {"a": [1], " a": [2], "b": [3, 4], " b": [5, 4]}


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random_options(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Each option is left out as often as not."""
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 1e-5, 0.3, 0.7, 1.0, 5.0],
        "top_k": [-1, 1, 2, 20, vocab // 2, vocab - 1, vocab],
        "top_p": [5e-324, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2**-53],
        "min_p": [5e-324, 0.001, 0.05, 0.3, 1.0],
        "presence_penalty": [-1.0, 0.5],
        "frequency_penalty": [-0.3, 0.2],
        "repetition_penalty": [0.7, 1.3],
        "logit_bias": [{rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(4)}],
        "bad_words": [["a"], ["b"], ["a", "b"]],
        "min_tokens": [2, 10],
        "stop_token_ids": [[rng.randrange(vocab)]],
        "allowed_token_ids": [[rng.randrange(vocab) for _ in range(5)]],
        "logprobs": [0, 1, 2, 5, 20],
    }
    options = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.5}
    if rng.random() < 0.8:
        options.pop("allowed_token_ids", None)
    if "logprobs" in options:
        options["logprobs"] = min(options["logprobs"], vocab)
    return options


def random_row(rng: random.Random, vocab: int) -> Sequence:
    options = random_options(rng, vocab)
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 50))]
    output = [rng.randrange(vocab) for _ in range(rng.randint(0, 20))]
    params = SamplingParams(max_tokens=1000, **options)
    seed = rng.choice([-(2**63), -1, 0, 7, 2**63 - 1])
    return Sequence(
        "r", rng.randint(0, 3), params, seed, prompt + output, len(prompt), 2000, eos_token_ids=frozenset({vocab - 1})
    )


def random_logits(rng: random.Random, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat and peaked rows, rows full of ties, rows mostly -inf, and now and then one that is not finite."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    for row in range(rows):
        logits[row] *= rng.choice([0.05, 1.0, 3.0, 10.0])
        kind = rng.random()
        if kind < 0.1:
            logits[row] = logits[row].round()
        elif kind < 0.15:
            logits[row, 3:] = float("-inf")
        elif kind < 0.2:
            logits[row, rng.randrange(vocab)] = rng.choice([float("nan"), float("inf")])
    return logits.to(dtype)


def told(answer: Sampled) -> tuple[int | None, LogprobEntry | None, str | None]:
    return answer.token_id, answer.logprob, None if answer.error is None else str(answer.error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_row_is_sampled_alike_alone_and_among_others(vocab: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab)
    for rows in (2, 5, 40):
        logits = random_logits(rng, rows, vocab, dtype)
        sequences = [random_row(rng, vocab) for _ in range(rows)]
        sampler = Sampler(ops_for("cpu"), WORDS.__getitem__)
        together = [told(answer) for answer in sampler.sample(logits, sequences)]
        order = rng.sample(range(rows), rows // 2 + 1)
        some = sampler.sample(logits[order], [sequences[row] for row in order])
        assert [told(answer) for answer in some] == [together[row] for row in order]
        for row in rng.sample(range(rows), min(rows, 12)):
            (alone,) = Sampler(ops_for("cpu"), WORDS.__getitem__).sample(logits[row : row + 1], [sequences[row]])
            assert told(alone) == together[row], (row, sequences[row].params)


@pytest.mark.parametrize("vocab", [256, 50257])
def test_the_number_of_threads_changes_nothing(vocab: int) -> None:
    rng = random.Random(vocab + 2)
    logits = random_logits(rng, 12, vocab, torch.float32)
    sequences = [random_row(rng, vocab) for _ in range(12)]
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([told(answer) for answer in Sampler(ops_for("cpu"), WORDS.__getitem__).sample(logits, sequences)])
    assert found[0] == found[1] == found[2]


def test_a_sampler_that_saw_the_batch_change_answers_as_a_fresh_one() -> None:
    rng, vocab = random.Random(3), 256
    running = [random_row(rng, vocab) for _ in range(6)]
    sampler = Sampler(ops_for("cpu"), WORDS.__getitem__)
    for step in range(60):
        if step % 4 == 0:
            running[rng.randrange(len(running))] = random_row(rng, vocab)
        batch = rng.sample(running, rng.randint(1, 6)) if step % 3 == 0 else list(running)
        logits = random_logits(rng, len(batch), vocab, torch.float32)
        answers = sampler.sample(logits, batch)
        fresh = Sampler(ops_for("cpu"), WORDS.__getitem__).sample(logits, batch)
        assert [told(answer) for answer in answers] == [told(answer) for answer in fresh]
        for sequence, answer in zip(batch, answers, strict=True):
            if answer.token_id is not None:
                sequence.tokens.append(answer.token_id)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_row_is_scored_alike_alone_and_among_others(vocab: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab + 1)
    logits = random_logits(rng, 17, vocab, dtype)
    tokens = [rng.randrange(vocab) for _ in range(17)]
    counts = [rng.choice([0, 1, 5, 20]) for _ in range(17)]
    together = score(ops_for("cpu"), logits, tokens, counts)
    for row in range(17):
        (alone,) = score(ops_for("cpu"), logits[row : row + 1], [tokens[row]], [counts[row]])
        assert str(alone) == str(together[row])
