"""From the rounds of several engines to figures and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.peer_contenders import BATCH, SINGLE, TTFT

OURS = "ropeway"
#: Ropeway where there is neither a wheel's library nor a compiler.
TORCH = "ropeway_torch"
Rounds = Mapping[str, Sequence[Mapping[str, float]]]


def in_turns(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: it starts one further in each, so that nobody always comes first or behind the same."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def absolute(rounds: Rounds) -> dict[str, float]:
    """Medians over rounds, as `<engine>_<figure>`."""
    return {
        f"{name}_{key}": statistics.median(sample[key] for sample in samples)
        for name, samples in rounds.items()
        for key in samples[0]
    }


def ratios(rounds: Rounds) -> dict[str, float]:
    """How many times as fast as each peer Ropeway was in the same round, medians over rounds.

    `ratio_<peer>` and `ratio_<peer>_single` compare rates, `ratio_<peer>_ttft` times, the peer's over ours.
    """
    figures: dict[str, float] = {}
    for name, samples in rounds.items():
        if name == OURS:
            continue
        pairs = list(zip(rounds[OURS], samples, strict=True))
        figures[f"ratio_{name}"] = statistics.median(ours[BATCH] / theirs[BATCH] for ours, theirs in pairs)
        figures[f"ratio_{name}_single"] = statistics.median(ours[SINGLE] / theirs[SINGLE] for ours, theirs in pairs)
        figures[f"ratio_{name}_ttft"] = statistics.median(theirs[TTFT] / ours[TTFT] for ours, theirs in pairs)
    return figures


def bandwidth(
    ours: Sequence[Mapping[str, float]], bytes_per_s: Sequence[float], weight_bytes: float
) -> dict[str, float]:
    """What the memory gave, and the share of it that one stream takes if each token reads all weights once."""
    shares = (sample[SINGLE] * weight_bytes / rate for sample, rate in zip(ours, bytes_per_s, strict=True))
    return {
        "bandwidth_gb_s": statistics.median(bytes_per_s) / 1e9,
        "bandwidth_fraction": statistics.median(shares),
    }


def neighbour(quiet: Sequence[Mapping[str, float]], disturbed: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The share of its speed that Ropeway keeps beside a busy process."""
    pairs = list(zip(quiet, disturbed, strict=True))
    return {
        "neighbour_tok_s": statistics.median(sample[BATCH] for sample in disturbed),
        "neighbour_single_tok_s": statistics.median(sample[SINGLE] for sample in disturbed),
        "neighbour_fraction": statistics.median(after[BATCH] / before[BATCH] for before, after in pairs),
        "neighbour_fraction_single": statistics.median(after[SINGLE] / before[SINGLE] for before, after in pairs),
    }


def servers(rounds: Mapping[str, Sequence[tuple[float, float]]], output_tokens: int) -> dict[str, float]:
    """Of HTTP servers, seconds for all streams and to the first token of one: rates, times and ratios.

    Args:
        rounds: by name of the engine; `ropeway` is among them.
    """
    figures: dict[str, float] = {}
    for name, samples in rounds.items():
        figures[f"{name}_http_tok_s"] = statistics.median(output_tokens / seconds for seconds, _ in samples)
        figures[f"{name}_http_ttft_ms"] = statistics.median(1e3 * first for _, first in samples)
        if name != OURS:
            pairs = list(zip(rounds[OURS], samples, strict=True))
            figures[f"ratio_{name}_http"] = statistics.median(theirs[0] / ours[0] for ours, theirs in pairs)
            figures[f"ratio_{name}_http_ttft"] = statistics.median(theirs[1] / ours[1] for ours, theirs in pairs)
    return figures
