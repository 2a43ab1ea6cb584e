"""The flow's fused pieces as Triton kernels, each with its twin in plain torch elsewhere. Needs Triton to import.

Letters as in flow.py. Products are computed as their operands are stored, sums, norms and angles in float32; float32
operands are never cut to TF32. Parity with the twins: tests/engine/test_flow_kernels.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.attention import TILE, Angles, Paged, Rows, Units, Whole
from engine.dit import NORM_EPS, Block, Estimator, Modulations, Packed

LOG2_E = 1.4426950408889634


def try_out() -> None:
    """Compiles and runs the smallest kernel. Raises what Triton raises."""
    device = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU only in Triton's interpreter
    row = torch.ones(1, 16, device=device)
    gated_norm(row[None, None], None, None, row, row)


class FusedPacked(Packed):
    """The packed network with its norms, gates and position convolutions in one kernel each."""

    def __init__(self, net: Estimator, modulations: Modulations) -> None:
        super().__init__(net, modulations)
        self.taps = [tap_major(conv) for conv in self.convs]

    def entered(self, x: Tensor, base: Tensor, pages: Tensor) -> Tensor:
        h, bias = self.projected(x), self.net.input_embed.proj.bias
        units, frames, dim = h.shape
        out = h.new_empty(units, 2, frames, dim)
        enter_kernel[(frames, units)](
            h, base, bias, pages, out, frames, dim, base.stride(0), BLOCK=triton.next_power_of_2(dim), num_warps=4
        )
        return out

    def with_history(self, h: Tensor, units: Units, contexts: Tensor) -> Tensor:
        frames, dim = h.shape[2:]
        context = contexts.shape[3]
        out = h.new_empty(units.count, 2, context + frames, dim)
        history_kernel[(context + frames, 2 * units.count)](
            h,
            contexts,
            out,
            units.steps,
            units.lanes,
            units.fresh,
            units.frames,
            units.count,
            frames,
            dim,
            *contexts.stride()[:3],
            CONTEXT=context,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=4,
        )
        return out

    def move(self, x: Tensor, velocity: Tensor, units: Units, spans: Tensor, guidance: float, health: Tensor) -> None:
        values = units.width * x.shape[-1]
        move_kernel[(units.count,)](
            x,
            velocity,
            units.pages,
            units.steps,
            units.lanes,
            spans,
            health,
            guidance,
            values,
            x.stride(0),
            BLOCK=triton.next_power_of_2(values),
            num_warps=8,
        )

    def conv_mish(self, x: Tensor, index: int) -> Tensor:
        return conv_mish(x, self.taps[index], self.convs[index].bias)

    def conv_mish_rows(self, h: Tensor, whole: Whole, index: int) -> Tensor:
        return conv_mish(h.contiguous(), self.taps[index], self.convs[index].bias, whole.positions)

    def normed(self, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return gated_norm(h, None, None, shift, scale)[1]

    def gated(self, h: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return gated_norm(h, y, gate, shift, scale)

    def hidden(self, a: Tensor, block: Block) -> Tensor:
        if a.dtype == torch.float32:
            return super().hidden(a, block)
        layer = block.ff["ff"][0][0]
        # cuBLASLt's own end of a product, tanh form as ours.
        flat = torch._addmm_activation(layer.bias, a.flatten(0, -2), layer.weight.t(), use_gelu=True)
        return flat.view(*a.shape[:-1], -1)


# --- the ends of a step ---


@triton.jit(do_not_specialize=["frames"])
def enter_kernel(h, base, bias, pages, out, frames, dim, page_stride, BLOCK: tl.constexpr):
    frame = tl.program_id(0)
    unit = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < dim
    x = tl.load(h + (unit * frames + frame) * dim + e, mask=real, other=0.0).to(tl.float32)
    given = base + tl.load(pages + unit) * page_stride + frame * dim
    to = out + (2 * unit * frames + frame) * dim + e
    tl.store(to, (x + tl.load(given + e, mask=real, other=0.0).to(tl.float32)).to(out.dtype.element_ty), mask=real)
    free = x + tl.load(bias + e, mask=real, other=0.0).to(tl.float32)
    tl.store(to + frames.to(tl.int64) * dim, free.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_units"])
def history_kernel(
    h,
    contexts,
    out,
    steps,
    lanes,
    fresh,
    frames,
    num_units,
    width,
    dim,
    lane_stride,
    step_stride,
    branch_stride,
    CONTEXT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of the history is read and then replaced by the same program, so no other can have replaced it before."""
    place = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    unit = pair // 2
    e = tl.arange(0, BLOCK)
    real = e < dim
    to = out + (pair * (CONTEXT + width) + place) * dim + e
    if place >= CONTEXT:
        tl.store(to, tl.load(h + (pair * width + place - CONTEXT) * dim + e, mask=real), mask=real)
    elif tl.load(fresh + unit) > 0:
        tl.store(to, tl.load(h + ((pair - 2) * width + width - CONTEXT + place) * dim + e, mask=real), mask=real)
    else:
        kept = contexts + tl.load(lanes + unit) * lane_stride + tl.load(steps + unit) * step_stride
        kept += (pair % 2) * branch_stride + place * dim
        tl.store(to, tl.load(kept + e, mask=real), mask=real)
        last = unit
        while tl.load(fresh + last + 1, mask=last + 1 < num_units, other=0) > 0:
            last += 1
        start = tl.load(frames + last) - CONTEXT
        if start >= 0:
            own = ((2 * last + pair % 2) * width + start + place) * dim
            tl.store(kept + e, tl.load(h + own + e, mask=real), mask=real)


@triton.jit(do_not_specialize=["guidance"])
def move_kernel(x, velocity, pages, steps, lanes, spans, health, guidance, values, page_stride, BLOCK: tl.constexpr):
    unit = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < values
    given = tl.load(velocity + 2 * unit * values + e, mask=real, other=0.0).to(tl.float32)
    free = tl.load(velocity + (2 * unit + 1) * values + e, mask=real, other=0.0).to(tl.float32)
    at = x + tl.load(pages + unit) * page_stride + e
    span = tl.load(spans + tl.load(steps + unit))
    moved = tl.load(at, mask=real, other=0.0) + span * (given + (guidance - 1.0) * (given - free))
    tl.store(at, moved, mask=real)
    is_finite = tl.abs(tl.sum(moved, axis=0)) < float("inf")
    tl.atomic_add(health + tl.load(lanes + unit), tl.where(is_finite, 0.0, float("nan")))


# --- h + gate * y, and its norm ---


def gated_norm(h: Tensor, y: Tensor | None, gate: Tensor | None, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """h, y [U, 2, w, D]; gate, shift, scale [U, D], D contiguous -> h + gate * y, or h itself, and its norm."""
    moved = h if y is None else torch.empty_like(h)
    out = torch.empty_like(h)
    dim = h.shape[-1]
    rows = h.numel() // dim
    gated_norm_kernel[(rows,)](
        h,
        h if y is None else y,
        shift if gate is None else gate,
        shift,
        scale,
        moved,
        out,
        rows // h.shape[0],
        shift.stride(0) if gate is None else gate.stride(0),
        shift.stride(0),
        scale.stride(0),
        dim,
        NORM_EPS,
        IS_GATED=y is not None,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return moved, out


@triton.jit(do_not_specialize=["rows_per_unit"])
def gated_norm_kernel(
    h,
    y,
    gate,
    shift,
    scale,
    moved,
    out,
    rows_per_unit,
    gate_stride,
    shift_stride,
    scale_stride,
    dim,
    eps,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    unit = row // rows_per_unit
    e = tl.arange(0, BLOCK)
    real = e < dim
    x = tl.load(h + row * dim + e, mask=real, other=0.0).to(tl.float32)
    if IS_GATED:
        by = tl.load(gate + unit * gate_stride + e, mask=real, other=0.0).to(tl.float32)
        x += by * tl.load(y + row * dim + e, mask=real, other=0.0).to(tl.float32)
        tl.store(moved + row * dim + e, x.to(moved.dtype.element_ty), mask=real)
    mean = tl.sum(x, axis=0) / dim
    centred = tl.where(real, x - mean, 0.0)
    x = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / dim + eps)
    x *= 1.0 + tl.load(scale + unit * scale_stride + e, mask=real, other=0.0).to(tl.float32)
    x += tl.load(shift + unit * shift_stride + e, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * dim + e, x.to(out.dtype.element_ty), mask=real)


# --- grouped causal convolution and Mish ---


def tap_major(conv: nn.Conv1d) -> Tensor:
    """Weight [D, D/G, K] as [G, K, D/G in, D/G out]: each tap of each group is one small product."""
    return conv.weight.unflatten(0, (conv.groups, -1)).permute(0, 3, 2, 1).contiguous()


def conv_mish(x: Tensor, taps: Tensor, bias: Tensor, positions: Tensor | None = None) -> Tensor:
    """x [B, K - 1 + T, D] -> Mish of the convolution, [B, T, D].

    With positions [T] x is [B, T, D], and a frame sees zeros before position 0 of its row.
    """
    groups, kernel, width, _ = taps.shape
    batch, length, dim = x.shape
    frames = length - kernel + 1 if positions is None else length
    out = x.new_empty(batch, frames, dim)
    rows = batch * frames
    block = 32 if rows <= 400 else 64 if rows <= 6400 else 128
    conv_mish_kernel[(triton.cdiv(rows, block), groups)](
        x.contiguous(),
        taps,
        bias,
        x if positions is None else positions,
        out,
        rows,
        frames,
        dim,
        IS_WHOLE=positions is not None,
        KERNEL=kernel,
        WIDTH=width,
        PADDED=max(16, triton.next_power_of_2(width)),  # the least that tensor cores take
        BLOCK=block,
        num_warps=8 if block == 128 else 4,
        num_stages=4 if x.element_size() == 2 else 2,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "frames"])
def conv_mish_kernel(
    x,
    taps,
    bias,
    positions,
    out,
    num_rows,
    frames,
    dim,
    IS_WHOLE: tl.constexpr,
    KERNEL: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = (row < num_rows)[:, None]
    channel = tl.arange(0, PADDED)
    known = channel < WIDTH
    both = known[:, None] & known[None, :]
    if IS_WHOLE:
        first = row.to(tl.int64) - (KERNEL - 1)
        missing = KERNEL - 1 - tl.load(positions + row % frames)
    else:
        # Output frame t of a batch row reads frames t .. t + KERNEL - 1 of it.
        first = (row // frames).to(tl.int64) * (frames + KERNEL - 1) + row % frames
    from_x = x + first[:, None] * dim + group * WIDTH + channel[None, :]
    from_taps = taps + (group * KERNEL * WIDTH + channel)[:, None] * WIDTH + channel[None, :]
    acc = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
    for tap in range(KERNEL):
        there = real & known[None, :]
        if IS_WHOLE:
            there = there & (tap >= missing)[:, None]
        heard = tl.load(from_x, mask=there, other=0.0)
        acc = tl.dot(heard, tl.load(from_taps, mask=both, other=0.0), acc, input_precision="ieee")
        from_x += dim
        from_taps += WIDTH * WIDTH
    acc += tl.load(bias + group * WIDTH + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    # x * tanh(log(1 + e^x)) without the logarithm; beyond 20 it is x to the last bit.
    grown = tl.exp(tl.minimum(acc, 20.0))
    grown = grown * (grown + 2.0)
    acc = tl.where(acc > 20.0, acc, acc * grown / (grown + 2.0))
    to = out + row.to(tl.int64)[:, None] * dim + group * WIDTH + channel[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real & known[None, :])


# --- attention ---


@triton.jit
def head_rows(at, stride, rows, real, E: tl.constexpr):
    """Rows of one head, [rows, E]; zero where not real."""
    e = tl.arange(0, E)
    return tl.load(at + rows[:, None] * stride + e[None, :], mask=real[:, None], other=0.0)


@triton.jit
def turned_rows(at, stride, rows, real, cos, sin, positions, E: tl.constexpr):
    """The same, neighbouring pairs turned by the angles of their positions."""
    e = tl.arange(0, E)
    there = rows[:, None] * stride
    x = tl.load(at + there + e[None, :], mask=real[:, None], other=0.0)
    partner = tl.load(at + there + (e ^ 1)[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    angle = positions[:, None] * (E // 2) + (e // 2)[None, :]
    c = tl.load(cos + angle, mask=real[:, None], other=0.0)
    s = tl.load(sin + angle, mask=real[:, None], other=0.0) * tl.where(e % 2 == 0, -1.0, 1.0)[None, :]
    return (x.to(tl.float32) * c + partner * s).to(x.dtype)


@triton.jit
def absorb(q, k, v, seen, scale, most, total, acc):
    """One block of keys into the running softmax. scale turns scores into powers of two."""
    hidden = tl.where(seen, 0.0, float("-inf"))
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + hidden[None, :]
    now = tl.maximum(most, tl.max(scores, axis=1))
    weights = tl.exp2(scores - now[:, None])
    kept = tl.exp2(most - now)
    total = total * kept + tl.sum(weights, axis=1)
    acc = acc * kept[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return now, total, acc


class Launch(NamedTuple):
    """How a kernel is compiled: which is quickest differs by chip and by size."""

    warps: int
    stages: int
    queries: int = 0  # of a program, where pages don't give it
    keys: int = 0  # of a turn of its loop

    def __str__(self) -> str:
        tile = f"{self.queries}x{self.keys}, " if self.keys else ""
        return f"triton ({tile}{self.warps} warps, {self.stages} stages)"


# By whether the numbers are float32; the first one is taken where nothing is measured.
PAGED_LAUNCHES = {True: [Launch(8, 1)], False: [Launch(4, 3), Launch(4, 2), Launch(2, 3), Launch(2, 2), Launch(2, 4)]}
ROWS_LAUNCHES = {
    True: [Launch(4, 1, 32, 32)],
    False: [Launch(4, 3, 128, 64), Launch(8, 3, 128, 128), Launch(4, 3, 64, 64)],
}


def paged_launches(dtype: torch.dtype) -> dict[str, Paged]:
    return {str(one): partial(FusedPaged, launch=one) for one in PAGED_LAUNCHES[dtype == torch.float32]}


def rows_launches(dtype: torch.dtype) -> dict[str, Rows]:
    return {str(one): partial(FusedRows, launch=one) for one in ROWS_LAUNCHES[dtype == torch.float32]}


class FusedPaged:
    """Reads solved pages through the table and this call's chunks from qkv itself, and writes those to their pages.

    One program per unit, branch and head: a page is written by exactly one, and nobody reads it in the same call.
    """

    def __init__(self, data: Tensor, units: Units, angles: Angles, launch: Launch | None = None) -> None:
        assert units.width == data.shape[5], f"units of {units.width} frames, pages of {data.shape[5]}"
        self.data, self.units, self.angles = data, units, angles
        self.launch = launch or PAGED_LAUNCHES[data.dtype == torch.float32][0]

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        units, data = self.units, self.data[:, :, layer]
        heads, width = qkv.shape[-2:]
        out = qkv.new_empty(*qkv.shape[:3], heads * width)
        paged_kernel[(heads, 2 * units.count)](
            qkv,
            out,
            data,
            units.steps,
            units.pages,
            units.starts,
            units.frames,
            units.fresh,
            units.table,
            self.angles.cos,
            self.angles.sin,
            units.count,
            *data.stride()[:4],
            LOG2_E / math.sqrt(width),
            W=units.width,
            H=heads,
            E=width,
            ROWS=max(16, triton.next_power_of_2(units.width)),
            num_warps=self.launch.warps,
            num_stages=self.launch.stages,
        )
        return out


@triton.jit(do_not_specialize=["num_units"])
def paged_kernel(
    qkv,
    out,
    data,
    steps,
    pages,
    starts,
    frames,
    fresh,
    table,
    cos,
    sin,
    num_units,
    step_stride,
    branch_stride,
    kv_stride,
    page_stride,
    scale,
    W: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    unit = pair // 2
    rows = tl.arange(0, ROWS)
    real = rows < W
    start = tl.load(starts + unit)
    ahead = tl.load(fresh + unit)
    here = qkv + pair * W * 3 * H * E + head * E
    solved = data + tl.load(steps + unit) * step_stride + (pair % 2) * branch_stride + head * E

    q = head_rows(here, 3 * H * E, rows, real, E)
    if head == 0:
        q = turned_rows(here, 3 * H * E, rows, real, cos, sin, start + rows, E)
    most = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, E), dtype=tl.float32)

    for index in range(start // W - ahead):
        at = solved + tl.load(table + index * num_units + unit) * page_stride
        k = head_rows(at, H * E, rows, real, E)
        v = head_rows(at + kv_stride, H * E, rows, real, E)
        most, total, acc = absorb(q, k, v, real, scale, most, total, acc)

    for back in range(ahead):
        # Chunks of the same row that this call solves too: their pages are being written right now.
        there = here - (ahead - back) * 2 * W * 3 * H * E
        k = head_rows(there + H * E, 3 * H * E, rows, real, E)
        if head == 0:
            k = turned_rows(there + H * E, 3 * H * E, rows, real, cos, sin, start - (ahead - back) * W + rows, E)
        v = head_rows(there + 2 * H * E, 3 * H * E, rows, real, E)
        most, total, acc = absorb(q, k, v, real, scale, most, total, acc)

    k = head_rows(here + H * E, 3 * H * E, rows, real, E)
    if head == 0:
        k = turned_rows(here + H * E, 3 * H * E, rows, real, cos, sin, start + rows, E)
    v = head_rows(here + 2 * H * E, 3 * H * E, rows, real, E)
    e = tl.arange(0, E)
    own = solved + tl.load(pages + unit) * page_stride + rows[:, None] * (H * E) + e[None, :]
    tl.store(own, k.to(data.dtype.element_ty), mask=real[:, None])
    tl.store(own + kv_stride, v.to(data.dtype.element_ty), mask=real[:, None])
    most, total, acc = absorb(q, k, v, rows < tl.load(frames + unit), scale, most, total, acc)

    to = out + pair * W * H * E + head * E + rows[:, None] * (H * E) + e[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


def turn_rows_(qkv: Tensor, positions: Tensor, angles: Angles) -> None:
    """Turns head 0 of q and k where they lie: qkv [1, 2, F, 3, H, E], positions [F]."""
    frames, heads, width = qkv.shape[2], qkv.shape[-2], qkv.shape[-1]
    turn_kernel[(triton.cdiv(frames, 32), 2)](
        qkv, positions, angles.cos, angles.sin, frames, H=heads, E=width, ROWS=32, num_warps=4
    )


@triton.jit(do_not_specialize=["frames"])
def turn_kernel(qkv, positions, cos, sin, frames, H: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr):
    """A pair is read and written by the same thread, so nobody reads a half that has been turned already."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = (rows < frames)[:, None]
    pair = tl.arange(0, E // 2)[None, :]
    at = tl.load(positions + rows, mask=rows < frames, other=0)[:, None] * (E // 2) + pair
    c, s = tl.load(cos + at, mask=real, other=0.0), tl.load(sin + at, mask=real, other=0.0)
    here = qkv + (tl.program_id(1) * frames + rows).to(tl.int64)[:, None] * (3 * H * E) + 2 * pair
    for _ in tl.static_range(2):
        a, b = (
            tl.load(here, mask=real, other=0.0).to(tl.float32),
            tl.load(here + 1, mask=real, other=0.0).to(tl.float32),
        )
        tl.store(here, (a * c - b * s).to(qkv.dtype.element_ty), mask=real)
        tl.store(here + 1, (b * c + a * s).to(qkv.dtype.element_ty), mask=real)
        here += H * E


class FusedRows:
    """Whole rows laid end to end, each frame to all of its own row. Its launches depend on tables alone, and tiles
    without frames end at once, so a captured one takes any rows."""

    def __init__(self, whole: Whole, angles: Angles, launch: Launch | None = None) -> None:
        self.whole, self.angles, self.launch = whole, angles, launch

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        frames, heads, width = qkv.shape[2], qkv.shape[-2], qkv.shape[-1]
        turn_rows_(qkv, self.whole.positions, self.angles)
        out = qkv.new_empty(*qkv.shape[:-3], heads * width)
        launch = self.launch or ROWS_LAUNCHES[qkv.dtype == torch.float32][0]
        num_tiles = self.whole.tiles.shape[1]
        rows_kernel[(num_tiles * (TILE // launch.queries), heads, 2)](
            qkv,
            out,
            self.whole.tiles,
            num_tiles,
            frames,
            LOG2_E / math.sqrt(width),
            H=heads,
            E=width,
            PARTS=TILE // launch.queries,
            QUERIES=launch.queries,
            KEYS=launch.keys,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
        return out


@triton.jit(do_not_specialize=["num_tiles", "frames"])
def rows_kernel(
    qkv,
    out,
    tiles,
    num_tiles,
    frames,
    scale,
    H: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile, a program each
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    tile, head, branch = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    length = tl.load(tiles + num_tiles + tile).to(tl.int32)
    start = tl.load(tiles + 2 * num_tiles + tile).to(tl.int32) + tl.program_id(0) % PARTS * QUERIES
    if start >= length:
        return
    first = tl.load(tiles + tile) + branch.to(tl.int64) * frames
    asking = start + tl.arange(0, QUERIES)
    at = qkv + first * (3 * H * E) + head * E
    q = head_rows(at, 3 * H * E, asking, asking < length, E)
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    acc = tl.zeros((QUERIES, E), dtype=tl.float32)
    e = tl.arange(0, E)[None, :]
    asked = tl.arange(0, KEYS)
    keys = at + H * E + asked[:, None] * (3 * H * E) + e
    # Whole blocks of keys without a mask, so that loads run ahead of products; then what is left.
    whole = length // KEYS * KEYS
    for _ in range(0, whole, KEYS):
        scores = tl.dot(q, tl.trans(tl.load(keys)), input_precision="ieee")
        now = tl.maximum(most, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - now[:, None])
        kept = tl.exp2(most - now)
        total = total * kept + tl.sum(weights, axis=1)
        v = tl.load(keys + H * E)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        most = now
        keys += KEYS * 3 * H * E
    if whole < length:
        seen = whole + asked < length
        k = tl.load(keys, mask=seen[:, None], other=0.0)
        v = tl.load(keys + H * E, mask=seen[:, None], other=0.0)
        most, total, acc = absorb(q, k, v, seen, scale, most, total, acc)
    to = out + (first + asking)[:, None] * (H * E) + head * E + e
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=(asking < length)[:, None])
