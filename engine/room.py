"""How many tokens of each prompt a pass has room for."""

from __future__ import annotations

from collections.abc import Iterable

from engine.classes import BATCH, is_watched
from engine.config import SchedulerConfig
from engine.sequence import Sequence


class Room:
    """What the prompts of one pass may take, asked in order of rank; the pass's budget is not counted here.

    Args:
        running: the sequences with rows in the pass. Those with one token left decode.
    """

    def __init__(self, config: SchedulerConfig, running: Iterable[Sequence]) -> None:
        self._config = config
        decodes = [sequence for sequence in running if sequence.remaining == 1]
        self._decodes = len(decodes)
        self._batch = config.max_num_batched_tokens
        if config.batch_prefill_tokens:
            # Where classes take turns nobody reads along with a batch: its decodes alone make no prompt shorter.
            if not any(is_watched(sequence) for sequence in decodes):
                self._decodes = 0
            self._batch = min(config.batch_prefill_tokens, self._limit(0))

    def take(self, sequence: Sequence) -> int:
        """Tokens for the next prompt, taken from what those behind it may have."""
        count = min(sequence.remaining, self._limit(sequence.computed), self.left(sequence))
        if sequence.priority >= BATCH:
            self._batch -= count
        return count

    def left(self, sequence: Sequence) -> int:
        """Tokens that the prompts of its class may have yet."""
        return self._batch if sequence.priority >= BATCH else self._config.max_num_batched_tokens

    def _limit(self, computed: int) -> int:
        """Most tokens of one prompt of which so many are computed."""
        config = self._config
        if self._decodes and config.prefill_pace is not None:
            return config.prefill_pace.tokens(self._decodes, computed)
        if self._decodes and config.long_prefill_token_threshold:
            return config.long_prefill_token_threshold
        return config.max_num_batched_tokens
