"""What passes through the engine's door. Standard library only, so that the gateway may import it.

One pipe message is a msgpack list of the maps that `pack` makes; all that one engine step has to say travels in
one such list. Every message of a context carries its epoch, so that a late one can never reach a new owner.
A Cancel overtakes all that waits for its context; everything else keeps its order.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

SAMPLE_RATE_HZ = 24_000


class BadPipeMessage(ValueError):
    """The other side of the pipe sent something that is no message of this table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """What a caller chose of the sampler's settings; None leaves the profile's value."""

    mode: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceInfo:
    """A voice that the engine can speak with. ms is the length of its prompt.

    owners: who registered it, with the name that each gave; none of them: it is everyone's.
    """

    id: str
    name: str
    lang: str
    ms: int
    owners: dict[str, str] = field(default_factory=dict)


# Gateway -> engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A context begins; its settings hold for its life. An empty voice means the profile's default."""

    context: int
    epoch: int
    voice: str
    seed: int
    sampling: SamplingChoice | None = None
    instruct: str | None = None
    lang: str | None = None
    streaming: bool = True
    allow_controls: bool = False
    by_words: bool = False  # clauses come, and are spoken, bit by bit


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """Text of one clause, verbatim; index counts from 0 without a gap. By words, one clause has several of these."""

    context: int
    epoch: int
    index: int
    text: str
    is_last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No more clauses: the context ends with Done when all are spoken."""

    context: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End the context now. Unknown or finished contexts are answered with Cancelled too; it may be sent twice."""

    context: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Audio may be produced up to this position, in samples at 24 kHz from the context's start. Never shrinks."""

    context: int
    epoch: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VoicePut:
    """Make a voice of a recording, for this owner. Answered with VoiceKept or Failed; context is the upload's name."""

    context: int
    epoch: int
    owner: str
    name: str
    transcript: str
    lang: str
    audio: bytes  # the file


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceDrop:
    """This owner gives up a voice that it registered. Answered with VoiceDropped or Failed."""

    context: int
    epoch: int
    owner: str
    voice: str


# Engine -> gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """First message on a new link, once the engine is warm; and again whenever the voices have changed."""

    model: str
    voices: list[VoiceInfo]
    sample_rate: int
    lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The context holds a lane. One that must wait for it is told so by the silence, or by Failed."""

    context: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClauseTaken:
    """The clause's text has gone to the model."""

    context: int
    epoch: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """The next samples of the context: float32, little endian, 24 kHz, not clipped."""

    context: int
    epoch: int
    pcm: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClauseDone:
    """All audio of the clause has been sent. samples counts from the context's start."""

    context: int
    epoch: int
    index: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Terminal: all is spoken and everything of the context is freed."""

    context: int
    epoch: int
    samples: int
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """Terminal: everything of the context is freed."""

    context: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Terminal: the context ended in an error. code is one of protocol.md's; message holds no user text."""

    context: int
    epoch: int
    code: str
    message: str
    retry: bool
    after_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceKept:
    """Terminal: the voice can be spoken with; a Ready that lists it came before."""

    context: int
    epoch: int
    voice: VoiceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceDropped:
    """Terminal: the owner has the voice no more. Open contexts go on with it."""

    context: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """How full the engine is. Sent at a fixed pace and after each context's end. A page is 32 rows or 50 frames."""

    lanes_used: int
    lanes: int
    talker_pages: int
    flow_pages: int
    hift_states: int = 0
    contexts: int = 0
    waiting: int = 0
    voice_pages: int = 0
    steps: int = 0
    step_ms: float = 0.0
    talker_s: float = 0.0  # the device's time in all since the start, by stage, as its launches were measured
    flow_s: float = 0.0
    hift_s: float = 0.0
    host_s: float = 0.0  # the device thread's own time, in which it neither slept nor waited for the device
    cache_bytes: int = 0  # of the pages in use, the voices' too
    places: int = 0  # lanes that are given out: no more than can be played, by what launches cost
    queue_ms: float = 0.0  # from a context's Open to its lane, lately


ToEngine = Open | Clause | End | Cancel | Credit | VoicePut | VoiceDrop
ToGateway = (
    Ready | Opened | ClauseTaken | Audio | ClauseDone | Done | Cancelled | Failed | VoiceKept | VoiceDropped | Gauges
)
Message = ToEngine | ToGateway
Terminal = Done | Cancelled | Failed

TABLE: Mapping[str, type[Message]] = {
    "open": Open,
    "clause": Clause,
    "end": End,
    "cancel": Cancel,
    "credit": Credit,
    "voice_put": VoicePut,
    "voice_drop": VoiceDrop,
    "ready": Ready,
    "opened": Opened,
    "taken": ClauseTaken,
    "audio": Audio,
    "clause_done": ClauseDone,
    "done": Done,
    "cancelled": Cancelled,
    "failed": Failed,
    "voice_kept": VoiceKept,
    "voice_dropped": VoiceDropped,
    "gauges": Gauges,
}
_TAG: Mapping[type[Message], str] = {kind: tag for tag, kind in TABLE.items()}


def pack(message: Message) -> dict[str, Any]:
    """The map that msgpack writes: the fields by name, and the type's tag under "t"."""
    return {"t": _TAG[type(message)], **_plain_fields(message)}


def unpack(table: object) -> Message:
    """The message that a map stands for. Unknown keys are ignored.

    Raises BadPipeMessage for an unknown type, a missing field or a field of the wrong type.
    """
    if not isinstance(table, dict):
        raise BadPipeMessage(f"a message is a map, this is {type(table).__name__}")
    tag = table.get("t")
    kind = TABLE.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise BadPipeMessage(f"unknown message type {tag!r:.40}")
    message: Message = _read_fields(kind, table)
    return message


def _plain_fields(value: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _plain_fields(value) if is_dataclass(value) else value


def _read_fields(kind: Any, table: Mapping[Any, Any]) -> Any:
    values = {name: read(table[name]) for name, read in _Readers.of(kind).items() if name in table}
    try:
        return kind(**values)
    except TypeError as error:  # a required field is missing: the dataclass names it
        raise BadPipeMessage(f"{kind.__name__}: {error}") from error


class _Readers:
    """For each message type, the function that checks and reads each of its fields; made once per type."""

    _made: ClassVar[dict[Any, dict[str, Callable[[Any], Any]]]] = {}

    @classmethod
    def of(cls, kind: Any) -> dict[str, Callable[[Any], Any]]:
        if kind not in cls._made:
            hints = get_type_hints(kind)
            cls._made[kind] = {f.name: _reader(f"{kind.__name__}.{f.name}", hints[f.name]) for f in fields(kind)}
        return cls._made[kind]


def _reader(name: str, hint: Any) -> Callable[[Any], Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = _reader(name, next(arg for arg in get_args(hint) if arg is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is list:
        item = _reader(f"{name}[]", get_args(hint)[0])
        return lambda value: [item(one) for one in _checked(name, list, value)]
    if origin is dict:
        number = _reader(f"{name}{{}}", get_args(hint)[1])
        return lambda value: {_checked(name, str, k): number(v) for k, v in _checked(name, dict, value).items()}
    if is_dataclass(hint):
        return lambda value: _read_fields(hint, _checked(name, dict, value))
    return lambda value: _checked(name, hint, value)


def _checked(name: str, kind: type, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # exact, so that a bool is no int
        raise BadPipeMessage(f"{name} is {kind.__name__}, this is {type(value).__name__}")
    return value
