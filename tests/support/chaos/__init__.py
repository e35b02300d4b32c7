"""A pool under fire: real processes, clients with a seed, disturbances, and a judge who goes by what clients saw.

`plan.py` draws orders and disturbances from a seed, `fleet.py` runs the processes, `disturbances.py` hits them,
`clients.py` are the clients, `witness.py` is what they saw, `judge.py` says what is wrong with it, `aftermath.py` looks
at what is left in Redis, and `run.py` puts all of it together for `benchmarks.chaos` and `tests/chaos`.
"""
