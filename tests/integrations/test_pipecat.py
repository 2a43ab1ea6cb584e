"""A real Pipecat pipeline against the real gateway: our service, and the framework's own for the JSON endpoint."""

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
    pytest.importorskip("pipecat", reason="Pipecat is not installed: pip install '.[agents]'")
    from pipecat.frames.frames import (
        EndFrame,
        ErrorFrame,
        Frame,
        InterruptionFrame,
        LLMFullResponseEndFrame,
        LLMFullResponseStartFrame,
        LLMTextFrame,
        TTSAudioRawFrame,
        TTSSpeakFrame,
        TTSStartedFrame,
        TTSStoppedFrame,
        TTSTextFrame,
        TTSUpdateSettingsFrame,
    )
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.worker import PipelineParams, PipelineWorker
    from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
    from pipecat.services.cartesia.tts import CartesiaTTSService
    from pipecat.services.tts_service import TextAggregationMode, TTSService
    from pipecat.workers.runner import WorkerRunner

    from gateway.integrations.pipecat import RillTTSService

pytestmark = pytest.mark.filterwarnings("ignore")

PATIENCE_S = 15.0
LONG = "A rather long sentence that goes on for a while, so that somebody may cut in. " * 8


class Sink(FrameProcessor):
    """Keeps every frame that comes out of the service, either way."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.changed = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.append(frame)
        self.changed.set()
        await self.push_frame(frame, direction)


class Bot:
    """A pipeline of one service between two sinks."""

    def __init__(self, service: TTSService, worker: PipelineWorker, before: Sink, after: Sink) -> None:
        self.service, self.worker, self.before, self.after = service, worker, before, after

    async def say(self, *tokens: str) -> None:
        """One turn, as a language model writes it."""
        await self.worker.queue_frames(
            [LLMFullResponseStartFrame(), *(LLMTextFrame(token) for token in tokens), LLMFullResponseEndFrame()]
        )

    async def interrupt(self) -> None:
        await self.worker.queue_frame(InterruptionFrame())

    def of(self, *kinds: type[Frame], since: int = 0) -> list[Any]:
        return [frame for frame in self.after.frames[since:] if isinstance(frame, kinds)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.after.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.after.changed.wait(), 0.05)

    async def until_stopped(self, count: int = 1, *, since: int = 0) -> None:
        await self.until(lambda: len(self.of(TTSStoppedFrame, since=since)) >= count)

    def audio(self, since: int = 0) -> bytes:
        return b"".join(frame.audio for frame in self.of(TTSAudioRawFrame, since=since))

    def errors(self) -> list[str]:
        return [frame.error for frame in self.before.frames if isinstance(frame, ErrorFrame)]


@contextlib.asynccontextmanager
async def running(service: TTSService, rate: int = 24_000) -> AsyncIterator[Bot]:
    before, after = Sink(), Sink()
    worker = PipelineWorker(
        Pipeline([before, service, after]),
        params=PipelineParams(audio_out_sample_rate=rate),
        cancel_on_idle_timeout=False,
        enable_rtvi=False,
    )
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def _started(worker: PipelineWorker, frame: Frame) -> None:
        started.set()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    task = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await started.wait()
        yield Bot(service, worker, before, after)
        await worker.queue_frame(EndFrame())
        async with asyncio.timeout(PATIENCE_S):
            await task
    finally:
        if not task.done():
            await runner.cancel()
            await asyncio.wait([task], timeout=PATIENCE_S)


def rill(stack: Stack, **settings: Any) -> TTSService:
    return RillTTSService(url=stack.address, settings=RillTTSService.Settings(**settings))


def cartesia(stack: Stack, **settings: Any) -> TTSService:
    """The framework's own service, as it is, at another address."""
    url = stack.address.replace("http", "ws", 1) + "tts/websocket"
    return CartesiaTTSService(api_key="any", url=url, settings=CartesiaTTSService.Settings(**settings))


both = pytest.mark.parametrize("make", [rill, cartesia])


def sent(stack: Stack) -> str:
    return "".join(message.text for message in stack.engine.received if isinstance(message, engine.Clause))


def opened(stack: Stack) -> list[engine.Open]:
    return [message for message in stack.engine.received if isinstance(message, engine.Open)]


# ---- round trip


async def test_tokens_go_out_word_for_word_and_the_audio_is_the_engines(stack: Stack) -> None:
    tokens = ["Größe", ": 3", ",5", " €", " — that's", " it.", "  And", " on\n", "it goes."]
    async with running(rill(stack, voice="bert", seed=7)) as bot:
        await bot.say(*tokens)
        await bot.until_stopped()
        assert sent(stack) == "".join(tokens)
        clauses = [message for message in stack.engine.received if isinstance(message, engine.Clause)]
        waves = [tone("bert", 7, c.index, 0, 1_200 * sum(map(str.isalnum, c.text))) for c in clauses]
        expected = np.concatenate([np.frombuffer(wave, dtype="<f4") for wave in waves])
        got = np.frombuffer(bot.audio(), dtype="<i2") / 32_767
        np.testing.assert_allclose(got, expected, atol=1 / 32_767)
        assert "".join(frame.text for frame in bot.of(TTSTextFrame)).split() == "".join(tokens).split()
        kinds = [type(frame) for frame in bot.of(TTSStartedFrame, TTSAudioRawFrame, TTSStoppedFrame)]
        assert kinds[0] is TTSStartedFrame and kinds[-1] is TTSStoppedFrame
        assert bot.errors() == []


async def test_whole_sentences_do_not_run_into_each_other(stack: Stack) -> None:
    service = RillTTSService(url=stack.address, text_aggregation_mode=TextAggregationMode.SENTENCE)
    async with running(service) as bot:
        await bot.say("Hello", " there.", " How are", " you?")
        await bot.until_stopped()
        assert sent(stack).strip() == "Hello there. How are you?"


async def test_the_frameworks_own_service_speaks_by_another_address_alone(stack: Stack) -> None:
    async with running(cartesia(stack)) as bot:
        await bot.say("Hello", " there.", " How are", " you?")
        await bot.until_stopped()
        assert "".join(sent(stack).split()) == "Hellothere.Howareyou?"
        assert len(bot.audio()) == 2 * 1_200 * len("HellothereHowareyou")
        assert [frame.text for frame in bot.of(TTSTextFrame)], "what was said reaches the conversation"
        assert bot.errors() == []


@both
@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 48_000])
async def test_audio_comes_at_the_pipelines_rate(make: Callable[..., TTSService], rate: int, stack: Stack) -> None:
    async with running(make(stack), rate) as bot:
        await bot.say("Twelve chars.")
        await bot.until_stopped()
        assert {frame.sample_rate for frame in bot.of(TTSAudioRawFrame)} == {rate}
        assert len(bot.audio()) / 2 == pytest.approx(rate * 0.05 * 11, abs=2)


async def test_a_rate_that_is_not_offered_is_told_as_what_it_is(stack: Stack) -> None:
    async with running(rill(stack), 32_000) as bot:
        await bot.say("Hello.")
        await bot.until_stopped()
        assert {frame.sample_rate for frame in bot.of(TTSAudioRawFrame)} == {24_000}


@both
async def test_one_socket_serves_all_turns_in_order(make: Callable[..., TTSService], stack: Stack) -> None:
    async with running(make(stack)) as bot:
        for number in range(3):
            await bot.say(f"Turn {number}.")
        await bot.worker.queue_frame(TTSSpeakFrame("By the way."))
        await bot.until_stopped(4)
        assert stack.server.num_sessions == 1
        assert len(opened(stack)) == 4
        assert len(bot.audio()) == 2 * 1_200 * (3 * 5 + 8)
    await until(lambda: stack.server.num_sessions == 0)


async def test_a_setting_that_changes_in_mid_turn_begins_a_new_context(stack: Stack) -> None:
    async with running(rill(stack, voice="ada")) as bot:
        await bot.worker.queue_frames([LLMFullResponseStartFrame(), LLMTextFrame("Before. ")])
        await bot.until(lambda: bool(opened(stack)))
        await bot.worker.queue_frame(TTSUpdateSettingsFrame(delta=RillTTSService.Settings(voice="bert")))
        await bot.worker.queue_frames([LLMTextFrame("After."), LLMFullResponseEndFrame()])
        await bot.until_stopped(2)
        assert [message.voice for message in opened(stack)] == ["ada", "bert"]
        assert bot.errors() == []


# ---- nothing to say


@both
async def test_turns_with_nothing_to_say_leave_the_service_usable(
    make: Callable[..., TTSService], stack: Stack
) -> None:
    """G15: after three turns without audio the framework would give the service up."""
    async with running(make(stack)) as bot:
        for text in ("🙂🙂", "...", "***", "!!!", "---"):
            since = len(bot.after.frames)
            await bot.say(text)
            await bot.until_stopped(since=since)
        since = len(bot.after.frames)
        await bot.say("Hello.")
        await bot.until_stopped(since=since)
        assert len(bot.audio(since)) == 2 * 1_200 * 5
        assert bot.service.is_usable and bot.errors() == []


# ---- interruption


@both
async def test_an_interruption_in_mid_audio_stops_the_engine_and_leaks_nothing(
    make: Callable[..., TTSService], make_stack: StackMaker
) -> None:
    async with make_stack(Script(step_s=0.01)) as stack, running(make(stack)) as bot:
        await bot.say(LONG)
        await bot.until(lambda: len(bot.audio()) > 48_000)
        await bot.interrupt()
        await until(lambda: stack.engine.num_contexts == 0)
        first = {frame.context_id for frame in bot.of(TTSAudioRawFrame)}
        since = len(bot.after.frames)
        await bot.say("Go on.")
        await bot.until_stopped(since=since)
        assert not first & {frame.context_id for frame in bot.of(TTSAudioRawFrame, since=since)}
        assert len(bot.audio(since)) == 2 * 1_200 * 4
        assert stack.server.num_sessions == 1, "the same socket"
        assert len([message for message in stack.engine.received if isinstance(message, engine.Cancel)]) == 1


@both
async def test_an_interruption_before_the_first_audio_leaves_no_context(
    make: Callable[..., TTSService], make_stack: StackMaker
) -> None:
    """G01: the bot has not begun to speak."""
    async with make_stack() as stack, running(make(stack)) as bot:
        stack.engine.script.gate.clear()
        await bot.say("Nobody shall hear this.")
        await until(lambda: stack.engine.num_contexts == 1)
        await bot.interrupt()
        await until(lambda: stack.engine.num_contexts == 0)
        stack.engine.script.gate.set()
        await until(lambda: stack.server.num_contexts == 0)
        await bot.say("But this.")
        await bot.until_stopped()
        assert len(bot.audio()) == 2 * 1_200 * 7


@both
async def test_an_interruption_without_a_turn_says_nothing(make: Callable[..., TTSService], stack: Stack) -> None:
    async with running(make(stack)) as bot:
        await bot.interrupt()
        await bot.worker.queue_frame(LLMFullResponseStartFrame())
        await bot.interrupt()
        await bot.say("Hello.")
        await bot.until_stopped()
        assert len(opened(stack)) == 1 and bot.errors() == []


# ---- errors


@both
async def test_a_context_that_fails_is_an_error_and_the_next_turn_speaks(
    make: Callable[..., TTSService], stack: Stack
) -> None:
    async with running(make(stack)) as bot:
        await bot.say("FAULT.")
        await bot.until(lambda: any("engine_error" in error for error in bot.errors()))
        await bot.until_stopped()
        since = len(bot.after.frames)
        await bot.say("Hello.")
        await bot.until(lambda: len(bot.audio(since)) == 2 * 1_200 * 5)
        assert bot.service.is_usable


async def test_an_unknown_voice_is_told_by_name(stack: Stack) -> None:
    async with running(rill(stack, voice="nobody")) as bot:
        await bot.say("Hello.")
        await bot.until(lambda: any("unknown_voice" in error for error in bot.errors()))
        await bot.until_stopped()


@both
async def test_a_lost_connection_is_made_again_and_the_next_turn_speaks(
    make: Callable[..., TTSService], make_stack: StackMaker
) -> None:
    async with make_stack(Script(step_s=0.01)) as stack, running(make(stack)) as bot:
        await bot.say(LONG)
        await bot.until(lambda: bool(bot.audio()))
        for session in list(stack.server._sessions):
            session._connection.transport.abort()
        await until(lambda: stack.server.num_sessions == 1 and stack.engine.num_contexts == 0)
        if isinstance(bot.service, RillTTSService):
            await bot.until_stopped()
        since = len(bot.after.frames)
        await bot.say("Hello.")
        await bot.until(lambda: len(bot.audio(since)) == 2 * 1_200 * 5)


async def test_a_connection_lost_between_turns_is_not_noticed(stack: Stack) -> None:
    async with running(rill(stack)) as bot:
        for _ in range(2):
            since = len(bot.after.frames)
            for session in list(stack.server._sessions):
                session._connection.transport.abort()
            await bot.say("Hello.")
            await bot.until(lambda since=since: len(bot.audio(since)) == 2 * 1_200 * 5)  # type: ignore[misc]
        assert bot.service.is_usable


@both
async def test_a_connection_closed_for_idleness_is_made_again(
    make: Callable[..., TTSService], make_stack: StackMaker
) -> None:
    """G09: long silence between two turns."""
    async with make_stack(idle_ms=400) as stack, running(make(stack)) as bot:
        await bot.say("Hello.")
        await bot.until(lambda: len(bot.audio()) == 2 * 1_200 * 5)
        (session,) = stack.server._sessions
        await until(lambda: session not in stack.server._sessions)
        await bot.say("Again.")
        await bot.until(lambda: len(bot.audio()) == 2 * 1_200 * 10)
        assert bot.service.is_usable


async def test_a_server_that_goes_away_is_heard_out_while_the_next_turn_goes_elsewhere(
    make_stack: StackMaker,
) -> None:
    async with make_stack(Script(step_s=0.02)) as stack, running(rill(stack)) as bot:
        await bot.say("A sentence that takes some time to be spoken.")
        await bot.until(lambda: bool(bot.audio()))
        for session in list(stack.server._sessions):
            session.retire("age", 5.0)
        await until(lambda: stack.server.num_sessions == 2)
        await bot.say("And the next.")
        await bot.until_stopped(2)
        assert len(bot.audio()) == 2 * 1_200 * (36 + 10)
        assert bot.errors() == []
        await until(lambda: stack.server.num_sessions == 1)
