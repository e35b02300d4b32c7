"""Tensors in one file, each at a multiple of a cache line: to be mapped and computed with as they lie, or read at once.

`<name>.bin` holds the bytes, `<name>.json` says where each tensor is. Both come to their names by renames, the second
last; what was cut off does not have the size that it says.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from engine.loading.memory import large_bytes

#: Bytes that a tensor's place is a multiple of.
ALIGNMENT = 64

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
}


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in the file."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    size: int


def write_weights(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write them under a name, in the place of what has it.

    Raises:
        OSError: they cannot be written; what was there is as it was.
        ValueError: a tensor's dtype is not served.
    """
    places = list(_places(tensors))
    total = _aligned(places[-1].offset + places[-1].size) if places else 0
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        data, table = Path(scratch) / "data", Path(scratch) / "table"
        with data.open("wb") as stream:
            for place in places:
                stream.seek(place.offset)
                stream.write(_bytes(tensors[place.name]))
            stream.truncate(total)
        data.chmod(0o600)
        table.write_text(json.dumps({"total": total, "tensors": [asdict(place) for place in places]}), "utf-8")
        data.replace(folder / f"{name}.bin")
        table.replace(folder / f"{name}.json")


def read_weights(folder: Path, name: str, *, mapped: bool) -> dict[str, torch.Tensor]:
    """Tensors by name.

    Args:
        folder: where they are.
        name: given to `write_weights`.
        mapped: let them be pages of the file, which all processes share; else they are copied into one allocation, for
            which the system is asked for large pages.

    Raises:
        OSError: there are none of that name, or they are somebody else's.
        ValueError: they are not what was written.
    """
    path = folder / f"{name}.bin"
    try:
        table = json.loads((folder / f"{name}.json").read_text("utf-8"))
        total, places = int(table["total"]), [_Place(**place) for place in table["tensors"]]
        _check(path, total, places)
        data = _map(path) if mapped and total else _read(path, total)
        return {each.name: _tensor(data, each) for each in places}
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path}: not what was written ({error})") from error


def _places(tensors: dict[str, torch.Tensor]) -> Iterator[_Place]:
    offset = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name}: {dtype} is not served")
        yield _Place(name, dtype, list(tensor.shape), offset, tensor.nbytes)
        offset = _aligned(offset + tensor.nbytes)


def _check(path: Path, total: int, places: list[_Place]) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others")
    if status.st_size != total:
        raise ValueError(f"{path} has {status.st_size} bytes, not {total}")
    for place in places:
        if place.offset % ALIGNMENT or place.offset + place.size > total or place.offset < 0 or place.size < 0:
            raise ValueError(f"{path}: tensor {place.name} does not lie in it")


def _map(path: Path) -> torch.Tensor:
    # Copied where it is written to, which nobody does: torch has no tensors that are read only.
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))


def _read(path: Path, total: int) -> torch.Tensor:
    data = large_bytes(total)
    view: memoryview = data.data
    with path.open("rb", buffering=0) as stream:
        while view:
            count = stream.readinto(view)
            if not count:
                raise ValueError(f"{path} ends early")
            view = view[count:]
    return torch.from_numpy(data)


def _tensor(data: torch.Tensor, place: _Place) -> torch.Tensor:
    return data[place.offset : place.offset + place.size].view(_DTYPES[place.dtype]).view(place.shape)


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    return flat


def _aligned(offset: int) -> int:
    return offset + -offset % ALIGNMENT
