"""What the processes' metrics have in common, so that one dashboard reads all of them: prefix, buckets, exposition."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shared.trace_context import Trace, is_sampled, trace_id

#: Namespace of every metric.
NAMESPACE: Final = "ropeway"

# Buckets are vLLM's, so that its dashboards carry over; where it has none, some below and above.

#: Seconds until the first token, and in the queue.
TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
#: Seconds per output token, and from one token to the next.
TPOT_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
#: Seconds of a whole request, and of its phases.
E2E_BUCKETS: Final = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
#: Tokens of prompts and outputs.
TOKEN_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
#: Answers to one prompt.
CHOICE_BUCKETS: Final = (1, 2, 5, 10, 20)


def exposition(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """The body of `/metrics` and its media type: OpenMetrics, with exemplars, for who accepts it, else plain text."""
    encode, media_type = choose_encoder(accept or "")
    return encode(registry), media_type


def exemplar(trace: Trace) -> dict[str, str] | None:
    """What a sample says of the request behind it: the id of its trace, where one is recorded."""
    found = trace_id(trace) if trace and is_sampled(trace) else None
    return None if found is None else {"trace_id": found}
