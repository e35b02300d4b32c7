"""`ropeway keys`: API keys, which gateways keep hashed in Redis. They speak with Redis, not with a gateway."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import date, timedelta
from typing import Annotated, Any

import httpx
import typer

from ropeway.console import EXIT_USAGE, err, fail, out, show_rows
from ropeway.options import Given, with_settings
from ropeway.redis_commands import run, time_text
from shared.access import Access
from shared.api_keys import ApiKey
from shared.settings import CommonSettings
from shared.usage import MAX_DAYS, UsageRow, UsageStore, days_of, parse_day

keys = typer.Typer(help="API keys: create, list, show, revoke, rotate; what they have used.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Id = Annotated[str, typer.Argument(help="Public id of the key.")]
Expires = Annotated[str | None, typer.Option(metavar="90d", help="Life of the key: s, m, h, d or w behind a number.")]
#: Seconds for a gateway to say whether it is open.
_LOOK_S = 5.0
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@keys.command("create")
@with_settings(CommonSettings)
def create_key(
    given: Given,
    tenant: Annotated[str, typer.Option(help="Whose key it is: limits and jobs are those of the tenant.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="inference, admin or metrics; may be repeated. Unset: inference.")
    ] = None,
    name: Annotated[str, typer.Option(help="For people.")] = "",
    expires: Expires = None,
    url: Annotated[
        str, typer.Option(envvar="ROPEWAY_URL", help="The gateway that is looked at: whether it asks for keys.")
    ] = "http://127.0.0.1:8000",
    as_json: Json = False,
) -> None:
    """Make a key and print it, once: it is kept nowhere, only a hash of it."""
    life = _seconds("--expires", expires)

    async def create(access: Access) -> tuple[str, ApiKey]:
        return await access.create_key(tenant, scope or ["inference"], name=name, expires_s=life)

    secret, key = run(given, Access, create)
    _print_new(secret, key, as_json)
    _say_if_open(url)


@keys.command("list")
@with_settings(CommonSettings)
def list_keys(
    given: Given,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Those too that have expired or were revoked.")] = False,
    as_json: Json = False,
) -> None:
    """Show keys, the oldest first."""

    async def gather(access: Access) -> tuple[int, list[ApiKey]]:
        return await access.now_ms(), await access.all_keys()

    now, found = run(given, Access, gather)
    found = [
        key for key in found if tenant in (None, key.tenant) and (everything or key.state(now) == "active")
    ]  # fmt: skip
    if as_json:
        out.out(json.dumps([_plain(key, now) for key in found], indent=2), highlight=False)
        return
    rows = []
    for key in found:
        expires = time_text(key.expires_ms) if key.expires_ms else "never"
        row = (key.id, key.tenant, " ".join(key.scopes), key.name, key.state(now), time_text(key.created_ms), expires)
        rows.append(row)
    show_rows(("key", "tenant", "scopes", "name", "state", "created", "expires"), rows, "no keys")


@keys.command("show")
@with_settings(CommonSettings)
def show_key(given: Given, key_id: Id) -> None:
    """Show what is kept of a key, as JSON: not the key."""

    async def find(access: Access) -> tuple[int, ApiKey]:
        return await access.now_ms(), await access.existing_key(key_id)

    now, key = run(given, Access, find)
    out.out(json.dumps(_plain(key, now), indent=2), highlight=False)


@keys.command("revoke")
@with_settings(CommonSettings)
def revoke_keys(given: Given, key_ids: Annotated[list[str], typer.Argument(help="Public ids of keys.")]) -> None:
    """Let keys open nothing any more, at every gateway within seconds. What they have queued goes on."""

    async def revoke(access: Access) -> list[ApiKey]:
        return [await access.revoke_key(key_id) for key_id in key_ids]

    for key in run(given, Access, revoke):
        out.print(f"{key.id} of {key.tenant} is revoked", soft_wrap=True, markup=False)


@keys.command("rotate")
@with_settings(CommonSettings)
def rotate_key(
    given: Given,
    key_id: Id,
    grace: Annotated[str, typer.Option(metavar="24h", help="How long the old key goes on.")] = "24h",
    expires: Expires = None,
    as_json: Json = False,
) -> None:
    """Make a key that opens the same and print it, once; the old one expires after the grace."""
    grace_s, life = _seconds("--grace", grace) or 0.0, _seconds("--expires", expires)
    secret, key, old = run(given, Access, lambda access: access.rotate_key(key_id, grace_s, life))
    _print_new(secret, key, as_json)
    err.print(f"ropeway: {old.id} expires {time_text(old.expires_ms)}", markup=False)


@keys.command("usage")
@with_settings(CommonSettings)
def show_usage(
    given: Given,
    day: Annotated[str | None, typer.Option(metavar="2026-01-31", help="The last day (UTC); unset: today.")] = None,
    days: Annotated[int, typer.Option(min=1, max=MAX_DAYS, help="So many days up to it.")] = 1,
    key: Annotated[str | None, typer.Option(help="Of this key only.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.")] = None,
    as_json: Json = False,
) -> None:
    """Show jobs that ended and their tokens, by day, key and model."""

    async def gather(store: UsageStore) -> list[UsageRow]:
        last: date = parse_day(day, "day") if day is not None else await store.today()
        return await store.usage(days_of(last - timedelta(days=days - 1), last), tenant)

    rows = [row for row in run(given, UsageStore, gather) if key in (None, row.key)]
    if as_json:
        plain = [dataclasses.asdict(row) | {"day": row.day.isoformat()} for row in rows]
        out.out(json.dumps(plain, indent=2), highlight=False)
        return
    texts = []
    for row in rows:
        counts = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        texts.append((row.day.isoformat(), row.tenant, row.key, row.model, *map(str, counts)))
    columns = ("day", "tenant", "key", "model", "requests", "prompt", "cached", "completion")
    show_rows(columns, texts, "nothing was used")


def _print_new(secret: str, key: ApiKey, as_json: bool) -> None:
    """The key alone on standard output, so that a shell can take it; the rest for people."""
    if as_json:
        out.out(json.dumps({"key": secret, **_plain(key, key.created_ms)}, indent=2), highlight=False)
        return
    out.out(secret, highlight=False)
    expires = time_text(key.expires_ms) if key.expires_ms else "never"
    err.print(
        f"ropeway: {key.id} of {key.tenant}, {' '.join(key.scopes)}, expires {expires}. It is shown this once.",
        markup=False,
        soft_wrap=True,
    )


def _say_if_open(url: str) -> None:
    """Say that a key in Redis closes no gateway, unless the one at the URL is closed already."""
    said = f"no gateway was found at {url}. One that has no key in its settings stays open"
    try:
        answer = httpx.get(url, timeout=_LOOK_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        pass
    else:
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return
        if answer.is_success and "Ropeway" in answer.text:
            said = f"the gateway at {url} is still open: it asks nobody for a key"
    said = f"ropeway: {said}; set ROPEWAY_REQUIRE_KEYS=true where it is started (`ropeway serve` too)"
    err.print(said, style="yellow", markup=False, soft_wrap=True)


def _plain(key: ApiKey, now_ms: int) -> dict[str, Any]:
    """A record as it is shown, without the hash."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": list(key.scopes),
        "name": key.name,
        "state": key.state(now_ms),
        "created": time_text(key.created_ms),
        "expires": time_text(key.expires_ms) if key.expires_ms else None,
        "revoked": time_text(key.revoked_ms) if key.revoked_ms else None,
        "replaced_by": key.replaced_by or None,
    }


def _seconds(option: str, text: str | None) -> float | None:
    """A duration such as `90d`."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,7})([smhdw])", text)
    if match is None:
        fail(f"{option} {text}: a number with s, m, h, d or w behind it is needed, such as 90d", EXIT_USAGE)
    return float(int(match[1]) * _UNITS[match[2]])
