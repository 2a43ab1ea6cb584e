"""A client for rill.v1.

    async with connect("ws://127.0.0.1:8020") as client:
        async for pcm in client.say("Good morning.", voice="ada", seed=7):
            ...                                     # bytes of 16 bit mono samples at 24 kHz

        context = await client.open(voice="ada")    # text that comes by and by
        await context.send("Good ")
        await context.send("morning. ")
        await context.end()                         # or flush(), to hear what is there and go on; or cancel()
        async for pcm in context:
            ...
        print(context.seed, context.result)

A context's audio is taken from the server as you take it from the context, `BUFFER_S` ahead at most: a slow listener
slows its own context and nobody else's. Errors of a context raise ContextError, a lost connection raises Disconnected.

    mia = await client.put_voice(recording, "The words that are spoken in it.", name="Mia", lang="en")
    async for pcm in client.say("Good morning.", voice=mia.voice):
        ...
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from types import TracebackType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.protocol import State
from websockets.typing import Subprotocol

from gateway import wire
from gateway.errors import GatewayError

_T = TypeVar("_T")

BUFFER_S: Final = 30.0
CREDIT_STEP_S: Final = 5.0
PART_BYTES: Final = 48 * 1024  # of a recording, in one `voice_put`
PIECE_CHARS: Final = 8_000  # of one `text` message; a character has at most four bytes
GREETING_S: Final = 10.0


class ServerError(GatewayError):
    """The server refused. `code` is one of rill.v1's; if `retry`, try again after `after_ms`."""

    def __init__(self, error: wire.Error) -> None:
        super().__init__(f"{error.code}: {error.msg}")
        self.code = error.code
        self.retry = error.retry
        self.after_ms = error.after_ms
        self.samples = error.samples


class ContextError(ServerError):
    """A context was refused or ended."""


class VoiceError(ServerError):
    """A recording has not become a voice, or a voice was not dropped."""


class Disconnected(GatewayError):
    """There is no connection: never made, refused, or lost."""


class connect:
    """Connects to a server given by its page's or its socket's address, until the block ends. Raises Disconnected."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self._url, self._key = url, key
        self._client: Client | None = None

    async def __aenter__(self) -> Client:
        self._client = await dial(self._url, key=self._key)
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()


def speech_url(url: str) -> str:
    """http or ws address of a server -> the address of its speech socket."""
    parts = urlsplit(url if "://" in url else f"ws://{url}")
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    path = wire.PATH if parts.path in ("", "/") else parts.path
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


async def dial(url: str, *, key: str | None = None) -> Client:
    """A connection for its taker to close. Raises Disconnected."""
    url = speech_url(url)
    try:
        socket = await connect_socket(
            url,
            subprotocols=[Subprotocol(wire.SUBPROTOCOL)],
            compression=None,
            additional_headers={"Authorization": f"Bearer {key}"} if key is not None else {},
            open_timeout=GREETING_S,
            max_size=wire.MESSAGE_BYTES,
            max_queue=64,
            proxy=None,
        )
        async with asyncio.timeout(GREETING_S):
            greeting = wire.read(await socket.recv(decode=False))
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
        raise Disconnected(f"can't connect to {url}: {error or type(error).__name__}") from error
    if not isinstance(greeting, wire.Ready):
        raise Disconnected(f"{url} does not speak {wire.SUBPROTOCOL}")
    return Client(socket, greeting)


class Client:
    """One connection; made by `connect`. Any number of contexts up to `ready.limits.contexts` may be open at once."""

    def __init__(self, socket: ClientConnection, ready: wire.Ready) -> None:
        self.ready = ready
        self.is_going_away = False
        self._socket = socket
        self._contexts: dict[str, Context] = {}
        self._ids = itertools.count()
        self._lists: deque[asyncio.Future[tuple[wire.Voice, ...]]] = deque()
        self._uploads: dict[str, asyncio.Future[wire.VoiceKept]] = {}
        self._drops: dict[str, asyncio.Future[tuple[wire.Voice, ...]]] = {}
        self._reader = asyncio.create_task(self._read(), name="rill-client")

    @property
    def is_open(self) -> bool:
        """The connection is there, as far as this side knows."""
        return self._socket.state is State.OPEN

    async def say(
        self,
        text: str | AsyncIterable[str],
        *,
        voice: str | None = None,
        seed: int | None = None,
        enc: str = "s16le",
        rate: int = 24000,
        lang: str | None = None,
        instruct: str | None = None,
        by_words: bool = False,
    ) -> AsyncIterator[bytes]:
        """The text's audio, as it is made. Leaving the iteration early cancels the rest."""
        context = await self.open(
            voice=voice, seed=seed, enc=enc, rate=rate, lang=lang, instruct=instruct, by_words=by_words
        )
        feeder = asyncio.create_task(context.feed(text), name="rill-feeder")
        try:
            async for pcm in context:
                yield pcm
            await feeder
        finally:
            feeder.cancel()
            with contextlib.suppress(asyncio.CancelledError, Disconnected):
                await feeder
            with contextlib.suppress(Disconnected):
                await context.cancel()

    async def open(
        self,
        *,
        voice: str | None = None,
        seed: int | None = None,
        enc: str = "s16le",
        rate: int = 24000,
        lang: str | None = None,
        instruct: str | None = None,
        sampling: wire.SamplingFields | None = None,
        by_words: bool = False,
        buffer_s: float = BUFFER_S,
    ) -> Context:
        """A new context, once the server has a place for it. Raises ContextError if it refuses.

        by_words: speak as the words come, not clause by clause; not every server can.
        buffer_s: how far the server may be ahead of what is taken from the context.
        """
        c = f"c{next(self._ids)}"
        request = wire.Open(
            c=c,
            voice=voice,
            seed=seed,
            fmt=wire.Format(enc=enc, rate=rate),
            lang=lang,
            instruct=instruct,
            sampling=sampling,
            aggregation="word" if by_words else None,
        )
        context = Context(self, c, buffer_s)
        self._contexts[c] = context
        await self.send(request)
        try:
            await context.opened()
        except asyncio.CancelledError:
            await context.cancel()  # nobody is left to end it
            raise
        return context

    async def voices(self) -> tuple[wire.Voice, ...]:
        """The voices that the server has now."""
        answer: asyncio.Future[tuple[wire.Voice, ...]] = asyncio.get_running_loop().create_future()
        self._lists.append(answer)
        await self.send(wire.Voices())
        return await answer

    async def put_voice(self, audio: bytes, transcript: str, *, name: str, lang: str | None = None) -> wire.VoiceKept:
        """Register the voice of a recording, a WAV, FLAC, Ogg or MP3 file of 3 to 30 s. Raises VoiceError."""
        v = f"v{next(self._ids)}"
        answer: asyncio.Future[wire.VoiceKept] = asyncio.get_running_loop().create_future()
        self._uploads[v] = answer
        try:
            parts = [audio[start : start + PART_BYTES] for start in range(0, len(audio), PART_BYTES)] or [b""]
            for n, part in enumerate(parts):
                if answer.done():
                    break  # refused already
                words = {"name": name, "transcript": transcript, "lang": lang} if n == 0 else {}
                await self.send(wire.VoicePut(v=v, n=n, d=part, last=n + 1 == len(parts), **words))
            return await answer
        finally:
            self._uploads.pop(v, None)

    async def drop_voice(self, voice: str) -> tuple[wire.Voice, ...]:
        """Forget a voice that was registered with this key -> those that are left. Raises VoiceError."""
        answer: asyncio.Future[tuple[wire.Voice, ...]] = asyncio.get_running_loop().create_future()
        self._drops[voice] = answer
        try:
            await self.send(wire.VoiceDrop(voice=voice))
            return await answer
        finally:
            self._drops.pop(voice, None)

    async def send(self, message: wire.ClientMessage) -> None:
        """One message as it is. Raises Disconnected."""
        try:
            await self._socket.send(wire.pack(message))
        except ConnectionClosed as error:
            raise Disconnected(f"the connection is closed: {error}") from error

    async def close(self) -> None:
        """End the connection and all its contexts."""
        await self._socket.close()
        await self._reader

    async def _read(self) -> None:
        why = "closed"
        try:
            async for data in self._socket:
                if isinstance(data, bytes) and (message := wire.read(data)) is not None:
                    self._dispatch(message)
        except ConnectionClosed as error:
            why = str(error)
        finally:
            self._lose(Disconnected(f"the connection ended: {why}"))

    def _dispatch(self, message: wire.ServerMessage) -> None:
        match message:
            case wire.VoiceList():
                _settle(self._lists.popleft() if message.v is None else self._drops.get(message.v), message.list)
            case wire.VoiceKept():
                _settle(self._uploads.get(message.v), message)
            case wire.Error(v=str(v)):
                _break(self._uploads.get(v), VoiceError(message))
                _break(self._drops.get(v), VoiceError(message))
            case wire.GoAway():
                self.is_going_away = True
            case wire.Ready() | wire.Pong() | wire.Error(c=None):
                pass
            case _:
                if (context := self._contexts.get(message.c or "")) is not None:
                    context.take(message)
                if isinstance(message, wire.TERMINAL):
                    self._contexts.pop(message.c or "", None)

    def _lose(self, error: Disconnected) -> None:
        for context in self._contexts.values():
            context.fail(error)
        self._contexts.clear()
        answers: list[asyncio.Future[Any]] = [*self._lists, *self._uploads.values(), *self._drops.values()]
        for answer in answers:
            _break(answer, error)


def _settle(answer: asyncio.Future[_T] | None, result: _T) -> None:
    if answer is not None and not answer.done():
        answer.set_result(result)


def _break(answer: asyncio.Future[Any] | None, error: GatewayError) -> None:
    if answer is not None and not answer.done():
        answer.set_exception(error)


class Context:
    """One utterance; made by `Client.open`. Iterate over it, once, for its audio."""

    def __init__(self, client: Client, c: str, buffer_s: float) -> None:
        self.c = c
        self._buffer_s = buffer_s
        self.result: wire.Done | wire.Cancelled | None = None
        self._client = client
        self._opened: asyncio.Future[wire.Opened] = asyncio.get_running_loop().create_future()
        self._audio: deque[wire.Audio] = deque()
        self._has_news = asyncio.Event()
        self._error: GatewayError | None = None
        self._num_pieces = 0
        self._num_flushes = 0
        self._waiting: deque[tuple[int, int]] = deque()  # pieces and their bytes, not taken by the model yet
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._taken_s = 0.0
        self._credit_s = 0.0

    @property
    def settings(self) -> wire.Opened:
        """What the server really uses."""
        return self._opened.result()

    @property
    def seed(self) -> int:
        """Named or drawn: opening again with it repeats the audio."""
        return self.settings.seed

    @property
    def rate(self) -> int:
        return self.settings.rate

    async def opened(self) -> wire.Opened:
        """Wait until the server has opened it. Raises ContextError or Disconnected."""
        return await self._opened

    async def send(self, text: str) -> None:
        """Append text, verbatim. Waits while the server has as much unspoken text as it takes: read audio meanwhile."""
        for start in range(0, len(text), PIECE_CHARS):
            await self._has_room.wait()
            await self._send_piece(text[start : start + PIECE_CHARS])

    async def _send_piece(self, piece: str) -> None:
        if self._is_over:
            return
        self._waiting.append((self._num_pieces, len(piece.encode())))
        message = wire.Text(c=self.c, n=self._num_pieces, s=piece)
        self._num_pieces += 1
        self._note_room()
        await self._client.send(message)

    def _note_room(self) -> None:
        """Half of what the server takes may wait; the other half is for one more piece."""
        if self._is_over or sum(size for _, size in self._waiting) < self._client.ready.limits.text_bytes // 2:
            self._has_room.set()
        else:
            self._has_room.clear()

    async def flush(self) -> int:
        """Speak what has been sent so far; the context goes on."""
        number = self._num_flushes
        self._num_flushes += 1
        await self._client.send(wire.Flush(c=self.c, f=number))
        return number

    async def end(self) -> None:
        """No more text: the context ends when all is spoken."""
        await self._client.send(wire.End(c=self.c))

    async def cancel(self, *, played_ms: float | None = None) -> None:
        """Stop now. The iteration ends; harmless if the context is over."""
        if not self._is_over:
            await self._client.send(wire.Cancel(c=self.c, played_ms=played_ms))

    async def feed(self, text: str | AsyncIterable[str]) -> None:
        """Send all of the text, then end."""
        if isinstance(text, str):
            await self.send(text)
        else:
            async for piece in text:
                await self.send(piece)
        if not self._is_over:
            await self.end()

    @property
    def _is_over(self) -> bool:
        return self.result is not None or self._error is not None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._allow()
        while True:
            while self._audio:
                message = self._audio.popleft()
                self._taken_s += self._seconds(message)
                await self._allow()
                yield message.d
            if self._error is not None:
                raise self._error
            if self.result is not None:
                return
            self._has_news.clear()
            await self._has_news.wait()

    def _seconds(self, message: wire.Audio) -> float:
        size = {"s16le": 2, "f32le": 4}.get(self.settings.enc, 1)
        return len(message.d) / size / self.settings.rate

    async def _allow(self) -> None:
        """Credit as far as the buffer reaches from what has been taken."""
        limit_s, step_s = self._taken_s + self._buffer_s, min(CREDIT_STEP_S, self._buffer_s / 5)
        if not self._is_over and limit_s >= self._credit_s + step_s:
            self._credit_s = limit_s
            await self._client.send(wire.Credit(c=self.c, ms=limit_s * 1000))

    def take(self, message: wire.ServerMessage) -> None:
        """A message of the server for this context."""
        match message:
            case wire.Opened():
                self._opened.set_result(message)
            case wire.Audio():
                self._audio.append(message)
            case wire.Taken(n=n):
                self._drop_waiting(n)
            case wire.Done() | wire.Cancelled():
                self._finish(message)
            case wire.Error():
                self.fail(ContextError(message))
        self._has_news.set()

    def _drop_waiting(self, n: int) -> None:
        while self._waiting and self._waiting[0][0] <= n:
            self._waiting.popleft()
        self._note_room()

    def _finish(self, message: wire.Done | wire.Cancelled) -> None:
        self.result = message
        self._has_room.set()
        if not self._opened.done():  # cancelled before it was opened
            self._opened.cancel()

    def fail(self, error: GatewayError) -> None:
        """The context is over by an error; whoever opens or reads it gets it."""
        if self._is_over:
            return
        self._error = error
        if not self._opened.done():
            self._opened.set_exception(error)
        self._has_room.set()
        self._has_news.set()


async def probe(url: str, *, key: str | None = None) -> bool:
    """True if a Rill server answers there and lets us in."""
    try:
        async with connect(url, key=key):
            return True
    except Disconnected:
        return False


__all__ = [
    "Client",
    "Context",
    "ContextError",
    "Disconnected",
    "ServerError",
    "VoiceError",
    "connect",
    "dial",
    "probe",
    "speech_url",
]
