"""The messages of rill.v1 and their bytes: the table of PROTOCOL.md, as types.

A message is one msgpack map with string keys; `t` names its type. What comes from a client is unpacked under strict
limits (`unpack`), then checked field by field (`parse`). What the server sends is packed by `pack`; the client library
reads it with `read`. Nothing here does I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Final, TypeVar

import msgpack  # type: ignore[import-untyped]

from gateway.errors import Close, Refusal, Violation

_T = TypeVar("_T")

SUBPROTOCOL: Final = "rill.v1"
PATH: Final = "/v1/speech"
MESSAGE_BYTES: Final = 64 * 1024  # both directions
MAP_ENTRIES: Final = 32
ARRAY_ITEMS: Final = 32
NESTING: Final = 4
CONTAINERS: Final = 64  # maps and arrays in one message, so that a bag of empty maps stays cheap
CONTEXT_ID_BYTES: Final = 64
NAME_BYTES: Final = 256
INSTRUCT_BYTES: Final = 2048
SEED_LIMIT: Final = 2**63
WINDOW_MS: Final = (200, 30_000)
CREDIT_MS_LIMIT: Final = 2**40

ENCODINGS: Final = ("s16le", "f32le", "mulaw", "alaw")
RATES: Final = (8000, 16000, 22050, 24000, 44100, 48000)


# ---- client -> server ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a context's audio is written: sample encoding and rate in Hz."""

    enc: str = "s16le"
    rate: int = 24000


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """The talker's sampling, where the client names it; None keeps the checkpoint's value."""

    mode: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    t: ClassVar[str] = "open"
    c: str
    voice: str | None = None
    fmt: Format | None = None
    lang: str | None = None
    instruct: str | None = None
    seed: int | None = None
    speed: float | None = None
    sampling: SamplingFields | None = None
    window_ms: int | None = None
    pace: str | None = None
    aggregation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    t: ClassVar[str] = "text"
    c: str
    n: int
    s: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    t: ClassVar[str] = "flush"
    c: str
    f: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    t: ClassVar[str] = "end"
    c: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    t: ClassVar[str] = "cancel"
    c: str
    played_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    t: ClassVar[str] = "credit"
    c: str
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Voices:
    t: ClassVar[str] = "voices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    t: ClassVar[str] = "ping"
    x: str | int | float | bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VoicePut:
    """One part of a recording; the first one says whose voice it is and what is spoken."""

    t: ClassVar[str] = "voice_put"
    v: str
    n: int
    d: bytes
    last: bool = False
    name: str | None = None
    transcript: str | None = None
    lang: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceDrop:
    t: ClassVar[str] = "voice_drop"
    voice: str


ClientMessage = Open | Text | Flush | End | Cancel | Credit | Voices | Ping | VoicePut | VoiceDrop


# ---- server -> client ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    contexts: int
    text_bytes: int
    message_bytes: int
    idle_ms: int
    window_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """A voice that can be asked for: `ms` is the length of its recording, where known."""

    id: str
    name: str
    lang: str | None = None
    ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    t: ClassVar[str] = "ready"
    session: str
    proto: str
    limits: Limits
    rates: tuple[int, ...]
    encs: tuple[str, ...]
    voices: tuple[Voice, ...]
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    t: ClassVar[str] = "opened"
    c: str
    rate: int
    enc: str
    seed: int
    voice: str
    queued_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """`d` holds whole samples; `q` counts messages, `pos` the samples before this one."""

    t: ClassVar[str] = "audio"
    c: str
    q: int
    pos: int
    d: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    t: ClassVar[str] = "flushed"
    c: str
    f: int
    pos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    t: ClassVar[str] = "taken"
    c: str
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    t: ClassVar[str] = "done"
    c: str
    samples: int
    ms: float
    stats: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """`text_upto`: characters of the context's text whose clauses were sent (or, with `played_ms`, played) whole."""

    t: ClassVar[str] = "cancelled"
    c: str
    samples: int
    ms: float
    text_upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Terminal for the context when it has `c`, for the upload or the drop when it has `v`, which names the upload or
    the voice; else of the connection, which lives."""

    t: ClassVar[str] = "error"
    c: str | None = None
    v: str | None = None
    code: str
    msg: str
    retry: bool
    after_ms: int | None = None
    samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceKept:
    """An upload has become a voice: `voice` is the id to open contexts with, `ms` the length of its recording."""

    t: ClassVar[str] = "voice"
    v: str
    voice: str
    name: str
    ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceList:
    """`v`: the voice whose drop this answers."""

    t: ClassVar[str] = "voices"
    v: str | None = None
    list: tuple[Voice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoAway:
    t: ClassVar[str] = "goaway"
    deadline_ms: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    t: ClassVar[str] = "pong"
    x: str | int | float | bytes | None = None


ServerMessage = (
    Ready | Opened | Audio | Flushed | Taken | Done | Cancelled | Error | VoiceKept | VoiceList | GoAway | Pong
)
TERMINAL: Final = (Done, Cancelled, Error)
_SERVER: Final[dict[str, type[ServerMessage]]] = {
    kind.t: kind
    for kind in (Ready, Opened, Audio, Flushed, Taken, Done, Cancelled, Error, VoiceKept, VoiceList, GoAway, Pong)
}


# ---- bytes ---------------------------------------------------------------------------------------------------------


def pack(message: ClientMessage | ServerMessage) -> bytes:
    """One message as msgpack; fields that are None are left out."""
    packed: bytes = msgpack.packb({"t": message.t, **_table(message)})
    return packed


def _table(value: Any) -> dict[str, Any]:
    return {name: _plain(item) for name in _names(value.__class__) if (item := getattr(value, name)) is not None}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _plain(item: Any) -> Any:
    if isinstance(item, str | bytes | int | float):  # nearly all
        return item
    if is_dataclass(item):
        return _table(item)
    if isinstance(item, tuple):
        return [_plain(one) for one in item]
    return item


class _Containers:
    """Counts maps and arrays while one message is unpacked, and refuses what a message may not hold."""

    def __init__(self) -> None:
        self.count = 0

    def take_map(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        self._count()
        table = dict(pairs)
        if len(table) != len(pairs):
            raise Violation("duplicate key")
        if not all(isinstance(key, str) for key in table):
            raise Violation("a key is not a string")
        return table

    def take_list(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def _count(self) -> None:
        self.count += 1
        if self.count > CONTAINERS:
            raise Violation(f"more than {CONTAINERS} maps and arrays")


def _refuse_ext(code: int, data: bytes) -> Any:
    raise Violation(f"ext type {code}")


def unpack(data: bytes) -> dict[str, Any]:
    """One client message as a map.

    Raises Violation, with the close code it asks for, if the bytes are too many, aren't one msgpack map, nest or hold
    more than the limits at the top of this file, repeat a key, or hold ext types, NaN or infinities, or bad UTF-8.
    """
    if len(data) > MESSAGE_BYTES:
        raise Violation(f"{len(data)} bytes, at most {MESSAGE_BYTES}", Close.TOO_LARGE)
    containers = _Containers()
    try:
        message = msgpack.unpackb(
            data,
            object_pairs_hook=containers.take_map,
            list_hook=containers.take_list,
            ext_hook=_refuse_ext,
            max_map_len=MAP_ENTRIES,
            max_array_len=ARRAY_ITEMS,
            max_str_len=MESSAGE_BYTES,
            max_bin_len=MESSAGE_BYTES,
            max_ext_len=MESSAGE_BYTES,
        )
    except UnicodeDecodeError as error:
        raise Violation("a string is not UTF-8", Close.BAD_UTF8) from error
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise Violation("not one msgpack map within the limits") from error
    if not isinstance(message, dict):
        raise Violation("not a map")
    _check_values(message, NESTING)
    return message


def _check_values(value: Any, nesting: int) -> None:
    if isinstance(value, dict | list):
        if nesting == 0:
            raise Violation(f"nested deeper than {NESTING}")
        for item in value.values() if isinstance(value, dict) else value:
            _check_values(item, nesting - 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Violation("a number is not finite")
    elif isinstance(value, msgpack.Timestamp):
        raise Violation("ext type -1")


def read(data: bytes) -> ServerMessage | None:
    """A server's message, for clients; None for a type this version doesn't know. Unknown keys are ignored."""
    table: dict[str, Any] = msgpack.unpackb(data)
    kind = _SERVER.get(table.get("t", ""))
    if kind is None:
        return None
    known = {field.name for field in fields(kind)}
    values = {key: value for key, value in table.items() if key in known}
    if kind is Ready:
        values["limits"] = _pick(Limits, values["limits"])
    if kind in (Ready, VoiceList):
        name = "voices" if kind is Ready else "list"
        values[name] = tuple(_pick(Voice, voice) for voice in values[name])
    return kind(**values)


def _pick(kind: type[_T], table: Mapping[str, Any]) -> _T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in table.items() if key in known})


# ---- fields --------------------------------------------------------------------------------------------------------


class Fields:
    """Reads one map's fields with their types and bounds; what is wrong is named in a `bad_message` refusal."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table

    def raw(self, name: str) -> Any:
        return self._table.get(name)

    def string(self, name: str, limit: int, *, least: int = 0) -> str:
        value = self._table.get(name)
        if not isinstance(value, str):
            raise Refusal("bad_message", f"{name} must be a string")
        if not least <= len(value.encode()) <= limit:
            raise Refusal("bad_message", f"{name} must have {least} to {limit} bytes")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._table.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise Refusal("bad_message", f"{name} must be a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        value = self._table.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise Refusal("bad_message", f"{name} must be a number from {low:g} to {high:g}")
        return value

    def bytes(self, name: str) -> bytes:
        value = self._table.get(name)
        if not isinstance(value, bytes):
            raise Refusal("bad_message", f"{name} must be bytes")
        return value

    def truth(self, name: str) -> bool:
        """False if it is left out."""
        value = self._table.get(name, False)
        if not isinstance(value, bool):
            raise Refusal("bad_message", f"{name} must be true or false")
        return value

    def optional_string(self, name: str, limit: int) -> str | None:
        return None if self._table.get(name) is None else self.string(name, limit)

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self._table.get(name) is None else self.integer(name, low, high)

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        return None if self._table.get(name) is None else self.number(name, low, high)

    def table(self, name: str) -> Fields | None:
        value = self._table.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise Refusal("bad_message", f"{name} must be a map")
        return Fields(value)


def context_id(table: Mapping[str, Any]) -> str | None:
    """The message's `c` if it is a legal id, else None."""
    value = table.get("c")
    return value if isinstance(value, str) and 1 <= len(value.encode()) <= CONTEXT_ID_BYTES else None


def upload_id(table: Mapping[str, Any]) -> str | None:
    """What an `error` about a `voice_put` or a `voice_drop` calls it: the upload's id, or the voice's."""
    value = table.get({"voice_put": "v", "voice_drop": "voice"}.get(str(table.get("t")), ""))
    return value if isinstance(value, str) and 1 <= len(value.encode()) <= NAME_BYTES else None


def parse(table: Mapping[str, Any]) -> ClientMessage:
    """The client message in an unpacked map. Raises Refusal: `bad_message` or `unsupported`, naming the field."""
    kind = table.get("t")
    if not isinstance(kind, str) or kind not in _PARSERS:
        raise Refusal("bad_message", "t is not a message type of rill.v1")
    return _PARSERS[kind](Fields(table))


def _c(read: Fields) -> str:
    return read.string("c", CONTEXT_ID_BYTES, least=1)


def _open(read: Fields) -> Open:
    return Open(
        c=_c(read),
        voice=read.optional_string("voice", NAME_BYTES),
        fmt=_format(read.table("fmt")),
        lang=read.optional_string("lang", NAME_BYTES),
        instruct=read.optional_string("instruct", INSTRUCT_BYTES),
        seed=read.optional_integer("seed", 0, SEED_LIMIT - 1),
        speed=read.optional_number("speed", 0.1, 10),
        sampling=_sampling(read.table("sampling")),
        window_ms=read.optional_integer("window_ms", *WINDOW_MS),
        pace=_one_of(read.optional_string("pace", NAME_BYTES), "pace", ("none", "listen")),
        aggregation=_one_of(read.optional_string("aggregation", NAME_BYTES), "aggregation", ("clause", "word")),
    )


def _format(read: Fields | None) -> Format | None:
    if read is None:
        return None
    enc = _one_of(read.optional_string("enc", NAME_BYTES), "fmt.enc", ENCODINGS) or "s16le"
    rate = read.optional_integer("rate", 0, 2**31) or 24000
    if rate not in RATES:
        raise Refusal("unsupported", f"fmt.rate must be one of {', '.join(map(str, RATES))}")
    return Format(enc=enc, rate=rate)


def _one_of(value: str | None, name: str, allowed: tuple[str, ...]) -> str | None:
    if value is not None and value not in allowed:
        raise Refusal("unsupported", f"{name} must be one of {', '.join(allowed)}")
    return value


def _sampling(read: Fields | None) -> SamplingFields | None:
    if read is None:
        return None
    return SamplingFields(
        mode=_one_of(read.optional_string("mode", NAME_BYTES), "sampling.mode", ("ras", "standard")),
        temperature=read.optional_number("temperature", 0.0, 5.0),
        top_p=read.optional_number("top_p", 0.0, 1.0),
        top_k=read.optional_integer("top_k", 0, 10_000),
        repetition_penalty=read.optional_number("repetition_penalty", 0.1, 10.0),
    )


def _text(read: Fields) -> Text:
    return Text(c=_c(read), n=read.integer("n", 0, 2**53), s=read.string("s", MESSAGE_BYTES))


def _flush(read: Fields) -> Flush:
    return Flush(c=_c(read), f=read.integer("f", 0, 2**53))


def _cancel(read: Fields) -> Cancel:
    return Cancel(c=_c(read), played_ms=read.optional_number("played_ms", 0, CREDIT_MS_LIMIT))


def _ping(read: Fields) -> Ping:
    value = read.raw("x")
    if not isinstance(value, str | bytes | int | float | None) or (
        isinstance(value, str | bytes) and len(value) > NAME_BYTES
    ):
        raise Refusal("bad_message", f"x must be a number, or at most {NAME_BYTES} characters or bytes")
    return Ping(x=value)


def _voice_put(read: Fields) -> VoicePut:
    n = read.integer("n", 0, 2**53)
    return VoicePut(
        v=read.string("v", CONTEXT_ID_BYTES, least=1),
        n=n,
        d=read.bytes("d"),
        last=read.truth("last"),
        name=read.string("name", MESSAGE_BYTES) if n == 0 else None,
        transcript=read.string("transcript", MESSAGE_BYTES) if n == 0 else None,
        lang=read.optional_string("lang", NAME_BYTES) if n == 0 else None,
    )


_PARSERS: Final[dict[str, Callable[[Fields], ClientMessage]]] = {
    "open": _open,
    "text": _text,
    "flush": _flush,
    "end": lambda read: End(c=_c(read)),
    "cancel": _cancel,
    "credit": lambda read: Credit(c=_c(read), ms=read.number("ms", 0, CREDIT_MS_LIMIT)),
    "voices": lambda read: Voices(),
    "ping": _ping,
    "voice_put": _voice_put,
    "voice_drop": lambda read: VoiceDrop(voice=read.string("voice", NAME_BYTES, least=1)),
}
