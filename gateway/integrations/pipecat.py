"""A Pipecat TTS service that speaks rill.v1: `pip install .[pipecat]`.

    tts = RillTTSService(url="ws://127.0.0.1:8020/v1/speech", settings=RillTTSService.Settings(voice="heart"))
    pipeline = Pipeline([transport.input(), stt, user, llm, tts, transport.output(), assistant])

One socket for all turns. A turn of the pipeline is one context: tokens go out as the language model writes them, word
for word, and the server cuts them into clauses. An interruption cancels the context on the server, before or while it
is heard; nothing of it can reach the next turn, since every message carries its context's id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

from pipecat.frames.frames import ErrorFrame, Frame, TTSAudioRawFrame, TTSStoppedFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode, WebsocketTTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.types import NOT_GIVEN, NotGiven, assert_given
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.typing import Subprotocol

from gateway import wire
from gateway.client import PIECE_CHARS, speech_url

SILENCE_MS: Final = 100  # for a turn with nothing to say: Pipecat gives up a service after three turns without audio


@dataclass
class RillTTSSettings(TTSSettings):  # type: ignore[misc]
    """What may change between turns: besides voice and language, words on how to speak, and a seed to repeat a turn."""

    instruct: str | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    seed: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)


@dataclass(slots=True)
class _Turn:
    """A context that is open on a socket."""

    socket: ClientConnection
    num_pieces: int = 0


class RillTTSService(WebsocketTTSService):  # type: ignore[misc]
    """Streams a turn's tokens to a Rill server and its audio back.

    url          the server's page or socket      api_key   where the server asks for one
    sample_rate  the pipeline's if left out; at a rate that Rill doesn't offer, 24 kHz, which Pipecat resamples
    """

    Settings = RillTTSSettings
    _settings: RillTTSSettings
    _turn_context_id: str | None

    def __init__(
        self,
        *,
        url: str = "ws://127.0.0.1:8020/v1/speech",
        api_key: str | None = None,
        sample_rate: int | None = None,
        text_aggregation_mode: TextAggregationMode = TextAggregationMode.TOKEN,
        settings: RillTTSSettings | None = None,
        **kwargs: Any,  # the framework's own
    ) -> None:
        chosen = RillTTSSettings(model=None, voice=None, language=None, instruct=None, seed=None)
        if settings is not None:
            chosen.apply_update(settings)
        super().__init__(
            sample_rate=sample_rate,
            text_aggregation_mode=text_aggregation_mode,
            push_start_frame=True,
            append_trailing_space=True,  # between whole sentences; tokens bring their own
            settings=chosen,
            **kwargs,
        )
        self._url = speech_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self._rate = wire.Format().rate
        self._turns: dict[str, _Turn] = {}
        self._connecting = asyncio.Lock()
        self._receive_task: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()  # one for each socket whose server is going away

    def can_generate_metrics(self) -> bool:
        return True

    def language_to_service_language(self, language: Language) -> str:
        return str(language.value)

    async def setup(self, setup: FrameProcessorSetup) -> None:
        await super().setup(setup)
        self._rate = self.sample_rate if self.sample_rate in wire.RATES else wire.Format().rate
        await self._connect()

    # ---- the socket

    async def _connect(self) -> None:
        await super()._connect()
        await self._connect_websocket()
        if self._websocket and not self._receive_task:
            self._receive_task = self.create_task(self._receive_task_handler(self._report_error))

    async def _disconnect(self) -> None:
        await super()._disconnect()
        for task in (*self._leaving, *filter(None, [self._receive_task])):
            await self.cancel_task(task)
        self._leaving.clear()
        self._receive_task = None
        await self._disconnect_websocket()

    async def _connect_websocket(self) -> None:
        async with self._connecting:
            if not self._is_open():
                await self._shake_hands()

    def _is_open(self) -> bool:
        return self._websocket is not None and self._websocket.state is State.OPEN

    async def _shake_hands(self) -> None:
        try:
            self._websocket = await self._websocket_connect(
                self._url,
                subprotocols=[Subprotocol(wire.SUBPROTOCOL)],
                additional_headers=self._headers,
                compression=None,
                max_size=wire.MESSAGE_BYTES,
            )
            await self._call_event_handler("on_connected")
        except Exception as error:  # whatever the handshake met: the framework decides what it means
            self._websocket = None
            await self.push_error(error_msg=f"can't connect to {self._url}: {error}", exception=error)
            await self._call_event_handler("on_connection_error", str(error))

    async def _disconnect_websocket(self) -> None:
        socket, self._websocket = self._websocket, None
        self._turns.clear()
        await self.stop_all_metrics()
        if socket is not None:
            await socket.close()
            await self._call_event_handler("on_disconnected")

    async def _close_connection_contexts(self) -> None:
        """What was to come over the socket comes no more: each turn on it ends with what has been heard."""
        for c in list(self._turns):
            await self._end(c)
        await super()._close_connection_contexts()

    async def _reconnect_websocket(self, attempt_number: int) -> bool:
        """A text may have opened it again by itself while the receive task waited for its next attempt."""
        if self._is_open():
            return True
        reconnected: bool = await super()._reconnect_websocket(attempt_number)
        return reconnected

    async def _receive_messages(self) -> None:
        """Until the connection ends. A server that goes away is heard out on the side, over its old socket."""
        while (socket := self._websocket) is not None:
            if not await self._listen(socket):
                return
            self._leaving.add(self.create_task(self._hear_out(socket)))
            self._websocket = None
            await self._connect_websocket()

    async def _listen(self, socket: ClientConnection) -> bool:
        """False: the connection has ended; True: its server asks us to go elsewhere."""
        async for data in socket:
            message = wire.read(data) if isinstance(data, bytes) else None
            if isinstance(message, wire.GoAway):
                return True
            if message is not None:
                await self._take(message)
        return False

    async def _hear_out(self, socket: ClientConnection) -> None:
        try:
            await self._listen(socket)
        except ConnectionClosed:
            pass
        finally:
            await socket.close()

    # ---- what the server says

    async def _take(self, message: wire.ServerMessage) -> None:
        match message:
            case wire.Audio(c=c, d=d):
                await self.append_to_audio_context(c, self._audio_frame(c, d))
            case wire.Done(c=c, samples=samples):
                if not samples:
                    await self.append_to_audio_context(c, self._audio_frame(c, self._silence()))
                await self._end(c)
            case wire.Error(c=str(c), code=code, msg=msg):
                await self.append_to_audio_context(c, ErrorFrame(error=f"{code}: {msg}"))
                await self._end(c)
            case wire.Error(code=code, msg=msg):
                await self.push_error(error_msg=f"{code}: {msg}")
            case wire.Cancelled(c=c):
                self._turns.pop(c, None)

    async def _end(self, c: str) -> None:
        self._turns.pop(c, None)
        if self.audio_context_available(c):
            await self.append_to_audio_context(c, TTSStoppedFrame(context_id=c))
            await self.remove_audio_context(c)

    def _audio_frame(self, c: str, pcm: bytes) -> TTSAudioRawFrame:
        return TTSAudioRawFrame(audio=pcm, sample_rate=self._rate, num_channels=1, context_id=c)

    def _silence(self) -> bytes:
        return bytes(2 * (self._rate * SILENCE_MS // 1000))

    # ---- what we say

    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Sends the text; its audio comes by the receive task."""
        try:
            turn = await self._turn(context_id)
            for start in range(0, len(text), PIECE_CHARS):
                piece = wire.Text(c=context_id, n=turn.num_pieces, s=text[start : start + PIECE_CHARS])
                turn.num_pieces += 1
                await turn.socket.send(wire.pack(piece))
            await self.start_tts_usage_metrics(text)
            yield None
        except (OSError, ConnectionClosed) as error:
            self._turns.pop(context_id, None)
            yield ErrorFrame(error=f"the connection to {self._url} was lost: {error}", exception=error)
            yield TTSStoppedFrame(context_id=context_id)

    async def _turn(self, context_id: str) -> _Turn:
        """The context, opened if it is new or its socket is gone. Raises ConnectionError."""
        turn = self._turns.get(context_id)
        if turn is None or turn.socket.state is not State.OPEN:
            await self._reopen(context_id)
            assert self._websocket is not None, "just opened"
            turn = self._turns[context_id] = _Turn(self._websocket)
            await turn.socket.send(wire.pack(self._open_message(context_id)))
        return turn

    async def _reopen(self, context_id: str) -> None:
        """A socket to speak on. The receive task, if it lives, may be at it too; either will do."""
        for c in [c for c, turn in self._turns.items() if turn.socket.state is not State.OPEN and c != context_id]:
            await self._end(c)  # its audio can't come any more
        await self._connect_websocket()
        if self._websocket is None:
            raise ConnectionError("it can't be had again")
        if self._receive_task is None or self._receive_task.done():
            self._receive_task = self.create_task(self._receive_task_handler(self._report_error))

    def _open_message(self, context_id: str) -> wire.Open:
        settings = self._settings
        return wire.Open(
            c=context_id,
            voice=assert_given(settings.voice),
            lang=assert_given(settings.language),
            instruct=assert_given(settings.instruct),
            seed=assert_given(settings.seed),
            fmt=wire.Format(enc="s16le", rate=self._rate),
        )

    async def flush_audio(self, context_id: str | None = None) -> None:
        """The turn's text is complete."""
        c = context_id or self.get_active_audio_context_id() or ""
        if (turn := self._turns.get(c)) is not None:
            await turn.socket.send(wire.pack(wire.End(c=c)))

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        turn = self._turns.pop(context_id, None)
        await self.stop_all_metrics()
        if turn is not None:
            await turn.socket.send(wire.pack(wire.Cancel(c=context_id)))
        await super().on_audio_context_interrupted(context_id)

    async def _update_settings(self, delta: RillTTSSettings) -> dict[str, Any]:
        """A context's settings are fixed for its life: the rest of a turn goes to a new one."""
        changed: dict[str, Any] = await super()._update_settings(delta)
        if changed and self._turn_context_id is not None:
            frames = await self._aggregated_frame_sequencer.finalize(self._turn_context_id)
            await self._push_sequencer_frames(frames, self._turn_context_id)
            await self.flush_audio(self._turn_context_id)
            self._turn_context_id = None
            self._turn_context_id = self.create_context_id()
        return changed
