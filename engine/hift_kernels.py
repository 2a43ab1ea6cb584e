"""The vocoder's Triton kernel: a causal convolution of many lanes with all that stands around it, in one launch.

It reads what came before a lane's first row from the lane's history and writes the history of the next push beside
it (two rows of state for each slot, used in turn, so no program reads what another one writes), adds residual streams,
and gives the result to the next convolutions through their activations. Programs of padding return at once.
plain_conv in engine/hift_lanes.py says the same in PyTorch; tests/engine/test_hift_lanes.py compares.
Letters: L lanes, T rows, I and O channels in and out.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.hift_lanes import Act, Field

if TYPE_CHECKING:
    from engine.hift_lanes import Finish, Layer, Plan

FIELDS = tl.constexpr(len(Field))
SOURCE = tl.constexpr(int(Field.SOURCE))
TARGET = tl.constexpr(int(Field.TARGET))
FRAMES = tl.constexpr(int(Field.FRAMES))
IS_FIRST = tl.constexpr(int(Field.IS_FIRST))
LEAKY = tl.constexpr(int(Act.LEAKY))
SNAKE = tl.constexpr(int(Act.SNAKE))
ELU = tl.constexpr(int(Act.ELU))
HALF_MAX = tl.constexpr(65_504.0)
PER_PI = tl.constexpr(0.3183098861837907)
# sin(pi r) / r on -0.5..0.5 in powers of r^2, minimax: 3e-9
SINE_0 = tl.constexpr(3.1415925800447253)
SINE_1 = tl.constexpr(-5.167706878926381)
SINE_2 = tl.constexpr(2.5500313772800567)
SINE_3 = tl.constexpr(-0.5980451741186925)
SINE_4 = tl.constexpr(0.07722012894559813)
MOST_HISTORY = 64  # rows; the widest convolution looks 50 back
FEW_ROWS = 16_384  # below these, small tiles fill the device better


@triton.jit
def snake(x, alpha):
    """x + sin(alpha x)^2 / alpha. The square has period pi, so half a turn is all that has to be reduced."""
    turns = x * (alpha * PER_PI)
    turns -= tl.floor(turns + 0.5)
    square = turns * turns
    sine = turns * (SINE_0 + square * (SINE_1 + square * (SINE_2 + square * (SINE_3 + square * SINE_4))))
    return x + sine * sine * (1.0 / (alpha + 1e-9))


@triton.jit
def keep_history(
    x, history, source, target, is_first, rows, reach, x_row, width, PAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows rows - reach .. rows of what a lane has seen become its next history."""
    place = tl.arange(0, PAST)
    row = rows - reach + place
    is_new = row >= 0
    is_there = (place < reach) & (is_new | (is_first == 0))
    old, new = history + source * reach * width, history + target * reach * width
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        from_new = x + row[:, None] * x_row + column
        from_old = old + (rows + place)[:, None] * width + column
        kept = tl.load(tl.where(is_new[:, None], from_new, from_old), mask=is_there[:, None], other=0.0)
        tl.store(new + place[:, None] * width + column, kept, mask=(place < reach)[:, None])


@triton.jit(do_not_specialize=["taps", "dilation", "rate", "extra"])
def conv(
    x,  # [L, T, I], rows and lanes strided
    history,  # [state rows, (taps - 1) * dilation, I]
    weight,  # [taps * I, O]
    bias,  # [O] float32
    plan,  # int32 [L, FIELDS]
    first_add,  # [L, T, O] float32, added to the result
    second_add,
    third_add,
    kept,  # [L, T, O] float32, the result
    operands,  # [NUM_OPERANDS, L, T, O], the result under each activation
    alpha,  # [NUM_OPERANDS, O] of snakes
    x_lane,
    x_row,
    kept_lane,
    lane_size,  # T * O
    operand_size,  # L * T * O
    num_in,
    num_out,
    taps,
    dilation,
    rate,  # rows of a frame
    extra,  # rows more
    scale,
    slope,
    HAS_HISTORY: tl.constexpr,
    NUM_ADDS: tl.constexpr,
    KEEPS: tl.constexpr,
    NUM_OPERANDS: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    lane = tl.program_id(1)
    block = tl.program_id(0)
    plan += lane * FIELDS
    frames = tl.load(plan + FRAMES)
    if frames == 0:
        return
    is_first = tl.load(plan + IS_FIRST)
    source = tl.load(plan + SOURCE)
    reach = (taps - 1) * dilation
    x += lane * x_lane
    if HAS_HISTORY:  # noqa: SIM102, known when the kernel is compiled
        if block == tl.num_programs(0) - 1:
            target = tl.load(plan + TARGET)
            keep_history(x, history, source, target, is_first, frames * rate, reach, x_row, num_in, PAST, BLOCK_IN)
            return
    columns = num_out // BLOCK_OUT
    start = block // columns * BLOCK_T
    rows = frames * rate + extra
    if start >= rows:
        return
    t = start + tl.arange(0, BLOCK_T)
    is_row = t < rows
    i = tl.arange(0, BLOCK_IN)
    o = block % columns * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    chunks = num_in // BLOCK_IN
    past = history + (source + 1) * reach * num_in
    weights = weight + i[:, None] * num_out + o[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_OUT), dtype=tl.float32)
    for step in range(taps * chunks):
        tap = step // chunks
        column = (step - tap * chunks) * BLOCK_IN + i[None, :]
        row = t + (tap * dilation - reach)
        places = x + row[:, None] * x_row + column
        is_there = is_row
        if HAS_HISTORY:
            is_new = row >= 0
            places = tl.where(is_new[:, None], places, past + row[:, None] * num_in + column)
            is_there = is_row & (is_new | (is_first == 0))
        part = tl.load(places, mask=is_there[:, None], other=0.0)
        total = tl.dot(part, tl.load(weights), total, input_precision=PRECISION)
        weights += BLOCK_IN * num_out
    value = total + tl.load(bias + o)[None, :]
    place = lane * lane_size + t[:, None] * num_out + o[None, :]
    mask = is_row[:, None]
    if NUM_ADDS > 0:
        value += tl.load(first_add + place, mask=mask, other=0.0)
    if NUM_ADDS > 1:
        value += tl.load(second_add + place, mask=mask, other=0.0)
    if NUM_ADDS > 2:
        value += tl.load(third_add + place, mask=mask, other=0.0)
    value *= scale
    if KEEPS:
        tl.store(kept + lane * kept_lane + t[:, None] * num_out + o[None, :], value, mask=mask)
    for number in tl.static_range(NUM_OPERANDS):
        if ACT == SNAKE:
            result = snake(value, tl.load(alpha + number * num_out + o)[None, :])
        elif ACT == LEAKY:
            result = tl.where(value > 0, value, value * slope)
        else:
            result = tl.where(value > 0, value, tl.exp(value) - 1.0)
        if operands.dtype.element_ty == tl.float16:
            # An overflow would turn to infinity and then to a lane's end; a NaN must stay one.
            result = tl.minimum(result, HALF_MAX, propagate_nan=tl.PropagateNan.ALL)
            result = tl.maximum(result, -HALF_MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(operands + number * operand_size + place, result.to(operands.dtype.element_ty), mask=mask)


class FusedConv:
    """plain_conv in one launch; the rows that a lane doesn't have hold anything."""

    def __init__(self) -> None:
        self._is_rehearsing = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within, calls compile what they would launch, several at a time, and launch nothing."""
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
            self._is_rehearsing = True
            try:
                yield
            finally:
                self._is_rehearsing = False

    def __call__(
        self, x: Tensor, layer: Layer, plan: Plan, finish: Finish, rate: int, extra: int
    ) -> tuple[Tensor | None, Tensor]:
        lanes, rows, num_in = x.shape
        num_out = layer.weight.shape[1]
        kept = finish.into
        if kept is None and finish.keeps:
            kept = x.new_empty(lanes, rows, num_out, dtype=torch.float32)
        operands = x.new_empty(finish.num_operands, lanes, rows, num_out)
        blocks = block_sizes(layer, x.dtype, lanes * rows)
        has_history = layer.history is not None
        programs = triton.cdiv(rows, blocks["BLOCK_T"]) * (num_out // blocks["BLOCK_OUT"]) + has_history
        unused = layer.bias
        self._run(
            (programs, lanes),
            x,
            layer.history if has_history else x,
            layer.weight,
            layer.bias,
            plan.table,
            *[*finish.adds, unused, unused, unused][:3],
            unused if kept is None else kept,
            operands,
            unused if finish.alpha is None else finish.alpha,
            x.stride(0),
            x.stride(1),
            0 if kept is None else kept.stride(0),
            rows * num_out,
            lanes * rows * num_out,
            num_in,
            num_out,
            layer.taps,
            layer.dilation,
            rate,
            extra,
            finish.scale,
            finish.slope,
            HAS_HISTORY=has_history,
            NUM_ADDS=len(finish.adds),
            KEEPS=kept is not None,
            NUM_OPERANDS=finish.num_operands,
            ACT=-1 if finish.act is None else int(finish.act),
            PRECISION="ieee" if layer.is_pitch else "tf32x3",
            PAST=MOST_HISTORY,
            **blocks,
        )
        return kept, operands

    def _run(self, grid: tuple[int, int], *args: object, **options: object) -> None:
        if self._is_rehearsing:
            conv.warmup(*args, grid=grid, **options)
        else:
            conv[grid](*args, **options)


def block_sizes(layer: Layer, dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Tiles of a launch over so many rows."""
    num_out, num_in = layer.weight.shape[1], layer.weight.shape[0] // layer.taps
    if layer.is_pitch:
        sizes = {"BLOCK_T": 32, "BLOCK_IN": 32, "BLOCK_OUT": 64, "num_warps": 4, "num_stages": 2}
    elif dtype == torch.float32:
        sizes = {"BLOCK_T": 64, "BLOCK_IN": 32, "BLOCK_OUT": 64, "num_warps": 4, "num_stages": 3}
    elif rows < FEW_ROWS:
        sizes = {"BLOCK_T": 64, "BLOCK_IN": 64, "BLOCK_OUT": 64, "num_warps": 4, "num_stages": 4}
    else:
        sizes = {"BLOCK_T": 128, "BLOCK_IN": 64, "BLOCK_OUT": 128, "num_warps": 8, "num_stages": 3}
    return sizes | {
        "BLOCK_IN": largest_block(num_in, sizes["BLOCK_IN"]),
        "BLOCK_OUT": largest_block(num_out, sizes["BLOCK_OUT"]),
    }


def largest_block(width: int, most: int) -> int:
    """The largest power of two up to `most` that divides a width."""
    return min(most, width & -width)
