"""Small tokenizers that need no download: byte-level BPE, and SentencePiece style with byte fallback."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_WORDS = ["Paris", "beta", "gamma", "DEF", "DEFG", "HI", "stop", "the", "cat"]

#: Ids of the byte-level tokenizer: bytes, then words with and without a space before them, then special tokens.
EOS_TEXT = "<|end|>"
_SPACE = "\u0120"
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
#: A token with the end of one character and the start of the next: last byte of an e acute, first two of a euro sign.
STRADDLE = "\u00a9\u00e2\u0124"
_PIECES = [*_ALPHABET, *_WORDS, *(_SPACE + word for word in _WORDS), STRADDLE]
EOS = len(_PIECES)
TOOL = EOS + 1
VOCAB_SIZE = EOS + 2


def byte_level() -> Tokenizer:
    """Byte-level BPE of `VOCAB_SIZE` ids: every byte, some words, an end token, and an added token with a space."""
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(_PIECES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS_TEXT, special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def piece(text: str) -> int:
    """Id of a whole word or single ASCII character of the byte-level tokenizer."""
    return _PIECES.index(text.replace(" ", _SPACE))


def spell(text: str | bytes) -> list[int]:
    """Ids that spell the text byte by byte."""
    data = text.encode() if isinstance(text, str) else text
    return [_BYTE_IDS[byte] for byte in data]


def _byte_ids() -> list[int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in characters]
    characters |= {byte: chr(0x100 + position) for position, byte in enumerate(others)}
    return [_PIECES.index(characters[byte]) for byte in range(256)]


_BYTE_IDS = _byte_ids()


def sentencepiece() -> Tokenizer:
    """SentencePiece style as in Llama 2: spaces as U+2581, byte fallback, the first space stripped."""
    words = ["\u2581", "\u2581the", "\u2581cat", "s", ".", "\u2581Paris", "\u65e5", "\ufffd"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(vocab={text: index for index, text in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer
