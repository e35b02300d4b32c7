"""The model behind `SimEngine`: a small tokenizer, a chat template, and tokens that are a pure function of the request.

Nothing here needs torch.
"""

from __future__ import annotations

import codecs
import hashlib
import struct
from collections.abc import Sequence
from functools import cached_property

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.request import LogprobEntry
from shared.sampling import SamplingParams

START, END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}" + START + "{{ message['role'] }}\n{{ message['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)

_WORDS = (
    "the a of and to in on over under by with from near past high low wide long short slow quick calm bright dark old "
    "new green blue grey white red gold cable cabin car rope tower wheel station valley ridge slope summit meadow "
    "forest river lake bridge village road path stone snow wind rain cloud light shadow morning evening night winter "
    "summer spring autumn hour moment passenger guide driver keeper engineer child crowd ticket window door bench "
    "platform engine motor gear signal bell lamp letter parcel queue moves climbs turns waits carries hangs glides "
    "stops begins joins leaves passes rises falls crosses follows reaches returns holds sounds shines opens closes "
    "slowly gently always again together quietly soon here there up down above below café naïve crème"
)


def _byte_symbols() -> list[str]:
    """GPT-2's table from bytes to symbols: printable ones stand for themselves, others are counted up from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]


_SYMBOLS = _byte_symbols()


class SimVocabulary:
    """Byte-level vocabulary: 256 bytes, each word with and without a space in front, two special tokens."""

    def __init__(self) -> None:
        texts = [text for word in _WORDS.split() for text in (" " + word, word)]
        pieces = [bytes([value]) for value in range(256)] + list(dict.fromkeys(t.encode() for t in texts if len(t) > 1))
        vocab = {"".join(_SYMBOLS[value] for value in piece): token for token, piece in enumerate(pieces)}
        # No merges: a pre-token that is a word is found whole, any other falls apart into its bytes.
        self.tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
        self.special = {len(pieces): START.encode(), len(pieces) + 1: END.encode()}
        self.end_id = len(pieces) + 1
        self._bytes = [*pieces, *self.special.values()]
        self.size = len(self._bytes)
        #: Ids that an answer is made of: words with a space in front.
        self.answer_ids = [token for token, data in enumerate(self._bytes) if len(data) > 1 and data.startswith(b" ")]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; of a special token, those of its name."""
        return self._bytes[token_id]

    @cached_property
    def tokenizer_json(self) -> str:
        """The file of the `tokenizers` library."""
        return str(self.tokenizer.to_str())

    def digest(self, *salt: object) -> str:
        """Identity of the model: tokenizer, template and whatever else decides its tokens."""
        data = repr((self._bytes, CHAT_TEMPLATE, salt)).encode()
        return hashlib.sha256(data).hexdigest()


class TokenSource:
    """Tokens of one choice, each a function of prompt, adapter, seed, choice index and position alone."""

    def __init__(
        self,
        vocabulary: SimVocabulary,
        prompt: Sequence[int],
        adapter: str | None,
        params: SamplingParams,
        seed: int,
        index: int,
        eos_period: int,
    ) -> None:
        # Greedy answers do not depend on the seed.
        head = (adapter, 0 if params.greedy else seed, index)
        digest = hashlib.blake2b(repr(head).encode(), digest_size=32)
        digest.update(struct.pack(f"<{len(prompt)}I", *prompt))
        self._key = digest.digest()
        self._eos_period, self._vocabulary, self._params = eos_period, vocabulary, params
        bias = params.logit_bias or {}
        forced = [token for token, value in bias.items() if value >= 100]
        allowed = params.allowed_token_ids
        self._choices = sorted(set(forced or allowed or vocabulary.answer_ids))
        self._free = not forced and not allowed
        self._banned = frozenset(token for token, value in bias.items() if value <= -100)
        self._ends = frozenset({vocabulary.end_id, *(params.stop_token_ids or [])})

    def token(self, position: int) -> int:
        """The token at an output position, from 0."""
        banned = self._banned | self._ends if position < self._params.min_tokens else self._banned
        if self._params.ignore_eos:
            banned = banned | {self._vocabulary.end_id}
        choices = [token for token in self._choices if token not in banned] if banned else self._choices
        draw = self._draw(position)
        if self._free and draw % self._eos_period == 0 and self._vocabulary.end_id not in banned:
            return self._vocabulary.end_id
        pool = choices or self._choices
        return pool[(draw >> 20) % len(pool)]

    def logprob(self, position: int, token_id: int) -> LogprobEntry:
        """A made-up entry: the sampled token is the likeliest."""
        return _entry(self._vocabulary, self._draw(position), token_id, 1, self._params.logprobs or 0)

    def _draw(self, position: int) -> int:
        data = hashlib.blake2b(position.to_bytes(8, "little"), key=self._key, digest_size=8).digest()
        return int.from_bytes(data, "little")


class PromptSource:
    """Log probabilities of a prompt's tokens, each a function of adapter and of the prompt up to its token."""

    def __init__(self, vocabulary: SimVocabulary, prompt: Sequence[int], adapter: str | None, count: int) -> None:
        self._vocabulary, self._prompt, self._count = vocabulary, prompt, count
        state = hashlib.blake2b(repr(adapter).encode(), digest_size=8)
        self._draws: list[int] = []
        for token in prompt:
            state.update(token.to_bytes(4, "little"))
            self._draws.append(int.from_bytes(state.digest(), "little"))

    def logprob(self, position: int) -> LogprobEntry:
        """A made-up entry of the token behind this position; its rank is from 1 to 40."""
        draw = self._draws[position + 1]
        return _entry(self._vocabulary, draw, self._prompt[position + 1], 1 + (draw >> 32) % 40, self._count)


def _entry(vocabulary: SimVocabulary, draw: int, token_id: int, rank: int, count: int) -> LogprobEntry:
    """An entry of the right shape: candidates fall off by rank, the token has its place among them or behind."""
    first = -0.01 - (draw % 997) / 1000
    others = (token for token in range(vocabulary.size) if token != token_id)
    candidates = [token_id if place == rank else next(others) for place in range(1, count + 1)]
    top = [(token, first - at, at + 1, vocabulary.token_bytes(token)) for at, token in enumerate(candidates)]
    return LogprobEntry(token_id, first - (rank - 1), rank, vocabulary.token_bytes(token_id), top)


class TextStream:
    """Text of one choice: bytes become characters, text that may be the start of a stop string is held back."""

    def __init__(self, vocabulary: SimVocabulary, params: SamplingParams) -> None:
        self._vocabulary, self._params = vocabulary, params
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = params.stop_strings
        self._text, self._sent, self._search_from = "", 0, 0

    def skip(self, sent: int) -> None:
        """Take the first `sent` characters as delivered."""
        self._sent = sent

    def push(self, token_id: int, count: int) -> str | None:
        """Add a token, the choice's `count`-th; answers the stop string that it completes."""
        if not self._params.detokenize:
            return None
        special = token_id in self._vocabulary.special
        data = b"" if special and self._params.skip_special_tokens else self._vocabulary.token_bytes(token_id)
        self._text += self._decoder.decode(data)
        if count <= self._params.min_tokens:
            self._search_from = len(self._text)
            return None
        longest = max((len(stop) for stop in self._stops), default=0)
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, self._search_from)) >= 0]
        if not found:
            self._search_from = max(self._search_from, len(self._text) - longest + 1)
            return None
        at, stop = min(found)
        self._text = self._text[: at + len(stop) if self._params.include_stop_str_in_output else at]
        self._decoder.reset()
        return stop

    def take(self, *, final: bool) -> str:
        """New text that is certain; with `final` all that is left."""
        if final:
            self._text += self._decoder.decode(b"", final=True)
        end = len(self._text) - (0 if final else self._held())
        # A resumed choice may have had more released by its former engine than is certain here.
        start, self._sent = self._sent, max(self._sent, end)
        return self._text[start:end]

    def _held(self) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        tail = self._text[max(self._search_from, len(self._text) - longest) :] if longest else ""
        return next((len(tail) - at for at in range(len(tail)) if any(s.startswith(tail[at:]) for s in self._stops)), 0)
