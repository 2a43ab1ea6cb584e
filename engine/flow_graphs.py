"""The flow's steps as captured graphs: one per number of units and of table rows, and what each of them costs.

A launch sends one table of indices to a buffer of fixed address and replays the smallest graph that takes it; the rest
of the graph's units are nobody's. More units than one graph takes, or than it takes well, go in several launches: the
first frames of a later one then stand behind the tails that the earlier one left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.attention import Clock, Columns, Paged, Unit, Units, fastest, median_ms, paged_back_ends, unit_columns
from engine.graphs import Graphs
from engine.noise import MAX_FRAMES

if TYPE_CHECKING:
    from engine.flow import Flow, FlowStore

logger = logging.getLogger(__name__)

UNIT_TIERS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)
PAGE_TIERS = (8, 32)  # and the most that the fixed noise allows
TYPICAL_PAGES = 6  # of a prompt of five seconds and a row's own chunk
GATHER_BYTES = 1 << 30  # a back end that copies keys first is not tried beyond this


class FlowGraphs:
    """Captured launches over one store. The clock tells the milliseconds of a run."""

    def __init__(
        self, flow: Flow, store: FlowStore, graphs: Graphs, *, most_units: int, clock: Clock = median_ms
    ) -> None:
        self.flow, self.store, self.clock = flow, store, clock
        self.tiers = [
            tier for tier in UNIT_TIERS if tier <= most_units and self._own_pages(tier) <= store.pool.num_pages
        ]
        most_pages = min(-(-MAX_FRAMES // flow.shape.chunk_frames), store.pool.num_pages)
        self.page_tiers = sorted({min(tier, most_pages) for tier in PAGE_TIERS} | {most_pages})
        rows = max(Units.COLUMNS + most_pages, flow.laying_rows)
        self._table = torch.empty(rows * self.tiers[0], dtype=torch.int64, device=flow.device)
        self._clear_nobody()
        store.data[:, :, 0].normal_()  # what the attentions are timed on; before any request all pages are free to use
        self._lay = {tier: self._captured_lay(graphs, tier) for tier in self.tiers}
        self._advance = {
            (tier, pages): self._captured_advance(graphs, tier, pages)
            for tier in self.tiers
            for pages in reversed(self.page_tiers)
        }
        self.split = cheapest({tier: self._measured(tier) for tier in self.tiers})
        shown = ", ".join(f"{tier}: {self.step_ms(tier):.2f}" for tier in reversed(self.tiers))
        logger.info("flow, ms of one Euler step by units: %s", shown)

    def step_ms(self, num_units: int) -> float:
        """Cost of one Euler step of so many units, as measured at the start behind TYPICAL_PAGES pages of keys."""
        whole, rest = divmod(num_units, self.tiers[0])
        return whole * self.split[self.tiers[0]][0] + self.split[rest][0]

    def parts(self, num_units: int) -> Iterator[int]:
        """Units of each launch."""
        while num_units > 0:
            part = min(num_units, self.split[min(num_units, self.tiers[0])][1])
            yield part
            num_units -= part

    # Launches

    def lay(self, columns: Columns) -> None:
        """columns as in Laying, [rows, U]."""
        at = 0
        for count in self.parts(columns.shape[1]):
            part, tier = columns[:, at : at + count], self._tier(count)
            padding = np.repeat(self.flow.laying_nobody(self.store), tier - count, axis=1)
            self._send(np.concatenate((part, padding), axis=1))
            self._lay[tier]()
            at += count

    def advance(self, units: list[Unit]) -> None:
        at = 0
        for count in self.parts(len(units)):
            part = alone(units[at : at + count])
            tier = self._tier(count)
            most = max(len(unit.pages) for unit in part)
            pages = next(pages for pages in self.page_tiers if pages >= most)
            self._send(unit_columns(part, self.store.nobody, tier, pages))
            self._advance[tier, pages]()
            at += count

    def _tier(self, count: int) -> int:
        return min(tier for tier in self.tiers if tier >= count)

    def _send(self, columns: Columns) -> None:
        host = torch.from_numpy(columns.flatten())
        host = host.pin_memory() if self._table.is_cuda else host  # see to_device() for why it may be forgotten at once
        self._table[: len(host)].copy_(host, non_blocking=True)

    # The start

    def _clear_nobody(self) -> None:
        nobody, store = self.store.nobody, self.store
        for of_page in (store.x, store.base, store.cond, store.data.movedim(4, 0)):
            of_page[nobody.pages[0]].zero_()
        for of_lane in (store.contexts, store.embeddings, store.health):
            of_lane[nobody.lane].zero_()

    def _table_of(self, rows: int, tier: int) -> Tensor:
        return self._table[: rows * tier].view(rows, tier)

    def _captured_lay(self, graphs: Graphs, tier: int) -> Callable[[], None]:
        self._send(np.repeat(self.flow.laying_nobody(self.store), tier, axis=1))
        table = self._table_of(self.flow.laying_rows, tier)
        return graphs.capture(f"flow: lay {tier}", lambda: self.flow.lay_units(table, self.store))

    def _captured_advance(self, graphs: Graphs, tier: int, pages: int) -> Callable[[], None]:
        units = Units.of(self._table_of(Units.COLUMNS + pages, tier), self.flow.shape.chunk_frames)
        back_end = self._quickest(units)
        self._send(unit_columns([], self.store.nobody, tier, pages))
        attend = back_end(self.store.data, units, self.flow.tables().angles)
        name = f"flow: step {tier}, {pages} pages"
        return graphs.capture(name, lambda: self.flow.advance_units(units, self.store, attend))

    def _own_pages(self, tier: int) -> int:
        return -(-tier // self.flow.shape.steps)

    def _typical(self, tier: int, pages: int) -> Columns:
        """A table of units at all steps, each behind solved chunks; none writes where another reads."""
        store, shape = self.store, self.flow.shape
        own, lane = self._own_pages(tier), store.nobody.lane
        past = min(TYPICAL_PAGES, pages, store.pool.num_pages - own + 1) - 1
        sample = []
        for place in range(tier):
            behind = [own + (place * past + back) % (store.pool.num_pages - own) for back in range(past)]
            listed = [*behind, place // shape.steps]
            start = past * shape.chunk_frames
            sample.append(Unit(lane, place % shape.steps, start, shape.chunk_frames, listed, 0, is_last=True))
        return unit_columns(sample, store.nobody, tier, pages)

    def _quickest(self, units: Units) -> Paged:
        """The attention for this graph's shape."""
        data, pages = self.store.data, units.table.shape[0]
        back_ends = paged_back_ends(data.dtype)
        gathered = 4 * units.count * pages * data[0, 0, 0, 0, 0].numel() * data.element_size()
        if gathered > GATHER_BYTES and len(back_ends) > 1:
            del back_ends["torch"]
        self._send(self._typical(units.count, pages))
        heads, width = data.shape[-2:]
        qkv = torch.randn(units.count, 2, units.width, 3, heads, width, device=data.device).to(data.dtype)
        attempts = {name: self._attempt(back_end, units) for name, back_end in back_ends.items()}
        label = f"of {units.count} units, {pages} pages"
        with torch.inference_mode():
            return back_ends[fastest(attempts, qkv, label, self.clock)]

    def _attempt(self, back_end: Paged, units: Units) -> Callable[[Tensor], Tensor]:
        attend = back_end(self.store.data, units, self.flow.tables().angles)
        return lambda qkv: attend(0, qkv)

    def _measured(self, tier: int) -> float:
        pages = self.page_tiers[0]
        self._send(self._typical(tier, pages))
        run = self._advance[tier, pages]
        with torch.inference_mode():
            run()
            return self.clock(run)


def alone(units: list[Unit]) -> list[Unit]:
    """Units of one launch: those before them in the call are solved, those behind them come later."""
    first = [replace(unit, fresh=place) if unit.fresh > place else unit for place, unit in enumerate(units)]
    return [*first[:-1], replace(first[-1], is_last=True)]


def cheapest(cost: dict[int, float]) -> dict[int, tuple[float, int]]:
    """For each number of units up to the largest tier: the least cost in all, and how many go first."""
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for count in range(1, max(cost) + 1):
        whole = min(tier for tier in cost if tier >= count)
        splits = [(cost[tier] + best[count - tier][0], tier) for tier in cost if tier < count]
        best[count] = min([(cost[whole], count), *splits], key=lambda split: (split[0], -split[1]))
    return best
