"""Voices of callers' own: recordings on their way in, and who may see, use and drop what became of them. No I/O.

A recording comes in parts of one upload, numbered from 0, and goes to the engine as a whole. An upload ends once, with
`voice` or with an `error` that carries its `v`; parts that still come for it are met with silence. A registered voice
is seen and used by the keys that registered it and by no other: a voice is somebody's.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from engine import messages as engine
from gateway import wire
from gateway.context import Lease
from gateway.errors import FINAL_CODES, RETRY_CODES, EngineUnavailable, Refusal

RECORDING_BYTES: Final = 10 << 20
ROOM_BYTES: Final = 64 << 20  # of recordings that wait, over all connections of this process
UPLOADS: Final = 2  # of one connection at once
DROPS: Final = 16  # likewise
REMEMBERED: Final = 64  # uploads that have ended, so that what still comes of them is met with silence
VOICE_NAME_BYTES: Final = 64
TRANSCRIPT_BYTES: Final = 4_096
BUSY_AFTER_MS: Final = 2_000
RESTART_AFTER_MS: Final = 1_000

_LANGUAGE_TAG: Final = re.compile(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8}){0,3}")


class Port(Protocol):
    """What voices need of the engine link; see protocol.EnginePort."""

    @property
    def ready(self) -> engine.Ready | None: ...

    @property
    def room(self) -> Room: ...

    def lease(self, deliver: Callable[[engine.ToGateway], None]) -> Lease: ...

    def post(self, message: engine.ToEngine) -> None: ...

    def release(self, lease: Lease) -> None: ...


class Room:
    """The memory for recordings that all connections share."""

    def __init__(self, limit: int = ROOM_BYTES) -> None:
        self._limit = limit
        self.used = 0

    def take(self, num_bytes: int) -> None:
        """Raises Refusal."""
        if self.used + num_bytes > self._limit:
            raise Refusal("overloaded", "too many recordings are on their way; try again", after_ms=BUSY_AFTER_MS)
        self.used += num_bytes

    def give(self, num_bytes: int) -> None:
        self.used -= num_bytes
        assert self.used >= 0, "more given back than taken"


@dataclass(slots=True)
class _Upload:
    """One recording: first its parts, then, with a lease, its way through the engine."""

    first: wire.VoicePut
    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    lease: Lease | None = None


def visible(ready: engine.Ready | None, owner: str) -> tuple[wire.Voice, ...]:
    """The voices that this owner may use, under the names that it gave."""
    listed = ready.voices if ready is not None else []
    return tuple(
        wire.Voice(id=one.id, name=one.owners.get(owner, one.name), lang=one.lang, ms=one.ms)
        for one in listed
        if not one.owners or owner in one.owners
    )


class Uploads:
    """One connection's. `owner` is the key's name, empty where no keys are asked for.

    say    takes an answer      fail   takes a refusal and the `v` that its error carries      wake   something was said
    take_one   one recording more of the quota; raises Refusal
    """

    def __init__(
        self,
        port: Port,
        *,
        owner: str,
        is_allowed: bool,
        take_one: Callable[[], None],
        say: Callable[[wire.ServerMessage], None],
        fail: Callable[[Refusal, str], None],
        wake: Callable[[], None],
    ) -> None:
        self._port = port
        self._owner, self._is_allowed, self._take_one = owner, is_allowed, take_one
        self._say, self._fail, self._wake = say, fail, wake
        self._uploads: dict[str, _Upload] = {}
        self._drops: dict[Lease, str] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Uploads and drops that are not answered yet."""
        return len(self._uploads) + len(self._drops)

    def put(self, part: wire.VoicePut) -> None:
        """Raises Refusal, which ends the upload."""
        try:
            self._put(part)
        except Refusal:
            self._end(part.v)
            raise

    def _put(self, part: wire.VoicePut) -> None:
        self._check_allowed()
        if part.n == 0 and part.v not in self._uploads:
            self._begin(part)
        upload = self._uploads.get(part.v)
        if upload is None:
            if part.v in self._ended:
                return
            raise Refusal("bad_sequence", f"voice part {part.n} of an upload that has not begun")
        if upload.lease is not None or part.n != len(upload.parts):
            due = "none" if upload.lease is not None else str(len(upload.parts))
            raise Refusal("bad_sequence", f"voice part {part.n}, expected {due}")
        self._append(upload, part.d)
        if part.last:
            self._hand_over(upload)

    def _begin(self, part: wire.VoicePut) -> None:
        check_words(part.name or "", part.transcript or "", part.lang or "")
        if len(self._uploads) >= UPLOADS:
            raise Refusal("overloaded", f"at most {UPLOADS} recordings at once", after_ms=BUSY_AFTER_MS)
        self._take_one()
        self._uploads[part.v] = _Upload(part)
        self._ended.pop(part.v, None)

    def _append(self, upload: _Upload, data: bytes) -> None:
        if upload.num_bytes + len(data) > RECORDING_BYTES:
            raise Refusal("bad_voice", f"the recording has over {RECORDING_BYTES} bytes, the most accepted")
        self._port.room.take(len(data))
        upload.parts.append(data)
        upload.num_bytes += len(data)

    def _hand_over(self, upload: _Upload) -> None:
        if not upload.num_bytes:
            raise Refusal("bad_voice", "the recording is empty: 0 bytes")
        first = upload.first
        lease = upload.lease = self._leased(lambda event: self._take(first.v, lease, event))
        self._port.post(
            engine.VoicePut(
                context=lease.context,
                epoch=lease.epoch,
                owner=self._owner,
                name=first.name or "",
                transcript=first.transcript or "",
                lang=first.lang or "",
                audio=b"".join(upload.parts),
            )
        )

    def drop(self, message: wire.VoiceDrop) -> None:
        """Answered with the list of voices. Raises Refusal."""
        self._check_allowed()
        if len(self._drops) >= DROPS:
            raise Refusal("overloaded", f"at most {DROPS} drops at once", after_ms=BUSY_AFTER_MS)
        lease = self._leased(lambda event: self._take_drop(lease, event))
        self._drops[lease] = message.voice
        self._port.post(
            engine.VoiceDrop(context=lease.context, epoch=lease.epoch, owner=self._owner, voice=message.voice)
        )

    def end_all(self, refusal: Refusal) -> None:
        """Every upload and drop that is not answered yet ends with this error."""
        for v in [*self._uploads, *self._drops.values()]:
            self._fail(refusal, v)
        self.close()

    def close(self) -> None:
        """The socket is gone. What the engine has already may still become a voice. Idempotent."""
        for v in list(self._uploads):
            self._end(v)
        for lease in self._drops:
            self._port.release(lease)
        self._drops.clear()

    def _check_allowed(self) -> None:
        if not self._is_allowed:
            raise Refusal("unsupported", "this key may not register voices")

    def _leased(self, deliver: Callable[[engine.ToGateway], None]) -> Lease:
        try:
            return self._port.lease(deliver)
        except EngineUnavailable as error:
            text = "the engine is starting; try again"
            raise Refusal("engine_restart", text, after_ms=RESTART_AFTER_MS) from error

    def _take(self, v: str, lease: Lease, event: engine.ToGateway) -> None:
        """The engine's answer to an upload."""
        upload = self._uploads.get(v)
        if upload is None or upload.lease != lease:
            return
        self._end(v)
        if isinstance(event, engine.VoiceKept):
            voice = event.voice
            name = voice.owners.get(self._owner, voice.name)
            self._say(wire.VoiceKept(v=v, voice=voice.id, name=name, ms=voice.ms))
        elif isinstance(event, engine.Failed):
            self._fail(_refusal_of(event), v)
        self._wake()

    def _take_drop(self, lease: Lease, event: engine.ToGateway) -> None:
        voice = self._drops.pop(lease)
        self._port.release(lease)
        if isinstance(event, engine.Failed):
            self._fail(_refusal_of(event), voice)
        else:
            self._say(wire.VoiceList(v=voice, list=visible(self._port.ready, self._owner)))
        self._wake()

    def _end(self, v: str) -> None:
        upload = self._uploads.pop(v, None)
        if upload is not None:
            self._port.room.give(upload.num_bytes)
            if upload.lease is not None:
                self._port.release(upload.lease)
        self._ended[v] = None
        self._ended.move_to_end(v)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


def check_words(name: str, transcript: str, lang: str) -> None:
    """Raises Refusal: `bad_voice`, with the value and the limit."""
    if not name.strip() or not name.isprintable() or len(name.encode()) > VOICE_NAME_BYTES:
        raise Refusal("bad_voice", f"the name has {len(name.encode())} bytes; 1 to {VOICE_NAME_BYTES} printable ones")
    if not transcript.strip():
        raise Refusal("bad_voice", "the transcript is empty; it must hold the words of the recording")
    if len(transcript.encode()) > TRANSCRIPT_BYTES:
        size = len(transcript.encode())
        raise Refusal("bad_voice", f"the transcript has {size} bytes; at most {TRANSCRIPT_BYTES} are accepted")
    if lang and not _LANGUAGE_TAG.fullmatch(lang):
        raise Refusal("bad_voice", "lang is not a language tag such as en or pt-BR")


def _refusal_of(failed: engine.Failed) -> Refusal:
    code = failed.code if failed.code in FINAL_CODES | RETRY_CODES else "internal"
    text = failed.message or "the engine was lost; try again"
    return Refusal(code, text, after_ms=failed.after_ms)
