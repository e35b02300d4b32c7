"""How fast all threads together read memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from line_protocol import answer_commands, claim_stdout, settings

_BYTES = 1 << 30
_PASSES = 5
_COLUMNS = 4096


def main() -> None:
    """Answer each command with `bytes_per_s`, the best of several passes of two operations over 1 GiB."""
    answer, given = claim_stdout(), settings()
    torch.set_num_threads(given["threads"])
    data = torch.ones(_BYTES // 4 // _COLUMNS, _COLUMNS)
    vector = torch.ones(_COLUMNS)

    def run(_: dict[str, Any]) -> dict[str, Any]:
        best = 0.0
        for read in (data.sum, lambda: data @ vector):
            for _ in range(_PASSES):
                start = time.perf_counter()
                read()
                best = max(best, _BYTES / (time.perf_counter() - start))
        return {"bytes_per_s": best}

    answer_commands(answer, {"version": f"torch {torch.__version__}"}, run)


if __name__ == "__main__":
    main()
