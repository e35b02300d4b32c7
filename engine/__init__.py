"""Continuous batching over a paged KV cache. Knows nothing of Redis or HTTP."""

import os

# Threads that spin at the end of a parallel region starve the thread they wait for as soon as another process needs a
# core: beside one busy process, two threads on two cores keep 0.75 of their speed when they sleep and 0.3 when they
# spin; alone, sleeping costs 0.15 to 0.2 of it. OpenMP reads this once, when torch is loaded, so it is set before that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
