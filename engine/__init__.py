"""Continuous batching over a paged KV cache. Knows nothing of Redis or HTTP."""

import os

# Threads that spin at the end of a parallel region starve the thread they wait for as soon as another process needs a
# core: beside one busy process two threads on two cores kept 0.2 to 0.35 of their speed when they spun for 0.15 ms or
# more, and by default they do for longer. To sleep at once costs a wake-up for each region, of which a batch has some
# 150 a step with torch's kernels; 0.05 ms cost a stream that had as many a third of its speed beside a neighbour
# (docs/kernels.md). OpenMP reads this once, when torch is loaded, so it is set before.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # GNU's library alone knows it. Whoever has chosen a policy has that library's number of spins with it.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
