"""Who runs in this step. Plain Python: no tensor, no clock of its own, no thread.

A context waits for a lane, holds it until its one terminal message, and gives it back. Its clauses are spoken in
order; each part of one goes through three stages, and a stage's state is a few counts:

    talker  rows fed .. prefill, then one token a step until the stop token or the limit
    flow    tokens solved -> hop staged -> Euler steps -> mel
    hift    mel -> samples

The hop schedule is a function of token counts alone, never of timing, so that a context sounds the same alone and
in a crowd. The earliest audio deadline goes first: the moment when the listener runs dry. A new context is due now.

A launch returns before its results are there. What is known at the launch is told at the launch (`fed`, `solved`,
`voiced`), so that the next step of a row can be launched behind it; ids and samples are told when they have landed
(`talked`, `sounded`). On the CPU both happen in the same turn.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from engine.costs import FLOW, Costs, Mean
from engine.messages import (
    SAMPLE_RATE_HZ,
    Audio,
    Cancel,
    Cancelled,
    Clause,
    ClauseDone,
    ClauseTaken,
    Credit,
    Done,
    End,
    Failed,
    Open,
    Opened,
    ToEngine,
    ToGateway,
)

logger = logging.getLogger(__name__)

SAMPLES_PER_TOKEN = 960
HOP_TOKENS = 25
LOOKAHEAD_TOKENS = 3


class SpeechError(Exception):
    """Ends one context. The text names the value and the limit and holds no user text."""

    code, is_retryable = "engine_error", False


class LaneFault(SpeechError):
    """One lane's input broke its computation; the batch goes on."""


class TextTooLong(SpeechError):
    code = "text_too_long"


class UnknownVoice(SpeechError):
    code = "unknown_voice"


class Unsupported(SpeechError):
    code = "unsupported"


class Overloaded(SpeechError):
    """No lane, no place in the queue or no memory: the caller may come back later."""

    code, is_retryable = "overloaded", True


class QueueTimeout(SpeechError):
    code, is_retryable = "queue_timeout", True


class Restarting(SpeechError):
    """The device's state is unknown: every context ends and the process is started again."""

    code, is_retryable = "engine_restart", True


RETRY_AFTER_MS = 1_000
LONGEST_RETRY_MS = 60_000
INFINITY = float("inf")
SECONDS_PER_TOKEN = SAMPLES_PER_TOKEN / SAMPLE_RATE_HZ


class Key(NamedTuple):
    """A context of one gateway link; the epoch keeps a reused number apart."""

    link: int
    context: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Lane:
    """A place on the device. The lease grows each time it is given out: a late result finds no tenant."""

    index: int
    lease: int


class Part(NamedTuple):
    """A clause is synthesised in one or more parts, each on its own; most have one."""

    clause: int
    number: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the scheduler must know of a part."""

    prefill_rows: int
    prompt_tokens: int
    waits_at: float = INFINITY  # rows, with which the talker waits for text that is still to come

    @property
    def first_hop(self) -> int:
        """Tokens to the first chunk boundary after the prompt."""
        return HOP_TOKENS - self.prompt_tokens % HOP_TOKENS


class TalkerRow(NamedTuple):
    lane: Lane
    part: Part
    start: int  # rows fed before
    rows: int  # of this step: part of the prompt, or 1
    is_prompt: bool


class FlowRow(NamedTuple):
    """One Euler step; with `is_new_hop` the tokens up to `upto` are staged first."""

    lane: Lane
    part: Part
    upto: int  # the hop may see the part's tokens 0..upto
    is_new_hop: bool
    is_final: bool


class HiftRow(NamedTuple):
    lane: Lane
    part: Part
    is_final: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step launches: each lane at most once per stage."""

    talker: tuple[TalkerRow, ...] = ()
    flow: tuple[FlowRow, ...] = ()
    hift: tuple[HiftRow, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.talker or self.flow or self.hift)


@dataclass(frozen=True, slots=True)
class Room:
    """What the device can take in this turn."""

    talker: bool = True
    flow: bool = True
    is_idle: bool = True  # nothing is under way: no result will come by itself


@dataclass(frozen=True, slots=True)
class Preparation:
    """Text work to be done for a clause, or for the next words of one: `before` are those that came earlier."""

    lane: Lane
    opened: Open
    clause: int
    text: str
    before: str = ""
    is_last: bool = True


@dataclass(slots=True, eq=False)
class _Run:
    """One part of a clause on its way. Before its text work a clause is one run."""

    part: Part
    texts: list[tuple[str, bool]] = field(default_factory=list)  # still to be worked on; is it the clause's last
    lengths: Lengths | None = None  # None: the text work isn't done
    is_last_part: bool = True
    before: str = ""  # what has been worked on, of a clause that comes word by word
    rows_fed: int = 0
    tokens: int = 0  # kept by the silent-run filter
    is_talked: bool = False
    tokens_solved: int = 0
    hop_end: int = 0  # tokens that will be solved after the next hop, if it isn't the last
    euler_steps: int = 0  # of the hop under way; 0: none is staged
    is_final_hop: bool = False
    is_solved: bool = False
    has_mel: bool = False
    is_mel_final: bool = False
    is_sounded: bool = False

    def __post_init__(self) -> None:
        if self.lengths is not None:
            self.hop_end = self.lengths.first_hop

    @property
    def is_hop_due(self) -> bool:
        """Are there tokens for a hop and its look-ahead, or is this the end of the clause?"""
        return self.is_talked or self.tokens >= self.hop_end + LOOKAHEAD_TOKENS

    @property
    def lacks_text(self) -> bool:
        """Has the talker drawn, or is it to draw without more rows, all that its text so far is good for?"""
        return self.lengths is not None and self.rows_fed >= max(self.lengths.waits_at, self.lengths.prefill_rows)

    @property
    def is_starved(self) -> bool:
        """Is there nothing to do before more text comes?"""
        return self.lacks_text and not (self.is_hop_due or self.euler_steps or self.has_mel)

    @property
    def is_last_hop(self) -> bool:
        return self.tokens < self.hop_end + LOOKAHEAD_TOKENS


@dataclass(slots=True, eq=False)
class _Context:
    """One context from its acceptance to its terminal message."""

    key: Key
    opened: Open
    since_s: float
    lane: Lane | None = None
    is_ended: bool = False
    credit: int | None = None  # None: not held back yet
    next_clause: int = 0
    is_amid: bool = False  # the last clause's words are still coming
    runs: deque[_Run] = field(default_factory=deque)
    samples: int = 0
    samples_coming: int = 0  # launched, not landed
    tokens: int = 0
    tokens_ahead: int = 0  # that the talker has written and the flow hasn't solved
    due_s: float = 0.0  # when the listener runs dry
    served_s: float = 0.0
    deadline: tuple[float, float] = (0.0, 0.0)  # when it is to be served again, and who goes first of two
    first_clause_s: float | None = None
    first_audio_s: float | None = None
    lacks_talker_pages: bool = False  # at its last try
    lacks_flow_pages: bool = False  # or its voice's prompt is still being solved

    @property
    def is_streaming(self) -> bool:
        return self.opened.streaming

    @property
    def has_mel(self) -> bool:
        return bool(self.runs) and self.runs[0].has_mel

    @property
    def is_dawning(self) -> bool:
        """Is its talker on the way to the first hop?"""
        run = self.runs[0]
        return self.is_streaming and not self.samples and run.rows_fed > 0 and not (run.is_hop_due or run.lacks_text)

    @property
    def is_blocked(self) -> bool:
        return self.lacks_talker_pages or self.lacks_flow_pages

    @property
    def is_resting(self) -> bool:
        """Is all that the listener granted already made?"""
        return self.credit is not None and self.samples + self.samples_coming >= self.credit


_DEADLINE = attrgetter("deadline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How the device is shared."""

    lanes: int
    waiting: int = 64
    is_serial: bool = False  # one row of one stage per step: the most urgent one (a CPU has nothing to overlap)
    lookahead_samples: int = 2 * SAMPLE_RATE_HZ
    prefill_rows: int = 512  # of prompts, in one step
    flow_rows: int = 64  # of one flow launch at most
    flow_rows_least: int = 32  # and at least, however urgent the first of them: smaller ones cost more for each row
    share: float = 0.0  # of each stream's time that listeners may take, by measured costs; 0: lanes alone are counted
    overlaps: bool = True  # do the talker's launches and the flow's run side by side
    prepared_clauses: int = 3  # text work ahead of the voice
    clauses: int = 512  # of one context, not yet spoken
    waiting_s: float = 10.0
    ageing_s: float = 5.0  # a lane far ahead of its listener is served again after this at the latest
    pressed_s: float = 0.5  # while somebody runs dry within this time,
    rest_s: float = 1.0  # rows and talkers that are further ahead of their listeners rest,
    gather_s: float = 0.0  # of each listener: so long what nobody needs soon gathers for one launch of them all
    fill_rows: int = 8  # but a flow launch that has fewer rows is filled up: it takes hardly longer;
    fill_share: float = 0.33  # and with so many of all: who rests keeps lanes and pages from those who wait


class Scheduler:
    """Owns every context's counts and the lanes. The only writer of both.

    Messages to the gateways gather in `outgoing` as (link, message); lanes whose tenants have ended gather in
    `freed`, and must be emptied before `outgoing` is delivered: Cancelled means that all is free.
    """

    def __init__(self, limits: Limits, costs: Costs | None = None) -> None:
        self.limits = limits
        self.costs = costs or Costs()
        self.places = limits.lanes  # lanes that are given out; fewer than all where the device couldn't play so many
        self.queued_s = Mean()  # from a context's Open to its lane
        self.outgoing: list[tuple[int, ToGateway]] = []
        self.freed: list[Lane] = []
        self.preparations: list[Preparation] = []
        self.num_ended = 0
        self._contexts: dict[Key, _Context] = {}
        self._waiting: deque[_Context] = deque()
        self._tenants: list[_Context | None] = [None] * limits.lanes
        self._order: list[_Context] = []  # those of all lanes; the most urgent first when last planned
        self._unsounded: set[_Context] = set()  # with a mel for the vocoder
        self._lease = [0] * limits.lanes
        self._free = list(range(limits.lanes - 1, -1, -1))
        self._may_begin = 0  # newcomers of the group under way
        self.gathers_until_s = 0.0
        self._now = 0.0
        self._ended_s = 0.0
        self._between_ends_s = Mean()

    # What the gateways say

    def take(self, link: int, message: ToEngine, now: float) -> None:
        self._now = now
        key = Key(link, message.context, message.epoch)
        match message:
            case Open():
                self._open(key, message, now)
            case Cancel():
                self._cancel(key)
            case Clause() | End() | Credit():
                if (context := self._contexts.get(key)) is not None:  # else it ended while this was on its way
                    self._feed(context, message, now)

    def refuse(self, link: int, message: Open, error: SpeechError) -> None:
        self._say_failed(Key(link, message.context, message.epoch), error)

    def close_link(self, link: int) -> None:
        """The gateway is gone: its contexts end without a word."""
        for context in self._waiting_first():
            if context.key.link == link:
                self._drop(context)

    def fail_all(self, error: SpeechError) -> None:
        for context in self._waiting_first():
            self._fail(context, error)

    def _waiting_first(self) -> list[_Context]:
        """All contexts, in an order in which none that is to end takes the lane of one that has."""
        return [*self._waiting, *self._seated()]

    def _open(self, key: Key, message: Open, now: float) -> None:
        if key in self._contexts:
            logger.warning("context %s is open already; the second Open is ignored", key)
            return
        if not self._has_place and len(self._waiting) >= self.limits.waiting:
            full = f"all {self.places} places are taken and {self.limits.waiting} contexts wait"
            self._say_failed(key, Overloaded(full))
            return
        context = _Context(key, message, since_s=now, due_s=now, served_s=now)
        self._set_deadline(context)
        self._contexts[key] = context
        self._waiting.append(context)
        self._seat_waiting()

    def _cancel(self, key: Key) -> None:
        if (context := self._contexts.get(key)) is not None:
            self._drop(context)
        self._say(key, Cancelled(context=key.context, epoch=key.epoch))

    def _feed(self, context: _Context, message: Clause | End | Credit, now: float) -> None:
        match message:
            case Clause():
                self._add_clause(context, message, now)
            case End() if context.is_amid:
                self._fail(context, SpeechError(f"the end came amid clause {context.next_clause - 1}"))
            case End():
                context.is_ended = True
                self._settle(context)
            case Credit():
                context.credit = max(context.credit or 0, message.samples)

    def _add_clause(self, context: _Context, message: Clause, now: float) -> None:
        due = context.next_clause - context.is_amid
        if context.is_ended or message.index != due:
            self._fail(context, SpeechError(f"clause {message.index} came where {due} was due"))
            return
        if context.is_amid:
            context.is_amid = not message.is_last
            context.runs[-1].texts.append((message.text, message.is_last))
            self._prepare_ahead(context)
            return
        if len(context.runs) >= self.limits.clauses:
            self._fail(context, TextTooLong(f"{self.limits.clauses} clauses wait already, which is the limit"))
            return
        if not context.runs:
            context.due_s = max(context.due_s, now)
            context.served_s = max(context.served_s, now)
            self._set_deadline(context)
        if context.first_clause_s is None:
            context.first_clause_s = now
        context.next_clause += 1
        context.is_amid = not message.is_last
        context.runs.append(_Run(Part(message.index, 0), [(message.text, message.is_last)]))
        self._prepare_ahead(context)

    # Lanes

    def is_current(self, lane: Lane) -> bool:
        return self._lease[lane.index] == lane.lease and self._tenants[lane.index] is not None

    @property
    def _has_place(self) -> bool:
        return bool(self._free) and self.lanes_used < self.places

    def admit(self) -> None:
        """Counts again how many listeners the device can play; whoever is seated stays."""
        if self.limits.share:
            limits = self.limits
            self.places = self.costs.playable(
                lanes=limits.lanes, flow_rows=limits.flow_rows, share=limits.share, overlaps=limits.overlaps
            )
            self._seat_waiting()

    def _seat_waiting(self) -> None:
        """Who waits takes the free lanes. One may still be in `freed`: it is emptied before its text work begins."""
        while self._has_place and self._waiting:
            context = self._waiting.popleft()
            index = self._free.pop()
            assert self._tenants[index] is None, f"lane {index} is taken"
            self._lease[index] += 1
            self._tenants[index] = context
            self._order.append(context)
            context.lane = Lane(index, self._lease[index])
            self.queued_s.add(self._now - context.since_s)
            self._say(context.key, Opened(context=context.key.context, epoch=context.key.epoch))
            self._prepare_ahead(context)
            self._settle(context)

    def _drop(self, context: _Context) -> None:
        """Forget a context and give its lane back."""
        del self._contexts[context.key]
        self.num_ended += 1
        if context.lane is None:
            self._waiting.remove(context)
            return
        index = context.lane.index
        assert self._tenants[index] is context, f"lane {index} belongs to another context"
        self._tenants[index] = None
        self._order.remove(context)
        self._unsounded.discard(context)
        self._free.append(index)
        self.freed.append(context.lane)
        self._between_ends_s.add(self._now - self._ended_s)
        self._ended_s = self._now
        self.unblock()
        self._seat_waiting()

    def unblock(self) -> None:
        """Pages came free: those who waited for some may try again."""
        self._unblock_talkers()
        self._unblock_flows()

    def _unblock_talkers(self) -> None:
        for context in self._order:
            context.lacks_talker_pages = False

    def _unblock_flows(self) -> None:
        for context in self._order:
            context.lacks_flow_pages = False

    def _seated(self) -> Iterator[_Context]:
        return (context for context in self._tenants if context is not None)

    # Text work

    def _prepare_ahead(self, context: _Context) -> None:
        if context.lane is None:
            return
        for run in list(context.runs)[: self.limits.prepared_clauses]:
            for text, is_last in run.texts:
                job = Preparation(context.lane, context.opened, run.part.clause, text, run.before, is_last)
                self.preparations.append(job)
                run.before += text if context.opened.by_words else ""
            run.texts.clear()

    def prepared(self, lane: Lane, clause: int, parts: Sequence[Lengths]) -> bool:
        """The text work is done; no parts: there is nothing to say. False: the context has ended meanwhile."""
        if not self.is_current(lane):
            return False
        context, run = self._run(lane, Part(clause, 0))
        if parts:
            place = context.runs.index(run)
            del context.runs[place]
            for number, lengths in reversed(list(enumerate(parts))):
                context.runs.insert(place, _Run(Part(clause, number), [], lengths, number + 1 == len(parts)))
        else:
            self._say(lane, ClauseTaken(context=context.key.context, epoch=context.key.epoch, index=clause))
            run.is_talked = run.is_solved = run.is_sounded = True
        self._settle(context)
        return True

    def given(self, lane: Lane, part: Part, lengths: Lengths) -> None:
        """What the talker of a part that comes word by word may be fed by now."""
        context, run = self._run(lane, part)
        if run.lengths is None:
            run.hop_end = lengths.first_hop
        elif run.is_starved:  # nobody has kept the listener waiting
            context.due_s, context.served_s = max(context.due_s, self._now), max(context.served_s, self._now)
            self._set_deadline(context)
        run.lengths = lengths

    # Planning

    def plan(self, now: float, room: Room = Room()) -> Plan:
        """The rows of the next step, most urgent first."""
        self._now = now
        self._expire(now)
        if not (room.talker or room.flow or self._unsounded):
            return Plan()
        self._order.sort(key=_DEADLINE)  # hardly anything has moved since the last time
        urgent = [context for context in self._order if context.runs and not context.runs[0].is_starved]
        is_pressed = self._is_pressed(urgent, now)
        if now < self.gathers_until_s and not is_pressed:
            return Plan(hift=self._hift_rows(room, now))
        plan = self._plan_one(urgent, room) if self.limits.is_serial else self._plan_all(urgent, room, now, is_pressed)
        self.gathers_until_s = now + self.limits.gather_s * len(urgent)
        if plan.is_empty and room.is_idle and (victim := self._victim(urgent, now)) is not None:
            self._fail(victim, Overloaded("no cache pages are free"))
            return self.plan(now, room)
        return plan

    def _victim(self, urgent: list[_Context], now: float) -> _Context | None:
        """Nobody can run: of those who lack pages the least urgent gives way, one that nobody has heard before others.
        Who only rests or waits for words will go on and give pages back, so for a while it is waited for."""
        stuck = [context for context in urgent if context.is_blocked]
        if not stuck:
            return None
        victim = next((context for context in reversed(stuck) if not context.samples), stuck[-1])
        is_hopeful = any(
            context.runs[0].is_starved or not context.is_blocked and self._rests(context)
            for context in self._order
            if context.runs
        )
        return None if is_hopeful and now - victim.served_s < self.limits.waiting_s else victim

    def _rests(self, context: _Context) -> bool:
        return context.is_resting or self._is_far_ahead(context)

    def _set_deadline(self, context: _Context) -> None:
        context.deadline = min(context.due_s, context.served_s + self.limits.ageing_s), context.since_s

    def _plan_one(self, urgent: list[_Context], room: Room) -> Plan:
        for context in urgent:
            if (hift := self._hift_row(context)) is not None:
                return Plan(hift=(hift,))
            if room.flow and (flow := self._flow_row(context)) is not None:
                return Plan(flow=(flow,))
            if room.talker and (talker := self._talker_row(context, self.limits.prefill_rows)) is not None:
                return Plan(talker=(talker,))
        return Plan()

    def _plan_all(self, urgent: list[_Context], room: Room, now: float, is_pressed: bool) -> Plan:
        rest_from_s = now + self.limits.rest_s if is_pressed else INFINITY
        return Plan(
            self._talker_rows(urgent, rest_from_s) if room.talker else (),
            self._flow_rows(urgent, now, rest_from_s) if room.flow else (),
            self._hift_rows(room, now),
        )

    def _hift_rows(self, room: Room, now: float) -> tuple[HiftRow, ...]:
        """All of them, once one is needed soon or there are enough to share a launch."""
        sounding = sorted(self._unsounded, key=_DEADLINE)
        rows = tuple(row for context in sounding if (row := self._hift_row(context)) is not None)
        may_gather = self.limits.gather_s > 0 and not room.is_idle and len(rows) < self.limits.fill_rows
        return () if rows and may_gather and sounding[0].deadline[0] > now + self.limits.pressed_s else rows

    def _is_pressed(self, urgent: list[_Context], now: float) -> bool:
        """Does somebody run dry soon whom the device can help?"""
        served = (c for c in urgent if c.is_streaming and not (c.is_resting or c.is_blocked))
        dry_first = next(served, None)
        return dry_first is not None and dry_first.due_s - now < self.limits.pressed_s

    def _talker_rows(self, urgent: list[_Context], rest_from_s: float) -> tuple[TalkerRow, ...]:
        """One row for each lane that may go on; prompts share out the rows of a step in their order."""
        rows, prefill, is_pressed = [], self.limits.prefill_rows, rest_from_s < INFINITY
        has_newcomer = False
        for context in urgent:
            if is_pressed and self._may_rest(context, rest_from_s):
                continue
            row = self._talker_row(context, prefill)
            if row is None:
                continue
            if row.is_prompt:
                if context.is_streaming and not context.samples and not row.start:
                    if not has_newcomer:
                        has_newcomer = True
                        self._admit_group(urgent)
                    if not self._may_begin:
                        continue
                    self._may_begin -= 1
                prefill -= row.rows
            rows.append(row)
        return tuple(rows)

    def _admit_group(self, urgent: list[_Context]) -> None:
        """Newcomers go in groups of as many as the flow takes at once, where it runs beside the talker.

        While a group is on its way to its first hops, no more prompts are begun: they would keep the flow waiting.
        """
        if not self.limits.overlaps:
            self._may_begin = self.limits.lanes
        elif not any(context.is_dawning for context in urgent):
            self._may_begin = self.limits.flow_rows_least

    def _may_rest(self, context: _Context, rest_from_s: float) -> bool:
        """Do the talker's tokens last beyond this moment, and has the flow enough of them for its next hop?"""
        if context.due_s + context.tokens_ahead * SECONDS_PER_TOKEN <= rest_from_s:
            return False
        return context.runs[0].lengths is not None and context.runs[0].is_hop_due

    def _talker_row(self, context: _Context, prefill: int) -> TalkerRow | None:
        run = context.runs[0]
        if run.is_talked:
            run = next((run for run in context.runs if not run.is_talked), run)
        if run.is_talked or run.lengths is None or context.lacks_talker_pages or self._is_far_ahead(context):
            return None
        if run.lacks_text:
            return None
        left = run.lengths.prefill_rows - run.rows_fed
        if left <= 0:
            return TalkerRow(self._lane(context), run.part, run.rows_fed, 1, False)
        count = min(left, prefill)
        return TalkerRow(self._lane(context), run.part, run.rows_fed, count, True) if count else None

    def _is_far_ahead(self, context: _Context) -> bool:
        """Has the talker written all that the listener granted, and the look-ahead?"""
        if context.credit is None:
            return False
        written = context.samples + context.tokens_ahead * SAMPLES_PER_TOKEN
        return written >= context.credit + self.limits.lookahead_samples

    def _flow_rows(self, urgent: list[_Context], now: float, rest_from_s: float) -> tuple[FlowRow, ...]:
        """The next launch: as large as the slack of its most urgent row allows. A full response is solved in one go,
        which takes as long as many steps: next to streams only one at a time."""
        streamed: list[FlowRow] = []
        whole: list[FlowRow] = []
        most = self.limits.flow_rows
        is_streamed = any(context.is_streaming for context in urgent)
        fill = self._filled_rows(len(urgent))
        for context in urgent:
            if len(streamed) >= most:
                break
            if len(streamed) >= fill and context.deadline[0] > rest_from_s:
                continue
            row = self._flow_row(context)
            if row is None:
                continue
            if not context.is_streaming:
                whole.append(row)
                continue
            if not streamed:
                most = self._launch_rows(context, now)
            streamed.append(row)
        return (*streamed, *whole[: 1 if is_streamed else self.limits.flow_rows])

    def _filled_rows(self, listeners: int) -> int:
        """A power of two times the least, since launches have tiers."""
        share = self.limits.fill_share * listeners / max(1, self.limits.fill_rows)
        return self.limits.fill_rows << max(0, int(share).bit_length() - 1)

    def _launch_rows(self, first: _Context, now: float) -> int:
        return self.costs.launch_rows(
            FLOW,
            least=min(self.limits.flow_rows_least, self.limits.flow_rows),
            most=self.limits.flow_rows,
            slack_s=first.due_s - now,
            steps=self.costs.euler_steps - first.runs[0].euler_steps,
        )

    def _flow_row(self, context: _Context) -> FlowRow | None:
        run = context.runs[0]
        if run.is_solved or run.lengths is None or context.lacks_flow_pages or context.is_resting:
            return None
        if run.euler_steps == 0:
            return self._new_hop(context, run)
        if run.has_mel and run.euler_steps == self.costs.euler_steps - 1:
            return None  # the mel of the hop before is still to be sounded
        return FlowRow(self._lane(context), run.part, run.tokens, is_new_hop=False, is_final=run.is_final_hop)

    def _new_hop(self, context: _Context, run: _Run) -> FlowRow | None:
        lane = self._lane(context)
        if not context.is_streaming:
            return FlowRow(lane, run.part, run.tokens, is_new_hop=True, is_final=True) if run.is_talked else None
        if not run.is_hop_due or run.has_mel and run.is_last_hop:
            return None  # a last hop may be solved in one go, and then gives its mel at once
        upto = run.tokens if run.is_last_hop else run.hop_end + LOOKAHEAD_TOKENS
        return FlowRow(lane, run.part, upto, is_new_hop=True, is_final=run.is_last_hop)

    def _hift_row(self, context: _Context) -> HiftRow | None:
        run = context.runs[0]
        if not run.has_mel or context.is_resting:
            return None
        return HiftRow(self._lane(context), run.part, run.is_mel_final)

    def _lane(self, context: _Context) -> Lane:
        assert context.lane is not None, "only seated contexts are planned"
        return context.lane

    def _expire(self, now: float) -> None:
        limit = self.limits.waiting_s
        while self._waiting and now - self._waiting[0].since_s > limit:
            self._fail(self._waiting[0], QueueTimeout(f"no lane came free in {limit:g} s"))

    # What a launch has begun

    def fed(self, row: TalkerRow, upto: int) -> None:
        """A row's input is on its way to the talker, which then has taken `upto` rows of the part."""
        context, run = self._run(row.lane, row.part)
        if self._has_all_gone(row, run, upto) if context.opened.by_words else row.start == 0 and row.part.number == 0:
            taken = ClauseTaken(context=context.key.context, epoch=context.key.epoch, index=row.part.clause)
            self._say(row.lane, taken)
        run.rows_fed = upto

    def _has_all_gone(self, row: TalkerRow, run: _Run, upto: int) -> bool:
        """With this row, has the model the last of a clause's words?"""
        assert run.lengths is not None, "it is planned"
        return row.is_prompt and run.lengths.waits_at == INFINITY and upto == run.lengths.prefill_rows

    def solved(self, row: FlowRow, *, has_mel: bool) -> None:
        """An Euler step is on its way; `has_mel` says that it is the hop's last."""
        context, run = self._run(row.lane, row.part)
        if row.is_new_hop:
            run.is_final_hop = row.is_final
        run.euler_steps += 1
        if not has_mel:
            return
        assert not run.has_mel, "a mel would be lost"
        run.euler_steps = 0
        run.has_mel, run.is_mel_final = True, run.is_final_hop
        run.is_solved = run.is_final_hop
        self._unsounded.add(context)
        upto = run.tokens if run.is_final_hop else run.hop_end
        context.tokens_ahead -= upto - run.tokens_solved
        run.tokens_solved, run.hop_end = upto, upto + HOP_TOKENS
        if run.is_solved:
            self._unblock_flows()

    def voiced(self, row: HiftRow, samples: int) -> None:
        """A mel is on its way through the vocoder, which makes so many samples of it."""
        context, run = self._run(row.lane, row.part)
        run.has_mel = False
        self._unsounded.discard(context)
        context.samples_coming += samples

    # What has landed

    def talked(self, row: TalkerRow, tokens: int, *, is_end: bool) -> None:
        """The talker drew an id; the part has `tokens` kept tokens now."""
        context, run = self._run(row.lane, row.part)
        context.tokens_ahead += tokens - run.tokens
        run.tokens, run.is_talked = tokens, is_end
        if is_end and tokens == 0:
            run.is_solved = run.is_sounded = True
        if is_end:
            self._settle(context)
            self._unblock_talkers()

    def sounded(self, row: HiftRow, pcm: bytes, now: float) -> None:
        """Samples of a clause are ready to be sent."""
        self._now = now
        context, run = self._run(row.lane, row.part)
        run.is_sounded = row.is_final
        if pcm:
            context.samples_coming -= len(pcm) // 4
            self._say(row.lane, Audio(context=context.key.context, epoch=context.key.epoch, pcm=pcm))
            self._count_samples(context, len(pcm) // 4, now)
        if row.is_final:
            self._settle(context)

    def blocked(self, row: TalkerRow | FlowRow) -> None:
        """The row wasn't run: there are no pages for it now. It is planned again after `unblock`."""
        context = self._tenant(row.lane)
        if isinstance(row, TalkerRow):
            context.lacks_talker_pages = True
        else:
            context.lacks_flow_pages = True

    def failed(self, lane: Lane, error: SpeechError) -> None:
        """One lane's fault: its context ends, if it hasn't yet."""
        if self.is_current(lane):
            self._fail(self._tenant(lane), error)

    def _count_samples(self, context: _Context, samples: int, now: float) -> None:
        if context.first_audio_s is None:
            context.first_audio_s = now
        context.samples += samples
        context.due_s = max(context.due_s, now) + samples / SAMPLE_RATE_HZ
        context.served_s = now
        self._set_deadline(context)

    def _settle(self, context: _Context) -> None:
        """Report clauses that are through, and the context's end."""
        key = context.key
        while context.runs and context.runs[0].is_sounded:
            run = context.runs.popleft()
            context.tokens += run.tokens
            if run.is_last_part:
                done = ClauseDone(context=key.context, epoch=key.epoch, index=run.part.clause, samples=context.samples)
                self._say(key, done)
        self._prepare_ahead(context)
        if context.is_ended and not context.runs and context.lane is not None:
            self._drop(context)
            stats = _stats(context)
            self._say(key, Done(context=key.context, epoch=key.epoch, samples=context.samples, stats=stats))

    def _fail(self, context: _Context, error: SpeechError) -> None:
        self._drop(context)
        self._say_failed(context.key, error)

    def _say_failed(self, key: Key, error: SpeechError) -> None:
        after_ms = self._retry_after_ms() if error.is_retryable else None
        self._say(
            key,
            Failed(
                context=key.context,
                epoch=key.epoch,
                code=error.code,
                message=str(error),
                retry=error.is_retryable,
                after_ms=after_ms,
            ),
        )

    def _retry_after_ms(self) -> int:
        """When those who wait now will have been seated, by the pace at which contexts have ended."""
        expected_ms = int(1e3 * self._between_ends_s.value * (1 + len(self._waiting)))
        return min(max(expected_ms, RETRY_AFTER_MS), LONGEST_RETRY_MS)

    def _say(self, whose: Key | Lane, message: ToGateway) -> None:
        key = whose if isinstance(whose, Key) else self._tenant(whose).key
        self.outgoing.append((key.link, message))

    def _tenant(self, lane: Lane) -> _Context:
        tenant = self._tenants[lane.index]
        assert tenant is not None and self._lease[lane.index] == lane.lease, f"{lane} has no tenant"
        return tenant

    def _run(self, lane: Lane, part: Part) -> tuple[_Context, _Run]:
        context = self._tenant(lane)
        for run in context.runs:  # mostly the first
            if run.part == part:
                return context, run
        raise AssertionError(f"{lane} has no part {part}")

    # How full it is

    @property
    def num_contexts(self) -> int:
        return len(self._contexts)

    @property
    def num_silent(self) -> int:
        """Contexts of which nothing was heard yet."""
        return sum(context.first_audio_s is None for context in self._contexts.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def lanes_used(self) -> int:
        return self.limits.lanes - len(self._free)

    def check_integrity(self) -> None:
        """Each lane is free or has one tenant; each context has a lane or waits, and none waits beside a free place."""
        seated = list(self._seated())
        assert len(seated) + len(self._free) == self.limits.lanes, "a lane is lost"
        assert len(set(self._free)) == len(self._free), "a lane is free twice"
        assert all(self._tenants[index] is None for index in self._free), "a free lane has a tenant"
        assert {c.key for c in seated} | {c.key for c in self._waiting} == set(self._contexts), "a context is lost"
        assert len(seated) + len(self._waiting) == len(self._contexts), "a context has two places"
        assert not (self._has_place and self._waiting), "a context waits beside a free place"
        assert len(self._order) == len(seated) and set(self._order) == set(seated), "a lane isn't planned"
        assert self._unsounded == {context for context in seated if context.has_mel}, "a mel is forgotten"
        for context in seated:
            ahead = sum(run.tokens - run.tokens_solved for run in context.runs)
            assert context.tokens_ahead == ahead, f"{context.tokens_ahead} tokens counted, {ahead} are ahead"


def _stats(context: _Context) -> dict[str, float]:
    stats = {
        "tokens": float(context.tokens),
        "clauses": float(context.next_clause),
        "audio_ms": 1e3 * context.samples / SAMPLE_RATE_HZ,
    }
    if context.first_audio_s is not None and context.first_clause_s is not None:
        stats["first_audio_ms"] = 1e3 * (context.first_audio_s - context.first_clause_s)
    return stats
