"""`ropeway webhooks`: what is owed, what was given up, sending it once more, and what signs it. Speaks with Redis."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ropeway.console import EXIT_USAGE, err, fail, out, show_rows
from ropeway.options import Given, build, with_settings
from ropeway.redis_commands import run, time_text
from shared.errors import JobNotFoundError, NotFoundError
from shared.protocol import FINAL_STATUSES
from shared.settings import CommonSettings, TasksSettings
from shared.webhook_calls import Delivery, Patience
from shared.webhook_secrets import TenantSecret, WebhookSecrets
from shared.webhook_signing import new_secret
from shared.webhooks import Webhooks

webhooks = typer.Typer(help="Webhooks: list, show, redeliver, and the secrets that sign them.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
#: Seconds that a secret which is replaced goes on signing.
_GRACE_S = 24 * 3600.0


@webhooks.command("list")
@with_settings(CommonSettings)
def list_webhooks(
    given: Given,
    only: Annotated[str | None, typer.Option("--pool", help="Of this pool only.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that were given up.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most webhooks per lane, the oldest first.")] = 100,
    as_json: Json = False,
) -> None:
    """Show webhooks that are not delivered yet, and those that were given up; not those that were delivered."""

    async def gather(store: Webhooks) -> list[Delivery]:
        found: list[Delivery] = []
        for pool, lane in await store.lanes():
            if only in (None, pool):
                found += await store.listed(pool, lane, undelivered=True, most=limit)
                if not failed:
                    found += await store.listed(pool, lane, undelivered=False, most=limit)
        return sorted(found, key=lambda delivery: delivery.owed_ms)

    found = run(given, Webhooks, gather)
    if as_json:
        out.out(json.dumps([_plain(delivery) for delivery in found], indent=2), highlight=False)
        return
    rows = []
    for delivery in found:
        last = delivery.last_error or ("" if delivery.last_status is None else str(delivery.last_status))
        following = time_text(delivery.next_ms) if delivery.next_ms else ""
        rows.append(
            (delivery.job_id, delivery.state, str(delivery.attempts), following, _host(delivery.url), last)
        )  # fmt: skip
    columns = ("job", "state", "tries", "next try", "host", "last answer")
    show_rows(columns, rows, "no webhooks are owed", prose=True)


@webhooks.command("show")
@with_settings(CommonSettings)
def show_webhook(
    given: Given, job_id: Annotated[str, typer.Argument(help="Id of the job, which is in the webhook too.")]
) -> None:
    """Show how far a job's webhook is, as JSON."""

    async def look(store: Webhooks) -> dict[str, Any]:
        delivery = await store.delivery(job_id)
        if delivery is not None:
            return _plain(delivery)
        view = await store.get(job_id)
        if view.envelope.callback_url is None:
            raise NotFoundError("the job has no callback_url")
        ended = view.status in FINAL_STATUSES
        return _plain(Delivery(job_id, "pending" if ended else "waiting", view.envelope.callback_url))

    try:
        shown = run(given, Webhooks, look)
    except JobNotFoundError as error:
        fail(error.message)
    out.out(json.dumps(shown, indent=2), highlight=False)


@webhooks.command("redeliver")
@with_settings(CommonSettings)
def redeliver(given: Given, job_ids: Annotated[list[str], typer.Argument(help="Ids of jobs that have ended.")]) -> None:
    """Send webhooks once more, whatever became of them, under the same id as before."""
    seconds = build(TasksSettings, given).webhook_retry_s

    async def send(store: Webhooks) -> None:
        for job_id in job_ids:
            await store.redeliver(job_id, Patience(seconds, seconds))
            out.print(f"{job_id} will be sent again", soft_wrap=True)

    run(given, Webhooks, send)


@webhooks.command("secret")
@with_settings(CommonSettings)
def secret(
    given: Given,
    tenant: Annotated[
        str | None, typer.Option(help="Of this tenant; unset: of all that have none of their own.")
    ] = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="Make a new one; the old one signs beside it.")] = False,
    grace_s: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="How long the old one goes on signing.")
    ] = _GRACE_S,
    remove: Annotated[bool, typer.Option("--remove", help="Take the tenant's own secret away.")] = False,
) -> None:
    """Print what signs webhooks, one secret a line, the newest first; where there is none, make it."""
    if remove and (rotate or tenant is None):
        fail("--remove goes with --tenant alone", EXIT_USAGE)
    settings = build(TasksSettings, given)
    if tenant is None and settings.webhook_secrets:
        fail("ROPEWAY_WEBHOOK_SECRETS says what signs: change it where tasks processes are started")

    async def change(store: WebhookSecrets) -> TenantSecret | None:
        if remove and tenant is not None:
            if not await store.remove(tenant):
                raise NotFoundError("the tenant has no secret of its own")
            return None
        if rotate:
            return await store.replace(tenant, new_secret(), grace_s)
        held = await store.of(tenant)
        if held is not None:
            return held
        return await store.made_default() if tenant is None else await store.replace(tenant, new_secret(), 0.0)

    async def call(store: WebhookSecrets) -> list[str]:
        held = await change(store)
        return [] if held is None else held.signing(await store.now_ms())

    for line in run(given, WebhookSecrets, call):
        out.out(line, highlight=False)
    if tenant is None and not rotate:
        err.print("ropeway: it signs where ROPEWAY_WEBHOOK_SECRETS is not set for tasks processes", soft_wrap=True)


def _plain(delivery: Delivery) -> dict[str, Any]:
    times = {
        "job_ended": delivery.owed_ms,
        "last_attempt": delivery.last_ms,
        "next_attempt": delivery.next_ms,
        "given_up": delivery.until_ms,
        "ended": delivery.ended_ms,
    }
    return {
        "job_id": delivery.job_id,
        "url": delivery.url,
        "state": delivery.state,
        "attempts": delivery.attempts,
        "last_status": delivery.last_status,
        "last_error": delivery.last_error,
        **{name: time_text(moment) if moment else None for name, moment in times.items()},
    }


def _host(url: str) -> str:
    """Without the path, which may hide something."""
    return url.partition("://")[2].partition("/")[0].partition("?")[0]
