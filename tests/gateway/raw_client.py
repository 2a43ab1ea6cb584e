"""A client that says exactly what a test tells it to, and waits for nothing longer than `PATIENCE_S`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgpack
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

PATIENCE_S = 10.0
TERMINAL = ("done", "cancelled", "error")


class RawClient:
    """Sends and receives maps, or bytes."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []

    async def say(self, t: str, **fields: Any) -> None:
        await self.socket.send(msgpack.packb({"t": t, **fields}))

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            data = await self.socket.recv()
        assert isinstance(data, bytes)
        assert len(data) <= 65_536  # G27
        message: dict[str, Any] = msgpack.unpackb(data)
        self.seen.append(message)
        return message

    async def hear_until(self, t: str, c: str | None = None) -> dict[str, Any]:
        """The next message of this type, and context if named."""
        while True:
            message = await self.hear()
            if message["t"] == t and (c is None or message.get("c") == c):
                return message

    async def hear_end(self, c: str) -> dict[str, Any]:
        """The context's terminal message."""
        while True:
            message = await self.hear()
            if message.get("c") == c and message["t"] in TERMINAL:
                return message

    async def hear_all(self, quiet_s: float = 0.15) -> list[dict[str, Any]]:
        """Whatever still comes until it is quiet for so long."""
        heard = []
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(quiet_s):
                    heard.append(await self.hear())
        return heard

    async def speak(self, c: str, text: str, **settings: Any) -> dict[str, Any]:
        """Open, say, end, and hear to the end."""
        await self.say("open", c=c, **settings)
        await self.say("text", c=c, n=0, s=text)
        await self.say("end", c=c)
        return await self.hear_end(c)

    def of(self, c: str) -> list[dict[str, Any]]:
        return [message for message in self.seen if message.get("c") == c]

    def audio(self, c: str) -> bytes:
        return b"".join(message["d"] for message in self.of(c) if message["t"] == "audio")

    async def close_code(self) -> int | None:
        """Waits until the server has closed; the code that it gave."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.hear()
        return self.socket.close_code


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Waits until it holds: for what goes on elsewhere and tells nobody."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


def check_promises(messages: list[dict[str, Any]]) -> None:
    """Promise 1 for one use of a context's id: opened, audio without gaps, one terminal, nothing after it."""
    kinds = [message["t"] for message in messages]
    assert sum(kind in TERMINAL for kind in kinds) == 1, kinds
    assert kinds[-1] in TERMINAL, kinds
    audio = [message for message in messages if message["t"] == "audio"]
    assert [message["q"] for message in audio] == list(range(len(audio)))
    if audio:
        assert kinds.index("opened") < kinds.index("audio")


@contextlib.asynccontextmanager
async def raw_client(address: str, path: str = "v1/speech", **options: Any) -> AsyncIterator[RawClient]:
    """Connected and greeted."""
    url = address.replace("http", "ws", 1) + path
    settings = {"subprotocols": ["rill.v1"], "compression": None, "proxy": None, "close_timeout": 1, **options}
    async with connect(url, **settings) as socket:
        client = RawClient(socket)
        assert (await client.hear())["t"] == "ready"
        yield client
