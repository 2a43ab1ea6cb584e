"""A plan -> launches. Owns what every lane holds on the device between two steps: talker lane, flow row, vocoder state.

Two streams: the talker's, and the flow's and vocoder's. A launch enqueues and returns; `collect` gives what has landed.
On the CPU each row is launched alone, so that a lane's samples are the same to the bit, alone or in a crowd; on CUDA
all rows of a stage share one call. What a launch finds wrong with one row ends that row's lane and no other.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.cache import OutOfPages
from engine.costs import FLOW, HIFT, PREFILL, TALKER, WHOLE, Costs, Mean
from engine.flow import FRAMES_PER_TOKEN, WHOLE_FRAMES, Flow, FlowError, FlowPrefix, FlowRow, FlowStore, FlowVoice
from engine.frontend import Prompt
from engine.graphs import Graphs
from engine.hift import Hift, HiftState
from engine.noise import MAX_FRAMES
from engine.sampler import Sampling
from engine.scheduler import (
    INFINITY,
    HiftRow,
    Lane,
    LaneFault,
    Lengths,
    Part,
    Plan,
    Room,
    SpeechError,
    TalkerRow,
    TextTooLong,
)
from engine.scheduler import (
    FlowRow as FlowStep,
)
from engine.streams import Flight, Stream
from engine.talker import Limits, SilentRunFilter, Talker, TalkerStore
from engine.talker_lanes import TalkerLanes, Ticket
from engine.text_stream import TextStream
from engine.voices import Voice

logger = logging.getLogger(__name__)
Row = TypeVar("Row", TalkerRow, FlowStep, HiftRow)
Result = TypeVar("Result")
Kernel = Callable[[Sequence[Row], "Launched"], None]

MANY = 1 << 30
CODES_PER_TEXT = 5.0  # until some have been counted
MAX_VOICES = 1_024  # whose prompts stay on the device, 0.1 MB each
MAX_SILENT_RUN = 75  # ids, three seconds: a talker that says nothing for so long has lost its text
MODEL_OF = {TALKER: TALKER, PREFILL: TALKER, FLOW: FLOW, WHOLE: FLOW, HIFT: HIFT}  # whose time a stage is
IN_FLIGHT = 2  # launches of a stage: one runs, the next waits behind it
CHUNK_FRAMES = 50
LAUNCH_UNITS = 64  # a launch of the flow is filled up to so many chunks with those of new voices' prompts,
PREFIX_UNITS = 32  # which have so many in any case
PREFIX_ROWS = 16  # and belong to so many prompts at most


class EngineFault(Exception):
    """The device's state is unknown: fail every context, exit, be restarted."""


@dataclass(frozen=True, slots=True)
class Weave:
    """How text that comes word by word is woven with speech, and what bounds it."""

    mix: tuple[int, int]
    end_of_prompt: int
    most_text: int
    code_ratios: tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Utterance:
    """One part of a clause as the models take it; with `weave`, what is known of it so far."""

    voice: Voice
    prompt: Prompt
    limits: Limits
    sampling: Sampling
    seed: int
    is_streaming: bool
    weave: Weave | None = None

    def with_more(self, text: Sequence[int]) -> Utterance:
        """Raises TextTooLong."""
        assert self.weave is not None, "its text is whole"
        whole = (*self.prompt.text, *text)
        if len(whole) > self.weave.most_text:
            raise TextTooLong(f"a clause of {len(whole)} text tokens, the limit is {self.weave.most_text}")
        prompt = replace(self.prompt, text=whole, num_target=len(whole))
        return replace(self, prompt=prompt, limits=part_limits(len(whole), self.voice, self.weave.code_ratios))

    @property
    def speech(self) -> list[int]:
        """The voice's tokens that the talker is given."""
        return self.voice.tokens.tolist() if self.prompt.has_prompt_speech else []

    @property
    def prefill_rows(self) -> int:
        speech = len(self.voice.tokens) if self.prompt.has_prompt_speech else 0
        return 2 + len(self.prompt.prompt_text) + len(self.prompt.text) + speech

    @property
    def most_rows(self) -> int:
        """Talker rows if the stop token never comes."""
        return self.prefill_rows + self.limits.max_len


@dataclass(slots=True, eq=False)
class Segment:
    """An utterance under way: everything of it that lies on the device."""

    utterance: Utterance
    part: Part
    silence: SilentRunFilter
    rows: list[int] = field(default_factory=list)  # ids fed before it draws; of a woven one, those of its turns so far
    stream: TextStream | None = None  # of a woven one
    turn_end: int = MANY  # codes, after which the talker waits for more rows,
    waits_at: float = INFINITY  # having been fed so many
    unfed: list[int] = field(default_factory=list)  # codes of this turn, which the next one's rows follow
    has_turn: bool = True  # the lane doesn't know all of the rows yet
    has_talker: bool = False  # it holds its lane's talker
    is_talked: bool = False
    num_drawn: int = 0
    tokens: list[int] = field(default_factory=list)  # those that go on to the flow
    silent_run: int = 0
    flow: FlowRow | None = None
    num_given: int = 0  # tokens given to the flow
    num_frames: int = 0  # of mel that came of them
    most_pages: int = 0  # that the flow row will probably hold in the end, the voice's not counted
    mel: Tensor | None = None  # [M, frames] not yet sounded
    health: Tensor | None = None  # of the mel: 0, or NaN if it is not finite
    hift: HiftState | None = None

    @property
    def clause(self) -> int:
        """Of the sampler's draws: a part of its own draws for itself."""
        return self.part.clause + (self.part.number << 32)

    @property
    def limits(self) -> Limits:
        """Of this turn: a talker that waits for text may not stop before it."""
        limits = self.utterance.limits
        if self.turn_end < MANY:
            return Limits(MANY, self.turn_end - self.num_drawn)
        return Limits(limits.min_len, max(IN_FLIGHT, limits.max_len - self.num_drawn))

    def take_turn(self) -> bool:
        """Takes up a woven one's next turn, if the talker is through with the last and the text is there."""
        if self.stream is None or self.has_turn or self.num_drawn < self.turn_end:
            return False
        turn = self.stream.next_turn(self.unfed)
        if turn is None:
            return False
        self.rows = [*self.rows, *turn.rows]
        self.unfed, self.has_turn = [], True
        if turn.num_codes is None:
            self.turn_end, self.waits_at = MANY, INFINITY
        else:
            self.turn_end = self.num_drawn + turn.num_codes
            self.waits_at = len(self.rows) + turn.num_codes - 1
        return True

    def add(self, code: int) -> None:
        self.num_drawn += 1
        if self.turn_end < MANY:
            self.unfed.append(code)
        is_kept = self.silence.keep(code)
        self.silent_run = 0 if is_kept else self.silent_run + 1
        if is_kept:
            self.tokens.append(code)

    @property
    def is_over(self) -> bool:
        if self.turn_end < MANY:
            return False
        return self.utterance.limits.is_over(self.num_drawn) or self.silent_run >= MAX_SILENT_RUN


@dataclass(slots=True)
class Launched:
    """What a launch has begun, for the scheduler."""

    fed: list[tuple[TalkerRow, int]] = field(default_factory=list)  # rows taken of the part
    solved: list[tuple[FlowStep, bool]] = field(default_factory=list)  # has mel
    voiced: list[tuple[HiftRow, int]] = field(default_factory=list)  # samples
    blocked: list[TalkerRow | FlowStep] = field(default_factory=list)
    faults: list[tuple[Lane, SpeechError]] = field(default_factory=list)
    has_new_voice: bool = False  # those who wait for one may try again


@dataclass(slots=True)
class Landed:
    """What has come back, for the scheduler."""

    talked: list[tuple[TalkerRow, int, bool]] = field(default_factory=list)  # kept tokens, is it the end
    given: list[tuple[Lane, Part, Lengths]] = field(default_factory=list)  # what else a woven part may be fed
    sounded: list[tuple[HiftRow, bytes]] = field(default_factory=list)
    faults: list[tuple[Lane, SpeechError]] = field(default_factory=list)
    num_flights: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Models:
    """The three models, and the caches they write to."""

    talker: Talker
    flow: Flow
    hift: Hift
    talker_store: TalkerStore
    flow_store: FlowStore
    silent_ids: Sequence[int]

    @property
    def device(self) -> torch.device:
        return self.flow.device


class Claim(NamedTuple):
    """Pages of one flow row under way."""

    held: int
    to_come: int


class Spoken(NamedTuple):
    """A row under way, with what it belongs to: the lane may have another part, or tenant, when it lands."""

    row: TalkerRow
    segment: Segment


class Runner:
    """One object per lane, by index; only this class writes the device."""

    def __init__(
        self,
        models: Models,
        *,
        lanes: int,
        rows_per_launch: int,
        prompt_remainder: int = 0,
        keeps_flow: bool = True,
        is_final_causal: bool = True,
        overlaps: bool = True,
        costs: Costs | None = None,
    ) -> None:
        self.models = models
        self.rows_per_launch = rows_per_launch
        self.keeps_flow, self.is_final_causal = keeps_flow, is_final_causal
        self.costs = costs or Costs(models.flow.shape.steps)
        self.codes_per_text = Mean(CODES_PER_TEXT)  # that talkers gave for an id of text
        self.seconds = dict.fromkeys((TALKER, FLOW, HIFT), 0.0)  # of the device, since the start
        self.talkers = TalkerLanes(models.talker, models.talker_store, lanes=lanes, rows_per_launch=rows_per_launch)
        self.prefixes = Prefixes(models.flow, models.flow_store, prompt_remainder)
        self._talking: Stream[Landed] = Stream(models.device, priority=-1)
        self._sounding: Stream[Landed] = Stream(models.device)
        if not overlaps:
            self._talking.take_turns_with(self._sounding)
        self._no_mel = torch.empty(models.flow.shape.mel, 0, device=models.device)
        self._lanes: list[dict[Part, Segment]] = [{} for _ in range(lanes)]
        self._leases = [0] * lanes
        self._claims: list[Claim] | None = None  # of the flow rows under way, once counted in this launch
        self._refused_pages = MANY  # the least that a row was refused in this launch

    def warm(self, *, has_graphs: bool, on_capture: Callable[[str], None]) -> None:
        """Lays out what the models keep on the device and captures their launches. On the CPU there is nothing to do.

        on_capture is called with the name of each launch before its capture. Afterwards nothing is captured any more.
        """
        models = self.models
        talking, sounding = (
            Graphs(models.device, stream=stream.cuda, is_enabled=has_graphs, on_capture=on_capture)
            for stream in (self._talking, self._sounding)
        )
        with self._talking.current():
            self.talkers.warm(talking)
        with self._sounding.current():
            models.flow.warm(sounding, models.flow_store)
            models.hift.warm(sounding, lanes=len(self._lanes))
        for graphs in (talking, sounding):
            graphs.close()
        if models.device.type == "cuda":
            torch.cuda.synchronize(models.device)

    # Lanes

    def lengths(self, utterance: Utterance) -> Lengths:
        return Lengths(utterance.prefill_rows, self.prefixes.prompt_tokens(utterance.voice))

    def _woven_lengths(self, segment: Segment) -> Lengths:
        prompt = self.prefixes.prompt_tokens(segment.utterance.voice)
        return Lengths(len(segment.rows), prompt, segment.waits_at)

    def check(self, utterance: Utterance) -> None:
        """Raises TextTooLong if the caches could never hold this part."""
        rows, limit = utterance.most_rows, self.talkers.max_rows
        if rows > limit:
            raise TextTooLong(f"the talker may need {rows} rows for this text, its cache holds {limit}")
        pages = self.models.flow.pages_for(self.prefixes.prompt_tokens(utterance.voice) + utterance.limits.min_len)
        if utterance.is_streaming and pages > self.models.flow_store.pool.num_pages:
            limit = self.models.flow_store.pool.num_pages
            raise TextTooLong(f"the flow needs {pages} pages at least for this text, its cache holds {limit}")

    def seat(self, lane: Lane, part: Part, utterance: Utterance) -> None:
        """Gives a part to its lane; the scheduler has checked the lease. A new voice's prompt is begun at once."""
        assert not self._lanes[lane.index] or self._leases[lane.index] == lane.lease, f"{lane} was never freed"
        self._leases[lane.index] = lane.lease
        segment = Segment(utterance, part, SilentRunFilter(self.models.silent_ids), self._first_rows(utterance))
        if (weave := utterance.weave) is not None:
            shape, prompt = self.models.talker.shape, utterance.prompt
            segment.stream = TextStream(shape, prompt.prompt_text, utterance.speech, weave.end_of_prompt, mix=weave.mix)
            segment.stream.push(prompt.text)
            segment.turn_end, segment.waits_at, segment.has_turn = 0, 0, False
        self._lanes[lane.index][part] = segment
        if utterance.is_streaming:
            self.expect(utterance.voice)

    def _first_rows(self, used: Utterance) -> list[int]:
        if used.weave is not None:
            return []
        return self.models.talker.prompt_ids(used.prompt.prompt_text, used.prompt.text, used.speech)

    def has_part(self, lane: Lane, part: Part) -> bool:
        return self._leases[lane.index] == lane.lease and part in self._lanes[lane.index]

    def hear(self, lane: Lane, part: Part, text: Sequence[int], *, is_last: bool) -> Lengths:
        """More text ids of a woven part. -> what it may be fed now. Raises TextTooLong."""
        segment = self._lanes[lane.index][part]
        assert segment.stream is not None, "its text is whole"
        if text:
            segment.utterance = segment.utterance.with_more(text)
            segment.stream.push(text)
        self.check(segment.utterance)
        if is_last:
            segment.stream.end()
        segment.take_turn()
        return self._woven_lengths(segment)

    def expect(self, voice: Voice) -> None:
        """Has the voice's prompt solved, if it isn't: before anybody waits for it, if there is time."""
        if self.keeps_flow:
            with self._sounding.current():
                self.prefixes.begin(voice)

    def free(self, lane: Lane) -> None:
        """Gives back all that the lane holds. A lane that never got a part holds nothing.

        What is in flight for it may still write there: before anything that a later tenant launches.
        """
        if self._leases[lane.index] == lane.lease:
            for segment in self._lanes[lane.index].values():
                self._release_talker(lane, segment)
                self._release_flow(segment)
            self._lanes[lane.index].clear()

    def _release_talker(self, lane: Lane, segment: Segment) -> None:
        if segment.has_talker:
            self.talkers.free(lane.index)
        segment.has_talker, segment.is_talked = False, True

    def _release_flow(self, segment: Segment) -> None:
        if segment.flow is not None:
            segment.flow.close(self.models.flow_store)
            segment.flow = None

    def _segment(self, row: TalkerRow | FlowStep | HiftRow) -> Segment:
        assert self._leases[row.lane.index] == row.lane.lease, f"{row.lane} has another tenant"
        return self._lanes[row.lane.index][row.part]

    # One turn

    @property
    def room(self) -> Room:
        talking, sounding = self._talking, self._sounding
        return Room(
            talker=max(talking.in_flight(TALKER), talking.in_flight(PREFILL)) < IN_FLIGHT,
            # Full responses gather while one launch of them runs: a larger one is cheaper for each.
            flow=sounding.in_flight(FLOW) < IN_FLIGHT and not sounding.in_flight(WHOLE),
            is_idle=talking.is_idle and sounding.is_idle and not self.prefixes.is_solving,
        )

    @property
    def next_due_s(self) -> float:
        """When something in flight may have landed, by the streams' clock; never, if nothing is in flight."""
        return min(self._talking.next_due_s, self._sounding.next_due_s)

    def _launched(self, stage: str, rows: int) -> AbstractContextManager[Flight[Landed]]:
        stream = self._talking if MODEL_OF[stage] == TALKER else self._sounding
        return stream.launch(stage, rows, self.costs.soonest(stage, rows))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched:
        """Enqueues every row of the plan. Raises EngineFault if the device can't be trusted any more."""
        done, room = Launched(), self.room
        with self._sounding.current():
            self._in_groups(plan.hift, self._sound, done)
            if room.flow:
                self._launch_flow(plan.flow, done)
        with self._talking.current():
            self._in_groups(plan.talker, self._talk, done)
        return done

    def collect(self) -> Landed:
        """What has landed since the last call. Raises EngineFault if the device can't be trusted any more."""
        landed = Landed()
        try:
            for stream in (self._sounding, self._talking):
                for flight in stream.landed():
                    landed.num_flights += 1
                    self.costs.add(flight.stage, flight.rows, flight.seconds)
                    self.seconds[MODEL_OF[flight.stage]] += flight.seconds
                    if flight.land is not None:
                        flight.land(landed)
        except Exception as error:
            raise EngineFault("a launch has failed on the device") from error
        return landed

    def _in_groups(self, rows: Sequence[Row], kernel: Kernel[Row], done: Launched) -> None:
        for start in range(0, len(rows), self.rows_per_launch):
            self._guarded(rows[start : start + self.rows_per_launch], kernel, done)

    def _guarded(self, rows: Sequence[Row], kernel: Kernel[Row], done: Launched) -> None:
        """A row alone on the CPU may fail without harm to the others. Raises EngineFault for any other failure."""
        try:
            kernel(rows, done)
        except Exception as error:
            if len(rows) != 1 or self.models.device.type == "cuda":
                raise EngineFault(f"a launch of {len(rows)} rows failed") from error
            logger.exception("lane %s failed", rows[0].lane)
            done.faults.append((rows[0].lane, LaneFault("this context's input broke the model")))

    # Talker

    def _talk(self, rows: Sequence[TalkerRow], done: Launched) -> None:
        chunks, ending, steps = [], [], []
        for row in rows:
            segment = self._segment(row)
            if not row.is_prompt:
                steps.append(Spoken(row, segment))
                done.fed.append((row, row.start + 1))
            elif (start := self._talker_start(row, segment)) is None:
                done.blocked.append(row)
            else:
                upto = min(start + row.rows, len(segment.rows))
                chunks.append((row.lane.index, start, upto - start))
                done.fed.append((row, upto))
                if upto == len(segment.rows):
                    ending.append(Spoken(row, segment))
        if chunks:
            with self._launched(PREFILL, sum(count for _, _, count in chunks)) as flight:
                flight.land = partial(self._land_ids, ending, self.talkers.prefill(chunks))
        if steps:
            with self._launched(TALKER, len(steps)) as flight:
                ticket = self.talkers.decode([row.lane.index for row, _ in steps])
                flight.land = partial(self._land_ids, steps, ticket)

    def _talker_start(self, row: TalkerRow, segment: Segment) -> int | None:
        """The first of the rows that are still to be fed. None: there are no pages for them."""
        if not segment.has_turn:
            return row.start
        used, lane, start = segment.utterance, row.lane.index, row.start
        settings = {"sampling": used.sampling, "seed": used.seed, "clause": segment.clause, "limits": segment.limits}
        try:
            if segment.has_talker:
                self.talkers.extend(lane, segment.rows, limits=segment.limits)
            else:
                start = self.talkers.seat(lane, segment.rows, **settings)
        except OutOfPages:
            return None
        segment.has_talker, segment.has_turn = True, False
        return start

    def _land_ids(self, spoken: Sequence[Spoken], ticket: Ticket, landed: Landed) -> None:
        for (row, segment), code in zip(spoken, ticket.fetch(), strict=True):
            if segment.is_talked:
                continue  # launched before the id that ended it was known
            if code is None:
                landed.faults.append((row.lane, LaneFault("the talker gave no finite scores")))
                self._release_talker(row.lane, segment)
            else:
                landed.talked.append((row, *self._add(row.lane, segment, code)))
                if segment.take_turn():
                    landed.given.append((row.lane, row.part, self._woven_lengths(segment)))

    def _add(self, lane: Lane, segment: Segment, code: int) -> tuple[int, bool]:
        """-> kept tokens, and whether the talker is through."""
        is_stop = code >= self.models.talker.shape.num_codes
        if not is_stop:
            segment.add(code)
        is_end = is_stop or segment.is_over
        if is_end:
            self._release_talker(lane, segment)
            segment.most_pages = self._pages_in_the_end(segment)
            self.codes_per_text.add(len(segment.tokens) / max(1, segment.utterance.prompt.num_target))
        return len(segment.tokens), is_end

    # Flow

    def _launch_flow(self, rows: Sequence[FlowStep], done: Launched) -> None:
        """An Euler step of the streamed rows and of new voices' prompts; all at once of full responses and, where
        the profile says so, of last hops."""
        self._claims, self._refused_pages = None, MANY
        streamed: list[FlowStep] = []
        last: list[FlowStep] = []
        whole: list[FlowStep] = []
        for row in rows:
            if not self._segment(row).utterance.is_streaming:
                whole.append(row)
            else:
                (last if row.is_final and not self.is_final_causal else streamed).append(row)
        if self.rows_per_launch == 1:
            self._in_groups(streamed, self._solve, done)
            self._solve_prompts(self.prefixes.under_way(most_rows=1), done)
        else:
            if streamed or self.prefixes.is_solving:
                self._guarded(streamed, partial(self._solve, has_prompts=True), done)
        self._in_groups(last, self._solve_last, done)
        self._in_groups(self._in_one_call(whole), self._solve_whole, done)

    def _solve(self, rows: Sequence[FlowStep], done: Launched, *, has_prompts: bool = False) -> None:
        ready: list[tuple[FlowStep, Segment, FlowRow]] = []
        for row in rows:
            segment = self._segment(row)
            if (flow := self._flow_ready(row, segment, done)) is not None:
                ready.append((row, segment, flow))
        stepped = [flow for _, _, flow in ready if flow.is_staged]
        if has_prompts:
            free = LAUNCH_UNITS - sum(map(num_units, stepped))
            stepped += self.prefixes.under_way(most_units=max(PREFIX_UNITS, free))
        self._step(stepped)
        done.has_new_voice |= self.prefixes.settle()
        ended = [item for item in ready if self._is_hop_solved(item[2])]
        done.solved += [(row, False) for row, _, flow in ready if not self._is_hop_solved(flow)]
        self._keep_mels(ended, done)

    def _solve_prompts(self, prompts: Sequence[FlowRow], done: Launched) -> None:
        """On the CPU: if it fails, so do those who wait for it."""
        try:
            self._step(prompts)
        except Exception:
            logger.exception("a voice's prompt broke the flow")
            for name in self.prefixes.give_up(prompts):
                done.faults += [(lane, LaneFault("this voice broke the model")) for lane in self._lanes_of(name)]
        done.has_new_voice |= self.prefixes.settle()

    def _step(self, rows: Sequence[FlowRow]) -> None:
        if rows:
            with self._launched(FLOW, sum(num_units(row) for row in rows)):
                self.models.flow.step(rows, self.models.flow_store)

    def _flow_ready(self, row: FlowStep, segment: Segment, done: Launched) -> FlowRow | None:
        """The flow row with its hop staged and pages for it, or None: it waits for some, or for its voice."""
        flow, store = self.models.flow, self.models.flow_store
        try:
            if row.is_new_hop and not self.keeps_flow:
                self._forget_flow(segment)
            if segment.flow is None and not self._may_begin(segment):
                done.blocked.append(row)
                return None
            state = segment.flow = segment.flow or self._fresh_row(segment.utterance.voice)
            if state is None:
                done.blocked.append(row)
                return None
            if row.is_new_hop and not state.is_staged:
                flow.begin(state, segment.tokens[segment.num_given : row.upto], row.is_final)
                segment.num_given = row.upto
            if state.is_staged and (self.is_final_causal or not row.is_final):
                self.prefixes.make_room(lambda: flow.reserve(state, store))
        except OutOfPages:
            done.blocked.append(row)
            return None
        except FlowError as error:
            done.faults.append((row.lane, TextTooLong(str(error))))
            return None
        return state

    def _may_begin(self, segment: Segment) -> bool:
        """A row begins if the pages will probably last to its end and to that of all rows under way, which take theirs
        at the same pace: else one that somebody listens to would stop short. With none under way it may try."""
        segment.most_pages = self._pages_in_the_end(segment)
        if segment.most_pages >= self._refused_pages:
            return False
        if self._claims is None:
            self._claims = [self._claim(one) for one in self.segments() if one.flow is not None]
        claims = [*self._claims, Claim(0, segment.most_pages)]
        lacking = most_held(claims) - self.models.flow_store.pool.num_free - sum(claim.held for claim in claims)
        if self._claims and lacking > 0 and lacking > self.prefixes.num_unused_pages(segment.utterance.voice):
            self._refused_pages = segment.most_pages
            return False
        self._claims = claims
        return True

    def _claim(self, segment: Segment) -> Claim:
        assert segment.flow is not None, "only rows under way hold pages"
        prefix = segment.flow.prefix
        held = len(segment.flow.pages) - (len(prefix.pages) if prefix is not None else 0)
        return Claim(held, max(0, segment.most_pages - held))

    def _pages_in_the_end(self, segment: Segment) -> int:
        """Of its own: those of the voice's prompt are shared."""
        used = segment.utterance
        tokens = len(segment.tokens)
        if not segment.is_talked:
            likely = int(self.codes_per_text.value * used.prompt.num_target)
            tokens = max(tokens, used.limits.min_len, min(likely, used.limits.max_len))
        whole = self.models.flow.pages_for(self.prefixes.prompt_tokens(used.voice) + tokens)
        return max(0, whole - self.prefixes.pages_of(used.voice))

    def _fresh_row(self, voice: Voice) -> FlowRow | None:
        """Behind the voice's solved prompt; where nothing is kept, with its prompt to solve."""
        return self.prefixes.row(voice) if self.keeps_flow else self.models.flow.row(self.prefixes.voice(voice))

    def _forget_flow(self, segment: Segment) -> None:
        """What the last hop solved: the next one solves it again. One that waits for pages is left as it is."""
        if segment.flow is not None and not segment.flow.is_staged:
            self._release_flow(segment)
            segment.num_given = 0

    def _is_hop_solved(self, flow: FlowRow) -> bool:
        return not flow.is_staged or flow.steps_done == self.models.flow.shape.steps

    def _keep_mels(self, ended: Sequence[tuple[FlowStep, Segment, FlowRow]], done: Launched) -> None:
        """Takes the mels off their pages, which a last hop gives back at once: whatever follows is launched later."""
        if not ended:
            return
        flow, store = self.models.flow, self.models.flow_store
        healths = torch.stack(flow.faults([state for _, _, state in ended], store))
        staged = [state for _, _, state in ended if state.is_staged]
        mels = dict(zip(map(id, staged), flow.finish_all(staged, store), strict=True))
        for (row, segment, state), health in zip(ended, healths, strict=True):
            mel = mels.get(id(state), self._no_mel)
            segment.mel = mel if self.keeps_flow else mel[:, segment.num_frames :]
            segment.num_frames += segment.mel.shape[1]
            segment.health = health
            if row.is_final:
                self._release_flow(segment)
            done.solved.append((row, True))

    def _solve_last(self, rows: Sequence[FlowStep], done: Launched) -> None:
        """Last hops as the reference has them: all of a row once more, looking both ways."""
        ready = [(row, segment) for row in rows if self._flow_ready(row, segment := self._segment(row), done)]
        flows = [segment.flow for _, segment in ready if segment.flow is not None]
        if ready:
            with self._launched(WHOLE, len(ready)):
                mels = self.models.flow.finish_whole(flows)
                self._keep_whole(ready, mels, done)

    def _keep_whole(self, solved: Sequence[tuple[FlowStep, Segment]], mels: Sequence[Tensor], done: Launched) -> None:
        healths = torch.stack(torch._foreach_norm(list(mels))) * 0
        for (row, segment), mel, health in zip(solved, mels, healths, strict=True):
            segment.mel, segment.health = mel, health
            self._release_flow(segment)
            done.solved.append((row, True))

    def _in_one_call(self, rows: Sequence[FlowStep]) -> Sequence[FlowStep]:
        """The first of these full responses, as many as the flow solves at once; the others stay planned. Several
        calls' kernels, enqueued in one turn, would keep everybody else waiting."""
        segments = [self._segment(row) for row in rows]
        sizes = (FRAMES_PER_TOKEN * (len(one.utterance.voice.tokens) + len(one.tokens)) for one in segments)
        count = sum(size <= WHOLE_FRAMES for size in accumulate(sizes))
        return rows[: max(1, count)]

    def _solve_whole(self, rows: Sequence[FlowStep], done: Launched) -> None:
        """Full responses: attention in both directions over all tokens."""
        segments = [self._segment(row) for row in rows]
        requests = [(self.prefixes.whole(one.utterance.voice), one.tokens) for one in segments]
        with self._launched(WHOLE, len(rows)):
            mels = self.models.flow.offline_all(requests)
            self._keep_whole(list(zip(rows, segments, strict=True)), mels, done)

    # HiFT

    def _sound(self, rows: Sequence[HiftRow], done: Launched) -> None:
        segments = [self._segment(row) for row in rows]
        with self._launched(HIFT, len(rows)) as flight:
            states = [segment.hift or self.models.hift.begin() for segment in segments]
            mels = [segment.mel for segment in segments if segment.mel is not None]
            healths = [segment.health for segment in segments if segment.health is not None]
            assert len(mels) == len(healths) == len(segments), "only rows with mel are planned"
            waves = self.models.hift.push(states, mels, [row.is_final for row in rows])
            lengths = [len(wave) for wave in waves]
            flat = torch.cat([*waves, torch.stack(healths)]).float().to("cpu", non_blocking=True)
            flight.land = partial(self._land_pcm, rows, lengths, flat)
        for row, segment, state, length in zip(rows, segments, states, lengths, strict=True):
            segment.hift, segment.mel, segment.health = state, None, None
            if row.is_final:
                segment.hift = None
                del self._lanes[row.lane.index][row.part]
            done.voiced.append((row, length))

    def _land_pcm(self, rows: Sequence[HiftRow], lengths: Sequence[int], flat: Tensor, landed: Landed) -> None:
        """flat: the waves end to end, float32, and behind them the health of each row's mel."""
        *waves, healths = np.split(flat.numpy(), np.cumsum(lengths))
        for row, wave, health in zip(rows, waves, healths, strict=True):
            if not np.isfinite(health):
                landed.faults.append((row.lane, LaneFault("the flow gave no finite mel")))
            elif not np.isfinite(wave).all():
                landed.faults.append((row.lane, LaneFault("the vocoder gave no finite samples")))
            else:
                landed.sounded.append((row, wave.tobytes()))

    # How full it is

    def segments(self) -> Iterator[Segment]:
        return (segment for lane in self._lanes for segment in lane.values())

    def _lanes_of(self, voice: str) -> list[Lane]:
        """Who speaks with a voice and has no flow row yet."""
        return [
            Lane(index, self._leases[index])
            for index, lane in enumerate(self._lanes)
            if any(one.utterance.voice.id == voice and one.flow is None for one in lane.values())
        ]

    @property
    def talker_pages(self) -> int:
        """Of lanes; what is kept of prompts is counted apart."""
        return self.talkers.num_pages

    @property
    def flow_pages(self) -> int:
        """Of lanes; what is kept for voices is counted apart."""
        return self.models.flow_store.pool.num_used - self.prefixes.num_pages

    @property
    def hift_states(self) -> int:
        return sum(segment.hift is not None for segment in self.segments())

    @property
    def cache_bytes(self) -> int:
        """Of all pages in use."""
        talker, flow = self.models.talker_store, self.models.flow_store
        of_talker = talker.pool.num_used * talker.kv.nbytes // talker.pool.num_pages
        return of_talker + flow.pool.num_used * FlowStore.page_bytes(flow.shape, flow.data.dtype)


def most_held(claims: Sequence[Claim]) -> int:
    """Pages that rows hold at once at most, if all take theirs at the same pace and give them back at their ends."""
    longest_first = sorted(claims, key=lambda claim: -claim.to_come)
    held = accumulate(claim.held for claim in longest_first)
    return max(
        already + count * claim.to_come
        for count, (already, claim) in enumerate(zip(held, longest_first, strict=True), 1)
    )


def num_units(row: FlowRow) -> int:
    """Chunks of a row under solution."""
    assert row.staged is not None, "only staged rows take a step"
    return -(-(row.staged.end - row.staged.start) // CHUNK_FRAMES)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that doesn't wait for what the stream has to do before it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Prefixes:
    """The solved whole chunks of voices' prompts: once per voice, shared by its rows; the oldest unused goes first.

    A row's first hop ends at the first chunk boundary after its prompt, so a prompt that ends shortly before one is
    heard sooner. With a remainder of 1..24 the flow leaves out as much of a prompt's start as makes it that many
    tokens longer than a whole number of chunks. The talker keeps all of it: its prompt must match the transcript.

    A prompt is solved like a row, packed with others, as soon as its voice is named. No row is born before it is done.
    """

    def __init__(self, flow: Flow, store: FlowStore, remainder: int = 0) -> None:
        self.flow, self.store, self.remainder = flow, store, remainder
        self._voices: OrderedDict[str, tuple[FlowVoice, FlowVoice]] = OrderedDict()  # whole, trimmed
        self._begun: dict[str, FlowRow] = {}
        self._wanted: set[str] = set()  # of those begun: a row waits for it
        self._solved: OrderedDict[str, FlowPrefix] = OrderedDict()

    @property
    def num_pages(self) -> int:
        held = (*self._solved.values(), *self._begun.values())
        return sum(len(prefix.pages) for prefix in held)

    def num_unused_pages(self, wanted: Voice) -> int:
        """That `make_room` could give to a row with the wanted voice, whose own prompt stays."""
        others = (prefix for name, prefix in self._solved.items() if name != wanted.id)
        return sum(len(one.pages) for one in others if all(self.store.pool.holders(page) == 1 for page in one.pages))

    def pages_of(self, voice: Voice) -> int:
        """That a row behind this voice's prompt would share."""
        return len(self._solved[voice.id].pages) if voice.id in self._solved else 0

    def prompt_tokens(self, voice: Voice) -> int:
        """Of a streamed row."""
        tokens = len(voice.tokens)
        if not self.remainder or tokens < self.remainder:
            return tokens
        return tokens - (tokens - self.remainder) % self.flow.shape.chunk_tokens

    def whole(self, voice: Voice) -> FlowVoice:
        """The voice on the device, for a full response."""
        return self._on_device(voice)[0]

    def voice(self, voice: Voice) -> FlowVoice:
        """The voice on the device as a streamed row takes it."""
        return self._on_device(voice)[1]

    def _on_device(self, voice: Voice) -> tuple[FlowVoice, FlowVoice]:
        if voice.id not in self._voices:
            left_out = len(voice.tokens) - self.prompt_tokens(voice)
            mel, embedding = (on_device(x, self.flow.device) for x in (voice.mel, voice.embedding))
            trimmed = FlowVoice(voice.tokens[left_out:], mel[FRAMES_PER_TOKEN * left_out :], embedding)
            self._voices[voice.id] = FlowVoice(voice.tokens, mel, embedding), trimmed
            if len(self._voices) > MAX_VOICES:
                self._voices.popitem(last=False)
        self._voices.move_to_end(voice.id)
        return self._voices[voice.id]

    # Solving

    def begin(self, voice: Voice) -> None:
        """Has the prompt solved by the next launches, if it isn't yet."""
        if voice.id in self._solved or voice.id in self._begun:
            return
        row = self.flow.row(self.voice(voice))
        if self.flow.begin(row, (), is_final=False):
            self._begun[voice.id] = row
        else:
            self._keep(voice.id, self.flow.prefix(row, self.store))

    def _keep(self, name: str, prefix: FlowPrefix) -> None:
        """Those with pages are as few as the pages; of those without, the oldest go."""
        self._solved[name] = prefix
        if len(self._solved) > MAX_VOICES:
            bare = next((one for one, kept in self._solved.items() if not kept.pages), None)
            if bare is not None:
                del self._solved[bare]

    @property
    def is_solving(self) -> bool:
        return bool(self._begun)

    def under_way(self, most_rows: int = PREFIX_ROWS, most_units: int = PREFIX_UNITS) -> list[FlowRow]:
        """The first of those begun, one at least, with pages for them. One that finds none is given up until it is
        wanted again; only for one that a row waits for do others go."""
        rows: list[FlowRow] = []
        for name, row in list(self._begun.items()):
            if len(rows) == most_rows or rows and sum(map(num_units, (*rows, row))) > most_units:
                break
            try:
                if name in self._wanted:
                    self.make_room(partial(self.flow.reserve, row, self.store))
                else:
                    self.flow.reserve(row, self.store)
            except OutOfPages:
                self.give_up([row])
            else:
                rows.append(row)
        return rows

    def settle(self) -> bool:
        """Keeps the prompts that are solved to their end. -> whether there were any."""
        steps = self.flow.shape.steps
        names = [name for name, row in self._begun.items() if row.steps_done == steps]
        for name in names:
            row = self._begun.pop(name)
            self._wanted.discard(name)
            self.flow.finish(row, self.store)
            self._keep(name, self.flow.prefix(row, self.store))
        return bool(names)

    def give_up(self, rows: Sequence[FlowRow]) -> list[str]:
        """Forgets prompts that were begun. -> the voices' names."""
        names = [name for name, row in self._begun.items() if row in rows]
        for name in names:
            self._begun.pop(name).close(self.store)
            self._wanted.discard(name)
        return names

    def row(self, voice: Voice) -> FlowRow | None:
        """A fresh row behind the voice's shared pages. None: they are being solved."""
        self.begin(voice)
        if voice.id not in self._solved:
            self._wanted.add(voice.id)
            return None
        self._solved.move_to_end(voice.id)
        return self.flow.row(self.voice(voice), self.store, self._solved[voice.id])

    def make_room(self, attempt: Callable[[], Result]) -> Result:
        """Tries again after each prefix that is given up. Raises OutOfPages when none is left to give."""
        while True:
            try:
                return attempt()
            except OutOfPages:
                if not self._evict():
                    raise

    def _evict(self) -> bool:
        for name, prefix in self._solved.items():
            if prefix.pages and all(self.store.pool.holders(page) == 1 for page in prefix.pages):
                self.store.pool.release(prefix.pages)
                del self._solved[name]
                return True
        return False


def part_limits(num_target: int, voice: Voice, code_ratios: tuple[float, float]) -> Limits:
    """How many codes a part may have: by its text, and by the 15000 frames that the fixed noise covers.

    At least as many as there may be steps behind a prompt that hasn't landed. Raises TextTooLong.
    """
    shortest, longest = code_ratios
    limits = Limits.of(num_target, shortest=shortest, longest=longest)
    most = MAX_FRAMES // 2 - len(voice.tokens)
    if most < IN_FLIGHT:
        raise TextTooLong(f"a voice of {len(voice.tokens)} tokens leaves no room for speech, {MAX_FRAMES // 2} are all")
    return Limits(min(limits.min_len, most), max(IN_FLIGHT, min(limits.max_len, most)))
