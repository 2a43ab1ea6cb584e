"""The one door to the engine: a WebSocket over a Unix socket, shared by all sessions of this process.

Each context has a lease: a number that is never given out twice, and as epoch the count of connections so far, so that
nothing from an earlier engine or for an earlier owner can be delivered. When the pipe ends, every leased context is
told so once, and the link comes back with back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

import msgpack  # type: ignore[import-untyped]
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from engine.messages import (
    BadPipeMessage,
    Failed,
    Gauges,
    Message,
    Ready,
    ToEngine,
    ToGateway,
    pack,
    unpack,
)
from gateway.context import Lease
from gateway.errors import EngineUnavailable
from gateway.metrics import Metrics
from gateway.protocol import RESTART_AFTER_MS, Deliver

logger = logging.getLogger(__name__)

BACKOFF_S: Final = (0.05, 1.0)  # first and longest wait before the next attempt
GREETING_S: Final = 600.0  # a big checkpoint takes its time to warm up
PING_S: Final = 10.0
SILENCE_S: Final = 30.0  # no pong for so long: the engine hangs


class EngineLink:
    """Implements protocol.EnginePort. `run` keeps it connected until it is cancelled."""

    def __init__(self, socket: str, metrics: Metrics) -> None:
        self._socket = socket
        self._metrics = metrics
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
            ping_interval=PING_S,
            ping_timeout=SILENCE_S,
            close_timeout=1,
        ) as pipe:
            await self._greet(pipe)
            writer = asyncio.create_task(self._write(pipe), name="engine-writer")
            try:
                async for data in pipe:
                    self._read(data)
            finally:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError, WebSocketException):
                    await writer

    async def _greet(self, pipe: ClientConnection) -> None:
        async with asyncio.timeout(GREETING_S):
            data = await pipe.recv()
        first, *rest = _messages(data)
        if not isinstance(first, Ready):
            raise BadPipeMessage(f"the engine began with {type(first).__name__}")
        self._epoch += 1
        self._ready = first
        self._outbox.clear()
        self.is_ready.set()
        logger.info("engine ready: %s, %d voices, %d lanes", first.model, len(first.voices), first.lanes)
        for message in rest:
            self._dispatch(message)

    async def _write(self, pipe: ClientConnection) -> None:
        while True:
            await self._has_outbox.wait()
            self._has_outbox.clear()
            batch, self._outbox = self._outbox, []
            if batch:
                await pipe.send(msgpack.packb([pack(message) for message in batch]))

    def _read(self, data: str | bytes) -> None:
        for message in _messages(data):
            self._dispatch(message)

    def _dispatch(self, message: Message) -> None:
        match message:
            case Gauges():
                self.gauges = message
            case Ready():
                self._ready = message
            case _:
                if message.epoch == self._epoch and (deliver := self._routes.get(message.context)) is not None:
                    deliver(_from_engine(message))

    def _lose(self) -> None:
        """The pipe has ended: tell every leased context, once."""
        if self._ready is None:
            return
        self._ready = None
        self.gauges = None
        self.is_ready.clear()
        self._metrics.num_engine_losses += 1
        routes, self._routes = self._routes, {}
        logger.warning("engine lost with %d contexts open", len(routes))
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


def _messages(data: str | bytes) -> list[Message]:
    """Raises BadPipeMessage or ValueError for what isn't a list of messages."""
    tables = msgpack.unpackb(data) if isinstance(data, bytes) else None
    if not isinstance(tables, list) or not tables:
        raise BadPipeMessage("a pipe message is a list of maps")
    return [unpack(table) for table in tables]


def _from_engine(message: Message) -> ToGateway:
    if isinstance(message, ToGateway):
        return message
    raise BadPipeMessage(f"the engine sent {type(message).__name__}, which is ours to send")
