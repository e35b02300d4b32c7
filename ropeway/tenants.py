"""`ropeway tenants`: what tenants may, beyond the settings of gateways. They speak with Redis, not with a gateway."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import typer

from ropeway.console import EXIT_USAGE, fail, out, show_rows
from ropeway.options import Given, with_settings
from ropeway.redis_commands import run
from shared.access import Access
from shared.settings import CommonSettings
from shared.tenant_terms import NO_LIMIT, TenantTerms

tenants = typer.Typer(help="Tenants: limits, weight, models and classes; set, show, list, reset.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the tenant.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
_LIMITS = ("requests", "tokens", "queued_jobs", "queued_tokens")


def _limit_option(what: str) -> Any:
    return typer.Option(metavar="N", help=f"{what}; none: no limit; default: as the gateways' settings say.")


@tenants.command("set")
@with_settings(CommonSettings)
def set_tenant(
    given: Given,
    name: Name,
    requests_per_minute: Annotated[str | None, _limit_option("Requests per minute")] = None,
    tokens_per_minute: Annotated[
        str | None, _limit_option("Tokens per minute, prompts and max_tokens of all choices")
    ] = None,
    queued_jobs: Annotated[str | None, _limit_option("Jobs that are queued at once, over all models")] = None,
    queued_tokens: Annotated[str | None, _limit_option("Tokens of such jobs")] = None,
    weight: Annotated[
        float | None, typer.Option(help="Share of the queue beside other tenants, relative to 1 (0.01 to 100).")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model or adapter that it may use; begins-with ends in *. May be repeated; replaces all."),
    ] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="It may use all models and adapters.")] = False,
    max_class: Annotated[
        Literal["high", "normal", "batch"] | None, typer.Option(help="The highest class of its jobs.")
    ] = None,
) -> None:
    """Change what a tenant may; what is not named stays as it is. Gateways know within seconds."""
    texts = (requests_per_minute, tokens_per_minute, queued_jobs, queued_tokens)
    changes: dict[str, Any] = {
        field: _limit(field, text) for field, text in zip(_LIMITS, texts, strict=True) if text is not None
    }
    if model and all_models:
        fail("--model and --all-models exclude each other", EXIT_USAGE)
    if model or all_models:
        changes["models"] = None if all_models else sorted(set(model or ()))
    changes |= {
        field: value for field, value in (("weight", weight), ("max_class", max_class)) if value is not None
    }  # fmt: skip
    if not changes:
        fail("nothing is to be set: see --help", EXIT_USAGE)

    async def change(access: Access) -> TenantTerms:
        return await access.change_terms(name, lambda held: msgspec.structs.replace(held, **changes))

    _print(run(given, Access, change))


@tenants.command("show")
@with_settings(CommonSettings)
def show_tenant(given: Given, name: Name) -> None:
    """Show what a tenant may, as JSON."""

    async def find(access: Access) -> TenantTerms:
        return await access.terms(name) or TenantTerms(name=name)

    _print(run(given, Access, find))


@tenants.command("list")
@with_settings(CommonSettings)
def list_tenants(given: Given, as_json: Json = False) -> None:
    """Show tenants for which something was set, or that have keys."""

    async def gather(access: Access) -> list[TenantTerms]:
        terms = {one.name: one for one in await access.all_terms()}
        names = terms.keys() | {key.tenant for key in await access.all_keys()}
        return [terms.get(name) or TenantTerms(name=name) for name in sorted(names)]

    found = run(given, Access, gather)
    if as_json:
        out.out(json.dumps([_plain(terms) for terms in found], indent=2), highlight=False)
        return
    rows = []
    for terms in found:
        limits = (str(_shown(getattr(terms, field))) for field in _LIMITS)
        models = "all" if terms.models is None else " ".join(terms.models) or "none"
        rows.append((terms.name, *limits, f"{terms.weight:g}", terms.max_class, models))
    columns = ("tenant", "requests/min", "tokens/min", "queued jobs", "queued tokens", "weight", "class", "models")
    show_rows(columns, rows, "no tenants", prose=True)


@tenants.command("reset")
@with_settings(CommonSettings)
def reset_tenant(given: Given, name: Name) -> None:
    """Let a tenant have what the gateways' settings say."""
    known = run(given, Access, lambda access: access.forget_terms(name))
    out.print(f"{name} is as the settings say" + ("" if known else "; nothing had been set"), soft_wrap=True)


def _limit(field: str, text: str) -> int | None:
    if text in ("none", "default"):
        return NO_LIMIT if text == "none" else None
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= 15) or int(text) < 1:
        fail(f"{field}: a number from 1, none or default is needed", EXIT_USAGE)
    return int(text)


def _shown(limit: int | None) -> int | str:
    return "default" if limit is None else "none" if limit == NO_LIMIT else limit


def _plain(terms: TenantTerms) -> dict[str, Any]:
    limits = {field: _shown(getattr(terms, field)) for field in _LIMITS}
    return {"name": terms.name, **limits, "weight": terms.weight, "models": terms.models, "max_class": terms.max_class}


def _print(terms: TenantTerms) -> None:
    out.out(json.dumps(_plain(terms), indent=2), highlight=False)
