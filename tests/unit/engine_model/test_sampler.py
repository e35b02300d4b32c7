"""The sampler over hand-made logits: every option, alone and among others."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from engine.penalties import Occurrences
from engine.plan import Sampled
from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.ops import ops_for
from shared.sampling import SamplingParams

VOCAB = 50
WORDS = {"bad": [7], " bad": [8], "two words": [3, 4], " two words": [5, 4], "odd": [9], " odd": [1, 9]}


def sampler() -> Sampler:
    return Sampler(ops_for("cpu"), WORDS.__getitem__)


def row(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    *,
    seed: int = 1,
    index: int = 0,
    eos: tuple[int, ...] = (),
    **options: Any,
) -> Sequence:
    prompt, output = prompt or [0], output or []
    return Sequence(
        "r", index, SamplingParams(**options), seed, prompt + output, len(prompt), 1000, eos_token_ids=frozenset(eos)
    )


def draw(logits: torch.Tensor, *rows: Sequence) -> list[Sampled]:
    return sampler().sample(logits, list(rows))


def one(logits: torch.Tensor, **options: Any) -> int:
    (answer,) = draw(logits.view(1, -1), row(**options))
    assert answer.error is None
    return answer.token_id


def peaked(*ids: int) -> torch.Tensor:
    """Logits that fall from the first id on; all others are lower."""
    logits = torch.full((VOCAB,), -5.0)
    for rank, token in enumerate(ids):
        logits[token] = 10.0 - rank
    return logits


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-12, 9.9e-6])
def test_temperatures_near_zero_are_greedy(temperature: float) -> None:
    logits = torch.randn(VOCAB) / 100
    assert one(logits, temperature=temperature) == int(logits.argmax())


@pytest.mark.parametrize("options", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-5}])
def test_filters_at_their_narrowest_leave_the_maximum_and_break_ties_as_greedy(options: dict[str, float]) -> None:
    logits = torch.zeros(VOCAB)
    logits[[17, 30, 41]] = 1.0
    for seed in range(20):
        answer = one(logits, seed=seed, **options)
        assert answer == 17 if "temperature" not in options else answer in (17, 30, 41)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 10**6])
def test_top_k_out_of_range_is_off(top_k: int) -> None:
    logits = torch.zeros(VOCAB)
    found = {one(logits, seed=seed, top_k=top_k) for seed in range(400)}
    assert len(found) == VOCAB


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = [row(seed=seed) for seed in range(4000)]
    answers = sampler().sample(probabilities.log().expand(4000, 4).contiguous(), rows)
    counts = torch.bincount(torch.tensor([answer.token_id for answer in answers]), minlength=4)
    chi = ((counts - 4000 * probabilities) ** 2 / (4000 * probabilities)).sum()
    assert float(chi) < 16.3  # 3 degrees of freedom, probability 0.001


def test_temperature_sharpens() -> None:
    logits = torch.tensor([0.0, 1.0])
    hot = sum(one(logits, seed=seed, temperature=5.0) for seed in range(500))
    cold = sum(one(logits, seed=seed, temperature=0.2) for seed in range(500))
    assert hot < 320 < 480 < cold


def mixed_rows() -> list[Sequence]:
    return [
        row(temperature=0),
        row(seed=2, temperature=0.7),
        row(seed=3, top_p=0.8),
        row(seed=4, top_k=5, temperature=2.0),
        row(seed=5, min_p=0.1, output=[4, 5]),
        row(seed=6, logit_bias={7: 3.0, 9: -100.0}),
        row(seed=7, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.2, output=[1, 2, 2]),
        row(seed=8, allowed_token_ids=[3, 5, 8]),
        row(seed=9, bad_words=["bad"], logprobs=3),
        row(seed=10, min_tokens=3, eos=(2,), stop_token_ids=[6]),
        row(seed=2, index=1, temperature=0.7),
        row(temperature=0, logprobs=0, repetition_penalty=2.0),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    rows = mixed_rows()
    logits = (torch.randn(len(rows), VOCAB) * 2).to(dtype)
    together = draw(logits, *rows)
    assert all(answer.error is None for answer in together)
    for i in range(len(rows)):
        (alone,) = draw(logits[i : i + 1], mixed_rows()[i])
        assert alone.token_id == together[i].token_id
    order = list(range(len(rows)))[::-1]
    reversed_answers = draw(logits[order], *[mixed_rows()[i] for i in order])
    assert [a.token_id for a in reversed_answers] == [together[i].token_id for i in order]


def test_seed_choice_and_position_change_the_draw() -> None:
    logits = torch.zeros(VOCAB)
    base = [one(logits, seed=1, output=[3] * position) for position in range(30)]
    assert base == [one(logits, seed=1, output=[3] * position) for position in range(30)]
    assert base != [one(logits, seed=2, output=[3] * position) for position in range(30)]
    assert base != [one(logits, seed=1, index=1, output=[3] * position) for position in range(30)]
    assert len(set(base)) > 10


def test_rows_that_are_not_finite_fail_alone() -> None:
    logits = torch.randn(5, VOCAB)
    logits[1, 4] = float("nan")
    logits[2, 9] = float("inf")
    logits[3] = float("-inf")
    rows = [row(temperature=0), row(seed=1), row(temperature=0), row(seed=2), row(seed=3, logprobs=2)]
    answers = draw(logits, *rows)
    assert [answer.error is not None for answer in answers] == [False, True, True, True, False]
    assert [answer.token_id for answer in answers[1:4]] == [None] * 3
    assert answers[0].token_id == int(logits[0].argmax())
    assert answers[4].token_id == draw(logits[4:], row(seed=3))[0].token_id


def test_options_that_leave_nothing_fail_that_row() -> None:
    logits = torch.randn(2, VOCAB)
    answers = draw(logits, row(allowed_token_ids=[2], min_tokens=2, max_tokens=5, eos=(2,)), row(temperature=0))
    assert answers[0].error is not None
    assert "no token" in answers[0].error.message
    assert answers[0].error.status == 400, "it is the request's fault, not the server's"
    assert answers[1].token_id == int(logits[1].argmax())


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 0}, {"allowed_token_ids": [3]}])
def test_a_penalty_that_leaves_the_range_of_numbers_fails_that_row(options: dict[str, Any]) -> None:
    logits = torch.randn(2, VOCAB)
    logits[0, 3] = 5.0
    spoilt = row(prompt=list(range(VOCAB)), repetition_penalty=1e-300, **options)
    answers = draw(logits, spoilt, row(seed=1))
    assert answers[0].error is not None
    assert answers[0].error.status == 400
    assert answers[1].token_id == draw(logits[1:], row(seed=1))[0].token_id


@pytest.mark.parametrize("sign", [1, -1])
def test_a_temperature_that_would_overflow_is_greedy(sign: int) -> None:
    logits = torch.full((2, VOCAB), 1e36) * sign
    logits[:, 3] += 1e36
    answers = draw(logits, row(temperature=1e-5, top_p=0.9), row(temperature=1e-5, repetition_penalty=2.0))
    assert [answer.token_id for answer in answers] == [3, 3]


def test_logits_are_not_changed() -> None:
    rows = mixed_rows()
    logits = torch.randn(len(rows), VOCAB)
    before = logits.clone()
    draw(logits, *rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_eos_and_all_stop_ids(temperature: float) -> None:
    options: dict[str, Any] = {
        "temperature": temperature,
        "min_tokens": 4,
        "max_tokens": 9,
        "eos": (2, 3),
        "stop_token_ids": [6],
        "logit_bias": {2: 100.0},
        "top_k": 1,
        "ignore_eos": False,
        "prompt": [1] * 10,
    }
    logits = peaked(2, 3, 6, 20)
    assert [one(logits, output=[9] * length, **options) for length in range(6)] == [20, 20, 20, 20, 2, 2]


def test_logit_bias_adds() -> None:
    assert one(peaked(4, 5), temperature=0, logit_bias={5: 2.0}) == 5
    assert one(peaked(4, 5), temperature=0, logit_bias={4: -100.0}) == 5


def test_allowed_ids_are_all_there_is() -> None:
    logits = peaked(4, 5, 6)
    assert one(logits, temperature=0, allowed_token_ids=[30, 6, 6]) == 6
    assert {one(torch.zeros(VOCAB), seed=seed, allowed_token_ids=[3, 8]) for seed in range(50)} == {3, 8}


def test_bad_words_mask_the_last_token_behind_the_words_beginning() -> None:
    logits = peaked(7, 8, 20)
    assert one(logits, temperature=0, bad_words=["bad"]) == 20
    logits = peaked(4, 20)
    options: dict[str, Any] = {"temperature": 0, "bad_words": ["two words"]}
    assert one(logits, output=[3], **options) == 20
    assert one(logits, output=[1, 5], **options) == 20
    assert one(logits, output=[3, 1], **options) == 4
    assert one(logits, prompt=[3], **options) == 4  # the prompt is not output
    # Behind a space it has more tokens than plain: only the plain spelling counts.
    assert one(peaked(9, 20), temperature=0, output=[1], bad_words=["odd"]) == 20


def test_penalties_distinguish_prompt_and_output() -> None:
    logits = peaked(4, 5)  # 10 and 9
    assert one(logits, temperature=0, prompt=[4], repetition_penalty=1.2) == 5
    assert one(logits, temperature=0, prompt=[4], presence_penalty=2.0, frequency_penalty=2.0) == 4
    assert one(logits, temperature=0, output=[4], presence_penalty=1.5) == 5
    assert one(logits, temperature=0, output=[4], frequency_penalty=0.6) == 4
    assert one(logits, temperature=0, output=[4, 4], frequency_penalty=0.6) == 5
    assert one(logits, temperature=0, output=[5], frequency_penalty=-1.1) == 5


def test_edits_are_made_in_order() -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[[4, 5, 6]] = torch.tensor([2.0, 2.4, 1.0])
    # Bias first, then repetition: (2 + 2) / 2 is less than 2.4, 2 / 2 + 2 would be more.
    assert one(logits, temperature=0, prompt=[4], logit_bias={4: 2.0}, repetition_penalty=2.0) == 5
    # What is masked stays so, whatever is added.
    assert one(logits, temperature=0, allowed_token_ids=[4, 6], logit_bias={5: 100.0}) == 4
    assert one(peaked(7, 8, 20), temperature=0, bad_words=["bad"], logit_bias={7: 100.0, 8: 100.0}) == 20


def test_a_repetition_penalty_makes_negative_logits_more_negative() -> None:
    logits = torch.full((VOCAB,), -9.0)
    logits[[4, 5]] = torch.tensor([-1.0, -1.5])
    assert one(logits, temperature=0, output=[4], repetition_penalty=2.0) == 5
    assert one(logits, temperature=0, prompt=[4, 4, 4], repetition_penalty=1.4) == 4


@pytest.mark.parametrize("length", [0, 1, 5, 200])
def test_occurrences_count_the_output_and_know_the_prompt(length: int) -> None:
    prompt = [3, 3, 1, 90]
    sequence = row(prompt)
    occurrences = Occurrences(sequence)
    output = [(i * i) % 101 for i in range(length)]
    for start in range(0, length + 1, 3):
        sequence.tokens = prompt + output[:start]
        tokens, counts = occurrences.update()
        counted = Counter(output[:start])
        assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == {t: counted[t] for t in prompt} | counted


def test_seeds_at_the_edges_of_their_range_are_seeds_like_others() -> None:
    logits = torch.zeros(VOCAB)
    texts = {
        seed: [one(logits, seed=seed, output=[3] * position) for position in range(20)]
        for seed in (-(2**63), -(2**63) + 1, -1, 0, 2**63 - 1)
    }
    assert len({tuple(text) for text in texts.values()}) == 5
    for seed, text in texts.items():
        assert text == [one(logits, seed=seed, output=[3] * position) for position in range(20)]


def test_penalties_follow_a_sequence_as_it_grows() -> None:
    shared = sampler()
    sequence = row(temperature=0, frequency_penalty=0.4)
    logits = peaked(4, 5, 6).view(1, -1)
    for _ in range(8):
        (answer,) = shared.sample(logits, [sequence])
        sequence.tokens.append(answer.token_id)
    (alone,) = draw(logits, sequence)
    assert shared.sample(logits, [sequence])[0].token_id == alone.token_id
    assert sequence.tokens[1:] != [4] * 8


def test_logprobs_are_of_the_raw_logits_with_ranks_from_one() -> None:
    logits = torch.randn(1, VOCAB)
    (answer,) = draw(logits, row(temperature=0, logprobs=3, logit_bias={11: 100.0}))
    entry = answer.logprob
    assert answer.token_id == 11
    assert entry is not None
    expected = logits.log_softmax(-1)[0]
    order = logits[0].argsort(descending=True).tolist()
    assert entry.token_id == 11
    assert entry.logprob == pytest.approx(float(expected[11]), abs=1e-5)
    assert entry.rank == order.index(11) + 1
    assert [token for token, *_ in entry.top] == order[:3]
    assert [rank for _, _, rank, _ in entry.top] == [1, 2, 3]
    assert [value for _, value, *_ in entry.top] == pytest.approx(expected[order[:3]].tolist(), abs=1e-5)


def test_equal_candidates_of_logprobs_are_in_order_of_their_ids_whatever_others_ask() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [9, 40]] = 1.0
    answers = draw(logits, row(logprobs=4), row(logprobs=20), row(logprobs=1))
    tops = [[token for token, *_ in answer.logprob.top] for answer in answers if answer.logprob is not None]
    assert tops == [[9, 40, 0, 1], [9, 40, *(i for i in range(19) if i != 9)], [9]]


def test_a_rank_counts_what_is_strictly_larger() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 40]] = 1.0
    ranks = {}
    for token in (9, 40, 0, 49):
        (answer,) = draw(logits, row(temperature=0, logprobs=0, allowed_token_ids=[token]))
        assert answer.logprob is not None
        ranks[token] = answer.logprob.rank
    assert ranks == {9: 1, 40: 1, 0: 3, 49: 3}


def test_logprobs_stay_finite_and_only_for_rows_that_ask() -> None:
    logits = torch.full((3, VOCAB), float("-inf"))
    logits[:, 5] = 0.0
    plain, none, several = draw(logits, row(temperature=0), row(temperature=0, logprobs=0), row(seed=1, logprobs=20))
    assert plain.logprob is None
    assert none.logprob is not None
    assert none.logprob.top == []
    assert several.logprob is not None
    assert len(several.logprob.top) == 20
    assert all(math.isfinite(value) for _, value, *_ in several.logprob.top)
