"""Uploads that are of no use any more."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shared.adapter_store.base import AdapterStore
from shared.errors import RopewayError
from shared.lora.source import parse_source

_log = structlog.stdlib.get_logger("shared.adapter_store")


def discard_upload(source: str, store: Callable[[], AdapterStore]) -> None:
    """Delete what a load was to be made of, where that is an upload. Blocks; what fails is left to the next sweep."""
    try:
        parsed = parse_source(source, uploads=True)
        if parsed.kind == "upload":
            store().drop_upload(parsed.where)
    except RopewayError as error:
        _log.warning("upload not deleted", error=error.message)
