"""The state machine of one connection: bytes in, bytes out, orders to the engine. No sockets and no asyncio.

`receive` takes one client message; what the engine says comes through the callback given with each lease;
`next_bytes` gives what may be written now. Control messages go before any audio; audio goes round robin. A context ends
exactly once, and nothing of it is written after that.

    unknown -- open --> waiting -- engine: Opened --> open -- done | cancelled | error --> finished (the id is free)
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from engine import messages as engine
from engine.config import KeyConfig
from gateway import wire
from gateway.context import Context, Lease
from gateway.errors import FINAL_CODES, RETRY_CODES, Close, EngineUnavailable, Refusal, Violation
from gateway.logs import event as log
from gateway.metrics import Metrics
from gateway.quarantine import Quarantine
from gateway.spans import Tracer
from gateway.voices import Room, Uploads, visible

logger = logging.getLogger(__name__)

CONTROL_BYTES: Final = 256 * 1024  # unread control messages of one connection
CONTEXT_BYTES: Final = 32 * 1024 * 1024  # unsent audio of one context; credit keeps it far below
REMEMBERED: Final = 1024  # finished ids, so that what crosses their terminal message on the wire is met with silence
SEED_BITS: Final = 32  # of seeds we draw: every client language has such integers
RESTART_AFTER_MS: Final = 1000
BUSY_AFTER_MS: Final = 500

Deliver = Callable[[engine.ToGateway], None]

_CALLERS_FAULT: Final = frozenset({"unsupported", "bad_text", "unknown_voice", "bad_voice", "text_too_long"})
_FIXED_TEXT: Final = {
    "engine_error": "the engine could not speak this context",
    "engine_restart": "the engine was lost; try again",
    "overloaded": "no place is free; try again",
    "queue_timeout": "no place came free in time; try again",
    "quota": "the quota is used up; try again later",
    "draining": "the server is going away; try another",
}


class EnginePort(Protocol):
    """What a connection needs of the engine link."""

    @property
    def ready(self) -> engine.Ready | None:
        """The engine's last greeting; None while it is away."""

    @property
    def quarantine(self) -> Quarantine:
        """Inputs over which the engine has died."""

    @property
    def room(self) -> Room:
        """For recordings on their way in."""

    def lease(self, deliver: Deliver) -> Lease:
        """A new name at the engine; its messages go to `deliver`. Raises EngineUnavailable."""

    def post(self, message: engine.ToEngine) -> None:
        """Queue a message; lost without a trace if its engine is gone."""

    def release(self, lease: Lease) -> None:
        """Forget the name: whatever still comes for it is dropped."""


class Quota(Protocol):
    """What a connection's key and address may take, together with their other connections."""

    @property
    def name(self) -> str:
        """Of the key; empty where none was asked for."""

    @property
    def rights(self) -> KeyConfig: ...

    def take_context(self) -> None:
        """Raises Refusal."""

    def give_context(self) -> None: ...

    def take_text(self, num_bytes: int) -> None:
        """Raises Refusal."""

    def take_voice(self) -> None:
        """Raises Refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolLimits:
    """What one connection may take."""

    contexts: int = 16
    text_bytes: int = 65_536
    idle_ms: int = 600_000
    context_idle_ms: int = 60_000
    window_ms: int = 3_000


@dataclass(frozen=True, slots=True)
class _Control:
    """A message that goes before all audio. `asked_at`: when the client asked for it, if how long it took is of
    interest."""

    data: bytes | str
    asked_at: float | None = None


class SpeechProtocol:
    """One client's side of rill.v1."""

    def __init__(
        self,
        *,
        session: str,
        port: EnginePort,
        limits: ProtocolLimits,
        quota: Quota,
        metrics: Metrics,
        tracer: Tracer,
        clock: Callable[[], float],
        seeds: random.Random,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = session
        self.quota = quota
        self._port = port
        self._limits = limits
        self._tracer = tracer
        self._metrics = metrics
        self._clock = clock
        self._seeds = seeds
        self._wake = wake
        self._contexts: dict[str, Context] = {}
        self._turns: deque[Context] = deque()  # the same contexts, in the order of their next turn to send
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._control: deque[_Control] = deque()
        self._control_bytes = 0
        self._is_draining = False
        self._uploads = Uploads(
            port,
            owner=quota.name,
            is_allowed=quota.rights.voices,
            take_one=quota.take_voice,
            say=self._say,
            fail=lambda refusal, v: self._say(self._error(refusal, None, v=v)),
            wake=wake,
        )
        self.received_at = clock()
        self._say(self._greeting())

    # ---- from the client

    def receive(self, data: bytes | str) -> None:
        """One message. Raises Violation if it can't be decoded; what decodes but is wrong is answered on the wire."""
        if isinstance(data, str):
            raise Violation("a text frame; messages are binary", Close.TEXT_FRAME)
        self.received_at = self._clock()
        table = wire.unpack(data)
        try:
            self._take(wire.parse(table))
        except Refusal as refusal:
            if (v := wire.upload_id(table)) is not None:
                self._say(self._error(refusal, None, v=v))
            else:
                self._refuse(refusal, kind=table.get("t"), c=wire.context_id(table))

    def _take(self, message: wire.ClientMessage) -> None:
        match message:
            case wire.Open():
                self._open(message)
            case wire.Cancel():
                self._cancel(message)
            case wire.Text() | wire.Flush() | wire.End() | wire.Credit():
                self._feed(message)
            case wire.Voices():
                self._say(wire.VoiceList(list=self._voices()))
            case wire.Ping():
                self._say(wire.Pong(x=message.x))
            case wire.VoicePut():
                if self._is_draining and message.n == 0:
                    raise Refusal("draining", _FIXED_TEXT["draining"], after_ms=RESTART_AFTER_MS)
                self._uploads.put(message)
            case wire.VoiceDrop():
                self._uploads.drop(message)

    def _open(self, message: wire.Open) -> None:
        if message.c in self._contexts:
            raise Refusal("duplicate_context", "a context with this id is open")
        if self._is_draining:
            raise Refusal("draining", _FIXED_TEXT["draining"], after_ms=RESTART_AFTER_MS)
        if len(self._contexts) >= self._limits.contexts:
            raise Refusal("context_limit", f"at most {self._limits.contexts} contexts", after_ms=BUSY_AFTER_MS)
        if message.speed not in (None, 1):
            raise Refusal("unsupported", "speed can't be changed; leave it out or say 1")
        if message.pace == "none" and not self.quota.rights.unpaced:
            raise Refusal("unsupported", "this key may not ask for unpaced audio")
        opened = self._settled(message)
        self.quota.take_context()
        try:
            self._start(message, opened)
        except Refusal:
            self.quota.give_context()
            raise

    def _settled(self, message: wire.Open) -> wire.Opened:
        """What will really be used. Raises Refusal: unknown voice, or no engine."""
        ready = self._port.ready
        if ready is None:
            raise Refusal("engine_restart", "the engine is starting; try again", after_ms=RESTART_AFTER_MS)
        voices = [voice.id for voice in self._voices()]
        voice = message.voice or (voices[0] if voices else "")
        if voice not in voices:
            raise Refusal("unknown_voice", "no such voice; `voices` lists them")
        fmt = message.fmt or wire.Format()
        seed = self._seeds.getrandbits(SEED_BITS) if message.seed is None else message.seed
        return wire.Opened(c=message.c, rate=fmt.rate, enc=fmt.enc, seed=seed, voice=voice)

    def _start(self, message: wire.Open, opened: wire.Opened) -> None:
        try:
            lease = self._port.lease(lambda event: self._deliver(message.c, lease, event))
        except EngineUnavailable as error:
            text = "the engine is starting; try again"
            raise Refusal("engine_restart", text, after_ms=RESTART_AFTER_MS) from error
        self._port.post(_engine_open(message, opened, lease, allow_controls=self.quota.rights.controls))
        context = Context(
            message,
            opened,
            lease,
            now=self._clock(),
            window_ms=self._limits.window_ms if message.window_ms is None else message.window_ms,
            text_bytes=self._limits.text_bytes,
            post=self._port.post,
            quarantine=self._port.quarantine,
            span=self._tracer(self.session, opened),
        )
        self._finished.pop(message.c, None)
        self._contexts[message.c] = context
        self._turns.append(context)
        self._metrics.opened.inc()

    def _feed(self, message: wire.Text | wire.Flush | wire.End | wire.Credit) -> None:
        context = self._contexts.get(message.c)
        if context is None:
            if message.c not in self._finished:
                raise Refusal("unknown_context", "no context with this id is open")
            return
        now = self._clock()
        match message:
            case wire.Text():
                self.quota.take_text(len(message.s.encode()))
                context.text(message, now)
            case wire.Flush():
                context.flush(message, now)
            case wire.End():
                context.end(now)
            case wire.Credit():
                context.credit(message.ms, now)

    def _cancel(self, message: wire.Cancel) -> None:
        context = self._contexts.get(message.c)
        if context is not None:
            self._finish(context, context.cancelled(message.played_ms))
        elif message.c not in self._finished:
            self._say(wire.Cancelled(c=message.c, samples=0, ms=0.0, text_upto=0), asked_at=self.received_at)

    def _refuse(self, refusal: Refusal, *, kind: object, c: str | None) -> None:
        """The error goes to the context it ends, to the one that never was, or else to the connection."""
        context = self._contexts.get(c) if c is not None else None
        if context is not None and kind in ("text", "flush", "end", "credit", "cancel"):
            self._finish(context, self._error(refusal, c, samples=context.sent))
        elif c is None or context is not None or c in self._finished and kind != "open":
            self._say(self._error(refusal, None))
        else:
            if kind == "open":
                self._remember(c)
            self._say(self._error(refusal, c))

    def _error(
        self, refusal: Refusal, c: str | None, *, v: str | None = None, samples: int | None = None
    ) -> wire.Error:
        self._metrics.refusals.labels(refusal.code).inc()
        return wire.Error(
            c=c,
            v=v,
            code=refusal.code,
            msg=refusal.text,
            retry=refusal.retry,
            after_ms=refusal.after_ms,
            samples=samples,
        )

    # ---- from the engine

    def _deliver(self, c: str, lease: Lease, event: engine.ToGateway) -> None:
        context = self._contexts.get(c)
        if context is None or context.lease != lease:
            return  # the link has dropped the lease already; this id may have a new owner
        try:
            self._apply(context, event)
        except Exception:  # the link serves everyone: our bug here must not reach it
            logger.exception("a context's engine event failed: our bug")
            if self._contexts.get(c) is context:
                self._fail(context, Refusal("internal", "internal error"))
        self._wake()

    def _apply(self, context: Context, event: engine.ToGateway) -> None:
        now = self._clock()
        match event:
            case engine.Opened():
                self._metrics.queue.observe(context.queued_s(now))
                context.span.event("opened")
                self._say(context.open(now))
            case engine.Audio(pcm=pcm):
                context.audio(pcm, now)
                if context.num_bytes > CONTEXT_BYTES:
                    self._fail(context, Refusal("slow_client", "the audio is not being taken"))
            case engine.ClauseTaken(index=index):
                self._say_if(context.taken(index))
            case engine.ClauseDone(index=index):
                self._say_if(context.clause_done(index))
            case engine.Done(stats=stats):
                context.done(stats)
                self._port.release(context.lease)
            case engine.Failed():
                if event.code == "engine_restart":
                    self._port.quarantine.strike(context.suspects())
                context.is_done = True
                self._fail(context, _refusal_of(event))
            case engine.Cancelled():  # the engine ended it on its own, which it does only when it goes down
                context.is_done = True
                self._fail(context, Refusal("engine_restart", _FIXED_TEXT["engine_restart"]))

    def _fail(self, context: Context, refusal: Refusal) -> None:
        self._finish(context, self._error(refusal, context.c, samples=context.sent))

    # ---- ends

    def _finish(self, context: Context, message: wire.Cancelled | wire.Error) -> None:
        """End the context now: its queued audio is dropped and the message overtakes all other audio."""
        if isinstance(message, wire.Cancelled):
            self._forget(context, "cancelled")
            self._say(message, asked_at=self.received_at)
        else:
            self._forget(context, message.code)
            self._say(message)

    def _forget(self, context: Context, outcome: str) -> None:
        del self._contexts[context.c]
        self._turns.remove(context)
        self._remember(context.c)
        self.quota.give_context()
        context.span.end(outcome, samples=context.sent, first_audio_s=context.first_audio_s)
        self._metrics.ended.labels(outcome if outcome in ("done", "cancelled", "hangup") else "error").inc()
        log(
            logger,
            "context ended",
            session=self.session,
            context=context.lease.context,
            outcome=outcome,
            samples=context.sent,
            first_audio_s=context.first_audio_s,
        )
        if not context.is_done:
            self._port.post(engine.Cancel(context=context.lease.context, epoch=context.lease.epoch))
        self._port.release(context.lease)

    def _remember(self, c: str) -> None:
        self._finished[c] = None
        self._finished.move_to_end(c)
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)

    def drain(self, deadline_ms: int, why: str) -> None:
        """No new contexts; what is open may finish until the deadline. `why`: shutdown or age."""
        if not self._is_draining:
            self._is_draining = True
            self._say(wire.GoAway(deadline_ms=deadline_ms, why=why))

    def end_all(self, refusal: Refusal) -> None:
        """Every open context ends with this error."""
        for context in list(self._contexts.values()):
            self._fail(context, refusal)
        self._uploads.end_all(refusal)

    def close(self) -> None:
        """The socket is gone: cancel whatever is open. Idempotent."""
        for context in list(self._contexts.values()):
            self._forget(context, "hangup")
        self._uploads.close()

    # ---- to the client

    @property
    def num_contexts(self) -> int:
        return len(self._contexts)

    def states(self) -> list[str]:
        """How each open context stands."""
        return [context.state for context in self._contexts.values()]

    @property
    def is_idle(self) -> bool:
        """Nothing is open and nothing waits to be written."""
        return not self._contexts and not self._control and not self._uploads.num_open

    @property
    def is_flooded(self) -> bool:
        """The client makes us answer but doesn't read."""
        return self._control_bytes > CONTROL_BYTES

    def tick(self) -> None:
        """Time has passed: credit may have grown with it, and whoever is waited for may have been too slow."""
        now = self._clock()
        for context in list(self._turns):
            context.tell_credit(now)
            if context.silence_s(now) > self._limits.context_idle_ms / 1000:
                self._fail(context, context.neglect())

    @property
    def has_output(self) -> bool:
        """There may be something to write. Where it waits for credit there isn't, and `next_bytes` gives None."""
        return bool(self._control) or any(context.num_bytes for context in self._turns)

    def next_bytes(self) -> bytes | str | None:
        """The next message to write, or None if nothing may be written now."""
        now = self._clock()
        if self._control:
            control = self._control.popleft()
            self._control_bytes -= len(control.data)
            if control.asked_at is not None:
                self._metrics.cancel_ack.observe(now - control.asked_at)
            return control.data
        for _ in range(len(self._turns)):
            context = self._turns[0]
            self._turns.rotate(-1)
            if (message := context.next_message(now)) is not None:
                return self._written(context, message)
        return None

    def to_send(self) -> list[bytes | str]:
        """All that may be written now."""
        return list(iter(self.next_bytes, None))

    def _written(self, context: Context, message: wire.Audio | wire.Flushed | wire.Done) -> bytes | str:
        if isinstance(message, wire.Done):
            self._forget(context, "done")
        elif isinstance(message, wire.Audio):
            self._measure(context, message)
        return self._packed(message)

    def _packed(self, message: wire.ServerMessage) -> bytes | str:
        """As it is written. Empty: there is no such message in this protocol."""
        return wire.pack(message)

    def _measure(self, context: Context, message: wire.Audio) -> None:
        self._metrics.audio_bytes.inc(len(message.d))
        if message.q == 0 and context.first_audio_s is not None:
            self._metrics.first_audio.observe(context.first_audio_s)
            context.span.event("first audio")
        if context.lead_s is not None:
            self._metrics.lead.observe(max(context.lead_s, 0.0))
            self._metrics.gap.observe(max(-context.lead_s, 0.0))
            if context.lead_s < 0:
                self._metrics.underruns.inc()

    def _say(self, message: wire.ServerMessage, *, asked_at: float | None = None) -> None:
        control = _Control(self._packed(message), asked_at)
        if control.data:
            self._control.append(control)
            self._control_bytes += len(control.data)

    def _say_if(self, message: wire.ServerMessage | None) -> None:
        if message is not None:
            self._say(message)

    def _greeting(self) -> wire.Ready:
        ready = self._port.ready
        return wire.Ready(
            session=self.session,
            proto=wire.SUBPROTOCOL,
            limits=wire.Limits(
                contexts=self._limits.contexts,
                text_bytes=self._limits.text_bytes,
                message_bytes=wire.MESSAGE_BYTES,
                idle_ms=self._limits.idle_ms,
                window_ms=self._limits.window_ms,
            ),
            rates=wire.RATES,
            encs=wire.ENCODINGS,
            voices=self._voices(),
            model=ready.model if ready is not None else "",
        )

    def _voices(self) -> tuple[wire.Voice, ...]:
        return visible(self._port.ready, self.quota.name)


def _engine_open(message: wire.Open, opened: wire.Opened, lease: Lease, *, allow_controls: bool) -> engine.Open:
    return engine.Open(
        context=lease.context,
        epoch=lease.epoch,
        voice=opened.voice,
        seed=opened.seed,
        sampling=None if message.sampling is None else _sampling(message.sampling),
        instruct=message.instruct,
        lang=message.lang,
        allow_controls=allow_controls,
        by_words=message.aggregation == "word",
    )


def _sampling(chosen: wire.SamplingFields) -> engine.SamplingChoice:
    return engine.SamplingChoice(
        mode=chosen.mode,
        temperature=None if chosen.temperature is None else float(chosen.temperature),
        top_p=None if chosen.top_p is None else float(chosen.top_p),
        top_k=chosen.top_k,
        repetition_penalty=None if chosen.repetition_penalty is None else float(chosen.repetition_penalty),
    )


def _refusal_of(failed: engine.Failed) -> Refusal:
    """The engine's text goes on only where it speaks of the caller's own request; its faults have fixed texts."""
    code = failed.code
    if code not in FINAL_CODES | RETRY_CODES:
        code = "internal" if failed.retry else "engine_error"
    text = failed.message if code in _CALLERS_FAULT else _FIXED_TEXT.get(code, code.replace("_", " "))
    return Refusal(code, text, after_ms=failed.after_ms)
