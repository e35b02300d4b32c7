"""What the processes' metrics have in common, so that one dashboard reads all of them: prefix and histogram buckets."""

from __future__ import annotations

from typing import Final

#: Namespace of every metric.
NAMESPACE: Final = "ropeway"

#: Seconds until the first token, and in the queue.
TTFT_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0,
)  # fmt: skip
#: Seconds per output token, and from one step to the next.
TPOT_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
#: Seconds of a whole request.
E2E_BUCKETS: Final = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0,
)  # fmt: skip
#: Tokens of prompts and outputs.
TOKEN_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
