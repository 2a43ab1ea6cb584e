"""Whole rows, looking both ways, laid end to end in slots of fixed address, and their captured launches.

A group of rows brings one table of indices, prompts' mels and speakers; one body lays it, and a run for each Euler step
of another, which counts its own steps, solves it. Captured once per number of frames, so a group costs the host about a
dozen launches.
Letters as in flow.py; R rows that a table takes. What fills a table up are rows of nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention import TILE, AttendLayer, Columns, EachRow, VarlenRows, Whole, places_of, tiles_of
from engine.dit import FRAMES_PER_TOKEN, PreLookahead
from engine.graphs import Graphs

if TYPE_CHECKING:
    from engine.flow import Flow

NO_TOKEN = -1
WHOLE_TIERS = (
    *range(32_768, 16_384, -4_096),
    *range(16_384, 8_192, -2_048),
    *range(8_192, 4_096, -1_024),
    *range(4_096, 2_048, -512),
    2_048,
    1_536,
    1_024,
    512,
)  # frames, prompts included; a tenth of them is nobody's, on average
MOST_ROWS = 128  # of a captured table, one of which is nobody's
SHORT_FRAMES = 1_024  # a kernel that is launched for the longest row is captured for rows up to this; else tiles serve


class Table(NamedTuple):
    """Index tables of rows laid end to end, N tokens: int64 views of one tensor, or arrays to fill it."""

    rows: Tensor | Columns  # [N], which row a token is of
    positions: Tensor | Columns  # [N], counted from the start of its row
    ids: Tensor | Columns  # [N + 5 R]: each row's behind two places without a token, and before three
    given: Tensor | Columns  # [R], frames of the prompt's mel
    ends: Tensor | Columns  # [2 R + 1], see Whole
    tiles: Tensor | Columns  # [3 * tiles], see Whole

    @staticmethod
    def sizes(tokens: int, rows: int, tiles: int, lookahead: int) -> list[int]:
        between = PreLookahead.BEHIND + lookahead
        return [tokens, tokens, tokens + between * rows, rows, 2 * rows + 1, 3 * tiles]

    @classmethod
    def of(
        cls, ids: Sequence[Columns], given: Sequence[int], *, tokens: int, rows: int, tiles: int, lookahead: int
    ) -> Table:
        """Filled up to so many tokens, rows and tiles; tokens of nobody belong to the rows behind the last one."""
        sizes, lengths = [len(row) for row in ids], [FRAMES_PER_TOKEN * len(row) for row in ids]
        used, unused = sum(sizes), rows - len(ids)
        assert unused > 0 or used == tokens, f"{used} of {tokens} tokens used, and no row left for the others"
        number, which = places_of(sizes)
        behind, ahead = np.full(PreLookahead.BEHIND, NO_TOKEN), np.full(lookahead, NO_TOKEN)
        flat = np.concatenate([part for row in ids for part in (behind, row, ahead)])
        asking, size = tiles_of(lengths), cls.sizes(tokens, rows, tiles, lookahead)
        frames, end = FRAMES_PER_TOKEN * tokens, FRAMES_PER_TOKEN * used
        own = np.concatenate((np.cumsum([0, *lengths]), np.linspace(end, frames, unused + 1, dtype=np.int64)[1:]))
        return cls(
            filled(which, size[0], len(ids)),
            filled(number, size[1], 0),
            filled(flat, size[2], NO_TOKEN),
            filled(np.array(given), rows, 0),
            np.concatenate((own, frames + own[1:])),
            np.stack([filled(column, tiles, 0) for column in asking]).flatten(),
        )


def filled(column: Columns, size: int, filler: int) -> Columns:
    return np.pad(column, (0, size - len(column)), constant_values=filler)


@dataclass(frozen=True, slots=True, eq=False)
class WholeSlots:
    """Where whole rows of F frames together lie while they are solved."""

    flat: Tensor  # of the table
    table: Table
    whole: Whole  # written by the body that lays them, but for its tiles
    x: Tensor  # [F, M]
    base: Tensor  # [F, D]
    cond: Tensor  # [F, M], at the start of each row its prompt's mel
    embeddings: Tensor  # [R, 192]
    step: Tensor  # int64 [1], counted by the body that solves

    @classmethod
    def empty(
        cls, flow: Flow, frames: int, rows: int, tiles: int, longest: int, lengths: Sequence[int] = ()
    ) -> WholeSlots:
        """See Whole for the last two."""
        shape, device, dtype, wide = flow.shape, flow.device, flow.dtype, flow.wide
        size = sum(Table.sizes(frames // FRAMES_PER_TOKEN, rows, tiles, shape.lookahead))
        positions, which = torch.zeros(2, frames, dtype=torch.int64, device=device)
        none = torch.empty(0)  # first() makes the views
        slots = cls(
            torch.zeros(size, dtype=torch.int64, device=device),
            Table(*[none] * len(Table._fields)),
            Whole([*lengths], longest, positions, which, none, none),
            torch.empty(frames, shape.mel, dtype=wide, device=device),
            torch.empty(frames, shape.dim, dtype=dtype, device=device),
            torch.empty(frames, shape.mel, dtype=wide, device=device),
            torch.zeros(rows, shape.speaker, dtype=wide, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        return slots.first(frames, tiles, longest, shape.lookahead)

    def first(self, frames: int, tiles: int, longest: int, lookahead: int) -> WholeSlots:
        """The same memory for fewer frames."""
        rows = len(self.embeddings)
        sizes = Table.sizes(frames // FRAMES_PER_TOKEN, rows, tiles, lookahead)
        flat = self.flat[: sum(sizes)]
        table = Table(*flat.split(sizes))
        ends = torch.zeros(2 * rows + 1, dtype=torch.int32, device=flat.device)
        positions, which = self.whole.positions[:frames], self.whole.rows[:frames]
        assert isinstance(table.tiles, Tensor), "views of the flat table"
        whole = Whole(self.whole.lengths, longest, positions, which, ends, table.tiles.view(3, tiles))
        return WholeSlots(
            flat, table, whole, self.x[:frames], self.base[:frames], self.cond[:frames], self.embeddings, self.step
        )

    @property
    def frames(self) -> int:
        return len(self.x)

    def send(self, ids: Sequence[Columns], given: Sequence[int], lookahead: int) -> None:
        """Without a wait, as to_device()."""
        rows, tiles = len(self.embeddings), self.whole.tiles.shape[1]
        tokens = self.frames // FRAMES_PER_TOKEN
        table = Table.of(ids, given, tokens=tokens, rows=rows, tiles=tiles, lookahead=lookahead)
        host = torch.from_numpy(np.concatenate(table))
        self.flat.copy_(host.pin_memory() if self.flat.is_cuda else host, non_blocking=True)


class Solve(NamedTuple):
    """A group's slots and what runs on them: once to lay it, then once for each Euler step."""

    slots: WholeSlots
    lay: Callable[[], None]
    step: Callable[[], None]


def eager_solve(flow: Flow, lengths: Sequence[int]) -> Solve:
    """Slots of just this size; nothing is captured."""
    tiles = tiles_of(lengths).shape[1]
    slots = WholeSlots.empty(flow, sum(lengths), len(lengths), tiles, max(lengths), lengths)
    attend = flow.rows_attention(slots.whole)
    return Solve(slots, partial(flow.lay_whole, slots), partial(flow.step_whole, slots, attend))


class WholeGraphs:
    """Captured launches; all tiers lie in the slots of the largest."""

    def __init__(
        self,
        flow: Flow,
        graphs: Graphs,
        *,
        tiers: Sequence[int] = WHOLE_TIERS,
        most_rows: int = MOST_ROWS,
        short: int = SHORT_FRAMES,
    ) -> None:
        self.most_frames, self.most_rows, self.short = tiers[0], most_rows - 1, short
        self._solves: dict[tuple[int, bool], Solve] = {}
        slots = WholeSlots.empty(flow, tiers[0], most_rows, self._tiles(tiers[0]), short)
        for tier in tiers:
            own = slots.first(tier, self._tiles(tier), min(tier, short), flow.shape.lookahead)
            own.flat.zero_()
            lay = graphs.capture(f"flow: lay whole {tier}", partial(flow.lay_whole, own))
            quickest = flow.rows_attention(own.whole)
            if isinstance(quickest, EachRow) and flow.device.type != "cpu":  # it would ask the host
                quickest = self._tiled(flow, own.whole)
            step = self._captured(flow, graphs, own, quickest)
            self._solves[tier, False] = self._solves[tier, True] = Solve(own, lay, step)
            if isinstance(quickest, VarlenRows) and tier > short:
                step = self._captured(flow, graphs, own, self._tiled(flow, own.whole), " of long rows")
                self._solves[tier, True] = Solve(own, lay, step)

    def of(self, lengths: Sequence[int]) -> Solve | None:
        """The smallest that takes rows of so many frames each, if one does."""
        is_long, frames = max(lengths) > self.short, sum(lengths)
        tier = min((tier for tier, _ in self._solves if tier >= frames), default=None)
        return None if tier is None or len(lengths) > self.most_rows else self._solves[tier, is_long]

    def _tiles(self, frames: int) -> int:
        return frames // TILE + self.most_rows + 1

    def _tiled(self, flow: Flow, whole: Whole) -> AttendLayer:
        tiled: AttendLayer = import_module("engine.flow_kernels").FusedRows(whole, flow.tables().angles)
        return tiled

    def _captured(
        self, flow: Flow, graphs: Graphs, slots: WholeSlots, attend: AttendLayer, of_what: str = ""
    ) -> Callable[[], None]:
        slots.step.zero_()
        return graphs.capture(f"flow: step whole {slots.frames}{of_what}", partial(flow.step_whole, slots, attend))
