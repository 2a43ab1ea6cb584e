from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.client import ContextError, Disconnected, connect, probe, speech_url
from tests.gateway.conftest import Stack, StackMaker
from tests.gateway.raw_client import until
from tests.scripted_engine import Script, tone

PATIENCE_S = 10.0
SENTENCE = "This is a sentence of some length to be spoken. "


async def test_say_gives_the_engines_samples(stack: Stack) -> None:
    async with asyncio.timeout(PATIENCE_S), connect(stack.address) as client:
        pcm = b"".join([part async for part in client.say("Hello", seed=3, voice="bert", enc="f32le")])
    assert pcm == tone("bert", 3, 0, 0, 5 * 1_200)


async def test_text_may_come_by_and_by(stack: Stack) -> None:
    async def words() -> AsyncIterator[str]:
        for word in SENTENCE.split(" "):
            yield word + " "

    async with asyncio.timeout(PATIENCE_S), connect(stack.address) as client:
        pieces = b"".join([part async for part in client.say(words(), seed=3)])
        whole = b"".join([part async for part in client.say(SENTENCE + " ", seed=3)])
    assert pieces == whole != b""


async def test_long_text_is_sent_as_fast_as_the_server_takes_it(make_stack: StackMaker) -> None:
    async with (
        make_stack(Script(samples_per_char=24), text_bytes=16_384) as stack,
        asyncio.timeout(PATIENCE_S),
        connect(stack.address) as client,
    ):
        size = sum([len(part) async for part in client.say("some words go on. " * 5_000)])
    assert size == 2 * 24 * 13 * 5_000


async def test_flush_and_go_on(stack: Stack) -> None:
    async with asyncio.timeout(PATIENCE_S), connect(stack.address) as client:
        context = await client.open(seed=9)
        assert context.seed == 9
        await context.send("Hello")
        await context.flush()
        audio = aiter(context)
        first = await anext(audio)
        assert 0 < len(first) <= 2 * 1_200 * 5
        await context.send(" there")
        await context.end()
        rest = b"".join([part async for part in audio])
        assert len(first + rest) == 2 * 1_200 * 10
        assert context.result is not None and context.result.t == "done"


async def test_cancel_ends_the_iteration(make_stack: StackMaker) -> None:
    async with (
        make_stack(Script(step_s=0.01)) as stack,
        asyncio.timeout(PATIENCE_S),
        connect(stack.address) as client,
    ):
        context = await client.open()
        await context.send(SENTENCE * 10)
        async for _ in context:
            await context.cancel()
        assert context.result is not None and context.result.t == "cancelled"
        await context.cancel()  # harmless


async def test_leaving_say_early_cancels_the_rest(make_stack: StackMaker) -> None:
    async with (
        make_stack(Script(step_s=0.01)) as stack,
        asyncio.timeout(PATIENCE_S),
        connect(stack.address) as client,
    ):
        stream = client.say(SENTENCE * 10)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: stack.engine.num_contexts == 0)


async def test_a_listener_that_stops_taking_rests_the_engine(stack: Stack) -> None:
    async with asyncio.timeout(PATIENCE_S), connect(stack.address) as client:
        context = await client.open()
        feeder = asyncio.create_task(context.feed(SENTENCE * 100))
        audio = aiter(context)
        await anext(audio)
        await asyncio.sleep(0.3)
        made = [one.samples for link in stack.engine.links for one in link.contexts.values()]
        assert made and max(made) <= 45 * 24_000
        await context.cancel()
        await feeder


async def test_errors_carry_code_and_advice(stack: Stack) -> None:
    async with asyncio.timeout(PATIENCE_S), connect(stack.address) as client:
        with pytest.raises(ContextError) as caught:
            await client.open(voice="nobody")
        assert (caught.value.code, caught.value.retry) == ("unknown_voice", False)
        with pytest.raises(ContextError) as caught:
            async for _ in client.say("BUSY now"):
                pass
        assert (caught.value.code, caught.value.retry, caught.value.after_ms) == ("overloaded", True, 500)


async def test_the_voices_are_listed(stack: Stack) -> None:
    async with asyncio.timeout(PATIENCE_S), connect(stack.address) as client:
        assert [voice.id for voice in await client.voices()] == ["ada", "bert"]


async def test_a_lost_connection_ends_the_iteration_with_an_error(make_stack: StackMaker) -> None:
    async with (
        make_stack(Script(step_s=0.01)) as stack,
        asyncio.timeout(PATIENCE_S),
        connect(stack.address) as client,
    ):
        context = await client.open()
        await context.send(SENTENCE * 10)
        with pytest.raises(Disconnected):
            async for _ in context:
                client._socket.transport.abort()


async def test_no_server_is_a_disconnected_error(socket_path: Path) -> None:
    with pytest.raises(Disconnected, match="127.0.0.1:9"):
        async with connect("http://127.0.0.1:9/"):
            pass
    assert not await probe("http://127.0.0.1:9/")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://127.0.0.1:8020/", "ws://127.0.0.1:8020/v1/speech"),
        ("127.0.0.1:8020", "ws://127.0.0.1:8020/v1/speech"),
        ("https://rill.example", "wss://rill.example/v1/speech"),
        ("ws://h/v1/speech?ticket=x", "ws://h/v1/speech?ticket=x"),
    ],
)
def test_any_form_of_address_will_do(given: str, meant: str) -> None:
    assert speech_url(given) == meant
