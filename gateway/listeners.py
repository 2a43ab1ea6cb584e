"""A process full of listeners for a bench: as lean as a rill.v1 client can be, so that the server is what is measured.

    python -m gateway.listeners

reads one line of JSON, the load; connects; says "ready"; reads the moment to begin, on the machine's monotonic clock;
and writes one line of JSON, what its listeners saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol

from gateway import wire
from gateway.decks import Request
from gateway.figures import RATE_HZ, Trace, played_out_s

SAMPLES_PER_TOKEN: Final = RATE_HZ // 25
BEFORE_AUDIO_S: Final = 0.05  # a cut of 0 comes so soon after the text
RETRY_S: Final = 0.1  # after a refusal that doesn't say when
LAG_CHECK_S: Final = 0.05
OPEN_S: Final = 30.0


@dataclass(slots=True, kw_only=True)
class Load:
    """What one process is to do. Each listener begins at its offset and takes the deck's next request.

    is_looped   until `stop_s` each takes another when its answer is there; else one each, timed from its offset
    is_endless  the deck begins again when it is through; else the listeners stop then
    listens     with `is_looped`: not before a player has played the answer
    pace        of rill.v1: "none" takes audio as fast as it is made, "listen" at most seconds ahead of a player
    """

    url: str
    lines: int  # connections
    deck: list[Request]
    offsets: list[float]  # seconds from the beginning, one for each listener
    is_looped: bool = False
    is_endless: bool = False
    listens: bool = False
    pace: str = "none"
    stop_s: float = 0.0
    patience_s: float = 120.0  # for one answer


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the listeners of one process saw. stray: messages of a context after its end, which may never come."""

    traces: list[Trace] = field(default_factory=list)
    stray: int = 0
    lag_s: float = 0.0  # the longest that this process itself was late: its times are no better than that

    @classmethod
    def read(cls, text: str) -> Seen:
        table = json.loads(text)
        traces = [Trace(**{**one, "arrivals": [(t, n) for t, n in one["arrivals"]]}) for one in table["traces"]]
        return cls(traces=traces, stray=table["stray"], lag_s=table["lag_s"])


class Answer:
    """The answer to one request, while it comes."""

    def __init__(self, request: Request, sent_s: float) -> None:
        self.trace = Trace(voice=request.voice, tokens=request.tokens, seed=request.seed, sent_s=sent_s)
        self.after_ms: int | None = None
        self.is_over = asyncio.Event()
        self.is_cut_due = asyncio.Event()  # set by the sample that the listener cuts in at, and by the end
        self._cut_samples = None if not request.cut else int(request.cut * request.tokens * SAMPLES_PER_TOKEN)
        self._position = 0

    def take(self, table: dict[str, Any], now: float) -> bool:
        """One message of the server; True if it was the last one."""
        match table["t"]:
            case "audio":
                self._take_audio(table, now)
            case "opened":
                self.trace.queued_ms = table.get("queued_ms", 0)
            case "done":
                whole = table["samples"] == self._position
                self.finish("done" if whole else "lost_audio", now)
            case "cancelled":
                self.finish("cancelled", now)
            case "error":
                self.after_ms = table.get("after_ms")
                self.finish(table["code"], now)
        return self.is_over.is_set()

    def _take_audio(self, table: dict[str, Any], now: float) -> None:
        data: bytes = table["d"]
        if table["pos"] != self._position:
            self.finish("lost_audio", now)
        if not data:
            return
        self._position += len(data) // 2
        self.trace.crc = zlib.crc32(data, self.trace.crc)
        self.trace.arrivals.append((now, len(data) // 2))
        if self._cut_samples is not None and self._position >= self._cut_samples:
            self.is_cut_due.set()

    def finish(self, outcome: str, now: float) -> None:
        if not self.is_over.is_set():
            self.trace.outcome, self.trace.end_s = outcome, now
            self.is_over.set()
            self.is_cut_due.set()


class Line:
    """One connection; any number of answers may be on their way."""

    def __init__(self, socket: ClientConnection, clock: Callable[[], float]) -> None:
        self.num_stray = 0
        self.answers: dict[str, Answer] = {}
        self._clock = clock
        self._socket = socket
        self._ids = itertools.count()
        self._reader = asyncio.create_task(self._read(), name="line")

    @classmethod
    async def open(cls, url: str, *, clock: Callable[[], float] = time.monotonic) -> tuple[Line, wire.Ready]:
        """Raises OSError or WebSocketException."""
        socket = await connect(
            url,
            subprotocols=[Subprotocol(wire.SUBPROTOCOL)],
            compression=None,
            open_timeout=OPEN_S,
            ping_interval=None,
            max_size=wire.MESSAGE_BYTES,
            max_queue=256,
            proxy=None,
        )
        ready = wire.read(await socket.recv(decode=False))
        if not isinstance(ready, wire.Ready):
            raise WebSocketException(f"{url} does not speak {wire.SUBPROTOCOL}")
        return cls(socket, clock), ready

    async def ask(self, request: Request, due_s: float, *, pace: str = "none", patience_s: float = 60.0) -> Answer:
        """The whole answer, or what there was of it when patience or the connection ended."""
        answer, c = Answer(request, due_s), f"b{next(self._ids)}"
        self.answers[c] = answer
        try:
            async with asyncio.timeout(patience_s):
                for message in _messages(c, request, pace):
                    await self._socket.send(message)
                if request.cut is not None:
                    await self._cut_in(c, request.cut, answer)
                await answer.is_over.wait()
        except TimeoutError:
            answer.finish("silent", self._clock())
            await self._cancel(c)
        except ConnectionClosed:
            answer.finish("disconnected", self._clock())
        return answer

    async def _cut_in(self, c: str, cut: float, answer: Answer) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEFORE_AUDIO_S if cut == 0 else None):
                await answer.is_cut_due.wait()
        if not answer.is_over.is_set():
            answer.trace.cancel_s = self._clock()
            await self._cancel(c)

    async def _cancel(self, c: str) -> None:
        with contextlib.suppress(ConnectionClosed):
            await self._socket.send(wire.pack(wire.Cancel(c=c)))

    async def _read(self) -> None:
        try:
            while True:
                data = await self._socket.recv(decode=False)
                self._take(msgpack.unpackb(data), self._clock())
        except ConnectionClosed:
            for answer in self.answers.values():
                answer.finish("disconnected", self._clock())

    def _take(self, table: dict[str, Any], now: float) -> None:
        c = table.get("c", "")
        if (answer := self.answers.get(c)) is not None:
            if answer.take(table, now):
                del self.answers[c]
        elif c:
            self.num_stray += 1

    async def close(self) -> None:
        await self._socket.close()
        await self._reader


def _messages(c: str, request: Request, pace: str) -> Iterator[bytes]:
    yield wire.pack(wire.Open(c=c, voice=request.voice, seed=request.seed, pace=pace))
    yield wire.pack(wire.Text(c=c, n=0, s=request.text))
    yield wire.pack(wire.End(c=c))


class Listeners:
    """All of one load."""

    def __init__(self, load: Load) -> None:
        self.seen = Seen()
        self._load = load
        self._deck = itertools.cycle(load.deck) if load.is_endless else iter(load.deck)
        self._lines: list[Line] = []

    async def connect(self) -> None:
        for _ in range(self._load.lines):
            line, _ = await Line.open(self._load.url)
            self._lines.append(line)

    async def run(self, begin_s: float) -> Seen:
        watch = asyncio.create_task(self._watch(), name="lag")
        async with asyncio.TaskGroup() as group:
            for offset in self._load.offsets:
                group.create_task(self._listen(begin_s, offset))
        watch.cancel()
        for line in self._lines:
            await line.close()
            self.seen.stray += line.num_stray
        return self.seen

    async def _listen(self, begin_s: float, offset: float) -> None:
        due_s = begin_s + offset
        await _sleep_until(due_s)
        for request in self._deck:
            line = min(self._lines, key=lambda line: len(line.answers))
            answer = await line.ask(request, due_s, pace=self._load.pace, patience_s=self._load.patience_s)
            self.seen.traces.append(answer.trace)
            if not self._load.is_looped:
                return
            await self._rest(answer)
            due_s = time.monotonic()
            if due_s >= begin_s + self._load.stop_s:
                return

    async def _rest(self, answer: Answer) -> None:
        """What lies between an answer and the listener's next request."""
        if answer.trace.is_failed:
            await asyncio.sleep(RETRY_S if answer.after_ms is None else answer.after_ms / 1e3)
        elif self._load.listens and answer.trace.outcome == "done":
            await _sleep_until(played_out_s(answer.trace))

    async def _watch(self) -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(LAG_CHECK_S)
            self.seen.lag_s = max(self.seen.lag_s, time.monotonic() - started - LAG_CHECK_S)


async def _sleep_until(when_s: float) -> None:
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))


async def serve_load(text: str) -> str:
    """The load as JSON -> what was seen, as JSON."""
    table = json.loads(text)
    load = Load(**{**table, "deck": [Request(**request) for request in table["deck"]]})
    listeners = Listeners(load)
    await listeners.connect()
    print("ready", flush=True)
    begin_s = float(await asyncio.to_thread(sys.stdin.readline))
    gc.collect()
    gc.disable()  # a collection in the middle would be seen as the server's lateness
    return json.dumps(asdict(await listeners.run(begin_s)))


def main() -> None:
    print(uvloop.run(serve_load(sys.stdin.readline())), flush=True)


if __name__ == "__main__":
    main()
