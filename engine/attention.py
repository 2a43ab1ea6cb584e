"""Attention of the flow: dense under a mask, over the pages of packed chunks, and over whole rows laid end to end.

Letters as in flow.py: U units (a unit is one chunk of one row with both guidance branches), w frames of a unit, W of a
page, H heads, E channels per head, P pages of a table, F frames of all rows laid end to end.

Only head 0 carries a position. Every query of a chunk sees the same keys, pages 0..own, so there is no mask, only
lengths. The twins here, in plain torch, are what a CPU runs and what the kernels are tested against.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, T, H, E] -> [B, T, H*E]
AttendLayer = Callable[[int, Tensor], Tensor]  # layer, qkv [..., 3, H, E] -> [..., H*E]
Columns = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


def dense_attend(mask: Tensor | None) -> Attend:
    """mask bool [B or 1, 1 or T, T], True = may attend."""
    spread = None if mask is None else mask[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=spread).transpose(1, 2).flatten(2)

    return attend


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., E] with its neighbouring pairs turned by cos, sin [..., E/2]."""
    a, b = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def rotate_head0(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, E] with head 0 turned by cos, sin [B or 1, T, E/2]; the other heads carry no position."""
    return torch.cat((rotate_pairs(x[:, :, :1], cos[:, :, None], sin[:, :, None]), x[:, :, 1:]), dim=2)


def rotate_head0_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turns head 0 of q and k where they lie. qkv [..., 3, H, E]; cos, sin [..., E/2]."""
    first = qkv[..., :2, 0, :]
    first.copy_(rotate_pairs(first, cos[..., None, :], sin[..., None, :]))


# --- units and their pages ---


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One chunk of one row in a packed call."""

    lane: int
    step: int
    start: int  # absolute frame
    frames: int  # real ones; the rest of the width is padding
    pages: list[int]  # pages 0..own
    fresh: int  # units of the same row right before it in this call
    is_last: bool  # of its row in this call

    @property
    def keys(self) -> int:
        return self.start + self.frames


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The index tables of one packed call: int64 views of one tensor [COLUMNS + P, U], column u for unit u."""

    COLUMNS = 7

    steps: Tensor  # [U]
    pages: Tensor  # own
    starts: Tensor  # absolute frame
    frames: Tensor  # real ones
    lanes: Tensor  # whose convolution tails stand before it
    keeps: Tensor  # whose tails it leaves: its row's if it is the last one, else nobody's
    fresh: Tensor  # units of the same row right before it
    table: Tensor  # [P, U], pages 0..own; missing places repeat page 0
    width: int  # frames computed of each

    @classmethod
    def of(cls, table: Tensor, width: int) -> Units:
        return cls(*table[: cls.COLUMNS], table=table[cls.COLUMNS :], width=width)

    @property
    def count(self) -> int:
        return self.steps.shape[0]

    def positions(self) -> Tensor:
        """Absolute frames, [U, w]."""
        return self.starts[:, None] + torch.arange(self.width, device=self.starts.device)


def unit_columns(units: list[Unit], nobody: Unit, num_units: int, num_pages: int) -> Columns:
    """The tables of Units on the host, [COLUMNS + num_pages, num_units], filled up with units of nobody."""
    units = [*units, *[nobody] * (num_units - len(units))]
    heads = [
        (
            unit.step,
            unit.pages[-1],
            unit.start,
            unit.frames,
            unit.lane,
            unit.lane if unit.is_last else nobody.lane,
            unit.fresh,
        )
        for unit in units
    ]
    counts = np.array([len(unit.pages) for unit in units])
    columns = np.empty((Units.COLUMNS + num_pages, num_units), dtype=np.int64)
    columns[: Units.COLUMNS] = np.array(heads).T
    columns[Units.COLUMNS :] = [unit.pages[0] for unit in units]
    # Transposed, the places that a unit fills lie in the order of its pages.
    columns[Units.COLUMNS :].T[np.arange(num_pages) < counts[:, None]] = [*chain.from_iterable(u.pages for u in units)]
    return columns


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Of the rotary turn at all positions, [frames, E/2], float32 at least."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] -> cos, sin [..., E/2]."""
        return self.cos[positions], self.sin[positions]

    def of(self, units: Units) -> tuple[Tensor, Tensor]:
        """cos, sin [U, 1, w, E/2] of units' frames."""
        return self.at(units.positions()[:, None])


def write_pages(data: Tensor, k_and_v: Tensor, units: Units) -> None:
    """k_and_v [U, 2, w, 2, H, E] into the units' own pages of data [S, 2, 2 (k, v), pages, W, H, E]."""
    data[units.steps, :, :, units.pages, : units.width] = k_and_v.permute(0, 1, 3, 2, 4, 5).to(data.dtype)


class EachPaged:
    """Unit by unit, neighbouring pages as a view: for the CPU, where padding is work and a launch is cheap."""

    def __init__(self, data: Tensor, units: Units, listed: list[Unit], angles: Angles) -> None:
        self.data, self.units, self.listed = data, units, listed
        self.turns = angles.of(units)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        data = self.data[:, :, layer]  # [S, 2, 2 (k, v), pages, W, H, E]
        rotate_head0_(qkv, *self.turns)
        write_pages(data, qkv[..., 1:, :, :], self.units)
        out = [self._attend(data[unit.step], unit, q) for unit, q in zip(self.listed, qkv[..., 0, :, :], strict=True)]
        return out[0][None] if len(out) == 1 else torch.stack(out)

    def _attend(self, data: Tensor, unit: Unit, q: Tensor) -> Tensor:
        """q [2, w, H, E] -> [2, w, H*E]."""
        past = self._pages_of(data, unit.pages).flatten(2, 3)[:, :, : unit.keys].to(q.dtype)
        k, v = past.transpose(2, 3).unbind(1)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2).flatten(2)

    def _pages_of(self, data: Tensor, pages: list[int]) -> Tensor:
        """Out of data [2, kv, pages, W, H, E]."""
        if pages == list(range(pages[0], pages[0] + len(pages))):
            return data[:, :, pages[0] : pages[0] + len(pages)]
        return data.index_select(2, torch.tensor(pages, device=data.device))


class GatheredPaged:
    """All units in one padded call of torch's own attention: few launches, but the keys are copied first.

    Units must be whole pages wide: what lies behind the mask has to be written, since 0 * NaN is NaN.
    """

    def __init__(self, data: Tensor, units: Units, angles: Angles) -> None:
        assert units.width == data.shape[5], f"units of {units.width} frames, pages of {data.shape[5]}"
        self.data, self.units, self.angles = data, units, angles

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        units, data = self.units, self.data[:, :, layer]
        rotate_head0_(qkv, *self.angles.of(units))
        write_pages(data, qkv[..., 1:, :, :], units)
        k, v = (self._gathered(data[:, :, kv]).to(qkv.dtype) for kv in (0, 1))
        keys = torch.arange(k.shape[2], device=data.device)
        mask = (keys < (units.starts + units.frames)[:, None]).repeat_interleave(2, dim=0)[:, None, None]
        q = qkv[..., 0, :, :].flatten(0, 1).transpose(1, 2)  # [U*2, H, W, E]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2).unflatten(0, (-1, 2))

    def _gathered(self, data: Tensor) -> Tensor:
        """Out of data [S, 2, pages, W, H, E]: [U*2, H, P*W, E]."""
        branch = torch.arange(2, device=data.device)[:, None]
        pages = data[self.units.steps[:, None, None], branch, self.units.table.T[:, None]]  # [U, 2, P, W, H, E]
        return pages.flatten(2, 3).flatten(0, 1).transpose(1, 2)


class FlashPaged:
    """FlashAttention 3 on Hopper reads pages where they lie: those of all steps and branches are one list to it."""

    def __init__(self, data: Tensor, units: Units, angles: Angles) -> None:
        assert units.width == data.shape[5], f"units of {units.width} frames, pages of {data.shape[5]}"
        self.data, self.units, self.angles = data, units, angles
        self.attend = import_module("flash_attn_interface").flash_attn_with_kvcache

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        units, (_, _, depth, _, pages, *_) = self.units, self.data.shape
        rotate_head0_(qkv, *self.angles.of(units))
        write_pages(self.data[:, :, layer], qkv[..., 1:, :, :], units)
        listed = self.data.flatten(0, 4)[
            2 * layer * pages :
        ]  # [S * 2 * depth * 2 * pages, W, H, E], from this layer on
        branch = torch.arange(2, device=qkv.device)
        at = (2 * units.steps[:, None] + branch) * 2 * depth * pages  # [U, 2]
        out = self.attend(
            qkv[..., 0, :, :].flatten(0, 1),
            listed,
            listed[pages:],
            cache_seqlens=(units.starts + units.frames).repeat_interleave(2).int(),
            page_table=(at[..., None] + units.table.T[:, None]).flatten(0, 1).int(),
        )
        return _without_extras(out).flatten(2).unflatten(0, (-1, 2))


def _without_extras(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some releases of flash-attn also give the logarithm of each softmax's sum."""
    return out if isinstance(out, Tensor) else out[0]


def paged(data: Tensor, units: Units, listed: list[Unit], angles: Angles) -> AttendLayer:
    """Torch's own attention as suits the device. The result takes qkv [U, 2, w, 3, H, E], overwrites it, writes the
    units' own pages of data [S, 2, depth, 2 (k, v), pages, W, H, E] and gives [U, 2, w, H*E]."""
    if gathers(data.device):
        return GatheredPaged(data, units, angles)
    return EachPaged(data, units, listed, angles)


def paged_width(listed: list[Unit], page_frames: int, device: torch.device) -> int:
    """Frames to compute of each unit: a last chunk that is alone needs no padding where padding is work."""
    return listed[0].frames if len(listed) == 1 and not gathers(device) else page_frames


def gathers(device: torch.device) -> bool:
    """Whether units share one padded call: few launches on an accelerator, wasted work on a CPU."""
    return device.type != "cpu"


# --- rows laid end to end ---


TILE = 128  # frames that ask together


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Index tables of whole rows laid end to end, F frames in all; their guidance twins lie behind them."""

    lengths: list[int]  # frames of each row; empty where a graph is captured that takes any
    longest: int  # no row has more frames
    positions: Tensor  # int64 [F], counted from the start of each row
    rows: Tensor  # int64 [F], which row each frame is of
    ends: Tensor  # int32 [2 * rows + 1], where rows and then twins begin and end
    tiles: Tensor  # int64 [3, tiles]: a row's first frame, its frames, and the tile's first one of them

    @property
    def most_rows(self) -> int:
        return (len(self.ends) - 1) // 2

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Whole:
        ends = np.cumsum([0, *lengths, *lengths])
        columns = (*places_of(lengths), ends, tiles_of(lengths))
        positions, rows, ends_there, tiles = (to_device(column, device) for column in columns)
        return cls(lengths, max(lengths), positions, rows, ends_there.int(), tiles)


def places_of(sizes: Sequence[int]) -> tuple[Columns, Columns]:
    """Of parts laid end to end: each place counted from the start of its part, and its part's number."""
    parts = np.repeat(np.arange(len(sizes)), sizes)
    starts = np.cumsum([0, *sizes[:-1]])
    return np.arange(len(parts)) - starts[parts], parts


def tiles_of(lengths: Sequence[int]) -> Columns:
    """See Whole.tiles."""
    number, rows = places_of([-(-length // TILE) for length in lengths])
    starts = np.cumsum([0, *lengths[:-1]])
    return np.stack((starts[rows], np.array(lengths)[rows], TILE * number))


def to_device(columns: Columns, device: torch.device) -> Tensor:
    """Without a wait: pinned memory that a copy still reads is not given out again, its allocator sees to that."""
    host = torch.from_numpy(columns)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class EachRow:
    """Row by row with torch's own attention: the twin of all the others."""

    def __init__(self, whole: Whole, angles: Angles) -> None:
        self.whole, self.angles = whole, angles

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [1, 2, F, 3, H, E], overwritten -> [1, 2, F, H*E]."""
        turn_rows_(qkv, self.whole.positions, self.angles)
        lengths = 2 * self.whole.lengths or [n for n in self.whole.ends.diff().tolist() if n]
        parts = qkv.flatten(0, 2).permute(1, 2, 0, 3).split(lengths, dim=2)  # [3, H, n, E] each
        out = [F.scaled_dot_product_attention(*part).transpose(0, 1) for part in parts]
        return torch.cat(out).view(*qkv.shape[:3], -1)


Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor | tuple[Tensor, ...]]
Turn = Callable[[Tensor, Tensor, Angles], None]  # qkv [1, 2, F, 3, H, E], positions [F]


def turn_rows_(qkv: Tensor, positions: Tensor, angles: Angles) -> None:
    """Turns head 0 of q and k where they lie."""
    rotate_head0_(qkv, *angles.at(positions))


class VarlenRows:
    """One call of a kernel for rows of any length: q, k, v [F, H, E], ends twice, longest twice -> [F, H, E]."""

    def __init__(self, whole: Whole, angles: Angles, kernel: Varlen, turn: Turn = turn_rows_) -> None:
        self.whole, self.angles, self.kernel, self.turn = whole, angles, kernel, turn

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [1, 2, F, 3, H, E], overwritten -> [1, 2, F, H*E]."""
        self.turn(qkv, self.whole.positions, self.angles)
        ends, longest = self.whole.ends, self.whole.longest
        out = self.kernel(*qkv.flatten(0, 2).unbind(1), ends, ends, longest, longest)
        return _without_extras(out).view(*qkv.shape[:3], -1)


# --- the choice ---

Clock = Callable[[Callable[[], object]], float]  # milliseconds of one run
Paged = Callable[[Tensor, Units, Angles], AttendLayer]  # data, units, angles
Rows = Callable[[Whole, Angles], AttendLayer]
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # relative RMS
ROWS_MEASURED = ((1, 500), (8, 500), (64, 500))  # rows, frames of each
VARLEN = {  # where each kernel is, if it is installed
    "torch-varlen": ("torch.nn.attention.varlen", "varlen_attn"),
    "fa2": ("flash_attn", "flash_attn_varlen_func"),
    "fa3": ("flash_attn_interface", "flash_attn_varlen_func"),
    "fa4": ("flash_attn.cute", "flash_attn_varlen_func"),
}


def paged_back_ends(dtype: torch.dtype) -> dict[str, Paged]:
    """Those that are installed and take this dtype; torch's own is always there, and first."""
    found: dict[str, Paged] = {"torch": GatheredPaged}
    if has_kernels(dtype):
        found |= import_module("engine.flow_kernels").paged_launches(dtype)
    if dtype in (torch.bfloat16, torch.float16) and is_installed("flash_attn_interface"):
        found["fa3"] = FlashPaged
    return found


def rows_back_ends(dtype: torch.dtype) -> dict[str, Rows]:
    """Those that are installed and take this dtype; torch's own, row by row, is always there, and first."""
    found: dict[str, Rows] = {"torch": EachRow}
    turn: Turn = turn_rows_
    if has_kernels(dtype):
        kernels = import_module("engine.flow_kernels")
        found |= kernels.rows_launches(dtype)
        turn = kernels.turn_rows_
    if dtype in (torch.bfloat16, torch.float16):
        for name, (module, function) in VARLEN.items():
            if is_installed(module):
                found[name] = partial(VarlenRows, kernel=getattr(import_module(module), function), turn=turn)
    return found


@cache
def has_kernels(dtype: torch.dtype) -> bool:
    """Whether the flow's kernels take this dtype and Triton can compile one here; if not, the reason is logged."""
    if not is_installed("triton") or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    try:
        import_module("engine.flow_kernels").try_out()
    except Exception as failure:
        logger.warning("Triton compiles nothing here, so the flow runs in plain torch: %s", failure)
        return False
    return True


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package it is in
        return False


def fastest(attempts: Mapping[str, Callable[[Tensor], Tensor]], qkv: Tensor, label: str, clock: Clock) -> str:
    """The quickest attempt that gives the first one's result but for rounding. Logs all times, and what is left out.

    Waits for the device: only for the start.
    """
    bound = BOUNDS[qkv.dtype]
    times: dict[str, float] = {}
    want = next(iter(attempts.values()))(qkv.clone()).double()
    for name, attempt in attempts.items():
        try:
            error = float((attempt(qkv.clone()).double() - want).norm() / want.norm())
        except Exception as failure:  # a back end of another release or for another chip
            logger.warning("attention %s: %s is left out: %s", label, name, failure)
            continue
        if not error <= bound:
            logger.warning("attention %s: %s is left out: off by %.1e", label, name, error)
            continue
        times[name] = clock(partial(attempt, qkv.clone()))  # a copy: attempts turn head 0 where it lies
    shown = ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(times.items(), key=lambda item: item[1]))
    logger.info("attention %s, ms: %s", label, shown)
    return min(times, key=times.__getitem__)


@dataclass(frozen=True, slots=True, eq=False)
class RowsChoice:
    """The attention over whole rows that was quickest for so many frames."""

    by_frames: Mapping[int, Rows]

    def of(self, frames: int) -> Rows:
        return self.by_frames[min(self.by_frames, key=lambda measured: abs(math.log(measured / frames)))]

    @classmethod
    def measured(cls, angles: Angles, like: Tensor, clock: Clock) -> RowsChoice:
        """like [H, E], of the device and dtype in question."""
        chosen, back_ends = {}, rows_back_ends(like.dtype)
        for rows, frames in ROWS_MEASURED:
            whole = Whole.of([frames] * rows, like.device)
            qkv = torch.randn(1, 2, rows * frames, 3, *like.shape, device=like.device).to(like.dtype)
            attempts = {name: partial(back_end(whole, angles), 0) for name, back_end in back_ends.items()}
            name = fastest(attempts, qkv, f"of {rows} whole rows of {frames} frames", clock)
            chosen[rows * frames] = back_ends[name]
        return cls(chosen)


def median_ms(attempt: Callable[[], object], rounds: int = 5) -> float:
    """Time of one run on the current stream of the current CUDA device."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in marks:
        start.record()
        attempt()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)
