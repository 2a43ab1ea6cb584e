"""A plan -> launches. Owns the tensors of every lane between two steps: prompt rows, pages, flow row, vocoder state.

On the CPU each row is launched alone, so that a lane's samples are the same to the bit, alone or in a crowd; on CUDA
all rows of a stage share one call. What a launch finds wrong with one row ends that row's lane and no other.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from engine.cache import OutOfPages
from engine.flow import FRAMES_PER_TOKEN, Flow, FlowError, FlowPrefix, FlowRow, FlowStore, FlowVoice
from engine.frontend import Prompt
from engine.hift import Hift, HiftState, NoiseTooShort
from engine.noise import MAX_FRAMES
from engine.sampler import Draw, Sampling, sample
from engine.scheduler import (
    FlowRow as FlowStep,
)
from engine.scheduler import (
    HiftRow,
    Lane,
    LaneFault,
    Lengths,
    Part,
    Plan,
    SpeechError,
    TalkerRow,
    TextTooLong,
)
from engine.talker import PAGE_ROWS, Limits, SilentRunFilter, Span, Talker, TalkerStore
from engine.voices import Voice

logger = logging.getLogger(__name__)
Row = TypeVar("Row", TalkerRow, FlowStep, HiftRow)
Result = TypeVar("Result")

MAX_VOICES = 1_024  # whose prompts stay on the device, 0.1 MB each
MAX_SILENT_RUN = 75  # ids, three seconds: a talker that says nothing for so long has lost its text


class EngineFault(Exception):
    """The device's state is unknown: fail every context, exit, be restarted."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Utterance:
    """One part of a clause as the models take it."""

    voice: Voice
    prompt: Prompt
    limits: Limits
    sampling: Sampling
    seed: int
    is_streaming: bool

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
    prompt_rows: Tensor | None = None  # [prefill_rows, H]
    pages: list[int] = field(default_factory=list)  # of the talker
    history: list[int] = field(default_factory=list)  # every id drawn
    tokens: list[int] = field(default_factory=list)  # those that go on to the flow
    silent_run: int = 0
    flow: FlowRow | None = None
    num_fed: int = 0  # tokens given to the flow
    mel: Tensor | None = None  # [M, frames] not yet sounded
    hift: HiftState | None = None

    def draw(self) -> Draw:
        used, step = self.utterance, len(self.history)
        clause = self.part.clause + (self.part.number << 32)
        return Draw(used.sampling, self.history, used.seed, clause, step, used.limits.mask(step))

    def add(self, code: int) -> None:
        self.history.append(code)
        is_kept = self.silence.keep(code)
        self.silent_run = 0 if is_kept else self.silent_run + 1
        if is_kept:
            self.tokens.append(code)

    @property
    def is_over(self) -> bool:
        return self.utterance.limits.is_over(len(self.history)) or self.silent_run >= MAX_SILENT_RUN


@dataclass(slots=True)
class Launched:
    """What a step did, for the scheduler."""

    talked: list[tuple[TalkerRow, int, bool]] = field(default_factory=list)  # kept tokens, is it the end
    solved: list[tuple[FlowStep, bool]] = field(default_factory=list)  # has mel
    sounded: list[tuple[HiftRow, bytes]] = field(default_factory=list)
    blocked: list[Lane] = field(default_factory=list)
    faults: list[tuple[Lane, SpeechError]] = field(default_factory=list)


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


class Runner:
    """One object per lane, by index; only this class writes the device."""

    def __init__(self, models: Models, *, lanes: int, rows_per_launch: int, prompt_remainder: int = 0) -> None:
        self.models = models
        self.rows_per_launch = rows_per_launch
        self.prefixes = Prefixes(models.flow, models.flow_store, prompt_remainder)
        self._lanes: list[dict[Part, Segment]] = [{} for _ in range(lanes)]
        self._leases = [0] * lanes

    # Lanes

    def lengths(self, utterance: Utterance) -> Lengths:
        return Lengths(utterance.prefill_rows, self.prefixes.prompt_tokens(utterance.voice))

    def check(self, utterance: Utterance) -> None:
        """Raises TextTooLong if the caches could never hold this part."""
        rows, limit = utterance.most_rows, self.models.talker_store.pool.num_pages * PAGE_ROWS
        if rows > limit:
            raise TextTooLong(f"the talker may need {rows} rows for this text, its cache holds {limit}")
        pages = self.models.flow.pages_for(self.prefixes.prompt_tokens(utterance.voice) + utterance.limits.min_len)
        if pages > self.models.flow_store.pool.num_pages:
            limit = self.models.flow_store.pool.num_pages
            raise TextTooLong(f"the flow needs {pages} pages at least for this text, its cache holds {limit}")

    def seat(self, lane: Lane, part: Part, utterance: Utterance) -> None:
        """Gives a part to its lane; the scheduler has checked the lease."""
        assert not self._lanes[lane.index] or self._leases[lane.index] == lane.lease, f"{lane} was never freed"
        self._leases[lane.index] = lane.lease
        silence = SilentRunFilter(self.models.silent_ids)
        self._lanes[lane.index][part] = Segment(utterance, part, silence)

    def free(self, lane: Lane) -> None:
        """Gives back all that the lane holds. A lane that never got a part holds nothing."""
        if self._leases[lane.index] == lane.lease:
            for segment in self._lanes[lane.index].values():
                self._release(segment)
            self._lanes[lane.index].clear()

    def _release(self, segment: Segment) -> None:
        self._release_talker(segment)
        self._release_flow(segment)
        segment.hift = segment.mel = None

    def _release_talker(self, segment: Segment) -> None:
        self.models.talker_store.pool.release(segment.pages)
        segment.pages, segment.prompt_rows = [], None

    def _release_flow(self, segment: Segment) -> None:
        if segment.flow is not None:
            segment.flow.close(self.models.flow_store)
            segment.flow = None

    def _segment(self, row: TalkerRow | FlowStep | HiftRow) -> Segment:
        assert self._leases[row.lane.index] == row.lane.lease, f"{row.lane} has another tenant"
        return self._lanes[row.lane.index][row.part]

    # One step

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched:
        """Runs every row of the plan. Raises EngineFault if the device can't be trusted any more."""
        done = Launched()
        self._in_groups(plan.hift, self._sound, done)
        self._in_groups(plan.flow, self._solve, done)
        self._in_groups(plan.talker, self._talk, done)
        return done

    def _in_groups(
        self, rows: Sequence[Row], kernel: Callable[[Sequence[Row], Launched], None], done: Launched
    ) -> None:
        for start in range(0, len(rows), self.rows_per_launch):
            group = rows[start : start + self.rows_per_launch]
            try:
                kernel(group, done)
            except Exception as error:
                if len(group) > 1 or self.models.device.type == "cuda":
                    raise EngineFault(f"a launch of {len(group)} rows failed") from error
                logger.exception("lane %s failed", group[0].lane)
                done.faults.append((group[0].lane, LaneFault("this context's input broke the model")))

    # Talker

    def _talk(self, rows: Sequence[TalkerRow], done: Launched) -> None:
        ready = [(row, segment) for row in rows if (segment := self._talker_ready(row, done)) is not None]
        if not ready:
            return
        inputs = torch.cat([self._talker_input(row, segment) for row, segment in ready])  # [N, H]
        spans = [Span(segment.pages, row.start, row.count) for row, segment in ready]
        hidden = self.models.talker.extend(inputs, spans, self.models.talker_store)  # [B, H]
        drawing = [i for i, (row, segment) in enumerate(ready) if _ends_prompt(row, segment)]
        codes = dict(zip(drawing, self._draw(hidden, [ready[i][1] for i in drawing], drawing), strict=True))
        for i, (row, segment) in enumerate(ready):
            if i not in codes:
                done.talked.append((row, 0, False))
            elif (code := codes[i]) is None:
                done.faults.append((row.lane, LaneFault("the talker gave no finite scores")))
            else:
                done.talked.append((row, *self._add(segment, code)))

    def _talker_ready(self, row: TalkerRow, done: Launched) -> Segment | None:
        """The segment, with its prompt laid out and pages for all it may ever write."""
        segment = self._segment(row)
        if row.start > 0:
            return segment
        try:
            self.models.talker_store.cover(segment.pages, segment.utterance.most_rows)
        except OutOfPages:
            done.blocked.append(row.lane)
            return None
        segment.prompt_rows = self._prompt_rows(segment.utterance)
        return segment

    def _prompt_rows(self, utterance: Utterance) -> Tensor:
        prompt, device = utterance.prompt, self.models.device
        text = [torch.tensor(ids, dtype=torch.int64, device=device) for ids in (prompt.prompt_text, prompt.text)]
        speech = utterance.voice.tokens if prompt.has_prompt_speech else utterance.voice.tokens[:0]
        return self.models.talker.prefill_rows(text[0], text[1], speech.to(device))

    def _talker_input(self, row: TalkerRow, segment: Segment) -> Tensor:
        if row.start < segment.utterance.prefill_rows:
            assert segment.prompt_rows is not None, "laid out at its first row"
            return segment.prompt_rows[row.start : row.start + row.count]
        last = torch.tensor(segment.history[-1:], device=self.models.device)
        return self.models.talker.speech_rows(last)

    def _draw(self, hidden: Tensor, segments: Sequence[Segment], places: list[int]) -> list[int | None]:
        if not segments:
            return []
        chosen = hidden if len(places) == len(hidden) else hidden[torch.tensor(places, device=hidden.device)]
        return sample(self.models.talker.logits(chosen), [segment.draw() for segment in segments]).fetch()

    def _add(self, segment: Segment, code: int) -> tuple[int, bool]:
        """-> kept tokens, and whether the talker is through."""
        is_stop = code >= self.models.talker.shape.num_codes
        if not is_stop:
            segment.add(code)
        is_end = is_stop or segment.is_over
        if is_end:
            self._release_talker(segment)
        return len(segment.tokens), is_end

    # Flow

    def _solve(self, rows: Sequence[FlowStep], done: Launched) -> None:
        ready: list[tuple[FlowStep, Segment, FlowRow]] = []
        for row in rows:
            segment = self._segment(row)
            if not segment.utterance.is_streaming:
                self._solve_whole(row, segment, done)
            elif (flow := self._flow_ready(row, segment, done)) is not None:
                ready.append((row, segment, flow))
        staged = [flow for _, _, flow in ready if flow.is_staged]
        if staged:
            self.models.flow.step(staged, self.models.flow_store)
        for row, segment, flow in ready:
            self._end_euler_step(row, segment, flow, done)

    def _flow_ready(self, row: FlowStep, segment: Segment, done: Launched) -> FlowRow | None:
        """The flow row with its hop staged and pages for it, or None: it waits for some."""
        flow, store = self.models.flow, self.models.flow_store
        try:
            state = segment.flow = segment.flow or self.prefixes.row(segment.utterance.voice)
            if row.is_new_hop and not state.is_staged:
                flow.begin(state, segment.tokens[segment.num_fed : row.upto], row.is_final)
                segment.num_fed = row.upto
            if state.is_staged:
                self.prefixes.make_room(lambda: flow.reserve(state, store))
        except OutOfPages:
            done.blocked.append(row.lane)
            return None
        except FlowError as error:
            done.faults.append((row.lane, TextTooLong(str(error))))
            return None
        return state

    def _end_euler_step(self, row: FlowStep, segment: Segment, flow: FlowRow, done: Launched) -> None:
        if flow.is_staged and flow.steps_done < self.models.flow.shape.steps:
            done.solved.append((row, False))
            return
        mel = self.models.flow.finish(flow) if flow.is_staged else self._no_mel()
        if row.is_final:
            self._release_flow(segment)
        self._keep_mel(row, segment, mel, done)

    def _no_mel(self) -> Tensor:
        return torch.empty(self.models.flow.shape.mel, 0, device=self.models.device)

    def _solve_whole(self, row: FlowStep, segment: Segment, done: Launched) -> None:
        """Full response: bidirectional attention over all tokens."""
        voice = self.prefixes.whole(segment.utterance.voice)
        try:
            (mel,) = self.models.flow.offline_all([(voice, segment.tokens)])
        except FlowError as error:
            done.faults.append((row.lane, TextTooLong(str(error))))
            return
        self._keep_mel(row, segment, mel, done)

    def _keep_mel(self, row: FlowStep, segment: Segment, mel: Tensor, done: Launched) -> None:
        if not bool(mel.isfinite().all()):
            done.faults.append((row.lane, LaneFault("the flow gave no finite mel")))
            return
        segment.mel = mel
        done.solved.append((row, True))

    # HiFT

    def _sound(self, rows: Sequence[HiftRow], done: Launched) -> None:
        segments = [self._segment(row) for row in rows]
        states = [segment.hift or self.models.hift.begin() for segment in segments]
        mels = [segment.mel for segment in segments if segment.mel is not None]
        assert len(mels) == len(segments), "only rows with mel are planned"
        try:
            waves = self.models.hift.push(states, mels, [row.is_final for row in rows])
        except NoiseTooShort as error:
            done.faults += [(row.lane, TextTooLong(str(error))) for row in rows]
            return
        for row, segment, state, wave in zip(rows, segments, states, waves, strict=True):
            self._keep_wave(row, segment, state, wave.float().cpu(), done)

    def _keep_wave(self, row: HiftRow, segment: Segment, state: HiftState, wave: Tensor, done: Launched) -> None:
        if not bool(wave.isfinite().all()):
            done.faults.append((row.lane, LaneFault("the vocoder gave no finite samples")))
            return
        segment.hift, segment.mel = state, None
        if row.is_final:
            self._release(segment)
            del self._lanes[row.lane.index][row.part]
        done.sounded.append((row, wave.numpy().tobytes()))

    # How full it is

    def segments(self) -> Iterator[Segment]:
        return (segment for lane in self._lanes for segment in lane.values())

    @property
    def talker_pages(self) -> int:
        return self.models.talker_store.pool.num_used

    @property
    def flow_pages(self) -> int:
        """Of lanes; what is kept for voices is counted apart."""
        return self.models.flow_store.pool.num_used - self.prefixes.num_pages

    @property
    def hift_states(self) -> int:
        return sum(segment.hift is not None for segment in self.segments())


def _ends_prompt(row: TalkerRow, segment: Segment) -> bool:
    return row.start + row.count >= segment.utterance.prefill_rows


class Prefixes:
    """The solved whole chunks of voices' prompts: once per voice, shared by its rows; the oldest unused goes first.

    A row's first hop ends at the first chunk boundary after its prompt, so a prompt that ends shortly before one is
    heard sooner. With a remainder of 1..24 the flow leaves out as much of a prompt's start as makes it that many
    tokens longer than a whole number of chunks. The talker keeps all of it: its prompt must match the transcript.
    """

    def __init__(self, flow: Flow, store: FlowStore, remainder: int = 0) -> None:
        self.flow, self.store, self.remainder = flow, store, remainder
        self._voices: OrderedDict[str, tuple[FlowVoice, FlowVoice]] = OrderedDict()  # whole, trimmed
        self._solved: OrderedDict[str, FlowPrefix] = OrderedDict()

    @property
    def num_pages(self) -> int:
        return sum(len(prefix.pages) for prefix in self._solved.values())

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
            device, left_out = self.flow.device, len(voice.tokens) - self.prompt_tokens(voice)
            mel, embedding = (x.to(device) for x in (voice.mel, voice.embedding))
            trimmed = FlowVoice(voice.tokens[left_out:], mel[FRAMES_PER_TOKEN * left_out :], embedding)
            self._voices[voice.id] = FlowVoice(voice.tokens, mel, embedding), trimmed
            if len(self._voices) > MAX_VOICES:
                self._voices.popitem(last=False)
        self._voices.move_to_end(voice.id)
        return self._voices[voice.id]

    def row(self, voice: Voice) -> FlowRow:
        """A fresh row behind the voice's shared pages. Raises OutOfPages if they can't be solved now."""
        on_device = self.voice(voice)
        if voice.id not in self._solved:
            self._solved[voice.id] = self.make_room(lambda: self.flow.solve_prefix(on_device, self.store))
        self._solved.move_to_end(voice.id)
        return self.flow.row(on_device, self.store, self._solved[voice.id])

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
    """How many codes a part may have: by its text, and by the 15000 frames that the fixed noise covers."""
    shortest, longest = code_ratios
    limits = Limits.of(num_target, shortest=shortest, longest=longest)
    most = MAX_FRAMES // 2 - len(voice.tokens)
    return Limits(min(limits.min_len, most), min(limits.max_len, most))
