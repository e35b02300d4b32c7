"""Continuous batching over a paged KV cache. Knows nothing of Redis or HTTP."""

from engine.waiting import choose_waiting

choose_waiting()  # before torch is loaded
