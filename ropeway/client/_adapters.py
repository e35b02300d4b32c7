"""Adapters as the client sees them, without any I/O but reading the files that it uploads; see `_core`."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Final
from urllib.parse import quote

from ropeway.client._core import Call, Json, Operation, checked

#: What is uploaded of an adapter's folder.
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
#: Seconds for a load, and for the way of its files.
_LOAD_S: Final = 3600.0


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter as the gateway shows it; `data` is the whole answer.

    Attributes:
        state: `registered`, `loading`, `resident`, `failed` or `draining`.
        error: why its last load failed, or None.
    """

    name: str
    base_model: str
    state: str
    error: str | None
    data: Json


def adapters() -> Operation[list[Adapter]]:
    """All adapters."""
    response = checked((yield Call("GET", "/v1/adapters")))
    return [_adapter(data) for data in response.json()["data"]]


def adapter(name: str) -> Operation[Adapter]:
    """One adapter."""
    return _adapter(checked((yield Call("GET", _path(name)))).json())


def load_adapter(
    name: str, source: str | Path, base_model: str | None, replace: bool, pin: bool, wait_s: float
) -> Operation[Adapter]:
    """Load an adapter. A `Path` is a folder here, whose files are uploaded; a text is for the server to read."""
    fields: Json = {"lora_name": name}
    fields |= {} if base_model is None else {"base_model": base_model}
    params = {"wait": f"{wait_s:g}"} if wait_s > 0 else {}
    if isinstance(source, str):
        body = {**fields, "lora_path": source, "load_inplace": replace, "pin": pin}
        call = Call("POST", "/v1/adapters", json=body, params=params, read_s=_LOAD_S)
        return _adapter(checked((yield call)).json())
    flags = {"load_inplace": str(replace).lower(), "pin": str(pin).lower()}
    with contextlib.ExitStack() as stack:
        files = {file: (file, stack.enter_context((source / file).open("rb"))) for file in FILES}
        call = Call("POST", "/v1/adapters", form={**fields, **flags}, files=files, params=params, read_s=_LOAD_S)
        return _adapter(checked((yield call)).json())


def unload_adapter(name: str) -> Operation[int]:
    """Unload an adapter; answers how many jobs go on with it."""
    return int(checked((yield Call("DELETE", _path(name)))).json()["in_flight"])


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"


def _adapter(data: Json) -> Adapter:
    return Adapter(str(data["id"]), str(data["base_model"]), str(data["state"]), data.get("error"), data)
