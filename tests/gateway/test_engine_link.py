from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from websockets.asyncio.server import ServerConnection, unix_serve

from engine import messages as engine
from gateway.engine_link import EngineLink
from gateway.errors import EngineUnavailable
from gateway.metrics import Metrics
from tests.gateway.raw_client import until
from tests.scripted_engine import Script, ScriptedEngine

PATIENCE_S = 5.0


@contextlib.asynccontextmanager
async def running(path: Path, **options: Any) -> AsyncIterator[EngineLink]:
    link = EngineLink(str(path), Metrics(), **options)
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def ready(link: EngineLink) -> None:
    await asyncio.wait_for(link.is_ready.wait(), PATIENCE_S)


async def lost(link: EngineLink) -> None:
    await until(lambda: link.ready is None)


async def test_there_are_no_leases_before_the_engine_has_greeted(socket_path: Path) -> None:
    async with running(socket_path) as link:
        with pytest.raises(EngineUnavailable):
            link.lease(lambda event: None)
        async with ScriptedEngine(socket_path):
            await ready(link)
            assert link.ready is not None and link.ready.model == "scripted"
            assert link.lease(lambda event: None).epoch == 1


async def test_each_lease_hears_of_the_loss_once_and_the_link_comes_back(socket_path: Path) -> None:
    async with ScriptedEngine(socket_path) as fake, running(socket_path) as link:
        await ready(link)
        heard: list[engine.ToGateway] = []
        leases = [link.lease(heard.append) for _ in range(3)]
        link.release(leases[1])
        fake.kill()
        await lost(link)
        assert [type(event) for event in heard] == [engine.Failed, engine.Failed]
        assert all(isinstance(event, engine.Failed) and event.code == "engine_restart" for event in heard)
        await ready(link)
        again = link.lease(heard.append)
        assert again.epoch == 2 and again.context not in {lease.context for lease in leases}


async def test_messages_for_an_engine_that_is_gone_are_dropped(socket_path: Path) -> None:
    async with ScriptedEngine(socket_path) as fake, running(socket_path) as link:
        await ready(link)
        old = link.lease(lambda event: None)
        fake.kill()
        await lost(link)
        await ready(link)
        fake.received.clear()
        link.post(engine.End(context=old.context, epoch=old.epoch))
        new = link.lease(lambda event: None)
        link.post(engine.Cancel(context=new.context, epoch=new.epoch))
        await until(lambda: bool(fake.received))
        assert fake.received == [engine.Cancel(context=new.context, epoch=new.epoch)]


async def test_nothing_is_delivered_after_a_release(socket_path: Path) -> None:
    async with ScriptedEngine(socket_path, Script(late_audio=True)) as fake, running(socket_path) as link:
        await ready(link)
        heard: list[engine.ToGateway] = []
        gone, kept = link.lease(heard.append), link.lease(heard.append)
        for lease in (gone, kept):
            link.post(engine.Open(context=lease.context, epoch=lease.epoch, voice="ada", seed=1))
        link.post(engine.Cancel(context=gone.context, epoch=gone.epoch))
        link.release(gone)
        link.post(engine.End(context=kept.context, epoch=kept.epoch))
        await until(lambda: any(isinstance(event, engine.Done) for event in heard))
        assert {event.context for event in heard if not isinstance(event, engine.Ready | engine.Gauges)} == {
            kept.context
        }
        assert fake.num_contexts == 0


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", "text", msgpack.packb([]), msgpack.packb([{"t": "sing"}]), msgpack.packb([{"t": "gauges"}])],
    ids=["empty", "not msgpack", "text frame", "empty list", "unknown type", "not a greeting"],
)
async def test_an_engine_that_talks_nonsense_is_left_and_tried_again(socket_path: Path, data: bytes | str) -> None:
    calls = 0

    async def talk(connection: ServerConnection) -> None:
        nonlocal calls
        calls += 1
        await connection.send(data)
        await connection.wait_closed()

    async with unix_serve(talk, str(socket_path)), running(socket_path) as link:
        await until(lambda: calls >= 2)
        assert link.ready is None


async def test_an_engine_that_says_nothing_any_more_is_reported_and_left(socket_path: Path) -> None:
    silences: list[float] = []
    async with (
        ScriptedEngine(socket_path) as fake,
        running(socket_path, silence_s=0.2, on_silence=lambda: silences.append(1)) as link,
    ):
        await ready(link)
        heard: list[engine.ToGateway] = []
        link.lease(heard.append)
        fake.script.gate.clear()
        await until(lambda: bool(heard))
        assert isinstance(heard[0], engine.Failed) and heard[0].code == "engine_restart"
        assert len(silences) == 1


async def test_an_engine_that_greets_but_does_not_answer_is_not_ready(socket_path: Path) -> None:
    """Whoever is told that we are ready may speak at once."""
    has_greeted = asyncio.Event()

    async def greet(connection: ServerConnection) -> None:
        connection.protocol.receive_data = lambda data: None  # type: ignore[method-assign]  # deaf from now on
        greeting = engine.Ready(model="deaf", voices=[], sample_rate=24_000, lanes=1)
        await connection.send(msgpack.packb([engine.pack(greeting)]))
        has_greeted.set()
        await connection.wait_closed()

    async with unix_serve(greet, str(socket_path), close_timeout=0.1), running(socket_path) as link:
        await has_greeted.wait()
        await asyncio.sleep(0.1)
        assert link.ready is None and not link.is_ready.is_set()


async def test_the_time_to_a_free_row_is_measured(socket_path: Path) -> None:
    metrics = Metrics()
    link = EngineLink(str(socket_path), metrics)
    task = asyncio.create_task(link.run())
    async with ScriptedEngine(socket_path):
        await ready(link)
        lease = link.lease(lambda event: None)
        link.post(engine.Cancel(context=lease.context, epoch=lease.epoch))
        await until(lambda: metrics.value("rill_engine_abort_seconds_count") == 1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
