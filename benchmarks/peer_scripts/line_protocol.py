"""How a script answers the benchmark: one JSON object a line, commands on stdin, answers on stdout.

The scripts of this folder run under the Python of the engine that they drive, so this needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def settings() -> dict[str, Any]:
    """What the script was started with: the one argument, a JSON object."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    return given


def claim_stdout() -> Callable[[dict[str, Any]], None]:
    """Take stdout for the answers, and send what libraries print there to stderr.

    Returns:
        What writes one answer.
    """
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    return answer


def answer_commands(
    answer: Callable[[dict[str, Any]], None],
    ready: dict[str, Any],
    run: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Say that all is loaded, then answer each command until stdin ends."""
    answer(ready)
    for line in sys.stdin:
        answer(run(json.loads(line)))


def answer_generations(
    answer: Callable[[dict[str, Any]], None],
    ready: dict[str, Any],
    prompts: list[list[int]],
    generate: Callable[[list[list[int]], int], tuple[float, int]],
) -> None:
    """Answer commands `{"prompts": [numbers], "new_tokens": n}` with `{"seconds": s}`.

    Args:
        generate: completes prompts by so many tokens each, all at once and greedily, whatever the end-of-sequence token
            says; answers the seconds that it took and the tokens that came out.

    Raises:
        RuntimeError: other than the tokens asked for came out.
    """

    def run(command: dict[str, Any]) -> dict[str, Any]:
        chosen = [prompts[number] for number in command["prompts"]]
        wanted = len(chosen) * command["new_tokens"]
        seconds, tokens = generate(chosen, command["new_tokens"])
        if tokens != wanted:
            raise RuntimeError(f"{tokens} tokens came out, not {wanted}")
        return {"seconds": seconds}

    answer_commands(answer, ready, run)


def read_prompts(path: str) -> list[list[int]]:
    """The workload: lists of token ids."""
    with open(path, encoding="utf-8") as file:
        prompts: list[list[int]] = json.load(file)
    return prompts
