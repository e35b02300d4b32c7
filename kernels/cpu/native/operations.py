"""The native operations behind their contracts."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import numpy as np
import torch

from kernels.blocked import BlockedLogits
from kernels.cpu.native import library as native
from kernels.cpu.native.draw import fill_maxima
from kernels.cpu.native.library import COMPACT, DTYPES, GATED, LOGITS, PANELS, PLAIN, ROWS
from kernels.cpu.native.lora import LowRank
from kernels.cpu.native.program import empty, issue, recorder, recording
from kernels.ops import register
from kernels.packed import Packed, Weight
from kernels.reference.linear import Linear
from kernels.reference.unembed import Unembed

_LINE = 64
_SLAB_BYTES = 32 * 1024 * 1024
#: The allocation that is being filled, and how far it is.
_slabs: list[tuple[int, torch.Tensor]] = []
_slabs_lock = threading.Lock()

#: Rows whose logits keep their memory: what it takes to call the library counts in the step of a single stream.
_FEW_ROWS = 8

#: Head sizes that attention serves: even, since rotary pairs are; and bounded by what a thread keeps in its cache.
MOST_HEAD_DIM = 512


def unserved(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why a model of such heads and such a dtype is not served; None where it is."""
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} is not served by the native kernels"
    if head_dim % 2 or head_dim > MOST_HEAD_DIM:
        return f"heads of {head_dim} are not served by the native kernels"
    return None


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight as products read it."""

    packed: Packed
    compact: bool


@register("embed", "cpu.native")
def embed(table: Weight, ids: torch.Tensor) -> torch.Tensor:
    """Contract of the reference; float32. Of a packed table each row is read from its panel."""
    entries, width = table.shape
    data, form = (table, ROWS) if isinstance(table, torch.Tensor) else _form(table)
    out = empty(len(ids), width, torch.float32)
    record = native.Gather(
        data.data_ptr(), ids.data_ptr(), out.data_ptr(), entries, width, DTYPES[table.dtype], DTYPES[out.dtype], form
    )
    issue(record, len(ids), data, ids, out)
    return out


@register("rms_norm", "cpu.native")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Contract of the reference; the product with the weight is rounded once instead of twice."""
    x = _rows(x)
    rows, width = x.shape
    out = empty(rows, width, weight.dtype)
    other = x if residual is None else residual
    record = native.Norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        width,
        DTYPES[x.dtype],
        DTYPES[other.dtype],
        DTYPES[weight.dtype],
        eps,
    )
    issue(record, rows, x, weight, out, other)
    return out


@register("linear", "cpu.native")
def linear(weight: Weight, bias: torch.Tensor | None = None) -> Linear:
    """Contract of the reference. The weight given may be freed afterwards."""
    panels = _panels(weight, gated=False)
    shift = None if bias is None else _padded(bias, _order(len(bias), native.library().ropeway_panel_columns()))
    width, dtype = weight.shape[0], weight.dtype

    def apply(x: torch.Tensor, delta: LowRank | None = None) -> torch.Tensor:
        return _project(x, panels, shift, empty(len(x), width, dtype), PLAIN, delta=delta)

    return apply


@register("gated_linear", "cpu.native")
def gated_linear(weight: Weight, bias: torch.Tensor | None = None) -> Linear:
    """Contract of the reference: SiLU and product are done where the matrix products leave their results."""
    panels = _panels(weight, gated=True)
    width, dtype = weight.shape[0] // 2, weight.dtype
    shift = None if bias is None else _padded(bias, _gated_order(width, native.library().ropeway_panel_columns() // 2))

    def apply(x: torch.Tensor, delta: LowRank | None = None) -> torch.Tensor:
        return _project(x, panels, shift, empty(len(x), width, dtype), GATED, delta=delta)

    return apply


class Head:
    """A packed output matrix; float32 as summed, and the blocks' maxima are found on the way."""

    def __init__(self, panels: Panels) -> None:
        self.panels = panels
        self._last: _FewLogits | None = None

    def __call__(self, hidden: torch.Tensor, delta: LowRank | None = None) -> BlockedLogits:
        last = self._last
        if last is not None and last.hidden is hidden and delta is None:
            return last.compute()
        if delta is None and len(hidden) <= _FEW_ROWS and hidden.stride(-1) == 1 and recorder() is None:
            last = self._last = _FewLogits(self, hidden)
            return last.compute()
        logits = BlockedLogits.empty(len(hidden), self.panels.packed.rows)
        self.fill(logits, hidden, delta)
        return logits

    def fill(self, logits: BlockedLogits, hidden: torch.Tensor, delta: LowRank | None) -> None:
        """Compute them, or record that."""
        _project(hidden, self.panels, None, logits.values, LOGITS, logits.vocab, logits.peaks, delta)
        fill_maxima(None, logits.peaks, logits.best)


class _FewLogits:
    """Logits of a tensor's rows, recorded: they stay where they are while the rows are in the same tensor, as those of
    decodes are."""

    def __init__(self, head: Head, hidden: torch.Tensor) -> None:
        rows = len(hidden)
        self.hidden = hidden
        self._logits, self._batch = BlockedLogits.empty(rows, head.panels.packed.rows), native.Batch(rows=rows)
        with recording(rows) as taken:
            head.fill(self._logits, hidden, None)
        self._program = taken.program()

    def compute(self) -> BlockedLogits:
        self._program.run(self._batch)
        return self._logits


@register("unembed", "cpu.native")
def unembed(weight: Weight) -> Unembed:
    """Contract of the reference."""
    return Head(_panels(weight, gated=False))


@register("rotary", "cpu.native")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Contract of the reference; rounded once. Tables may be wider than `x`."""
    rows, heads, dim = x.shape
    record = native.Rotary(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        x.stride(0),
        heads,
        dim,
        DTYPES[x.dtype],
        DTYPES[cos.dtype],
    )
    issue(record, rows, x, cos, sin)


@register("write_kv", "cpu.native")
def write_kv(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Contract of the reference, but that a block's elements lie as `paged_attention` takes them: see `src/cache.h`."""
    _, block_size, _, kv_heads, dim = cache.shape
    record = native.WriteKv(
        kv.data_ptr(),
        cache.data_ptr(),
        slot_mapping.data_ptr(),
        kv.stride(0) * kv.dtype.itemsize,
        block_size,
        kv_heads,
        dim,
        DTYPES[kv.dtype],
    )
    issue(record, len(kv), kv, cache, slot_mapping)


@register("pack", "cpu.native")
def pack(weight: torch.Tensor, gated: bool = False) -> Packed:
    """Contract of the reference; the library's own layout, in panels. The weight given may be freed afterwards.

    Weights in bfloat16 are compacted, where they can be: see `src/compact.h`.
    """
    rows, columns = weight.shape
    weight, dtype = weight.contiguous(), DTYPES[weight.dtype]
    lib = native.library()
    size, less = _sizes(rows, columns, dtype, gated=gated)
    data = torch.empty(size, dtype=torch.uint8) if less else allocate(size)
    lib.ropeway_pack(weight.data_ptr(), rows, columns, dtype, gated, data.data_ptr())
    if less:
        compact = allocate(less)
        if lib.ropeway_compact(data.data_ptr(), rows, columns, gated, compact.data_ptr()):
            data = compact
    return Packed(data, rows, columns, weight.dtype)


def layout() -> str:
    """A name for the layouts that `pack` makes here: what was packed under another name is packed anew.

    It is a hash of a small packed weight of each kind, so that no version has to be counted up by hand.
    """
    total = hashlib.sha256()
    for dtype in DTYPES:
        weight = torch.arange(1, 1 + 6 * 70 * 8, dtype=torch.int32).remainder(251).view(420, 8).to(dtype)
        for gated in (False, True):
            for columns in (5, 8):
                total.update(pack(weight[:, :columns], gated).data.numpy().tobytes())
    return total.hexdigest()[:16]


def _form(table: Packed) -> tuple[torch.Tensor, int]:
    panels = _panels(table, gated=False)
    return table.data, COMPACT if panels.compact else PANELS


def _sizes(rows: int, columns: int, dtype: int, *, gated: bool) -> tuple[int, int]:
    """Bytes of the panels, plain and compacted; 0 where the latter is not done."""
    lib = native.library()
    less = lib.ropeway_compact_bytes(rows, columns, dtype, gated)
    return lib.ropeway_packed_bytes(rows, columns, dtype, gated), less


def _panels(weight: Weight, *, gated: bool) -> Panels:
    """The panels of a weight, whoever has packed it.

    Raises:
        ValueError: it was packed for another layer or another library, or is harmed.
    """
    if not isinstance(weight, Packed):
        weight = pack(weight, gated)
    size, less = _sizes(weight.rows, weight.columns, DTYPES[weight.dtype], gated=gated)
    if len(weight.data) not in (size, less or size):
        wanted = f"{size} or {less}" if less else str(size)
        raise ValueError(f"a packed weight of {weight.shape} has {len(weight.data)} bytes, not {wanted}")
    compact = len(weight.data) != size
    if compact and not native.library().ropeway_compact_fits(weight.data.data_ptr(), *weight.shape, gated):
        raise ValueError(f"a packed weight of {weight.shape} is not what was packed")
    return Panels(weight, compact)


def allocate(size: int) -> torch.Tensor:
    """Bytes for a packed weight, aligned to a line of the cache.

    Weights lie side by side in large allocations, for which NumPy asks the system for large pages: a pass over all
    weights is then a tenth faster than on small ones.
    """
    with _slabs_lock:
        start, slab = _slabs[-1] if _slabs else (0, torch.empty(0, dtype=torch.uint8))
        if start + size > len(slab):
            raw = np.empty(max(_SLAB_BYTES, size) + _LINE, dtype=np.uint8)
            skip = -raw.ctypes.data % _LINE
            start, slab = 0, torch.from_numpy(raw)[skip:]
        _slabs[:] = [(start + size + -size % _LINE, slab)]
    return slab[start : start + size]


def _order(width: int, panel: int) -> list[int]:
    return list(range(width)) + [-1] * (-width % panel)


def _gated_order(width: int, lanes: int) -> list[int]:
    order: list[int] = []
    for first in range(0, width, lanes):
        places = [place if place < width else -1 for place in range(first, first + lanes)]
        order += places + [place if place < 0 else width + place for place in places]
    return order


def _padded(bias: torch.Tensor, order: list[int]) -> torch.Tensor:
    """[columns] float32: the bias as the packed columns are."""
    return torch.cat((bias.float(), bias.new_zeros(1, dtype=torch.float32)))[torch.tensor(order)]


def _project(
    x: torch.Tensor,
    panels: Panels,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: int,
    width: int | None = None,
    peaks: torch.Tensor | None = None,
    delta: LowRank | None = None,
) -> torch.Tensor:
    x = _rows(x)
    record = native.Linear(
        x.data_ptr(),
        panels.packed.data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if delta is None else delta.address,
        out.data_ptr(),
        None if peaks is None else peaks.data_ptr(),
        x.stride(0),
        out.stride(0),
        0 if peaks is None else peaks.stride(0),
        x.shape[1],
        out.shape[1] if width is None else width,
        DTYPES[x.dtype],
        epilogue,
        panels.compact,
    )
    tensors = (x, panels.packed.data, bias, None if delta is None else delta.low, out, peaks)
    batch = None if delta is None else delta.batch
    issue(record, len(x), *(each for each in tensors if each is not None), batch=batch)
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
