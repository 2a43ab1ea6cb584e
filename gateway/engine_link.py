"""The one door to the engine: a WebSocket over a Unix socket, shared by all sessions of this process.

Each context has a lease: a number that is never given out twice, and as epoch the count of connections so far, so that
nothing from an earlier engine or for an earlier owner can be delivered. When the pipe ends, every leased context is
told so once, and the link comes back with back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgpack  # type: ignore[import-untyped]
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from engine.messages import (
    BadPipeMessage,
    Cancel,
    Cancelled,
    Failed,
    Gauges,
    Message,
    Ready,
    ToEngine,
    ToGateway,
    VoicePut,
    pack,
    unpack,
)
from gateway.context import Lease
from gateway.errors import EngineUnavailable
from gateway.logs import event as log
from gateway.metrics import Metrics
from gateway.protocol import RESTART_AFTER_MS, Deliver
from gateway.quarantine import Quarantine
from gateway.voices import Room

logger = logging.getLogger(__name__)

BACKOFF_S: Final = (0.05, 1.0)  # first and longest wait before the next attempt
GREETING_S: Final = 600.0  # a big checkpoint takes its time to warm up
PING_S: Final = 10.0
SILENCE_S: Final = 30.0  # no word for so long, though its gauges come every second: the engine hangs
FRAGMENT_BYTES: Final = 256 * 1024  # of one pipe message, written at once
TURN: Final = 16  # messages that are delivered before others get their turn
ABORTS: Final = 10_000  # cancels whose answers are awaited, to time them


class EngineLink:
    """Implements protocol.EnginePort. `run` keeps it connected until it is cancelled."""

    def __init__(
        self,
        socket: str,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = SILENCE_S,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket
        self._metrics = metrics
        self._clock = clock
        self._silence_s = silence_s
        self._on_silence = on_silence
        self.quarantine = Quarantine(Path(socket).parent / "suspects", time.time)
        self.room = Room()
        self._aborts: dict[int, float] = {}  # when the engine was told to cancel a context
        self._ready: Ready | None = None
        self._routes: dict[int, Deliver] = {}
        self._next_context = 1
        self._epoch = 0
        self._outbox: list[ToEngine] = []
        self._has_outbox = asyncio.Event()
        self.is_ready = asyncio.Event()
        self.gauges: Gauges | None = None

    @property
    def ready(self) -> Ready | None:
        return self._ready

    @property
    def was_ready(self) -> bool:
        """Has an engine ever greeted?"""
        return self._epoch > 0

    @property
    def num_leases(self) -> int:
        return len(self._routes)

    def lease(self, deliver: Deliver) -> Lease:
        if self._ready is None:
            raise EngineUnavailable("the engine is away")
        lease = Lease(context=self._next_context, epoch=self._epoch)
        self._next_context += 1
        self._routes[lease.context] = deliver
        return lease

    def release(self, lease: Lease) -> None:
        self._routes.pop(lease.context, None)

    def post(self, message: ToEngine) -> None:
        if self._ready is not None and message.epoch == self._epoch:
            if isinstance(message, Cancel) and len(self._aborts) < ABORTS:
                self._aborts[message.context] = self._clock()
            self._outbox.append(message)
            self._has_outbox.set()

    async def run(self) -> None:
        wait_s = BACKOFF_S[0]
        while True:
            epoch = self._epoch
            try:
                await self._serve_once()
            except (OSError, TimeoutError, WebSocketException, InvalidHandshake, BadPipeMessage, ValueError) as error:
                logger.debug("engine pipe: %s", type(error).__name__)
            finally:
                self._lose()
            wait_s = BACKOFF_S[0] if self._epoch != epoch else min(2 * wait_s, BACKOFF_S[1])
            await asyncio.sleep(wait_s)

    async def _serve_once(self) -> None:
        async with unix_connect(
            self._socket,
            uri="ws://engine/",
            compression=None,
            max_size=None,
            ping_interval=None,  # a pong would only say that the pipe's thread lives
            close_timeout=1,
        ) as pipe:
            await self._greet(pipe)
            writer = asyncio.create_task(self._write(pipe), name="engine-writer")
            try:
                while True:
                    await self._read(await self._hear(pipe))
            finally:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError, WebSocketException):
                    await writer

    async def _hear(self, pipe: ClientConnection) -> str | bytes:
        try:
            async with asyncio.timeout(self._silence_s):
                return await pipe.recv()
        except TimeoutError:
            log(logger, "engine silent", level=logging.ERROR, seconds=self._silence_s)
            self._on_silence()
            raise

    async def _greet(self, pipe: ClientConnection) -> None:
        async with asyncio.timeout(GREETING_S):
            data = await pipe.recv()
        first, *rest = map(unpack, _tables(data))
        if not isinstance(first, Ready):
            raise BadPipeMessage(f"the engine began with {type(first).__name__}")
        async with asyncio.timeout(PING_S):
            await (await pipe.ping())  # it answers: whoever is told that we are ready may speak
        self._epoch += 1
        self._ready = first
        self.quarantine.engine = _life(self._socket)
        self._outbox.clear()
        self.is_ready.set()
        self._metrics.engine_up.set(1)
        log(logger, "engine ready", model=first.model, voices=len(first.voices), lanes=first.lanes)
        for message in rest:
            self._dispatch(message)

    async def _write(self, pipe: ClientConnection) -> None:
        while True:
            await self._has_outbox.wait()
            self._has_outbox.clear()
            batch, self._outbox = self._outbox, []
            for messages in _bundles(batch):
                await pipe.send(_fragments(msgpack.packb([pack(message) for message in messages])))

    async def _read(self, data: str | bytes) -> None:
        """All of one step, a few messages at a time: a cancel must not wait until everybody has been served."""
        for number, table in enumerate(_tables(data), 1):
            self._dispatch(unpack(table))
            if number % TURN == 0:
                await asyncio.sleep(0)

    def _dispatch(self, message: Message) -> None:
        match message:
            case Gauges():
                self.gauges = message
                self._metrics.take(message)
            case Ready():
                self._ready = message
            case _ if message.epoch == self._epoch:
                self._route(message)

    def _route(self, message: Message) -> None:
        assert not isinstance(message, Ready | Gauges), "they belong to no context"
        if isinstance(message, Cancelled) and (asked_at := self._aborts.pop(message.context, None)) is not None:
            self._metrics.engine_abort.observe(self._clock() - asked_at)
        if (deliver := self._routes.get(message.context)) is not None:
            deliver(_from_engine(message))

    def _lose(self) -> None:
        """The pipe has ended: tell every leased context, once."""
        if self._ready is None:
            return
        self._ready = None
        self.gauges = None
        self._aborts.clear()
        self.is_ready.clear()
        self._metrics.take(None)
        self._metrics.engine_losses.inc()
        routes, self._routes = self._routes, {}
        log(logger, "engine lost", level=logging.WARNING, contexts=len(routes))
        for context, deliver in routes.items():
            deliver(
                Failed(
                    context=context,
                    epoch=self._epoch,
                    code="engine_restart",
                    message="",
                    retry=True,
                    after_ms=RESTART_AFTER_MS,
                )
            )


def _life(socket: str) -> str:
    """The same for every process that is connected to one life of the engine, which makes its socket anew."""
    with contextlib.suppress(OSError):
        found = Path(socket).stat()
        return f"{found.st_ino}-{found.st_ctime_ns}"
    return secrets.token_hex(8)


def _bundles(batch: list[ToEngine]) -> Iterator[list[ToEngine]]:
    """What travels as one pipe message: all of it, but each recording ends one, since two may be too large together."""
    bundle: list[ToEngine] = []
    for message in batch:
        bundle.append(message)
        if isinstance(message, VoicePut):
            yield bundle
            bundle = []
    if bundle:
        yield bundle


def _fragments(data: bytes) -> bytes | list[bytes]:
    """A recording's megabytes are written bit by bit, so that sessions get their turns in between."""
    if len(data) <= FRAGMENT_BYTES:
        return data
    return [data[start : start + FRAGMENT_BYTES] for start in range(0, len(data), FRAGMENT_BYTES)]


def _tables(data: str | bytes) -> list[object]:
    """Raises BadPipeMessage or ValueError for what isn't a list of messages."""
    tables = msgpack.unpackb(data) if isinstance(data, bytes) else None
    if not isinstance(tables, list) or not tables:
        raise BadPipeMessage("a pipe message is a list of maps")
    return tables


def _from_engine(message: Message) -> ToGateway:
    if isinstance(message, ToGateway):
        return message
    raise BadPipeMessage(f"the engine sent {type(message).__name__}, which is ours to send")
