"""The sampler under any parameters and logits: a row is answered or fails, alone as in a batch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.ops import ops_for
from shared.sampling import SamplingParams

VOCAB = 40

tokens = st.integers(0, VOCAB - 1)
params = st.fixed_dictionaries(
    {"max_tokens": st.just(50)},
    optional={
        "temperature": st.sampled_from([0.0, 1e-300, 9e-6, 1e-5, 1e-3, 0.7, 1.0, 1e4]),
        "top_p": st.sampled_from([5e-324, 1e-9, 0.5, 1 - 1e-9, 1.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, VOCAB, VOCAB + 1, 2**31 - 1]),
        "min_p": st.sampled_from([0.0, 5e-324, 0.1, 1.0]),
        "presence_penalty": st.sampled_from([-2.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 2.0]),
        "repetition_penalty": st.sampled_from([5e-324, 1e-40, 1e-30, 0.5, 100.0]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, 0.0, 100.0]), max_size=4),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=4),
        "bad_words": st.lists(st.sampled_from(["a", "b"]), max_size=2),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(tokens, max_size=3),
        "logprobs": st.integers(0, 20),
        "seed": st.sampled_from([-(2**63), -1, 0, 2**63 - 1]),
    },
)
scales = st.sampled_from([0.0, 1e-30, 1.0, 100.0, 1e30, 3e38])
spoilers = st.lists(
    st.tuples(tokens, st.sampled_from([float("nan"), float("inf"), float("-inf"), 3e38, -3e38])), max_size=2
)
rows = st.lists(st.tuples(params, scales, spoilers, st.lists(tokens, max_size=4)), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(rows=rows, salt=st.integers(0, 1000))
def test_every_row_has_a_token_or_an_error_of_its_own(rows: list[tuple], salt: int) -> None:  # type: ignore[type-arg]
    sampler = Sampler(ops_for("cpu"), {"a": [1], " a": [2], "b": [3, 4], " b": [5, 4]}.__getitem__)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(salt)).clamp_(-1, 1)
    sequences = []
    for index, (options, scale, spoilt, output) in enumerate(rows):
        logits[index] *= scale
        for token, value in spoilt:
            logits[index, token] = value
        known = [0, 7, *output]
        sequences.append(
            Sequence(str(index), 0, SamplingParams(**options), 5, known, 2, 100, eos_token_ids=frozenset({6}))
        )
    answers = sampler.sample(logits, sequences)
    for index, (answer, sequence) in enumerate(zip(answers, sequences, strict=True)):
        (alone,) = sampler.sample(logits[index : index + 1], [sequence])
        assert (alone.token_id, str(alone.error)) == (answer.token_id, str(answer.error))
        if answer.error is not None:
            continue
        assert 0 <= answer.token_id < VOCAB
        options = sequence.params
        if options.allowed_token_ids is not None:
            assert answer.token_id in options.allowed_token_ids
        if sequence.output_len < options.min_tokens:
            assert answer.token_id not in {6, *(options.stop_token_ids or ())}
        if options.logprobs is not None:
            assert answer.logprob is not None
            assert len(answer.logprob.top) == options.logprobs
            assert all(-9999.0 <= value <= 0.0 for _, value, _, _ in answer.logprob.top)
