"""Command line options made from settings classes, so that every setting is an option and none is written twice."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import SettingsError

from ropeway.console import EXIT_USAGE, err, fail
from shared.settings import CommonSettings

S = TypeVar("S", bound=CommonSettings)

#: What was given on the command line, by name of the setting.
Given = Mapping[str, Any]

#: Short spellings beside the regular one.
_ALIASES = {"redis_url": ["--redis"]}
_SCALARS = (bool, int, float, str, Path)
#: Variables of the prefix that are no settings: those of `ropeway submit` and of the installation.
_OTHER_VARIABLES = {"ROPEWAY_URL", "ROPEWAY_API_KEY", "ROPEWAY_TORCH", "ROPEWAY_TORCH_INDEX"}
#: What Kubernetes sets in every pod beside a service of our name.
_SERVICE_LINK = re.compile(r"ROPEWAY_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")


def flag(name: str) -> str:
    """`max_num_seqs` as `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def env_name(cls: type[CommonSettings], name: str) -> str:
    """The environment variable of a setting."""
    return f"{cls.model_config.get('env_prefix', '')}{name}".upper()


def is_secret(field: FieldInfo) -> bool:
    """Whether the value must not be shown, nor be given where `ps` shows it."""
    return field.annotation is SecretStr or SecretStr in typing.get_args(field.annotation)


def with_settings(
    *classes: type[CommonSettings], unset: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per setting of these classes; it gets those that were given as its first argument.

    Secrets and lists have no option, only their environment variable. A setting that two classes share is one option.
    `unset` says by name what the command does without a setting, where that is not the setting's default.
    """
    parameters = _parameters(classes, unset or {})

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            warn_of_unknown(os.environ)
            given = {name: value for name in parameters if (value := arguments.pop(name)) is not None}
            command(given, **arguments)

        every = [*own, *parameters.values()]
        wrapper.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return wrapper

    return decorate


def build(cls: type[S], given: Given) -> S:
    """Settings from options, then the environment, then defaults; a wrong one ends the command with exit code 2."""
    try:
        return cls(**{name: value for name, value in given.items() if name in cls.model_fields})
    except ValidationError as error:
        fail("; ".join(_explain(cls, dict(detail)) for detail in error.errors()), EXIT_USAGE)
    except SettingsError as error:
        # Raised where a variable that holds JSON does not parse; its text names the field and not the value.
        fail(f"{error}: JSON is needed in the environment variable", EXIT_USAGE)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Variables of our prefix that no process reads, each with the name that may be meant."""
    known = set(_OTHER_VARIABLES)
    for cls in _all_settings(CommonSettings):
        known |= {env_name(cls, name) for name in cls.model_fields}
    prefix = str(CommonSettings.model_config.get("env_prefix", ""))
    found = [
        name
        for name in environ
        if name.upper().startswith(prefix) and name.upper() not in known and not _SERVICE_LINK.fullmatch(name)
    ]
    return {name: next(iter(difflib.get_close_matches(name.upper(), known, 1, 0.8)), None) for name in sorted(found)}


def warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Say which variables have no effect: a misspelt setting would else be its default, silently."""
    for name, meant in unknown_variables(environ).items():
        hint = f"; {meant} is one" if meant else " (`ropeway config` lists all)"
        err.print(f"ropeway: {name} is no setting{hint}", style="yellow", markup=False, soft_wrap=True)


def _all_settings(cls: type[CommonSettings]) -> list[type[CommonSettings]]:
    return [cls, *(each for child in cls.__subclasses__() for each in _all_settings(child))]


def as_environment(given: Given) -> dict[str, str]:
    """Options as the variables that say the same to a child process."""
    return {env_name(CommonSettings, name): str(value) for name, value in given.items()}


def _explain(cls: type[CommonSettings], detail: Mapping[str, Any]) -> str:
    name = str(detail["loc"][0]) if detail["loc"] else "settings"
    field = cls.model_fields.get(name)
    if field is None:
        return f"{name}: {detail['msg']}"
    value = "" if is_secret(field) else f", not {detail['input']!r}"
    return f"{flag(name)} ({env_name(cls, name)}): {detail['msg']}{value}"


def _parameters(classes: tuple[type[CommonSettings], ...], unset: Mapping[str, str]) -> dict[str, inspect.Parameter]:
    found: dict[str, inspect.Parameter] = {}
    for cls in classes:
        for name, field in cls.model_fields.items():
            kind = _option_type(field)
            if kind is None or name in found:
                continue
            panel = "Common" if name in CommonSettings.model_fields else cls.__name__.removesuffix("Settings")
            found[name] = _parameter(name, field, kind, f"{panel} settings", unset.get(name))
    return found


def _parameter(name: str, field: FieldInfo, kind: Any, panel: str, unset: str | None) -> inspect.Parameter:
    spelling = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    option = typer.Option(
        spelling,
        *_ALIASES.get(name, []),
        help=field.description,
        show_default=unset or (False if field.default is None else str(field.default)),
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _option_type(field: FieldInfo) -> Any | None:
    """The type of an option for this setting; None where it has none."""
    kind = field.annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        kind = members[0] if len(members) == 1 else None
    if typing.get_origin(kind) is Literal or kind in _SCALARS:
        return kind
    return None
