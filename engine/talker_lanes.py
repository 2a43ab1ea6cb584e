"""The talkers of all lanes as one: prompts are seated and fed, lanes step, drawn ids come back as tickets.

A lane's state lies on the device at fixed addresses, its last id included, so a step needs the lanes' numbers and
nothing else from the host, and may be launched before the ids of the step before are known.

Letters as in engine/talker.py. Tests: tests/engine/test_talker_lanes.py.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from engine.cache import OutOfPages, PagePool
from engine.graphs import Graphs
from engine.sampler import Field, LaneDraws, Sampling, drawn, unmarked
from engine.talker import PAGE_ROWS, Limits, Span, Talker, TalkerStore, index

if TYPE_CHECKING:
    from engine.talker_paged import PagedTalker

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


class Ticket:
    """Ids on their way to the host."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """parts: ids [B] each, on the device, -1 for faulty scores; they may be overwritten by later launches."""
        self._parts = [ids.to("cpu", non_blocking=True) for ids in parts]
        self._event = None
        if any(ids.is_cuda for ids in parts):
            self._event = torch.cuda.Event()
            self._event.record()

    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def fetch(self) -> list[int | None]:
        """The ids in the order asked for, None where a lane's scores were not finite; waits if they aren't there."""
        if self._event is not None:
            self._event.synchronize()
        return unmarked([i for part in self._parts for i in part.tolist()])


@dataclass(slots=True, eq=False)
class Tenant:
    """What the host knows of a lane."""

    prompt: list[int]  # row ids
    names: list[bytes]  # of the prompt's whole pages
    pages: list[int]
    length: int  # rows launched, or there from the start
    most_rows: int


class TalkerLanes:
    """All that a talker's lanes hold, and what moves them.

    rows_per_launch  lanes that share a call. 1 (on the CPU): a lane draws the same to the bit, alone or in a crowd;
                     prompts then share no pages either, since a product's last bits depend on how many rows it has.
    """

    def __init__(self, talker: Talker, store: TalkerStore, *, lanes: int, rows_per_launch: int) -> None:
        self.talker, self.store = talker, store
        self.rows_per_launch = rows_per_launch
        self.device = store.kv.device
        self.draws = LaneDraws(lanes, talker.shape.speech_vocab, device=self.device)
        self.prompts = PromptPages(store.pool)
        self._tenants: list[Tenant | None] = [None] * lanes
        self._unsettled: list[Callable[[], None]] = []
        self._paged: PagedTalker | None = None

    def warm(self, graphs: Graphs) -> None:
        """Makes the kernels and captures their tiers; where Triton can't serve, every launch is plain PyTorch."""
        if graphs.device.type == "cuda":
            self._paged = paged_talker(self.talker, self.store, self.draws, lanes=len(self._tenants))
        if self._paged is not None:
            self._paged.warm(graphs)

    @property
    def max_rows(self) -> int:
        """What one lane can hold at most."""
        return self._paged.max_rows if self._paged else self.store.pool.num_pages * PAGE_ROWS

    # Lanes

    def seat(self, lane: int, prompt: list[int], *, sampling: Sampling, seed: int, clause: int, limits: Limits) -> int:
        """Gives a lane its prompt (row ids, see Talker.prompt_ids) and pages for all it may ever write.

        -> how many of the prompt's rows are there already, at least one fewer than all: feed from there.
        Raises OutOfPages, changing nothing, if the pages can't be had now.
        """
        assert self._tenants[lane] is None, f"lane {lane} was never freed"
        names = page_names(prompt) if self.rows_per_launch > 1 else []
        pages = self.prompts.find(names)
        shared = len(pages) * PAGE_ROWS
        most = len(prompt) + limits.max_len
        try:
            self._cover(pages, most)
        except OutOfPages:
            self.store.pool.release(pages)
            raise
        self._tenants[lane] = Tenant(prompt, names, pages, shared, most)
        min_len = limits.min_len
        self._unsettled.append(partial(self.draws.seat, lane, sampling, seed=seed, clause=clause, min_len=min_len))
        if self._paged is not None:
            self._unsettled.append(partial(self._paged.seat, lane, pages, len(prompt)))
        return shared

    def extend(self, lane: int, rows: list[int], *, limits: Limits) -> None:
        """A longer prompt for a lane that has stepped: all rows so far, the codes that were fed among them, and new
        ones, to be fed from the lane's length on. `limits.max_len` codes may follow.

        Raises OutOfPages, changing nothing, if the pages can't be had now.
        """
        tenant = self._tenant(lane)
        most = len(rows) + limits.max_len
        self._cover(tenant.pages, most)
        tenant.prompt, tenant.most_rows = rows, most
        self._unsettled.append(partial(self.draws.hold, lane, min_len=limits.min_len))
        if self._paged is not None:
            self._unsettled.append(partial(self._paged.seat, lane, tenant.pages, len(rows)))

    def free(self, lane: int) -> None:
        """Gives back a lane's pages; work in flight for it may still write them, before anything of the next tenant."""
        tenant = self._tenants[lane]
        if tenant is not None:
            self.store.pool.release(tenant.pages)
            self._tenants[lane] = None

    def _cover(self, pages: list[int], rows: int) -> None:
        while True:
            try:
                self.store.cover(pages, rows)
                return
            except OutOfPages:
                if not self.prompts.evict():
                    raise

    def _tenant(self, lane: int) -> Tenant:
        tenant = self._tenants[lane]
        assert tenant is not None, f"lane {lane} has no tenant"
        return tenant

    @property
    def num_pages(self) -> int:
        """Held by lanes; what is kept of prompts beyond that is counted apart."""
        return self.store.pool.num_used - self.prompts.num_unheld

    # Steps

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[tuple[int, int, int]]) -> Ticket:
        """Feeds (lane, start, count): prompt rows start, start+1, ... of a lane, in order and without a gap.

        The ticket holds the first ids of those lanes whose prompt this completes, in the order given.
        """
        self._settle()
        fed = [(lane, self._span(self._tenant(lane), start, count)) for lane, start, count in chunks]
        if self._paged is not None:
            parts = self._feed_paged(self._paged, fed)
        else:
            parts = [ids for group in self._groups(fed) for ids in self._feed(group)]
        for lane, _ in fed:
            self._keep_prompt(self._tenant(lane))
        return Ticket(parts)

    @torch.inference_mode()
    def decode(self, lanes: Sequence[int]) -> Ticket:
        """One more id for each lane, whose own last id is fed; every lane at most once."""
        self._settle()
        stepped = [(lane, self._span(tenant, tenant.length, 1)) for lane in lanes if (tenant := self._tenant(lane))]
        if self._paged is not None:
            return Ticket([self._paged.decode(lanes)] if lanes else [])
        return Ticket([self._step(group) for group in self._groups(stepped)])

    def _settle(self) -> None:
        """Tells the device of new tenants, on the stream that launches for them and before it does."""
        for tell in self._unsettled:
            tell()
        self._unsettled.clear()

    def _groups(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        return (items[at : at + self.rows_per_launch] for at in range(0, len(items), self.rows_per_launch))

    def _feed_paged(self, paged: PagedTalker, fed: Sequence[tuple[int, Span]]) -> list[Tensor]:
        chunks = [
            chunk
            for lane, span in fed
            for chunk in paged.chunks(lane, span.start, self._fed_ids(lane, span), is_end=self._is_end(lane, span))
        ]
        return [ids.clone() for group in paged.launches(chunks) if len(ids := paged.prefill(group))]

    def _fed_ids(self, lane: int, span: Span) -> list[int]:
        return self._tenant(lane).prompt[span.start : span.start + span.count]

    def _is_end(self, lane: int, span: Span) -> bool:
        return span.start + span.count == len(self._tenant(lane).prompt)

    def _feed(self, fed: Sequence[tuple[int, Span]]) -> list[Tensor]:
        ids = [i for lane, span in fed for i in self._fed_ids(lane, span)]
        rows = self.talker.rows_of(index(ids, self.device))
        hidden = self.talker.extend(rows, [span for _, span in fed], self.store)
        ending = [place for place, (lane, span) in enumerate(fed) if self._is_end(lane, span)]
        if not ending:
            return []
        last = hidden if len(ending) == len(hidden) else hidden[index(ending, self.device)]
        lanes = [fed[place][0] for place in ending]
        return [self._draw(last, lanes, index(lanes, self.device))]

    def _span(self, tenant: Tenant, start: int, count: int) -> Span:
        assert tenant.length == start, f"rows from {start} come after {tenant.length} rows"
        assert start + count <= tenant.most_rows, f"a lane of {tenant.most_rows} rows asked for {start + count}"
        tenant.length += count
        return Span(tenant.pages, start, count)

    def _keep_prompt(self, tenant: Tenant) -> None:
        num_whole = min(tenant.length // PAGE_ROWS, len(tenant.names))
        self.prompts.keep(tenant.names[:num_whole], tenant.pages[:num_whole])

    def _step(self, stepped: Sequence[tuple[int, Span]]) -> Tensor:
        lanes = [lane for lane, _ in stepped]
        chosen = index(lanes, self.device)
        rows = self.talker.speech_rows(self.draws.record[chosen, Field.LAST])
        return self._draw(self.talker.extend(rows, [span for _, span in stepped], self.store), lanes, chosen)

    def _draw(self, hidden: Tensor, lanes: Sequence[int], chosen: Tensor) -> Tensor:
        """hidden [B, H], one row a lane -> ids [B], taken up as the lanes' last."""
        draws = drawn(self.talker.logits(hidden), self.draws.lanes(chosen, lanes))
        self.draws.keep(chosen, draws)
        return draws.marked()


def paged_talker(talker: Talker, store: TalkerStore, draws: LaneDraws, *, lanes: int) -> PagedTalker | None:
    """None, with the reason in the log, where its kernels can't run."""
    try:
        from engine import talker_paged

        talker_paged.smoke(store.kv.device)
    except Exception as error:  # no Triton, no compiler for it, or a device that it doesn't know
        logger.warning("the talker runs without its kernels, one operation at a time: %s", error)
        return None
    if not talker_paged.can_serve(talker.shape, store.kv.dtype):
        logger.warning("the talker runs without its kernels: they don't take %s in %s", talker.shape, store.kv.dtype)
        return None
    return talker_paged.PagedTalker(talker, store, draws, lanes=lanes)


class PromptPages:
    """Whole pages of prompts that have been fed, by name. Each is held once here; the oldest that no lane holds goes
    first."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_unheld(self) -> int:
        return sum(self._pool.holders(page) == 1 for page in self._pages.values())

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning, with one more holder."""
        num_known = next((i for i, name in enumerate(names) if name not in self._pages), len(names))
        pages = [self._pages[name] for name in names[:num_known]]
        self._pool.share(pages)
        self._touch(names[:num_known])
        return pages

    def keep(self, names: Sequence[bytes], pages: Sequence[int]) -> None:
        """The written pages of a prompt's beginning; those known by name already are left out."""
        for name, page in zip(names, pages, strict=True):
            if name not in self._pages:
                self._pool.share([page])
                self._pages[name] = page
        self._touch(names)

    def _touch(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):  # a page outlives those that follow it
            self._pages.move_to_end(name)

    def evict(self) -> bool:
        for name, page in self._pages.items():
            if self._pool.holders(page) == 1:
                del self._pages[name]
                self._pool.release([page])
                return True
        return False


def page_names(prompt: Sequence[int]) -> list[bytes]:
    """One name per whole page of rows but the prompt's last row: a hash of all row ids up to the page's end."""
    names: list[bytes] = []
    for start in range(0, len(prompt) - PAGE_ROWS, PAGE_ROWS):
        before = names[-1] if names else b""
        page = array("q", prompt[start : start + PAGE_ROWS]).tobytes()
        names.append(hashlib.blake2b(before + page, digest_size=16).digest())
    return names
