"""An engine that behaves but has no model: the same pipe, the same promises, audio by rule.

Each clause is a tone whose pitch depends on the seed and the voice and whose length depends on the text, so that a
listener can tell whose audio it hears. `Script` says how it misbehaves. Text may carry orders too:

    FAULT    this context fails with `engine_error`            DIE     the engine drops the pipe at once
    STALL    no audio of this context ever comes               BUSY    refused as overloaded, retry
    KILL     the process kills itself                          HANG    the engine says nothing any more

A recording becomes a voice whatever is in it, but for transcripts that hold such an order: FAULT, STALL, DIE or BUSY.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgpack
import numpy as np
from websockets.asyncio.server import Server, ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed

from engine.leash import on_parent_gone
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
    Gauges,
    Message,
    Open,
    Opened,
    Ready,
    VoiceDrop,
    VoiceDropped,
    VoiceInfo,
    VoiceKept,
    VoicePut,
    pack,
    unpack,
)

GAUGES_S = 1.0


@dataclass(kw_only=True)
class Script:
    """How the engine behaves. Times in seconds, audio in samples at 24 kHz."""

    step_s: float = 0.0  # pause before each step; 0: as fast as the pipe takes it
    is_steady: bool = False  # step_s is from step to step, whatever a step itself takes
    phases: int = 1  # a step is for one in so many contexts, each in its turn
    step_samples: int = 2_400
    samples_per_char: int = 1_200
    is_mute: bool = False  # silence, which costs nothing to make: for measuring others
    amplitude: float = 0.5  # 1.2 leaves the range, as a real vocoder may
    lanes: int = 8
    waiting: int = 8
    fail_after_samples: int | None = None  # every context fails once it has sent so much
    die_after_samples: int | None = None  # the pipe ends once so much has been sent in all
    late_audio: bool = False  # one more frame of a cancelled context, with its old epoch, after Cancelled
    refuse: bool = False  # every Open fails as overloaded
    start_s: float = 0.0  # of a process, before it opens its pipe
    is_ready: bool = True  # False: the link opens but Ready does not come
    voices: tuple[str, ...] = ("ada", "bert")
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: no step runs

    def __post_init__(self) -> None:
        self.gate.set()


def tone(voice: str, seed: int, clause: int, start: int, count: int, amplitude: float = 0.5) -> bytes:
    """Samples start..start+count of a clause's audio, float32."""
    hz = 150 + (sum(voice.encode()) * 7 + seed * 13 + clause * 29) % 900
    step = 2 * math.pi * hz / SAMPLE_RATE_HZ
    return (amplitude * np.sin(step * np.arange(start, start + count))).astype("<f4").tobytes()


@dataclass
class Context:
    """A context on one link, as the engine sees it."""

    opened: Open
    clauses: list[Clause] = field(default_factory=list)
    is_ended: bool = False
    current: int = 0  # clause being spoken
    clause_samples: int = 0  # of it, sent
    samples: int = 0  # of the context, sent
    credit: int | None = None

    @property
    def has_clause(self) -> bool:
        return self.current < len(self.clauses)

    @property
    def allowance(self) -> int:
        return sys.maxsize if self.credit is None else self.credit - self.samples


class Link:
    """One gateway's connection: its contexts and what waits to be sent to it."""

    def __init__(self, engine: ScriptedEngine, connection: ServerConnection) -> None:
        self.engine, self.connection = engine, connection
        self.contexts: dict[int, Context] = {}
        self.out: list[Message] = []
        self.is_dead = False
        self.due = 0.0
        self.turn = 0
        self.work = asyncio.Event()

    async def serve(self) -> None:
        if self.engine.script.is_ready:
            self.out.append(self.engine.ready())
        tasks = [asyncio.create_task(self.run(), name="scripted-steps")]
        if self.engine.script.is_ready:
            tasks.append(asyncio.create_task(self.tell_gauges(), name="scripted-gauges"))
        try:
            async for data in self.connection:
                for table in msgpack.unpackb(data):
                    self.take(unpack(table))
                self.work.set()
        except ConnectionClosed:
            pass
        finally:
            self.is_dead = True
            self.contexts.clear()
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                    await task

    def take(self, message: Message) -> None:
        if self.engine.keeps_messages:
            self.engine.received.append(message)
        match message:
            case Open():
                self.open(message)
            case Cancel(context=key, epoch=epoch):
                self.cancel(key, epoch)
            case VoicePut():
                self.put_voice(message)
            case VoiceDrop():
                self.drop_voice(message)
            case Clause() | End() | Credit():
                if (context := self.current(message.context, message.epoch)) is not None:
                    self.feed(context, message)

    def current(self, key: int, epoch: int) -> Context | None:
        context = self.contexts.get(key)
        return context if context is not None and context.opened.epoch == epoch else None

    def open(self, message: Open) -> None:
        script = self.engine.script
        if script.refuse or len(self.contexts) >= script.lanes + script.waiting:
            self.fail(message, "overloaded", "no lane is free", retry=True)
        elif message.voice and message.voice not in (*script.voices, *self.engine.kept):
            self.fail(message, "unknown_voice", "no such voice", retry=False)
        else:
            self.contexts[message.context] = Context(message)
            self.out.append(Opened(context=message.context, epoch=message.epoch))

    def put_voice(self, message: VoicePut) -> None:
        if "DIE" in message.transcript:
            self.is_dead = True
            self.connection.transport.abort()
        elif "FAULT" in message.transcript:
            self.fail(message, "bad_voice", "the sample rate is 8000 Hz; 16000 to 192000 Hz are accepted", retry=False)
        elif "BUSY" in message.transcript:
            self.fail(message, "overloaded", "8 recordings wait already", retry=True)
        elif "STALL" not in message.transcript:
            key = hashlib.sha256(message.audio + message.transcript.encode()).hexdigest()[:24]
            owners = {**self.engine.owners(key), message.owner: message.name}
            self.engine.kept[key] = VoiceInfo(id=key, name=message.name, lang=message.lang, ms=5_000, owners=owners)
            self.engine.tell_voices()
            self.out.append(VoiceKept(context=message.context, epoch=message.epoch, voice=self.engine.kept[key]))

    def drop_voice(self, message: VoiceDrop) -> None:
        owners = self.engine.owners(message.voice)
        is_there = message.voice in (*self.engine.script.voices, *self.engine.kept)
        if owners.pop(message.owner, None) is not None:
            kept = self.engine.kept.pop(message.voice)
            if owners:
                self.engine.kept[message.voice] = dataclasses.replace(kept, owners=owners)
            self.engine.tell_voices()
        elif is_there:
            self.fail(message, "unknown_voice", "no voice of yours has this id", retry=False)
            return
        self.out.append(VoiceDropped(context=message.context, epoch=message.epoch))

    def feed(self, context: Context, message: Clause | End | Credit) -> None:
        match message:
            case Clause():
                context.clauses.append(message)
                if "BUSY" in message.text:
                    self.fail(context.opened, "overloaded", "no lane is free", retry=True)
            case End():
                context.is_ended = True
            case Credit():
                context.credit = max(context.credit or 0, message.samples)

    def cancel(self, key: int, epoch: int) -> None:
        context = self.current(key, epoch)
        if context is not None:
            del self.contexts[key]
        self.out.append(Cancelled(context=key, epoch=epoch))
        if context is not None and self.engine.script.late_audio:
            self.out.append(Audio(context=key, epoch=epoch, pcm=tone("late", 0, 0, 0, 2_400)))

    def fail(self, opened: Open | VoicePut | VoiceDrop, code: str, why: str, *, retry: bool) -> None:
        self.contexts.pop(opened.context, None)
        self.out.append(
            Failed(
                context=opened.context,
                epoch=opened.epoch,
                code=code,
                message=why,
                retry=retry,
                after_ms=500 if retry else None,
            )
        )

    async def tell_gauges(self) -> None:
        """At the pace of the real engine, until the link ends."""
        while True:
            await asyncio.sleep(GAUGES_S)
            self.out.append(self.engine.gauges(len(self.contexts)))
            self.work.set()

    async def run(self) -> None:
        """One message on the pipe per step, until the link ends."""
        while not self.is_dead:
            if not self.out and not any(self.can_step(c) for c in self.contexts.values()):
                self.work.clear()
                await self.work.wait()
            await self.wait()
            await self.engine.script.gate.wait()
            for context in list(self.contexts.values())[: self.engine.script.lanes]:
                if context.opened.context % self.engine.script.phases == self.turn and self.can_step(context):
                    self.step(context)
            self.turn = (self.turn + 1) % self.engine.script.phases
            if self.is_dead:
                self.connection.transport.abort()
                return
            out, self.out = self.out, []
            if out:
                await self.connection.send(msgpack.packb([pack(message) for message in out]))

    async def wait(self) -> None:
        now, script = time.monotonic(), self.engine.script
        if not script.is_steady:
            await asyncio.sleep(script.step_s)
            return
        self.due = max(self.due + script.step_s, now)
        await asyncio.sleep(self.due - now)

    def can_step(self, context: Context) -> bool:
        if context.has_clause and "STALL" in context.clauses[context.current].text:
            return False
        return context.allowance > 0 if context.has_clause else context.is_ended

    def step(self, context: Context) -> None:
        opened = context.opened
        key, epoch = opened.context, opened.epoch
        if not context.has_clause:
            del self.contexts[key]
            self.out.append(Done(context=key, epoch=epoch, samples=context.samples, stats={"steps": 1.0}))
            self.out.append(self.engine.gauges(len(self.contexts)))
            return
        clause = context.clauses[context.current]
        if "KILL" in clause.text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "DIE" in clause.text:
            self.is_dead = True
            return
        if "FAULT" in clause.text:
            self.fail(opened, "engine_error", "this lane's input broke the model", retry=False)
            return
        if context.clause_samples == 0:
            self.out.append(ClauseTaken(context=key, epoch=epoch, index=clause.index))
        self.speak(context, clause)
        limit = self.engine.script.fail_after_samples
        if limit is not None and context.samples >= limit:
            self.fail(opened, "engine_error", "this lane failed as scripted", retry=False)

    def speak(self, context: Context, clause: Clause) -> None:
        script, opened = self.engine.script, context.opened
        total = script.samples_per_char * sum(c.isalnum() for c in clause.text)
        count = min(script.step_samples, total - context.clause_samples, context.allowance)
        if count > 0:
            voice = opened.voice or script.voices[0]
            start = context.clause_samples
            pcm = (
                bytes(4 * count)
                if script.is_mute
                else tone(voice, opened.seed, clause.index, start, count, script.amplitude)
            )
            self.out.append(Audio(context=opened.context, epoch=opened.epoch, pcm=pcm))
            context.clause_samples += count
            context.samples += count
            self.is_dead |= self.engine.count(count)
        if context.clause_samples == total:
            context.current += 1
            context.clause_samples = 0
            self.out.append(
                ClauseDone(context=opened.context, epoch=opened.epoch, index=clause.index, samples=context.samples)
            )


class ScriptedEngine:
    """`async with ScriptedEngine(path, Script(...)) as engine:` serves the pipe at `path` until the block ends.

    `received` lists all messages in order; `links` holds the living links with their contexts; `kill()` ends the
    pipe at once, as a dying process does.
    """

    def __init__(self, socket: Path | str, script: Script | None = None, *, keeps_messages: bool = True) -> None:
        self.socket = str(socket)
        self.keeps_messages = keeps_messages
        self.script = script or Script()
        self.received: list[Message] = []
        self.links: list[Link] = []
        self.num_samples = 0
        self.kept: dict[str, VoiceInfo] = {}  # callers' voices
        self._server: Server | None = None

    @property
    def num_contexts(self) -> int:
        return sum(len(link.contexts) for link in self.links)

    def received_of(self, kinds: type[Message] | tuple[type[Message], ...]) -> Iterable[Message]:
        return [message for message in self.received if isinstance(message, kinds)]

    def ready(self) -> Ready:
        voices = [VoiceInfo(id=name, name=name.title(), lang="en", ms=4_000) for name in self.script.voices]
        voices += self.kept.values()
        return Ready(model="scripted", voices=voices, sample_rate=SAMPLE_RATE_HZ, lanes=self.script.lanes)

    def owners(self, voice: str) -> dict[str, str]:
        return dict(self.kept[voice].owners) if voice in self.kept else {}

    def tell_voices(self) -> None:
        """Every link hears the new list."""
        for link in self.links:
            link.out.append(self.ready())
            link.work.set()

    def gauges(self, used: int) -> Gauges:
        lanes, waiting = min(used, self.script.lanes), max(used - self.script.lanes, 0)
        return Gauges(
            lanes_used=lanes,
            lanes=self.script.lanes,
            talker_pages=lanes,
            flow_pages=lanes,
            contexts=used,
            waiting=waiting,
        )

    def count(self, samples: int) -> bool:
        """Add to what was sent in all; True when the script says that the engine dies of it."""
        self.num_samples += samples
        limit = self.script.die_after_samples
        return limit is not None and self.num_samples >= limit

    def kill(self) -> None:
        for link in self.links:
            link.is_dead = True
            link.connection.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await unix_serve(self._handle, self.socket, compression=None, max_size=None, ping_interval=None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self.kill()
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, connection: ServerConnection) -> None:
        link = Link(self, connection)
        self.links.append(link)
        try:
            await link.serve()
        finally:
            self.links.remove(link)


async def _main(socket: str, script: Script) -> None:
    stop = asyncio.Event()
    on_parent_gone(stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await asyncio.sleep(script.start_s)
    async with ScriptedEngine(socket, script, keeps_messages=False):
        await stop.wait()


if __name__ == "__main__":  # in the place of `python -m engine`; SCRIPT holds fields of Script as JSON
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket")
    parser.add_argument("--config")
    parser.add_argument("--leashed", action="store_true")
    asyncio.run(_main(parser.parse_args().socket, Script(**json.loads(os.environ.get("SCRIPT", "{}")))))
