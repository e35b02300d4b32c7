"""The commands of operators: dead letters, and pools as a whole. They speak with Redis, not with a gateway."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import msgspec
import typer

from ropeway.console import EXIT_USAGE, fail, out, show_rows
from ropeway.options import Given, with_settings
from ropeway.redis_commands import run, time_text
from shared.errors import ProtocolError
from shared.jobs import DeadLetter, LaneLoad
from shared.protocol import Envelope, decode
from shared.settings import CommonSettings
from shared.upkeep import Upkeep

dead = typer.Typer(help="Jobs that were given up: list, show, retry, purge.", no_args_is_help=True)
pool = typer.Typer(help="Pools: list, pause, unpause.", no_args_is_help=True)

JobIds = Annotated[list[str], typer.Argument(help="Ids of dead jobs.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
PoolName = Annotated[str, typer.Argument(help="Name of the pool.")]
#: Seconds that a worker may miss its heartbeat and still counts as alive.
_WORKER_TTL_MS = 15_000


@dataclasses.dataclass(frozen=True, slots=True)
class PoolState:
    """A pool as `ropeway pool list` shows it."""

    name: str
    paused: bool
    workers: int
    load: LaneLoad


@dead.command("list")
@with_settings(CommonSettings)
def list_dead(
    given: Given,
    only: Annotated[str | None, typer.Option("--pool", help="Of this pool only.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most letters per lane, the newest first.")] = 100,
    as_json: Json = False,
) -> None:
    """Show dead letters, the newest first."""

    async def gather(upkeep: Upkeep) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        for name, lanes in await _pools(upkeep, only):
            for lane in range(lanes):
                found += await upkeep.dead_letters(name, lane, limit)
        return sorted(found, key=lambda letter: letter.buried_ms, reverse=True)

    letters = run(given, Upkeep, gather)
    if as_json:
        out.out(json.dumps([_plain(letter) for letter in letters], indent=2), highlight=False)
        return
    rows = []
    for letter in letters:
        error = letter.error.message if letter.error is not None else ""
        rows.append((letter.job_id, time_text(letter.buried_ms), str(letter.attempts), letter.reason, error))
    show_rows(("job", "buried", "attempts", "reason", "error"), rows, "no dead letters", prose=True)


@dead.command("show")
@with_settings(CommonSettings)
def show_dead(
    given: Given,
    job_id: Annotated[str, typer.Argument(help="Id of the dead job.")],
    prompt: Annotated[
        bool, typer.Option("--prompt", help="With the prompt's token ids, which may be private.")
    ] = False,
) -> None:
    """Show one dead letter with its envelope, as JSON."""
    letter = run(given, Upkeep, lambda upkeep: upkeep.find_dead(job_id))
    shown = _plain(letter)
    try:
        envelope = decode(letter.envelope, Envelope)
    except ProtocolError as error:
        shown["envelope"] = None
        shown["envelope_error"] = error.message
    else:
        shown["envelope"] = msgspec.to_builtins(envelope)
        shown["envelope"]["prompt_tokens"] = len(envelope.prompt_token_ids)
        if not prompt:
            del shown["envelope"]["prompt_token_ids"]
    out.out(json.dumps(shown, indent=2), highlight=False)


@dead.command("retry")
@with_settings(CommonSettings)
def retry_dead(given: Given, job_ids: JobIds) -> None:
    """Submit dead jobs once more, each as a new job, and remove their letters."""

    async def retry(upkeep: Upkeep) -> list[tuple[str, str]]:
        return [(job_id, await upkeep.retry_dead(job_id)) for job_id in job_ids]

    for old, new in run(given, Upkeep, retry):
        out.print(f"{old} -> {new}", soft_wrap=True)


@dead.command("purge")
@with_settings(CommonSettings)
def purge_dead(
    given: Given,
    job_ids: Annotated[list[str] | None, typer.Argument(help="Ids of dead jobs.")] = None,
    only: Annotated[str | None, typer.Option("--pool", help="Every letter of this pool.")] = None,
) -> None:
    """Remove dead letters for good: those named, or all of a pool."""
    if bool(job_ids) == (only is not None):
        fail("name the jobs, or a pool with --pool", EXIT_USAGE)

    async def purge(upkeep: Upkeep) -> int:
        letters = [await upkeep.find_dead(job_id) for job_id in job_ids or ()]
        for name, lanes in await _pools(upkeep, only) if only is not None else ():
            for lane in range(lanes):
                letters += [letter async for letter in upkeep.all_dead(name, lane)]
        for letter in letters:
            await upkeep.purge_dead(letter)
        return len(letters)

    out.print(f"purged {run(given, Upkeep, purge)}")


@pool.command("list")
@with_settings(CommonSettings)
def list_pools(given: Given, as_json: Json = False) -> None:
    """Show pools with their workers and load."""

    async def gather(upkeep: Upkeep) -> list[PoolState]:
        return [
            PoolState(
                name,
                await upkeep.paused(name),
                len(await upkeep.live_workers(name, _WORKER_TTL_MS)),
                await upkeep.pool_load(name, lanes),
            )
            for name, lanes in await _pools(upkeep, None)
        ]

    states = run(given, Upkeep, gather)
    if as_json:
        out.out(json.dumps([dataclasses.asdict(state) for state in states], indent=2), highlight=False)
        return
    rows = [
        (
            state.name,
            "paused" if state.paused else "on",
            str(state.workers),
            f"{state.load.queued_jobs} jobs, {state.load.queued_tokens} tokens",
            f"{state.load.running_jobs} jobs, {state.load.running_tokens} tokens",
        )
        for state in states
    ]
    show_rows(("pool", "state", "workers", "queued", "running"), rows, "no pools")


@pool.command("pause")
@with_settings(CommonSettings)
def pause_pool(given: Given, name: PoolName) -> None:
    """Let a pool's workers take no further job; what runs goes on, and jobs are still accepted."""
    run(given, Upkeep, lambda upkeep: _existing(upkeep, name, upkeep.pause))


@pool.command("unpause")
@with_settings(CommonSettings)
def unpause_pool(given: Given, name: PoolName) -> None:
    """Let a paused pool's workers take jobs again."""
    run(given, Upkeep, lambda upkeep: _existing(upkeep, name, upkeep.unpause))


async def _existing(upkeep: Upkeep, name: str, call: Callable[[str], Awaitable[None]]) -> None:
    await _pools(upkeep, name)
    await call(name)


async def _pools(upkeep: Upkeep, only: str | None) -> Sequence[tuple[str, int]]:
    """Names of pools and their numbers of lanes; `only` must be one of them."""
    names = await upkeep.pools()
    if only is not None and only not in names:
        fail(f"there is no pool {only}; known: {', '.join(names) or 'none'}")
    found = []
    for name in names if only is None else [only]:
        card = await upkeep.get_card(name)
        found.append((name, 0 if card is None else card.lanes))
    return found


def _plain(letter: DeadLetter) -> dict[str, Any]:
    return {
        "job_id": letter.job_id,
        "buried": time_text(letter.buried_ms),
        "attempts": letter.attempts,
        "reason": letter.reason,
        "error": letter.error.message if letter.error is not None else None,
        "code": letter.error.code if letter.error is not None else None,
    }
