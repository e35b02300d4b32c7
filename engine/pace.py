"""How much of a prompt fits beside decodes before those notice."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig

#: Rows whose arithmetic takes as long as reading the weights once: a pass over `n` decodes takes the time of about
#: `FIXED_ROWS + n` rows. On two cores with AVX512-BF16 8, 16 and 32 sequences took 12.6, 19.0 and 31.9 ms.
FIXED_ROWS = 8
#: Share of such a pass's time that prompt tokens may add to it. With 1 for itself a pass comes to 2.2 times its own
#: length; the aim is that no gap is longer than 3, and the longest of a hundred is up to 0.9 above the others.
SHARE = 1.15
#: What a key costs to look at over what its share of the floating-point operations would, and how much less than a row
#: of a decode a prompt's token costs, which gets no logits: measured there too.
_KEY_COST, _TOKEN_COST = 2.4, 0.9
#: Few tokens cost what some do, as the weights are read anyway: a prompt gets on also beside a single stream.
_LEAST = 8


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """A bound on the prompt tokens of one sequence in a pass that also decodes: by what they cost, beside how many.

    Attributes:
        keys_per_row: keys that a token may attend to for as long as the rest of its arithmetic takes.
    """

    keys_per_row: float

    @classmethod
    def of(cls, model: ModelConfig) -> PrefillPace:
        """For a model's layers on the native CPU kernels."""
        width = model.num_attention_heads * model.head_dim
        projections = 2 * width + 2 * model.num_key_value_heads * model.head_dim
        weights = model.hidden_size * (projections + 3 * model.intermediate_size)
        return cls(weights / (2 * width) / _KEY_COST)

    def tokens(self, decodes: int, computed: int) -> int:
        """Most tokens of a prompt of which so many are computed, beside so many decodes."""
        allowed = SHARE * (FIXED_ROWS + decodes) / _TOKEN_COST
        return max(_LEAST, int(allowed / (1.0 + computed / self.keys_per_row)))
