"""Whether a request's answer depends on anything but the request: the same ones alone and under every disturbance.

    python -m benchmarks.consistency [--dtype float32] [--deterministic | --default] [--requests 40] [--json FILE]

40 requests with every sampling option run alone, one after another, without a prefix cache. That is compared with: all
together; all together on a small pool and beside waves of a higher class, so that each is preempted at least once;
with the prefix cache, cold and then warm; with a small odd token budget, so that prompts come in chunks; and each taken
up in the middle by another engine. In deterministic mode any difference is an error, and the exit status is 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common import print_conditions
from benchmarks.engines import Engines
from benchmarks.mixed import Answer, Answered, Case, drain, mixed_cases

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.request import LogprobEntry

CONTEXT = 512
#: Of the run that preempts: it holds some 3 of the longest requests.
SCARCE_BLOCKS, SCARCE_SEQS = 72, 8
#: Of the run in chunks.
ODD_BUDGET, ODD_SEQS = 37, 16


@dataclass
class Comparison:
    """How the answers of one run differ from those of the requests alone.

    Attributes:
        run: its name.
        same: share of requests with the same ids, text, ends and usage.
        difference: largest difference of log probabilities behind equal tokens, of samples, candidates and prompts.
        exact: nothing differs at all, candidates and their ranks included.
        note: what shows that the run was what it says.
    """

    run: str
    same: float
    difference: float
    exact: bool
    note: str = ""


def alone(engines: Engines, cases: list[Case]) -> dict[str, Answer]:
    """One after another, without a prefix cache."""
    engine = engines.make(enable_prefix_caching=False)
    answers = {case.name: Answer() for case in cases}
    for case in cases:
        engine.add(case.request())
        drain(engine, answers)
    return answers


def together(engine: Engine, cases: list[Case]) -> dict[str, Answer]:
    """All at once."""
    answers = {case.name: Answer() for case in cases}
    for case in cases:
        engine.add(case.request())
    drain(engine, answers)
    return answers


def preempted(engine: Engine, cases: list[Case]) -> dict[str, Answer]:
    """All at once, and whenever one runs that was not preempted yet, a wave of a higher class takes every place."""
    from shared.sampling import SamplingParams

    answers = {case.name: Answer() for case in cases}
    for case in cases:
        engine.add(case.request())
    intruder = Case("intruder ", list(range(1000, 1040)), SamplingParams(temperature=0, max_tokens=1))
    waves = 0
    while engine.has_work():
        begun = False
        for output in engine.step():
            if output.request_id in answers:
                answers[output.request_id].take(output)
                begun |= bool(output.choices) and not output.finished and not output.preemptions
        if begun:
            for place in range(SCARCE_SEQS):
                engine.add(intruder.request(f"{waves}.{place}", priority=0))
            waves += 1
    return answers


def taken_up(first: Engine, second: Engine, cases: list[Case], whole: dict[str, Answer]) -> dict[str, Answer]:
    """All at once on one engine; each goes on elsewhere once half of its tokens are there."""
    answers = {case.name: Answer() for case in cases}
    by_name = {case.name: case for case in cases}
    for case in cases:
        first.add(case.request())
    while first.has_work():
        for output in first.step():
            answer = answers[output.request_id]
            answer.take(output)
            if not output.finished and 2 * answer.tokens >= whole[output.request_id].tokens:
                first.abort(output.request_id)
                second.add(
                    by_name[output.request_id].request(
                        resume=answer.published(), prompt_logprobs_done=len(answer.prompt_logprobs)
                    )
                )
    drain(second, answers)
    return answers


def compare(run: str, expected: dict[str, Answer], got: dict[str, Answer], note: str = "") -> Comparison:
    """The answers of one run against those of the requests alone."""
    pairs = [(expected[name], got[name]) for name in expected]
    same = sum(_said(a) == _said(b) for a, b in pairs) / len(pairs)
    entries = [entry for a, b in pairs for entry in _comparable(a, b)]
    difference = max((_difference(a, b) for a, b in entries), default=0.0)
    return Comparison(run, same, difference, same == 1 and all(a == b for a, b in entries), note)


def _said(answer: Answer) -> list[object]:
    """All but the log probabilities; nor what depends on the cache's content."""
    usage = answer.usage
    assert usage is not None
    choices = [
        (index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for index, c in sorted(answer.choices.items())
    ]
    return [choices, usage.prompt_tokens, usage.completion_tokens, len(answer.prompt_logprobs)]


def _comparable(a: Answer, b: Answer) -> Iterator[tuple[LogprobEntry, LogprobEntry]]:
    """Entries behind equal tokens."""
    yield from zip(a.prompt_logprobs, b.prompt_logprobs, strict=False)
    for index in a.choices:
        yield from _behind_equal(a.choices[index], b.choices.get(index, Answered()))


def _behind_equal(a: Answered, b: Answered) -> Iterator[tuple[LogprobEntry, LogprobEntry]]:
    for position, pair in enumerate(zip(a.logprobs, b.logprobs, strict=False)):
        if a.token_ids[:position] != b.token_ids[:position]:
            return
        yield pair


def _difference(a: LogprobEntry, b: LogprobEntry) -> float:
    """Over the tokens that both name."""
    ours, theirs = ({e.token_id: e.logprob} | {t: x for t, x, *_ in e.top} for e in (a, b))
    return max((abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()), default=0.0)


def comparisons(engines: Engines, cases: list[Case]) -> Iterator[Comparison]:
    """Each run's, as soon as it is there."""
    expected = alone(engines, cases)
    yield compare("together", expected, together(engines.make(enable_prefix_caching=False), cases))

    got = preempted(engines.make(num_blocks=SCARCE_BLOCKS, max_num_seqs=SCARCE_SEQS), cases)
    least = min(answer.preemptions for answer in got.values())
    if least < 1:
        raise RuntimeError("a request was not preempted")
    yield compare(
        "preempted", expected, got, f"each at least {least} times, {sum(a.preemptions for a in got.values())} in all"
    )

    engine = engines.make()
    for run in ("prefix cache, cold", "prefix cache, warm"):
        got = together(engine, cases)
        hits = sum(answer.usage.cached_tokens for answer in got.values() if answer.usage is not None)
        yield compare(run, expected, got, f"{hits} tokens from the cache")
    chunked = engines.make(max_num_seqs=ODD_SEQS, max_num_batched_tokens=ODD_BUDGET, enable_prefix_caching=False)
    yield compare("in chunks", expected, together(chunked, cases), f"{ODD_BUDGET} tokens a step")
    other = engines.make(max_num_seqs=ODD_SEQS)
    yield compare("taken up", expected, taken_up(engines.make(enable_prefix_caching=False), other, cases, expected))


def main(
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; both by default")] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic/--default", help="one mode alone; both by default")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="how many")] = 40,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
) -> None:
    """Run, compare, print."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="benchmarks.consistency: against the same requests alone", highlight=True)
    for column in ("dtype", "mode", "run", "same answers", "largest difference of logprobs", ""):
        table.add_column(column)
    console = Console()
    figures: dict[str, float] = {}
    broken = False
    for kind in ("float32", "bfloat16") if dtype is None else (dtype,):
        for exact in (False, True) if deterministic is None else (deterministic,):
            engines = Engines.load(kind, deterministic=exact, max_model_len=CONTEXT)
            mode = "deterministic" if exact else "default"
            for found in comparisons(engines, mixed_cases(engines.tokenizer(), requests)):
                name = found.run.replace(", ", "_").replace(" ", "_")
                figures[f"{kind}_{mode}_{name}_same"] = found.same
                figures[f"{kind}_{mode}_{name}_max_diff"] = found.difference
                table.add_row(kind, mode, found.run, f"{found.same:.1%}", f"{found.difference:.3g}", found.note)
                broken |= exact and not found.exact
    console.print(table)
    print_conditions(console, dtype=dtype or "float32 and bfloat16")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    if broken:
        console.print("deterministic mode gave different answers", style="bold red")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
