"""Fixtures of the tests with a real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """torch on at most two threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference() -> object:
    """transformers' model in float32 with the weights that the engine reads."""
    from benchmarks.reference import reference_model

    return reference_model("float32")
