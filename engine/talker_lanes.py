"""The talkers of all lanes as one: prompts are seated and fed, lanes step, drawn ids come back as tickets.

A lane's state lies on the device at fixed addresses, its last id included, so a step needs the lanes' numbers and
nothing else from the host, and may be launched before the ids of the step before are known.

Letters as in engine/talker.py. Tests: tests/engine/test_talker_lanes.py.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from engine.cache import OutOfPages, PagePool
from engine.sampler import Field, LaneDraws, Sampling, drawn, unmarked
from engine.talker import PAGE_ROWS, Limits, Span, Talker, TalkerStore, index

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
    most_rows: int = field(default=0)


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
        self.draws.seat(lane, sampling, seed=seed, clause=clause, min_len=limits.min_len)
        return shared

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
        return Ticket([ids for group in self._groups(chunks) for ids in self._feed(group)])

    @torch.inference_mode()
    def decode(self, lanes: Sequence[int]) -> Ticket:
        """One more id for each lane, whose own last id is fed; every lane at most once."""
        return Ticket([self._step(group) for group in self._groups(lanes)])

    def _groups(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        return (items[at : at + self.rows_per_launch] for at in range(0, len(items), self.rows_per_launch))

    def _feed(self, chunks: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        ids: list[int] = []
        spans, ending = [], []
        for place, (lane, start, count) in enumerate(chunks):
            tenant = self._tenant(lane)
            ids += tenant.prompt[start : start + count]
            spans.append(self._span(tenant, start, count))
            if tenant.length == len(tenant.prompt):
                ending.append(place)
        rows = self.talker.rows_of(index(ids, self.device))
        hidden = self.talker.extend(rows, spans, self.store)
        for lane, _, _ in chunks:
            self._keep_prompt(self._tenant(lane))
        if not ending:
            return []
        last = hidden if len(ending) == len(hidden) else hidden[index(ending, self.device)]
        return [self._draw(last, [chunks[place][0] for place in ending])]

    def _span(self, tenant: Tenant, start: int, count: int) -> Span:
        assert tenant.length == start, f"rows from {start} come after {tenant.length} rows"
        assert start + count <= tenant.most_rows, f"a lane of {tenant.most_rows} rows asked for {start + count}"
        tenant.length += count
        return Span(tenant.pages, start, count)

    def _keep_prompt(self, tenant: Tenant) -> None:
        num_whole = min(tenant.length // PAGE_ROWS, len(tenant.names))
        self.prompts.keep(tenant.names[:num_whole], tenant.pages[:num_whole])

    def _step(self, lanes: Sequence[int]) -> Tensor:
        chosen = index(lanes, self.device)
        spans = [self._span(tenant, tenant.length, 1) for tenant in map(self._tenant, lanes)]
        rows = self.talker.speech_rows(self.draws.record[chosen, Field.LAST])
        return self._draw(self.talker.extend(rows, spans, self.store), lanes, chosen)

    def _draw(self, hidden: Tensor, lanes: Sequence[int], chosen: Tensor | None = None) -> Tensor:
        """hidden [B, H], one row a lane -> ids [B], taken up as the lanes' last."""
        chosen = index(lanes, self.device) if chosen is None else chosen
        draws = drawn(self.talker.logits(hidden), self.draws.lanes(chosen, lanes))
        self.draws.keep(chosen, draws)
        return draws.marked()


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
