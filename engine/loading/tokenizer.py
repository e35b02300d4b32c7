"""Tokenizers of folders and of GGUF files, as objects of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.loading.checkpoint import TokenizerBundle, write_atomically
from engine.loading.gguf import GGUFFile

logger = logging.getLogger(__name__)

#: Kinds of token in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4

#: Texts that end a turn. Where a GGUF file names no `eot` token, a control token of these is one, as in llama.cpp.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


#: How text is cut before merging, by `tokenizer.ggml.pre`.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "llama-bpe": lambda: _by_pattern(_LLAMA3_PATTERN),
    "qwen2": lambda: _by_pattern(_QWEN2_PATTERN),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    ),
}


def from_gguf(file: GGUFFile, cache_dir: Path) -> TokenizerBundle:
    """The tokenizer that a GGUF file describes.

    Byte-level BPE with a known way of cutting text is built from the file itself. All else is converted by
    transformers, which takes seconds, and cached as `tokenizer.json`.
    """
    known = file.value("tokenizer.ggml.model") == "gpt2" and file.value("tokenizer.ggml.pre") in _PRE_TOKENIZERS
    tokenizer = _build_bpe(file) if known else _converted(file.path, cache_dir)
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.value(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            special[f"{role}_token"] = tokens[index]
    return TokenizerBundle(
        tokenizer=tokenizer,
        chat_template=file.value("tokenizer.chat_template"),
        special_tokens=special,
        eos_token_ids=_gguf_eos_ids(file, tokens),
    )


def _gguf_eos_ids(file: GGUFFile, tokens: list[str]) -> list[int]:
    ids = [file.value(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    kinds = file.value("tokenizer.ggml.token_type", [])
    ids += [index for index, kind in enumerate(kinds) if kind == _CONTROL and tokens[index] in _END_OF_TURN]
    return sorted({index for index in ids if index is not None})


def _build_bpe(file: GGUFFile) -> Tokenizer:
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    kinds: list[int] = file.value("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges")]
    pre = str(file.value("tokenizer.ggml.pre"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a whole word that is a token as it is, without the merges that would lead there.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    if file.value("tokenizer.ggml.add_bos_token", False):
        bos = int(file.value("tokenizer.ggml.bos_token_id"))
        _prepend(tokenizer, tokens[bos], bos)
    return tokenizer


def _prepend(tokenizer: Tokenizer, token: str, index: int) -> None:
    tokenizer.post_processor = TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, index)]
    )


def _converted(path: Path, cache_dir: Path) -> Tokenizer:
    status = path.stat()
    identity = json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns])
    cached = cache_dir / "tokenizers" / hashlib.sha256(identity.encode()).hexdigest() / "tokenizer.json"
    if cached.is_file():
        return Tokenizer.from_file(str(cached))
    from transformers import AutoTokenizer

    logger.info("converting the tokenizer of %s", path.name)
    text = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer.to_str()
    write_atomically(cached, text)
    return Tokenizer.from_str(text)


def from_folder(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> TokenizerBundle:
    """The tokenizer of a folder in Hugging Face form.

    Raises:
        ValueError: the folder has no tokenizer.
    """
    settings = read_json(folder / "tokenizer_config.json")
    tokenizer = _fast_tokenizer(folder)
    # A setting may be there and null.
    special = {role: _text(value) for role, value in settings.items() if role.endswith("_token") and value is not None}
    special = {role: text for role, text in special.items() if text}
    ids: set[int] = set()
    for source in (generation.get("eos_token_id"), config.get("eos_token_id")):
        if source is not None:
            ids.update([source] if isinstance(source, int) else source)
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if eos is not None:
        ids.add(eos)
    return TokenizerBundle(tokenizer, _template(folder, settings), special, sorted(ids))


def _fast_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
        # Files may ask for both; the engine cuts and pads by itself.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise ValueError(f"{folder}: no tokenizer.json, tokenizer.model or vocab.json")
    from transformers import AutoTokenizer

    return Tokenizer.from_str(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several named templates: the one for plain chats.
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file; empty if there is no such file.

    Raises:
        ValueError: the file does not hold an object.
    """
    if not path.is_file():
        return {}
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value
