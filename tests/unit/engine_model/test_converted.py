"""GGUF files that were converted once: what is kept equals what was read, and nothing that is harmed is used."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.loading import resolve
from engine.loading.checkpoint import Checkpoint
from engine.loading.resolve import load

HIDDEN, INNER, HEADS = 32, 64, 2
BYTES = [chr(0x100 + byte) if byte < 33 or 127 <= byte < 161 or byte == 173 else chr(byte) for byte in range(256)]
TOKENS = [*BYTES, "ab"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A random Llama of one layer, in float32, with a vocabulary of bytes."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(7)
    writer.add_chat_template("{{ messages }}")
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """GGUF files that are opened."""
    opened: list[Path] = []
    real = resolve.GGUFFile

    def counted(path: Path) -> resolve.GGUFFile:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(resolve, "GGUFFile", counted)
    return opened


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert (one.name, one.config, one.digest) == (other.name, other.config, other.digest)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name])
    assert one.bundle.tokenizer.to_str() == other.bundle.tokenizer.to_str()
    for field in ("chat_template", "special_tokens", "eos_token_ids"):
        assert getattr(one.bundle, field) == getattr(other.bundle, field)


def kept(cache: Path) -> Path:
    (folder,) = (cache / "converted").iterdir()
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_load_reads_what_the_first_has_kept(
    file: Path, tmp_path: Path, reads: list[Path], dtype: torch.dtype
) -> None:
    plain = load(str(file), tmp_path / "cache")
    assert not (tmp_path / "cache" / "converted").exists()
    plain.tensors = {name: tensor.to(dtype) for name, tensor in plain.tensors.items()}
    first, second = (load(str(file), tmp_path / "cache", dtype) for _ in range(2))
    assert len(reads) == 2
    assert_same(first, plain)
    assert_same(second, plain)


def test_each_dtype_and_each_content_is_kept_apart(file: Path, tmp_path: Path, reads: list[Path]) -> None:
    cache = tmp_path / "cache"
    for dtype in (torch.float32, torch.bfloat16):
        load(str(file), cache, dtype)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    changed = load(str(file), cache, torch.float32)
    assert len(reads) == 3
    assert len(list((cache / "converted").iterdir())) == 3
    assert_same(load(str(file), cache, torch.float32), changed)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "checkpoint.json"])
@pytest.mark.parametrize("harm", ["cut", "gone", "other"])
def test_what_is_harmed_is_made_anew(
    file: Path, tmp_path: Path, reads: list[Path], name: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    first = load(str(file), cache, torch.float32)
    victim = kept(cache) / name
    content = victim.read_bytes()
    victim.unlink()  # the file itself is mapped by what was loaded
    if harm != "gone":
        victim.write_bytes(content[: len(content) // 2] if harm == "cut" else b"{}")
    with caplog.at_level(logging.WARNING):
        assert_same(load(str(file), cache, torch.float32), first)
    assert "is made anew" in caplog.text
    assert_same(load(str(file), cache, torch.float32), first)
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(
    file: Path, tmp_path: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "converted").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        first, second = (load(str(file), cache, torch.float32) for _ in range(2))
    assert "cannot be kept" in caplog.text
    assert_same(first, second)
    assert len(reads) == 2
