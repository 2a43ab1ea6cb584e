"""LiveKit Agents' streams against the real gateway: our plugin, and the framework's own for the JSON endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from engine import messages as engine
from tests.gateway.conftest import Stack, StackMaker
from tests.gateway.raw_client import until
from tests.scripted_engine import Script, tone

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("livekit.agents", reason="LiveKit Agents is not installed: pip install '.[agents]'")
    import aiohttp
    from livekit.agents import APIConnectionError, APIConnectOptions, APIStatusError
    from livekit.agents.tts import TTS as AnyTTS
    from livekit.agents.tts import SynthesizedAudio

    from gateway.integrations.livekit import TTS

    cartesia = pytest.importorskip("livekit.plugins.cartesia", reason="its Cartesia plugin is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

PATIENCE_S = 15.0
LONG = "A rather long sentence that goes on for a while, so that somebody may cut in. " * 8
ONCE = APIConnectOptions(max_retry=0, timeout=PATIENCE_S)
TWICE = APIConnectOptions(max_retry=1, retry_interval=0.05, timeout=PATIENCE_S)

Make = Callable[..., contextlib.AbstractAsyncContextManager[AnyTTS]]


@contextlib.asynccontextmanager
async def rill(stack: Stack, **options: Any) -> AsyncIterator[AnyTTS]:
    async with TTS(url=stack.address, **options) as tts:
        yield tts


@contextlib.asynccontextmanager
async def unmodified(stack: Stack, **options: Any) -> AsyncIterator[AnyTTS]:
    """The framework's own plugin, as it is, at another address."""
    async with aiohttp.ClientSession() as session:
        base_url = stack.address.rstrip("/")
        async with cartesia.TTS(api_key="any", base_url=base_url, http_session=session, **options) as tts:
            yield tts


both = pytest.mark.parametrize("make", [rill, unmodified])


async def speak(tts: AnyTTS, *tokens: str, options: APIConnectOptions = ONCE) -> list[SynthesizedAudio]:
    """One turn, as a language model writes it."""
    async with asyncio.timeout(PATIENCE_S), tts.stream(conn_options=options) as stream:
        for token in tokens:
            stream.push_text(token)
        stream.end_input()
        return [event async for event in stream]


def pcm(events: list[SynthesizedAudio]) -> bytes:
    return b"".join(event.frame.data.tobytes() for event in events)


def sent(stack: Stack) -> str:
    return "".join(message.text for message in stack.engine.received if isinstance(message, engine.Clause))


def opened(stack: Stack) -> list[engine.Open]:
    return [message for message in stack.engine.received if isinstance(message, engine.Open)]


# ---- round trip


async def test_tokens_go_out_word_for_word_and_the_audio_is_the_engines(stack: Stack) -> None:
    tokens = ["  ", "Größe", ": 3", ",5", " €", " — that's", " it.", "  And", " on\n", "it goes."]
    async with rill(stack, voice="bert", seed=7, language="de", instruct="softly") as tts:
        events = await speak(tts, *tokens)
    assert sent(stack) == "".join(tokens)
    clauses = [message for message in stack.engine.received if isinstance(message, engine.Clause)]
    waves = [tone("bert", 7, c.index, 0, 1_200 * sum(map(str.isalnum, c.text))) for c in clauses]
    expected = np.concatenate([np.frombuffer(wave, dtype="<f4") for wave in waves])
    got = np.frombuffer(pcm(events), dtype="<i2") / 32_767
    np.testing.assert_allclose(got, expected, atol=1 / 32_767)
    assert [event.is_final for event in events][-1] and len({event.segment_id for event in events}) == 1
    (request,) = opened(stack)
    assert (request.voice, request.seed, request.lang, request.instruct) == ("bert", 7, "de", "softly")


async def test_the_frameworks_own_plugin_speaks_by_another_address_alone(stack: Stack) -> None:
    async with unmodified(stack) as tts:
        events = await speak(tts, "Hello", " there.", " How are", " you?")
    assert "".join(sent(stack).split()) == "Hellothere.Howareyou?"
    assert len(pcm(events)) == 2 * 1_200 * len("HellothereHowareyou")


@both
@pytest.mark.parametrize("rate", [8_000, 24_000, 48_000])
async def test_audio_comes_at_the_rate_that_was_asked_for(make: Make, rate: int, stack: Stack) -> None:
    async with make(stack, sample_rate=rate) as tts:
        events = await speak(tts, "Twelve chars.")
        assert {event.frame.sample_rate for event in events} == {rate} == {tts.sample_rate}
        assert len(pcm(events)) / 2 == pytest.approx(rate * 0.05 * 11, abs=2)


def test_a_rate_that_is_not_offered_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample_rate is 11025; one of 8000"):
        TTS(sample_rate=11_025)


@both
async def test_one_socket_serves_all_turns(make: Make, stack: Stack) -> None:
    async with make(stack) as tts:
        for number in range(3):
            assert len(pcm(await speak(tts, f"Turn {number}."))) == 2 * 1_200 * 5
            assert stack.server.num_sessions == 1
    await until(lambda: stack.server.num_sessions == 0)


async def test_streams_side_by_side_share_the_connection_and_never_mix(stack: Stack) -> None:
    async with rill(stack, seed=7) as tts:
        texts = [f"Stream {'x' * number}." for number in range(1, 6)]
        turns = await asyncio.gather(*(speak(tts, text) for text in texts))
        for text, events in zip(texts, turns, strict=True):
            assert len(pcm(events)) == 2 * 1_200 * sum(map(str.isalnum, text))
        assert stack.server.num_sessions == 1


async def test_a_whole_text_may_be_synthesised_at_once(stack: Stack) -> None:
    async with rill(stack) as tts:
        tts.prewarm()
        frame = await tts.synthesize("Hello.", conn_options=ONCE).collect()
        assert frame.samples_per_channel in (1_200 * 5, 1_200 * 5 + 240)  # the framework may add 10 ms to mark the end


async def test_options_hold_for_the_streams_that_follow(stack: Stack) -> None:
    async with rill(stack, voice="ada") as tts:
        await speak(tts, "Before.")
        tts.update_options(voice="bert", seed=3)
        await speak(tts, "After.")
        assert [(request.voice, request.seed == 3) for request in opened(stack)] == [("ada", False), ("bert", True)]


# ---- nothing to say


@both
@pytest.mark.parametrize("text", ["🙂🙂", "...", "***", "!!!", "```", "\u0301"])
async def test_a_text_with_nothing_to_say_is_silence_and_no_fault(make: Make, text: str, stack: Stack) -> None:
    """G15: the framework takes an answer without audio for a fault and tries again."""
    async with make(stack) as tts:
        audio = pcm(await speak(tts, text))
        assert audio and not any(audio)
        assert len(opened(stack)) == 1, "no second try"


async def test_a_blank_text_opens_nothing(stack: Stack) -> None:
    async with rill(stack) as tts:
        assert await speak(tts, " ", "\n") == []
        assert await speak(tts) == []
        assert opened(stack) == []


# ---- interruption


async def test_a_closed_stream_stops_the_engine_and_keeps_the_connection(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_s=0.01)) as stack, rill(stack) as tts:
        stream = tts.stream(conn_options=ONCE)
        stream.push_text(LONG)
        await anext(stream)
        await stream.aclose()
        await until(lambda: stack.engine.num_contexts == 0)
        assert len([message for message in stack.engine.received if isinstance(message, engine.Cancel)]) == 1
        assert len(pcm(await speak(tts, "Go on."))) == 2 * 1_200 * 4
        assert stack.server.num_sessions == 1


async def test_a_stream_closed_before_its_first_audio_leaves_no_context(make_stack: StackMaker) -> None:
    async with make_stack() as stack, rill(stack) as tts:
        await speak(tts, "First.")
        stack.engine.script.gate.clear()  # not even `opened` comes
        stream = tts.stream(conn_options=ONCE)
        stream.push_text(LONG)
        await until(lambda: stack.engine.num_contexts == 1)
        await stream.aclose()
        await until(lambda: stack.engine.num_contexts == 0 and stack.server.num_contexts == 0)
        stack.engine.script.gate.set()
        assert len(pcm(await speak(tts, "Go on."))) == 2 * 1_200 * 4


async def test_what_is_made_lies_little_ahead_of_what_is_spoken(make_stack: StackMaker) -> None:
    async with make_stack(Script(samples_per_char=24_000)) as stack, rill(stack) as tts:
        stream = tts.stream(conn_options=ONCE)
        stream.push_text(LONG)
        stream.end_input()
        await anext(stream)
        await asyncio.sleep(0.5)
        assert stack.engine.num_samples < 24_000 * 25, "of eight minutes"
        await stream.aclose()


async def test_the_unmodified_plugins_forgotten_turn_is_ended_and_holds_nothing(make_stack: StackMaker) -> None:
    """G11: it leaves the socket open and unread until the next turn, which may never come."""
    script = Script(samples_per_char=48_000)
    async with make_stack(script, stall_ms=300, window_ms=30_000) as stack, unmodified(stack) as tts:
        stream = tts.stream(conn_options=ONCE)
        for _ in range(20):
            stream.push_text(LONG)
        await anext(stream)
        await stream.aclose()
        await until(lambda: stack.server.num_contexts == 0 and stack.engine.num_contexts == 0)
        assert len(pcm(await speak(tts, "Hi.", options=TWICE))) == 2 * 48_000 * 2


# ---- errors


@both
async def test_a_context_that_fails_raises_and_the_next_turn_speaks(make: Make, stack: Stack) -> None:
    async with make(stack) as tts:
        with pytest.raises(Exception, match="engine_error|engine could not speak"):
            await speak(tts, "FAULT.")
        assert len(pcm(await speak(tts, "Hello.", options=TWICE))) == 2 * 1_200 * 5


@pytest.mark.parametrize(
    ("voice", "text", "code", "retry"), [("nobody", "Hello.", 404, False), ("ada", "BUSY", 503, True)]
)
async def test_an_error_says_whether_another_try_may_help(
    voice: str, text: str, code: int, retry: bool, stack: Stack
) -> None:
    async with rill(stack, voice=voice) as tts:
        with pytest.raises(APIStatusError) as caught:
            await speak(tts, text)
        assert (caught.value.status_code, caught.value.retryable) == (code, retry)


async def test_a_refused_turn_is_tried_again_with_all_its_words(make_stack: StackMaker) -> None:
    async with make_stack(Script(refuse=True)) as stack, rill(stack) as tts:

        async def relent() -> None:
            await until(lambda: bool(opened(stack)))
            stack.engine.script.refuse = False

        events, _ = await asyncio.gather(speak(tts, "Hello", " there.", options=TWICE), relent())
        assert len(pcm(events)) == 2 * 1_200 * 10
        assert len(opened(stack)) == 2


async def test_without_a_server_the_connection_error_is_the_frameworks(stack: Stack) -> None:
    async with TTS(url="ws://127.0.0.1:9") as tts:
        with pytest.raises(APIConnectionError):
            await speak(tts, "Hello.")


@both
async def test_a_connection_lost_between_turns_is_made_again(make: Make, stack: Stack) -> None:
    async with make(stack) as tts:
        for _ in range(3):
            assert len(pcm(await speak(tts, "Hello.", options=TWICE))) == 2 * 1_200 * 5
            for session in list(stack.server._sessions):
                session._connection.transport.abort()
            await until(lambda: stack.server.num_sessions == 0)


@both
async def test_a_connection_closed_for_idleness_is_made_again(make: Make, make_stack: StackMaker) -> None:
    """G09: a pooled socket that the server has closed meanwhile."""
    async with make_stack(idle_ms=100) as stack, make(stack) as tts:
        for _ in range(2):
            assert len(pcm(await speak(tts, "Hello.", options=TWICE))) == 2 * 1_200 * 5
            await until(lambda: stack.server.num_sessions == 0)


async def test_a_connection_lost_in_mid_audio_is_an_error_and_the_next_turn_speaks(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_s=0.01)) as stack, rill(stack) as tts:
        stream = tts.stream(conn_options=ONCE)
        stream.push_text(LONG)
        await anext(stream)
        for session in list(stack.server._sessions):
            session._connection.transport.abort()
        with pytest.raises(APIConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                async for _ in stream:
                    pass
        await stream.aclose()
        assert len(pcm(await speak(tts, "Hello."))) == 2 * 1_200 * 5


async def test_a_server_that_goes_away_is_heard_out_while_the_next_turn_goes_elsewhere(
    make_stack: StackMaker,
) -> None:
    async with make_stack(Script(step_s=0.02)) as stack, rill(stack) as tts:
        first = asyncio.create_task(speak(tts, "A sentence that takes some time to be spoken."))
        await until(lambda: stack.engine.num_samples > 0)
        for session in list(stack.server._sessions):
            session.retire("age", 5.0)
        await asyncio.sleep(0.05)
        second = await speak(tts, "And the next.")
        assert stack.server.num_sessions == 2
        assert (len(pcm(await first)), len(pcm(second))) == (2 * 1_200 * 36, 2 * 1_200 * 10)
