"""GGUF files that were converted once: what is kept equals what was read, and nothing that is harmed is used."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.loading import converted as converting
from engine.loading import resolve
from engine.loading.checkpoint import Checkpoint
from engine.loading.resolve import load, take_weights
from engine.request import EngineRequest
from kernels.cpu import native
from kernels.cpu.native import operations
from kernels.ops import Ops, ops_for
from kernels.packed import Packed
from shared.sampling import SamplingParams
from tests.support.native import load_native

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
    monkeypatch.setattr(converting, "GGUFFile", counted)
    return opened


def whole(file: Path, cache: Path, dtype: torch.dtype | None = None) -> Checkpoint:
    """A checkpoint with its tensors."""
    checkpoint = load(str(file), cache, dtype)
    take_weights(checkpoint)
    return checkpoint


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
    first, second = (whole(file, tmp_path / "cache", dtype) for _ in range(2))
    assert len(reads) == 2
    assert_same(first, plain)
    assert_same(second, plain)


def test_each_dtype_and_each_content_is_kept_apart(file: Path, tmp_path: Path, reads: list[Path]) -> None:
    cache = tmp_path / "cache"
    for dtype in (torch.float32, torch.bfloat16):
        whole(file, cache, dtype)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    changed = whole(file, cache, torch.float32)
    assert len(reads) == 3
    assert len(list((cache / "converted").iterdir())) == 3
    assert_same(whole(file, cache, torch.float32), changed)


@pytest.mark.parametrize("name", ["rows.bin", "rows.json", "tokenizer.json", "checkpoint.json"])
@pytest.mark.parametrize("harm", ["cut", "gone", "other"])
def test_what_is_harmed_is_made_anew(
    file: Path, tmp_path: Path, reads: list[Path], name: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    first = whole(file, cache, torch.float32)
    victim = kept(cache) / name
    content = victim.read_bytes()
    victim.unlink()  # the file itself is mapped by what was loaded
    if harm != "gone":
        victim.write_bytes(content[: len(content) // 2] if harm == "cut" else b"{}")
    with caplog.at_level(logging.WARNING):
        assert_same(whole(file, cache, torch.float32), first)
    assert "is made anew" in caplog.text or (harm == "gone" and name.startswith("rows"))
    assert_same(whole(file, cache, torch.float32), first)
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(
    file: Path, tmp_path: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "converted").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        first, second = (whole(file, cache, torch.float32) for _ in range(2))
    assert "cannot be kept" in caplog.text
    assert_same(first, second)
    assert len(reads) == 2


def answer(file: Path, cache: Path, **settings: object) -> list[int]:
    """Token ids of an engine over the file."""
    engine = build_engine(
        EngineConfig(str(file), device="cpu", num_blocks=8, max_model_len=64, cache_dir=cache, **settings)  # type: ignore[arg-type]
    )
    engine.add(EngineRequest("a", list(range(20)), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)))
    ids: list[int] = []
    while engine.has_work():
        ids += [token for output in engine.step() for delta in output.choices for token in delta.token_ids]
    wait_for_keepers()
    return ids


def wait_for_keepers() -> None:
    for thread in threading.enumerate():
        if thread.name == "keep-weights":
            thread.join()


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Weights that are packed; those of `layout` are not counted."""
    load_native()
    shapes: list[tuple[int, ...]] = []
    real = operations.pack

    def counted(weight: torch.Tensor, gated: bool = False) -> Packed:
        shapes.append(tuple(weight.shape))
        return real(weight, gated)

    def chosen(device_type: str, **options: bool) -> Ops:
        ops = ops_for(device_type, **options)
        return replace(ops, pack=counted) if options.get("native") else ops

    monkeypatch.setattr("engine.build.ops_for", chosen)
    return shapes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mapped", [False, True])
def test_packed_weights_are_packed_once(
    file: Path, tmp_path: Path, reads: list[Path], packs: list[tuple[int, ...]], dtype: str, mapped: bool
) -> None:
    first = answer(file, tmp_path / "cache", dtype=dtype)
    assert len(packs) == 5
    assert len(first) == 12
    assert answer(file, tmp_path / "cache", dtype=dtype, map_weights=mapped) == first
    assert len(packs) == 5
    assert len(reads) == 1
    names = {path.name for path in kept(tmp_path / "cache").iterdir()}
    assert names == {"checkpoint.json", "tokenizer.json", f"{native.layout()}.bin", f"{native.layout()}.json"}


def test_torch_and_native_kernels_keep_their_own(file: Path, tmp_path: Path, packs: list[tuple[int, ...]]) -> None:
    cache = tmp_path / "cache"
    native_ids = [answer(file, cache, dtype="float32") for _ in range(2)]
    torch_ids = [answer(file, cache, dtype="float32", cpu_kernels="torch") for _ in range(2)]
    assert native_ids[0] == native_ids[1] == torch_ids[0] == torch_ids[1]
    assert {path.stem for path in kept(cache).glob("*.bin")} == {"rows", native.layout()}


def test_another_layout_is_packed_anew(
    file: Path, tmp_path: Path, packs: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answer(file, tmp_path / "cache")
    monkeypatch.setattr(native, "layout", lambda: "another")
    assert answer(file, tmp_path / "cache") == first
    assert len(packs) == 10


@pytest.mark.parametrize("harm", ["cut", "table", "names", "sizes", "writable by others"])
def test_harmed_packed_weights_are_packed_anew(
    file: Path, tmp_path: Path, packs: list[tuple[int, ...]], harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = answer(file, tmp_path / "cache")
    data = kept(tmp_path / "cache") / f"{native.layout()}.bin"
    table = data.with_suffix(".json")
    content = json.loads(table.read_text())
    if harm == "cut":
        data.write_bytes(data.read_bytes()[:-64])
    elif harm == "table":
        table.write_text("{")
    elif harm == "names":
        content["tensors"][3]["name"] = "x"
        table.write_text(json.dumps(content))
    elif harm == "sizes":
        first_packed = next(each for each in content["tensors"] if each["name"].endswith("packed"))
        first_packed["size"] -= 64
        first_packed["shape"][0] -= 64
        table.write_text(json.dumps(content))
    else:
        data.chmod(0o666)
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            assert answer(file, tmp_path / "cache") == first
    assert "is made anew" in caplog.text
    assert len(packs) == 10
