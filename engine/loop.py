"""Take, plan, launch, deliver: the engine's one loop, on the one thread that touches the device.

Whatever comes from elsewhere comes through the inbox: the gateways' messages, links that open and close, and clauses
whose text work, done on a worker thread, is ready. Whatever leaves goes to `deliver`, which must not block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice

from engine.batch import EngineFault, Landed, Launched, Runner, Utterance, Weave, part_limits
from engine.costs import FLOW, HIFT, TALKER
from engine.frontend import Tokenizer, assemble, choose_mode, segments, stretch
from engine.messages import (
    SAMPLE_RATE_HZ,
    Cancel,
    Clause,
    End,
    Failed,
    Gauges,
    Open,
    Ready,
    SamplingChoice,
    ToEngine,
    ToGateway,
)
from engine.sampler import Sampling
from engine.scheduler import (
    INFINITY,
    LaneFault,
    Overloaded,
    Part,
    Preparation,
    Restarting,
    Scheduler,
    SpeechError,
    TextTooLong,
    UnknownVoice,
    Unsupported,
)
from engine.voice_store import VoiceStore
from engine.voices import Voice

logger = logging.getLogger(__name__)

WARM_LINK = -1  # no gateway: the engine speaks to itself before it is ready
# The sum of money wakes the normaliser's grammars.
WARM_TEXT = "Here we go, for $4."
WARM_CROWDS = (2, 4, 8, 16, 32, 64, 128, 256, 512)  # contexts at once
WARM_PAGES = 4  # that the flow may need for each of them
WARM_VOICES = 2  # the others' prompts are solved at their first use: many would take long, and fill the cache
QUEUE_CHECK_S = 0.1  # while contexts wait, or the gateways don't know yet that some have ended
POLL_S = 1e-4  # between two looks at what should have landed
REPLAN_S = 5e-3  # while nothing happens: listeners' leads shrink, and talkers that rest may go on


# What comes in


@dataclass(frozen=True, slots=True)
class Said:
    link: int
    message: ToEngine


@dataclass(frozen=True, slots=True)
class LinkOpened:
    link: int


@dataclass(frozen=True, slots=True)
class LinkClosed:
    link: int


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    job: Preparation
    work: Future[list[Utterance]]


@dataclass(frozen=True, slots=True)
class VoiceMade:
    """A caller has registered it, and is likely to speak with it soon."""

    voice: Voice


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Item = Said | LinkOpened | LinkClosed | Prepared | VoiceMade | Stop


class Inbox:
    """Filled by any thread, emptied by the device's. Bounded by its senders: credit, clause and context limits."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._filled = threading.Condition()

    def put(self, *items: Item) -> None:
        with self._filled:
            self._items.extend(items)
            self._filled.notify()

    def drain(self, wait_s: float) -> list[Item]:
        """All that is there, after a wait for the first of them."""
        with self._filled:
            if not self._items and wait_s > 0:
                self._filled.wait(wait_s)
            items = list(self._items)
            self._items.clear()
        return items


# Text work


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Open):
    """An Open with nothing left to defaults. It holds its voice: a context goes on with one that is dropped."""

    speaker: Future[Voice]  # there, or being read by the worker that will ask for it


class Reader:
    """A clause's text -> what the models take. `utterances` runs on a worker thread and changes nothing here."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        voices: VoiceStore,
        *,
        worker: Executor,
        sampling: Sampling,
        code_ratios: tuple[float, float],
        default_voice: str,
        clause_tokens: int,
        can_stream: bool,
        mix: tuple[int, int] | None = None,
    ) -> None:
        """mix: text ids to speech ids that the talker is trained to weave; None: it isn't."""
        self.tokenizer, self.voices, self.sampling = tokenizer, voices, sampling
        self.worker = worker
        self.code_ratios, self.mix = code_ratios, mix
        self.default_voice, self.clause_tokens, self.can_stream = default_voice, clause_tokens, can_stream

    def settled(self, message: Open) -> Settled:
        """Raises UnknownVoice or Unsupported."""
        self._sampling(message.sampling)
        if message.by_words and not (message.streaming and self.can_stream):
            raise Unsupported("a full response can't be spoken word by word: it needs all of its text")
        if message.by_words and self.mix is None:
            raise Unsupported("this checkpoint's talker is not trained to speak word by word")
        voice = message.voice or self.default_voice
        given = {field.name: getattr(message, field.name) for field in fields(message)}
        streaming = message.streaming and self.can_stream
        return Settled(**{**given, "voice": voice, "streaming": streaming}, speaker=self._speaker(voice))

    def _speaker(self, voice: str) -> Future[Voice]:
        """Raises UnknownVoice."""
        try:
            held = self.voices.in_memory(voice)
        except KeyError as error:
            raise UnknownVoice(f"no such voice; {len(self.voices)} are known") from error
        if held is None:
            return self.worker.submit(self.voices.get, voice)
        speaker: Future[Voice] = Future()
        speaker.set_result(held)
        return speaker

    def _sampling(self, choice: SamplingChoice | None) -> Sampling:
        if choice is None:
            return self.sampling
        chosen = {name: value for name in choice.__slots__ if (value := getattr(choice, name)) is not None}
        try:
            return replace(self.sampling, **chosen)
        except ValueError as error:
            raise Unsupported(str(error)) from error

    def utterances(self, job: Preparation) -> list[Utterance]:
        """The clause in parts; none where there is nothing to say. Raises TextTooLong or UnknownVoice."""
        opened = job.opened
        assert isinstance(opened, Settled), "the loop settles what it gives to the scheduler"
        try:
            voice = opened.speaker.result()
        except KeyError as error:
            raise UnknownVoice("this voice is gone, or can't be read") from error
        lang, can_steer = opened.lang or "", opened.allow_controls
        if opened.by_words:
            words = stretch(job.text, job.before, is_last=job.is_last, lang=lang, allow_controls=can_steer)
            return [self._woven(self._utterance(opened, voice, words))] if words else []
        parts = segments(job.text, self.tokenizer, lang=lang, allow_controls=can_steer)
        return [self._utterance(opened, voice, part) for part in parts]

    def _utterance(self, opened: Settled, voice: Voice, text: str) -> Utterance:
        mode = choose_mode(
            instruct=opened.instruct,
            voice_prompt_text=voice.prompt_text,
            has_prompt=voice.has_prompt,
            is_foreign=are_foreign(opened.lang or "", voice.lang),
        )
        prompt = assemble(
            mode,
            text,
            self.tokenizer,
            voice_prompt_text=voice.prompt_text,
            instruct=opened.instruct or "",
            allow_controls=opened.allow_controls,
        )
        if prompt.num_target > self.clause_tokens:
            raise TextTooLong(f"a clause of {prompt.num_target} text tokens, the limit is {self.clause_tokens}")
        return Utterance(
            voice=voice,
            prompt=prompt,
            limits=part_limits(prompt.num_target, voice, self.code_ratios),
            sampling=self._sampling(opened.sampling),
            seed=opened.seed,
            is_streaming=opened.streaming,
        )

    def _woven(self, utterance: Utterance) -> Utterance:
        """Raises Unsupported for an instruction prefix that the caller's own text holds."""
        prompt, end_of_prompt = utterance.prompt, self.tokenizer.end_of_prompt
        assert self.mix is not None, "refused else"
        head = prompt.prompt_text or prompt.text[: -prompt.num_target]
        if end_of_prompt not in head:
            raise Unsupported("text with a prefix of its own can't be spoken word by word")
        weave = Weave(self.mix, end_of_prompt, self.clause_tokens, self.code_ratios)
        prompt = replace(prompt, prompt_text=head, text=prompt.text[-prompt.num_target :])
        return replace(utterance, prompt=prompt, weave=weave)


def are_foreign(lang: str, other: str) -> bool:
    """Whether both languages are known and differ: en and de, but not en-GB and en."""
    first, second = (tag.lower().replace("_", "-").partition("-")[0] for tag in (lang, other))
    return bool(first and second) and first != second


def _as_speech_error(error: BaseException) -> SpeechError:
    if isinstance(error, SpeechError):
        return error
    logger.error("text work failed", exc_info=error)
    return LaneFault("this context's text broke the front end")


# The loop

Deliver = Callable[[list[tuple[int, ToGateway]]], None]


class Engine:
    """Everything but the sockets. All methods but `inbox.put` belong to the device's thread."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        reader: Reader,
        *,
        deliver: Deliver,
        model: str = "",
        gauges_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.scheduler, self.reader = runner, scheduler, reader
        self.deliver, self.clock = deliver, clock
        self.model, self.gauges_s = model, gauges_s
        self.inbox = Inbox()
        self.num_steps = 0
        self._links: set[int] = set()
        self.host_s = 0.0  # of this thread's turns; on the CPU the models' time is in it
        self._has_launched = False
        self._is_warm = False
        self._plan_by_s = 0.0
        self._is_stopping = False
        self._gauged_at = clock()
        self._gauged_ends = 0
        self._admitted_at = clock()
        self._step_s = 0.0

    def run(self) -> None:
        """Turns of the loop until Stop comes. Raises EngineFault; call `abandon` then."""
        while not self._is_stopping:
            self.step()
        self.abandon()
        self._free()

    def abandon(self) -> None:
        """Every context ends with a retryable error. Touches no device, so it may follow an EngineFault."""
        self.scheduler.fail_all(Restarting("the engine is going down"))
        self._deliver()

    def step(self) -> None:
        """One turn: take what came, deliver what has landed, plan, launch. It waits only if there is nothing to do."""
        items = self.inbox.drain(self._patience_s())
        started = self.clock()
        for item in items:
            self._take(item)
        landed = self.runner.collect()
        if landed.num_flights:
            self._report_landed(landed)
            self._hand_out()  # before the next launch: on the CPU that is where the time goes
        if items or landed.num_flights or self._has_launched or started >= self._plan_by_s:
            self._launch(started)
        self._gauge(started)
        self._hand_out()
        self.host_s += self.clock() - started

    def _launch(self, now: float) -> None:
        plan = self.scheduler.plan(now, self.runner.room)
        self._free()  # of whoever has just ended, before the next tenant of the lane runs
        self._report_launched(self.runner.launch(plan))
        self._has_launched = not plan.is_empty
        gathers_until_s = self.scheduler.gathers_until_s
        self._plan_by_s = min(now + REPLAN_S, gathers_until_s if gathers_until_s > now else INFINITY)
        if self._has_launched:
            self.num_steps += 1
            self._step_s += 0.1 * (self.clock() - now - self._step_s)

    def _hand_out(self) -> None:
        """Frees what has ended, then says so; then the new tenants' text work may begin: their lanes are empty."""
        self._free()
        self._start_text_work()
        self._deliver()

    def warm(self, *, has_graphs: bool = True, on_progress: Callable[[str], None] = lambda name: None) -> None:
        """Everything that a first caller would have to wait for. Raises EngineFault.

        Captures the models' launches, speaks a sentence with the default voice and another, and, where rows share
        launches, begins one in crowds of every size: memory is there then, and what a launch of each size costs has
        been measured.
        on_progress is called with the name of what comes next.
        """
        self.runner.warm(has_graphs=has_graphs, on_capture=on_progress)
        default = self.reader.default_voice
        others = (voice for voice in self.reader.voices.builtin if voice != default)
        voices = [default, *islice(others, WARM_VOICES - 1)]
        for voice in voices:
            on_progress(f"speak as {voice}")
            self._whisper([voice])
            while self.scheduler.num_contexts:
                self.step()
        for size in self._crowds():
            on_progress(f"speak with {size} voices")
            self._whisper([voices[number % len(voices)] for number in range(size)])
            self._hear(size)
        self.scheduler.check_integrity()
        self._is_warm = True
        logger.info("a launch costs, in ms by rows: %s", self.runner.costs.table())

    def _crowds(self) -> list[int]:
        """Powers of two up to all lanes, as far as the pages last, where rows share launches at all."""
        if self.runner.rows_per_launch == 1:
            return []
        most = min(self.scheduler.limits.lanes, self.runner.models.flow_store.pool.num_pages // WARM_PAGES)
        return sorted({most, *(size for size in WARM_CROWDS if size < most)} - {0, 1})

    def _whisper(self, voices: Sequence[str]) -> None:
        """The engine speaks to itself, a context for each voice."""
        for number, voice in enumerate(voices):
            self._say_to_itself(
                Open(context=number, epoch=0, voice=voice, seed=number),
                Clause(context=number, epoch=0, index=0, text=WARM_TEXT),
                End(context=number, epoch=0),
            )
        self.step()

    def _hear(self, contexts: int) -> None:
        """Until there is some audio of every context, or its end; then it is enough."""
        while self.scheduler.num_silent:
            self.step()
        self._say_to_itself(*(Cancel(context=number, epoch=0) for number in range(contexts)))
        while self.scheduler.num_contexts or not self.runner.room.is_idle:
            self.step()

    def _say_to_itself(self, *messages: ToEngine) -> None:
        self.inbox.put(*(Said(WARM_LINK, message) for message in messages))

    def _patience_s(self) -> float:
        """How long to wait for a message: not at all while there is work; else until something lands, or may go on."""
        if self._has_launched:
            return 0.0
        now, room = self.clock(), self.runner.room
        if room.is_idle:
            longest = QUEUE_CHECK_S if self.scheduler.num_waiting or self._has_news else self.gauges_s
            gathers_s = self.scheduler.gathers_until_s - now
            return min(longest, gathers_s) if gathers_s > 0 else longest
        return min(max(POLL_S, self.runner.next_due_s - now), REPLAN_S)

    def _take(self, item: Item) -> None:
        match item:
            case Said(link, message):
                self._take_message(link, message)
            case LinkOpened(link):
                self._links.add(link)
                self.scheduler.outgoing.append((link, self.ready()))
            case LinkClosed(link):
                self._links.discard(link)
                self.scheduler.close_link(link)
            case Prepared(job, work):
                self._take_prepared(job, work)
            case VoiceMade(voice):
                if self.reader.can_stream:
                    self.runner.expect(voice)
            case Stop():
                self._is_stopping = True

    def _take_message(self, link: int, message: ToEngine) -> None:
        if link not in self._links and link != WARM_LINK:
            return  # what a closed link said last
        if isinstance(message, Open):
            try:
                message = self.reader.settled(message)
            except SpeechError as error:
                self.scheduler.refuse(link, message, error)
                return
        self.scheduler.take(link, message, self.clock())

    def _start_text_work(self) -> None:
        jobs, self.scheduler.preparations = self.scheduler.preparations, []
        for job in jobs:
            work = self.reader.worker.submit(self.reader.utterances, job)
            work.add_done_callback(partial(self._hand_in, job))

    def _hand_in(self, job: Preparation, work: Future[list[Utterance]]) -> None:
        """On the worker's thread."""
        self.inbox.put(Prepared(job, work))

    def _take_prepared(self, job: Preparation, work: Future[list[Utterance]]) -> None:
        lane, clause, error = job.lane, job.clause, work.exception()
        if error is not None:
            self.scheduler.failed(lane, _as_speech_error(error))
            return
        utterances = work.result()
        part = Part(clause, 0)
        try:
            if job.opened.by_words and (utterances or self.runner.has_part(lane, part)):
                self._take_words(job, part, utterances)
                return
            for utterance in utterances:
                self.runner.check(utterance)
        except TextTooLong as too_long:
            self.scheduler.failed(lane, too_long)
            return
        if job.opened.by_words and not job.is_last:
            return  # nothing to say yet
        if self.scheduler.prepared(lane, clause, [self.runner.lengths(utterance) for utterance in utterances]):
            for number, utterance in enumerate(utterances):
                self.runner.seat(lane, Part(clause, number), utterance)

    def _take_words(self, job: Preparation, part: Part, utterances: Sequence[Utterance]) -> None:
        """The next words of a clause, if they hold any text ids. Raises TextTooLong."""
        if not self.scheduler.is_current(job.lane):
            return
        text: Sequence[int] = ()
        if not self.runner.has_part(job.lane, part):
            self.runner.seat(job.lane, part, utterances[0])
        elif utterances:
            text = utterances[0].prompt.text
        self.scheduler.given(job.lane, part, self.runner.hear(job.lane, part, text, is_last=job.is_last))

    def _report_launched(self, launched: Launched) -> None:
        scheduler = self.scheduler
        for hift, samples in launched.voiced:
            scheduler.voiced(hift, samples)
        for flow, has_mel in launched.solved:
            scheduler.solved(flow, has_mel=has_mel)
        for talker, upto in launched.fed:
            scheduler.fed(talker, upto)
        for row in launched.blocked:
            scheduler.blocked(row)
        if launched.has_new_voice:
            scheduler.unblock()
        for lane, error in launched.faults:
            scheduler.failed(lane, error)

    def _report_landed(self, landed: Landed) -> None:
        """What is there now; a lane whose tenant has ended meanwhile hears nothing of it."""
        scheduler, now = self.scheduler, self.clock()
        for hift, pcm in landed.sounded:
            if scheduler.is_current(hift.lane):
                scheduler.sounded(hift, pcm, now)
        for talker, tokens, is_end in landed.talked:
            if scheduler.is_current(talker.lane):
                scheduler.talked(talker, tokens, is_end=is_end)
        for lane, part, lengths in landed.given:
            if scheduler.is_current(lane):
                scheduler.given(lane, part, lengths)
        for lane, error in landed.faults:
            scheduler.failed(lane, error)

    def _free(self) -> None:
        lanes, self.scheduler.freed = self.scheduler.freed, []
        for lane in lanes:
            self.runner.free(lane)

    # What goes out

    def ready(self) -> Ready:
        voices, lanes = self.reader.voices.infos(), self.scheduler.limits.lanes
        return Ready(model=self.model, voices=voices, sample_rate=SAMPLE_RATE_HZ, lanes=lanes)

    def gauges(self) -> Gauges:
        return Gauges(
            lanes_used=self.scheduler.lanes_used,
            lanes=self.scheduler.limits.lanes,
            talker_pages=self.runner.talker_pages,
            flow_pages=self.runner.flow_pages,
            hift_states=self.runner.hift_states,
            contexts=self.scheduler.num_contexts,
            waiting=self.scheduler.num_waiting,
            voice_pages=self.runner.prefixes.num_pages,
            steps=self.num_steps,
            step_ms=1e3 * self._step_s,
            talker_s=self.runner.seconds[TALKER],
            flow_s=self.runner.seconds[FLOW],
            hift_s=self.runner.seconds[HIFT],
            host_s=self.host_s,
            cache_bytes=self.runner.cache_bytes,
            places=self.scheduler.places,
            queue_ms=1e3 * self.scheduler.queued_s.value,
        )

    @property
    def _has_news(self) -> bool:
        """Has a context ended since the gateways heard the gauges?"""
        return self.scheduler.num_ended != self._gauged_ends

    def _gauge(self, now: float) -> None:
        """At a fixed pace, and soon after each context's end."""
        if now - self._gauged_at < (min(self.gauges_s, QUEUE_CHECK_S) if self._has_news else self.gauges_s):
            return
        if self._is_warm and now - self._admitted_at >= self.gauges_s:
            self._admitted_at = now
            self.scheduler.admit()
        self._gauged_at, self._gauged_ends = now, self.scheduler.num_ended
        if self._links:
            gauges = self.gauges()
            self.scheduler.outgoing += [(link, gauges) for link in self._links]

    def _deliver(self) -> None:
        outgoing, self.scheduler.outgoing = self.scheduler.outgoing, []
        for link, message in outgoing:
            if link == WARM_LINK and isinstance(message, Failed) and message.code != Overloaded.code:
                raise EngineFault(f"the warm-up failed: {message.message}")
        if outgoing:
            self.deliver(outgoing)
