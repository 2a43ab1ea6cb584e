"""A LiveKit Agents TTS plugin that speaks rill.v1: `pip install .[livekit]`.

    session = AgentSession(tts=TTS(url="ws://127.0.0.1:8020/v1/speech", voice="heart"), ...)

One connection for all streams, made when it is first needed and again when it was lost; a stream is one context on it.
Tokens go out word for word as they are pushed. Closing a stream cancels its context at once and leaves the connection
to the others. What is made lies no more than LEAD_S ahead of what has been spoken, so a cut-in wastes little.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

from livekit.agents import APIConnectionError, APIStatusError, APITimeoutError, tts, utils
from livekit.agents.types import DEFAULT_API_CONNECT_OPTIONS, NOT_GIVEN, APIConnectOptions, NotGivenOr
from livekit.agents.utils import is_given

from gateway import wire
from gateway.client import Client, Context, Disconnected, ServerError, dial

LEAD_S: Final = 5.0
SILENCE_MS: Final = 100  # for a text with nothing to say: the framework takes an answer without audio for a fault
_STATUS: Final = {"unknown_voice": 404, "quota": 429, "context_limit": 429}


@dataclass(frozen=True, slots=True)
class _Options:
    voice: str | None
    language: str | None
    instruct: str | None
    seed: int | None


class TTS(tts.TTS):  # type: ignore[misc]
    """`url`: the server's page or socket. `api_key`: where it asks for one. `sample_rate`: one of wire.RATES."""

    def __init__(
        self,
        *,
        url: str = "ws://127.0.0.1:8020/v1/speech",
        api_key: str | None = None,
        voice: str | None = None,
        language: str | None = None,
        instruct: str | None = None,
        seed: int | None = None,
        sample_rate: int = 24_000,
    ) -> None:
        if sample_rate not in wire.RATES:
            raise ValueError(f"sample_rate is {sample_rate}; one of {', '.join(map(str, wire.RATES))} is accepted")
        super().__init__(
            capabilities=tts.TTSCapabilities(streaming=True, aligned_transcript=False),
            sample_rate=sample_rate,
            num_channels=1,
        )
        self._url, self._api_key = url, api_key
        self._options = _Options(voice, language, instruct, seed)
        self._clients: list[Client] = []  # the last one serves; those before are heard out by their streams
        self._connecting = asyncio.Lock()
        self._warming: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return self._clients[-1].ready.model if self._clients else "unknown"

    @property
    def provider(self) -> str:
        return "Rill"

    def update_options(
        self,
        *,
        voice: NotGivenOr[str | None] = NOT_GIVEN,
        language: NotGivenOr[str | None] = NOT_GIVEN,
        instruct: NotGivenOr[str | None] = NOT_GIVEN,
        seed: NotGivenOr[int | None] = NOT_GIVEN,
    ) -> None:
        """For streams that are made from now on."""
        given = {"voice": voice, "language": language, "instruct": instruct, "seed": seed}
        self._options = replace(self._options, **{name: value for name, value in given.items() if is_given(value)})

    def prewarm(self) -> None:
        """Connect now rather than at the first stream."""
        self._warming = asyncio.create_task(self._warm(), name="rill-prewarm")

    async def _warm(self) -> None:
        with contextlib.suppress(Disconnected):  # the first stream will say so
            await self.client()

    async def client(self) -> Client:
        """The connection that all streams share. Raises Disconnected."""
        async with self._connecting:
            self._clients = [client for client in self._clients if client.is_open]
            if not self._clients or self._clients[-1].is_going_away:
                self._clients.append(await dial(self._url, key=self._api_key))
            return self._clients[-1]

    def synthesize(
        self, text: str, *, conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS
    ) -> tts.ChunkedStream:
        return self._synthesize_with_stream(text, conn_options=conn_options)

    def stream(self, *, conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS) -> SynthesizeStream:
        return SynthesizeStream(self, self._options, conn_options)

    async def aclose(self) -> None:
        if self._warming is not None:
            await utils.aio.cancel_and_wait(self._warming)
        clients, self._clients = self._clients, []
        for client in clients:
            await client.close()


class SynthesizeStream(tts.SynthesizeStream):  # type: ignore[misc]
    """One turn's speech."""

    def __init__(self, owner: TTS, options: _Options, conn_options: APIConnectOptions) -> None:
        super().__init__(tts=owner, conn_options=conn_options)
        self._owner, self._options = owner, options

    async def _run(self, output_emitter: tts.AudioEmitter) -> None:
        request = utils.shortuuid()
        output_emitter.initialize(
            request_id=request,
            sample_rate=self._owner.sample_rate,
            num_channels=1,
            mime_type="audio/pcm",
            stream=True,
        )
        try:
            if (first := await self._first_words()) is not None:
                output_emitter.start_segment(segment_id=request)
                await self._speak(first, output_emitter)
                output_emitter.end_segment()
        except TimeoutError as error:
            raise APITimeoutError() from error
        except Disconnected as error:
            raise APIConnectionError(str(error)) from error
        except ServerError as error:
            status = _STATUS.get(error.code, 503 if error.retry else 400)
            raise APIStatusError(str(error), status_code=status, retryable=error.retry) from error

    async def _first_words(self) -> str | None:
        """All text up to the first that is more than blank; None if there is none. No context is opened before."""
        blank = ""
        async for piece in self._pieces():
            blank += piece
            if blank.strip():
                return blank
        return None

    async def _pieces(self) -> AsyncIterator[str]:
        """A flush only marks what the end of the input marks too: that this turn's text is complete."""
        async for piece in self._input_ch:
            if isinstance(piece, str):
                yield piece

    async def _speak(self, first: str, output_emitter: tts.AudioEmitter) -> None:
        async with asyncio.timeout(self._conn_options.timeout):
            context = await self._open()
        self._mark_started()
        feeder = asyncio.create_task(self._feed(context, first), name="rill-feed")
        try:
            await self._play(context, output_emitter)
            await feeder
        finally:
            await utils.aio.cancel_and_wait(feeder)
            with contextlib.suppress(Disconnected):
                await context.cancel()

    async def _open(self) -> Context:
        options = self._options
        client = await self._owner.client()
        return await client.open(
            voice=options.voice,
            lang=options.language,
            instruct=options.instruct,
            seed=options.seed,
            rate=self._owner.sample_rate,
            buffer_s=LEAD_S,
        )

    async def _feed(self, context: Context, first: str) -> None:
        await context.send(first)
        async for piece in self._pieces():
            await context.send(piece)
        await context.end()

    async def _play(self, context: Context, output_emitter: tts.AudioEmitter) -> None:
        """Hands the audio on as it comes, LEAD_S ahead of the clock at most."""
        started, num_bytes = 0.0, 0
        async for pcm in context:
            started = started or time.monotonic()
            output_emitter.push(pcm)
            num_bytes += len(pcm)
            lead_s = num_bytes / 2 / context.rate - (time.monotonic() - started)
            await asyncio.sleep(max(lead_s - LEAD_S, 0.0))
        if not num_bytes:
            output_emitter.push(bytes(2 * (context.rate * SILENCE_MS // 1000)))
