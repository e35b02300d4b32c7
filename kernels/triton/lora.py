"""Low-rank updates of another adapter for each row, in two launches: shrink to the rank, expand to the outputs.

Rows are sorted by adapter and cut into tiles of one adapter each (the grouping of Punica, Chen et al., 2023). The
inputs are cut into parts of fixed width, whose sums the second launch adds up in order: few rows fill the device too,
and a row's result depends on that row and its adapter alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.lora import TILE_ROWS, FixedRows, LoraBatch, LoraLayer
from kernels.ops import register
from kernels.transfer import to_device
from kernels.triton.launch import FLOATS, cdiv, check, check_tensor, dot_dtype, power_of_2

#: Rows of a tile: what a product takes at least.
ROWS = TILE_ROWS
#: Inputs that one program sums over, and outputs that one program writes.
PART_INPUTS = 512
OUTPUTS = 128
MOST_RANK = 256
MOST_PARTS = 3


@triton.jit(do_not_specialize=["tiles", "count", "cuts"])
def shrink_kernel(
    x,
    a,
    low,
    rows,
    plan,
    tiles,
    count,
    cuts,
    inputs,
    max_rank,
    x_stride,
    slot_stride,
    part_stride,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PART_INPUTS: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program multiplies one tile with the A of one part over some of the inputs: `low` [cuts, count, parts, rank].

    `plan` is [3, tiles]: slot, first of `rows`, number of rows.
    """
    tile, part, cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    slot = tl.load(plan + tile).to(tl.int64)
    first = tl.load(plan + tiles + tile).to(tl.int64)
    size = tl.load(plan + 2 * tiles + tile)
    if size == 0:
        return
    each = tl.arange(0, ROWS)
    row = tl.load(rows + first + each, mask=each < size, other=0)
    rank = tl.arange(0, RANK)
    total = tl.zeros((ROWS, RANK), tl.float32)
    my_a = a + slot * slot_stride + part * part_stride
    begin = cut * PART_INPUTS
    for start in range(begin, min(begin + PART_INPUTS, inputs), STEP):
        column = start + tl.arange(0, STEP)
        inside = column < inputs
        mask = (each < size)[:, None] & inside[None, :]
        left = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        mask = (rank < max_rank)[None, :] & inside[:, None]
        right = tl.load(my_a + rank[None, :] * inputs + column[:, None], mask=mask, other=0.0)
        total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision="ieee")
    place = ((cut * count + first + each) * parts + part) * RANK
    tl.store(low + place[:, None] + rank[None, :], total, mask=(each < size)[:, None])


@triton.jit(do_not_specialize=["tiles", "count", "cuts"])
def expand_kernel(
    low,
    b,
    delta,
    rows,
    plan,
    tiles,
    count,
    cuts,
    max_rank,
    width_0,
    width_1,
    width_2,
    slot_stride,
    outputs,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program adds up the cuts of one tile and part, and multiplies with some columns of its B."""
    tile, piece, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = tl.where(part == 0, width_0, tl.where(part == 1, width_1, width_2))
    begin = tl.where(part == 0, 0, tl.where(part == 1, width_0, width_0 + width_1))
    if piece * OUTPUTS >= width:
        return
    slot = tl.load(plan + tile).to(tl.int64)
    first = tl.load(plan + tiles + tile).to(tl.int64)
    size = tl.load(plan + 2 * tiles + tile)
    if size == 0:
        return
    each = tl.arange(0, ROWS)
    rank = tl.arange(0, RANK)
    total = tl.zeros((ROWS, RANK), tl.float32)
    for cut in range(cuts):
        place = ((cut * count + first + each) * PARTS + part) * RANK
        total += tl.load(low + place[:, None] + rank[None, :], mask=(each < size)[:, None], other=0.0)
    column = piece * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = (rank < max_rank)[:, None] & (column < width)[None, :]
    right = tl.load(b + slot * slot_stride + rank[:, None] * outputs + begin + column[None, :], mask=mask, other=0.0)
    result = tl.dot(total.to(DOT), right.to(DOT), input_precision="ieee")
    row = tl.load(rows + first + each, mask=each < size, other=0)
    mask = (each < size)[:, None] & (column < width)[None, :]
    tl.store(delta + row[:, None] * outputs + begin + column[None, :], result, mask=mask)


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Tiles of a batch, worked out in its first layer.

    Attributes:
        tiles: [3, count] int32: slot, first of `rows` and number of rows of each; none may be empty.
        rows: [rows] int64, the rows by slot; of a fixed batch also those of the base model, which no tile has.
        slots: [rows] int64, slot of each of `rows`; None for a fixed batch, where hardly any layer asks.
    """

    tiles: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor | None


@register("lora_delta", "triton")
def lora_delta(x: torch.Tensor, layer: LoraLayer, batch: LoraBatch | FixedRows) -> torch.Tensor:
    """Contract of the reference; the inner result is rounded to the dtype of the adapters.

    Raises:
        KernelInputError: the arguments are not served.
    """
    name = "lora_delta"
    _check_layer(name, layer, len(layer.widths))
    slots, parts, max_rank, inputs = layer.a.shape
    check_tensor(name, "x", x, dtypes=(layer.a.dtype,), shape=(len(batch.slots), inputs), device=layer.a.device)
    _check_batch(name, batch, slots, x.device)
    delta = torch.zeros((len(x), layer.b.shape[2]), dtype=torch.float32, device=x.device)
    # What is in the slots of a fixed batch may be another thing each time.
    if isinstance(batch, LoraBatch) and not int(layer.ranks[batch.active].max(initial=0)):
        return delta
    plan, rank, cuts = _plan(batch, x.device), _padded_rank(max_rank), cdiv(inputs, PART_INPUTS)
    count, tiles = len(plan.rows), plan.tiles.shape[1]
    low = torch.empty((cuts, count, parts, rank), dtype=torch.float32, device=x.device)
    shrink_kernel[(tiles, parts, cuts)](
        x,
        layer.a,
        low,
        plan.rows,
        plan.tiles,
        tiles,
        count,
        cuts,
        inputs,
        max_rank,
        x.stride(0),
        layer.a.stride(0),
        layer.a.stride(1),
        ROWS=ROWS,
        RANK=rank,
        PART_INPUTS=PART_INPUTS,
        STEP=shrink_step(rank, x.dtype.itemsize),
        DOT=dot_dtype(x.dtype),
        num_warps=4,
        num_stages=2,
    )
    _expand(low, layer, delta, plan)
    return delta


@register("embed_delta", "triton")
def embed_delta(ids: torch.Tensor, layer: LoraLayer, batch: LoraBatch | FixedRows) -> torch.Tensor:
    """Contract of the reference.

    Raises:
        KernelInputError: the arguments are not served.
    """
    name = "embed_delta"
    _check_layer(name, layer, 1)
    slots, _, _, max_rank = layer.a.shape
    check_tensor(name, "ids", ids, dtypes=(torch.int64,), shape=(len(batch.slots),), device=layer.a.device)
    _check_batch(name, batch, slots, ids.device)
    delta = torch.zeros((len(ids), layer.b.shape[2]), dtype=torch.float32, device=ids.device)
    plan, rank = _plan(batch, ids.device), _padded_rank(max_rank)
    low = torch.zeros((1, len(plan.rows), 1, rank), dtype=torch.float32, device=ids.device)
    # A row of the base model takes another's, which no tile reads.
    mine = plan.slots if plan.slots is not None else batch.slots[plan.rows].clamp(min=0)
    low[0, :, 0, :max_rank] = layer.a[mine, 0, ids[plan.rows]]
    _expand(low, layer, delta, plan)
    return delta


def _expand(low: torch.Tensor, layer: LoraLayer, delta: torch.Tensor, plan: LoraPlan) -> None:
    cuts, count, parts, rank = low.shape
    widths = [*layer.widths.tolist(), 0, 0]
    expand_kernel[(plan.tiles.shape[1], cdiv(max(widths), OUTPUTS), parts)](
        low,
        layer.b,
        delta,
        plan.rows,
        plan.tiles,
        plan.tiles.shape[1],
        count,
        cuts,
        layer.b.shape[1],
        widths[0],
        widths[1],
        widths[2],
        layer.b.stride(0),
        layer.b.shape[2],
        PARTS=parts,
        ROWS=ROWS,
        RANK=rank,
        OUTPUTS=OUTPUTS,
        DOT=dot_dtype(layer.b.dtype),
        num_warps=4,
        num_stages=1,
    )


def shrink_step(rank: int, itemsize: int) -> int:
    """Inputs of a product: about 16 KiB of A at a time."""
    return max(32, min(128, 16384 // (rank * itemsize)))


def _padded_rank(max_rank: int) -> int:
    return max(16, power_of_2(max_rank))


def _plan(batch: LoraBatch | FixedRows, device: torch.device) -> LoraPlan:
    if isinstance(batch, FixedRows):
        return LoraPlan(batch.tiles, batch.order, None)
    if isinstance(batch.plan, LoraPlan):
        return batch.plan
    of_rows = np.sort(batch.slots[batch.slots >= 0], kind="stable")
    slots, counts = np.unique(of_rows, return_counts=True)
    tiles = -(-counts // ROWS)
    of_tile = np.repeat(np.arange(len(slots)), tiles)
    within = (np.arange(len(of_tile)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * ROWS
    first = (np.cumsum(counts) - counts)[of_tile] + within
    table = np.stack((slots[of_tile], first, np.minimum(ROWS, counts[of_tile] - within))).astype(np.int32)
    plan = batch.plan = LoraPlan(to_device(table, device), batch.rows, to_device(of_rows, device))
    return plan


def _check_layer(name: str, layer: LoraLayer, parts: int) -> None:
    slots, found, _, _ = layer.a.shape if layer.a.ndim == 4 else (0, 0, 0, 0)
    check_tensor(name, "a", layer.a, dtypes=FLOATS, shape=(None, parts, None, None), contiguous=True)
    max_rank = layer.b.shape[1] if layer.b.ndim == 3 else 0
    outputs = int(layer.widths.sum())
    check_tensor(
        name, "b", layer.b, dtypes=(layer.a.dtype,), shape=(slots, None, outputs), device=layer.a.device,
        contiguous=True,
    )  # fmt: skip
    check(name, found <= MOST_PARTS, f"{found} parts; served are up to {MOST_PARTS}")
    check(name, 0 < max_rank <= MOST_RANK, f"a rank of {max_rank}; served are up to {MOST_RANK}")
    check(name, max_rank in layer.a.shape[2:], f"a of {list(layer.a.shape)} has not the rank of b, {max_rank}")


def _check_batch(name: str, batch: LoraBatch | FixedRows, slots: int, device: torch.device) -> None:
    if isinstance(batch, FixedRows):
        rows, ints = len(batch.slots), (torch.int64,)
        check_tensor(name, "slots", batch.slots, dtypes=ints, shape=(rows,), device=device)
        check_tensor(name, "order", batch.order, dtypes=ints, shape=(rows,), device=device)
        shape = (3, None)
        check_tensor(name, "tiles", batch.tiles, dtypes=(torch.int32,), shape=shape, device=device, contiguous=True)
        return
    count = int((batch.slots >= 0).sum())
    check_tensor(name, "rows", batch.rows, dtypes=(torch.int64,), shape=(count,), device=device)
    check(name, int(batch.slots.max(initial=-1)) < slots, f"a row's slot is not among the {slots} that there are")
