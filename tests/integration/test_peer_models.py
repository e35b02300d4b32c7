"""The model that peers are given is the one that the engine loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.common import MODEL
from benchmarks.peer_models import export_folder, export_gguf
from engine.loading.resolve import load

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_peers_get_the_same_values(tmp_path: Path) -> None:
    ours = load(MODEL)
    for path in (export_folder(MODEL, tmp_path / "hf"), export_gguf(MODEL, tmp_path / "m.gguf")):
        theirs = load(str(path))
        assert theirs.tensors.keys() == ours.tensors.keys()
        for name, tensor in ours.tensors.items():
            assert torch.equal(theirs.tensors[name].bfloat16(), tensor.bfloat16()), name
        assert {key: theirs.config[key] for key in ours.config} == ours.config
        assert theirs.bundle.chat_template == ours.bundle.chat_template
        assert theirs.bundle.eos_token_ids == ours.bundle.eos_token_ids
        text = "Cable cars 1902, été\n"
        assert theirs.bundle.tokenizer.encode(text).ids == ours.bundle.tokenizer.encode(text).ids
