"""`/tts/websocket`: the same sessions for clients that speak JSON with base64 audio, as a voice agent's frameworks do.

The messages have the shape of a hosted service's public documentation, so that its clients need another address and
nothing else; integrations/README.md lists what they can't have here. One connection carries many contexts. A context
begins with the first message that names it and ends with `done` or `error`, once; nothing of it follows. An id that was
cancelled stays dead, so that text which was already on its way opens nothing.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

from websockets.datastructures import Headers

from engine.messages import SAMPLE_RATE_HZ
from gateway import wire
from gateway.context import Context
from gateway.encodings import Encoder
from gateway.errors import Close, Refusal, Violation
from gateway.protocol import SpeechProtocol

PATH: Final = "/tts/websocket"
SILENCE_MS: Final = 100  # for a text with nothing to say: the clients take an answer without audio for a fault
CANCELLED: Final = 1024  # ids remembered
ENCODINGS: Final = {"pcm_s16le": "s16le", "pcm_f32le": "f32le", "pcm_mulaw": "mulaw", "pcm_alaw": "alaw"}
_PARTIAL: Final = 206  # the status of all that is well
_STATUS: Final = {
    "unknown_voice": 404,
    "context_limit": 429,
    "quota": 429,
    "overloaded": 503,
    "queue_timeout": 503,
    "engine_restart": 503,
    "draining": 503,
    "idle": 408,
    "slow_client": 408,
    "engine_error": 500,
    "internal": 500,
}
_FOREIGN_VOICE: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # none of ours is named so


def with_key(headers: Headers, query: str) -> Headers:
    """The key, which these clients send as X-API-Key or in the query, where ours is looked for."""
    keys = headers.get_all("X-API-Key") or parse_qs(query).get("api_key", [])
    if len(keys) != 1 or "Authorization" in headers:
        return headers
    known = headers.copy()
    known["Authorization"] = f"Bearer {keys[0]}"
    return known


@dataclass(slots=True)
class _Spoken:
    """What one context has been asked so far."""

    enc: str
    rate: int
    num_pieces: int = 0
    num_flushes: int = 0
    num_asked: int = 0
    asked: dict[int, int] = field(default_factory=dict)  # flushes that the client waits for, and what it counts them
    has_words: bool = False
    last_at: float = 0.0  # of its last audio


class JsonProtocol(SpeechProtocol):
    """One client's side. What is said to it is text; what has no counterpart in its messages is not said."""

    def __init__(self, **settings: Any) -> None:
        self._spoken: dict[str, _Spoken] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        super().__init__(**settings)

    # ---- from the client

    def receive(self, data: bytes | str) -> None:
        self.received_at = self._clock()
        request = read(data)
        c = wire.context_id({"c": request.get("context_id")}) or uuid.uuid4().hex
        try:
            if request.get("context_id") not in (None, c):
                raise Refusal("bad_message", f"context_id must be a string of 1 to {wire.CONTEXT_ID_BYTES} bytes")
            for message in self._messages(c, wire.Fields(request)):
                self._take(message)
        except Refusal as refusal:
            self._refuse(refusal, kind="text" if c in self._contexts else "open", c=c)

    def _messages(self, c: str, request: wire.Fields) -> Iterator[wire.ClientMessage]:
        """What the request means in rill.v1. Raises Refusal."""
        if request.truth("cancel"):
            self._bury(c)
            yield wire.Cancel(c=c)
        elif c not in self._cancelled:
            yield from self._speech(c, request)

    def _speech(self, c: str, request: wire.Fields) -> Iterator[wire.ClientMessage]:
        transcript = request.optional_string("transcript", wire.MESSAGE_BYTES) or ""
        goes_on, is_flush = request.truth("continue"), request.truth("flush")
        delay_ms = request.optional_number("max_buffer_delay_ms", 0, 5_000)
        if c not in self._contexts:
            if not transcript and not goes_on:
                self._say(wire.Done(c=c, samples=0, ms=0.0, stats={}))  # the end of what never was
                return
            opening = _opening(c, request)
            fmt = opening.fmt or wire.Format()
            self._spoken[c] = _Spoken(fmt.enc, fmt.rate)
            yield opening
        spoken = self._spoken[c]
        if transcript:
            spoken.has_words |= bool(transcript.strip())
            spoken.num_pieces += 1
            yield wire.Text(c=c, n=spoken.num_pieces - 1, s=transcript)
        if is_flush or (transcript and delay_ms == 0):
            spoken.num_flushes += 1
            if is_flush:
                spoken.num_asked += 1
                spoken.asked[spoken.num_flushes] = spoken.num_asked
            yield wire.Flush(c=c, f=spoken.num_flushes)
        if not goes_on:
            yield wire.End(c=c)

    def _bury(self, c: str) -> None:
        self._cancelled[c] = None
        self._cancelled.move_to_end(c)
        if len(self._cancelled) > CANCELLED:
            self._cancelled.popitem(last=False)

    # ---- to the client

    def next_bytes(self) -> bytes | str | None:
        while (data := super().next_bytes()) == "":
            pass
        return data

    def _written(self, context: Context, message: wire.Audio | wire.Flushed | wire.Done) -> bytes | str:
        spoken = self._spoken.get(message.c)
        written = super()._written(context, message)
        if isinstance(message, wire.Done) and not message.samples and spoken is not None and spoken.has_words:
            self._say(message)
            return self._chunk(message.c, _silence(spoken))
        return written

    def _packed(self, message: wire.ServerMessage) -> str:
        match message:
            case wire.Audio(c=c, d=d):
                return self._chunk(c, d)
            case wire.Flushed(c=c, f=f) if f in self._asked(c):
                return _json(c, "flush_done", flush_done=True, flush_id=self._asked(c).pop(f))
            case wire.Done(c=c) | wire.Cancelled(c=c):
                self._spoken.pop(c, None)
                return _json(c, "done", done=True)
            case wire.Error(c=str(c)):
                self._spoken.pop(c, None)
                status = _STATUS.get(message.code, 400)
                words = {"title": message.code.replace("_", " "), "message": message.msg, "error": message.msg}
                return _json(c, "error", status_code=status, error_code=message.code, retry=message.retry, **words)
            case _:
                return ""

    def _asked(self, c: str) -> dict[int, int]:
        return self._spoken[c].asked if c in self._spoken else {}

    def _chunk(self, c: str, data: bytes) -> str:
        now, step_ms = self._clock(), 0.0
        if (spoken := self._spoken.get(c)) is not None:
            step_ms = 1000 * (now - spoken.last_at) if spoken.last_at else 0.0
            spoken.last_at = now
        return _json(c, "chunk", data=base64.b64encode(data).decode(), step_time=round(step_ms, 1))


def read(data: bytes | str) -> dict[str, Any]:
    """One request as a map. Raises Violation for what is no JSON map within the size of a message."""
    if isinstance(data, bytes):
        raise Violation("a binary frame; messages are text", Close.TEXT_FRAME)
    if len(data.encode()) > wire.MESSAGE_BYTES:
        raise Violation(f"over {wire.MESSAGE_BYTES} bytes", Close.TOO_LARGE)
    try:
        request = json.loads(data, parse_constant=_refuse_constant)
        request = _readable(request) if "\\u" in data else request
    except (ValueError, RecursionError) as error:
        raise Violation("not JSON") from error
    if not isinstance(request, dict):
        raise Violation("not a map")
    return request


def _readable(value: Any) -> Any:
    """Escaped halves of surrogate pairs, as of an emoji that was cut in two, have no bytes: they become U+FFFD."""
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _opening(c: str, request: wire.Fields) -> wire.Open:
    """The context's settings. Raises Refusal for what can't be honoured, rather than speak otherwise than asked."""
    generation = request.table("generation_config") or wire.Fields({})
    for fields, name, neutral in (
        (request, "duration", None),
        (request, "pronunciation_dict_id", None),
        (request, "speed", "normal"),
        (generation, "speed", 1),
        (generation, "volume", 1),
        (generation, "emotion", None),
    ):
        if fields.raw(name) not in (None, neutral):
            raise Refusal("unsupported", f"{name} can't be set here; leave it out")
    return wire.Open(
        c=c, voice=_voice(request.table("voice")), fmt=_format(request.table("output_format")), lang=_language(request)
    )


def _voice(voice: wire.Fields | None) -> str | None:
    if voice is None:
        return None
    if voice.raw("mode") not in (None, "id"):
        raise Refusal("unsupported", "voice.mode must be id")
    if voice.raw("__experimental_controls"):
        raise Refusal("unsupported", "voice.__experimental_controls can't be set here; leave it out")
    name = voice.optional_string("id", wire.NAME_BYTES)
    return None if name is None or _FOREIGN_VOICE.fullmatch(name.lower()) else name


def _format(fmt: wire.Fields | None) -> wire.Format:
    if fmt is None:
        return wire.Format()
    if fmt.raw("container") not in (None, "raw"):
        raise Refusal("unsupported", "output_format.container must be raw")
    enc = fmt.optional_string("encoding", wire.NAME_BYTES) or "pcm_s16le"
    rate = fmt.optional_integer("sample_rate", 0, 2**31) or wire.Format().rate
    if enc not in ENCODINGS:
        raise Refusal("unsupported", f"output_format.encoding must be one of {', '.join(ENCODINGS)}")
    if rate not in wire.RATES:
        raise Refusal("unsupported", f"output_format.sample_rate must be one of {', '.join(map(str, wire.RATES))}")
    return wire.Format(enc=ENCODINGS[enc], rate=rate)


def _language(request: wire.Fields) -> str | None:
    return request.optional_string("language", wire.NAME_BYTES)


def _silence(spoken: _Spoken) -> bytes:
    count = spoken.rate * SILENCE_MS // 1000
    return Encoder(spoken.enc, SAMPLE_RATE_HZ).push(bytes(4 * count))


def _json(c: str, kind: str, **fields: Any) -> str:
    table: Mapping[str, Any] = {"type": kind, "done": False, "status_code": _PARTIAL, "context_id": c, **fields}
    return json.dumps(table, separators=(",", ":"))
