"""Files and batches as OpenAI shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from shared.batch_record import BatchRecord, FileRecord, Progress


def file_view(record: FileRecord) -> dict[str, Any]:
    """A file object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_ms // 1000,
        "expires_at": record.expires_ms // 1000,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


def batch_view(record: BatchRecord, progress: Progress) -> dict[str, Any]:
    """A batch object."""
    ended: dict[str, int | None] = {f"{s}_at": None for s in ("completed", "failed", "expired", "cancelled")}
    if record.ended:
        ended[f"{record.status}_at"] = _seconds(record.ended_ms)
    errors = None
    if record.faults:
        errors = {"object": "list", "data": [asdict(fault) for fault in record.faults]}
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": errors,
        "input_file_id": record.input_file,
        "completion_window": "24h",
        "status": record.status,
        "output_file_id": record.output_file,
        "error_file_id": record.error_file,
        "created_at": record.created_ms // 1000,
        "in_progress_at": _seconds(record.started_ms),
        "expires_at": record.expires_ms // 1000,
        "finalizing_at": _seconds(record.finalizing_ms),
        "cancelling_at": _seconds(record.cancelling_ms),
        **ended,
        "request_counts": {
            "total": record.total,
            "completed": progress.seen_completed,
            "failed": progress.seen_failed,
        },
        "metadata": record.metadata,
    }


def page_view(views: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of a list."""
    return {
        "object": "list",
        "data": list(views),
        "first_id": views[0]["id"] if views else None,
        "last_id": views[-1]["id"] if views else None,
        "has_more": more,
    }


def _seconds(milliseconds: int) -> int | None:
    return milliseconds // 1000 or None
