"""The numerical operations of the engine, chosen by device in `kernels.ops`. Knows torch and nothing of the engine."""
