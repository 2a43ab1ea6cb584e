"""One TOML file per profile, read by both processes. Standard library only.

Unknown tables and keys are refused. "auto" and 0 stand for "resolve it here"; what they became is logged once,
by the process that uses it.
"""

from __future__ import annotations

import logging
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

logger = logging.getLogger(__name__)


class ConfigError(Exception):
    """The operator's file is wrong; the text names the key, its value and what is allowed."""


class _Table:
    """A TOML table whose keys are the fields of a frozen dataclass."""

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Self:
        hints = get_type_hints(cls)
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        if unknown := table.keys() - known:
            raise ConfigError(f"unknown keys {sorted(unknown)} in [{cls._title()}]; known are {sorted(known)}")
        return cls(**{key: cls._value(key, value, hints[key]) for key, value in table.items()})

    @classmethod
    def _title(cls) -> str:
        return cls.__name__.removesuffix("Config").lower()

    @classmethod
    def _value(cls, key: str, value: Any, hint: Any) -> Any:
        if hint is float and type(value) is int:
            return float(value)
        if hint == tuple[str, ...]:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"[{cls._title()}] {key} is a list of strings, not {value!r}")
            return tuple(value)
        if get_origin(hint) is dict:
            return get_args(hint)[1]._named(f"[{cls._title()}.{key}]", value)
        if type(value) is not hint:
            raise ConfigError(f"[{cls._title()}] {key} is {hint.__name__}, not {value!r}")
        return value

    @classmethod
    def _named(cls, key: str, value: Any) -> dict[str, Self]:
        """Tables of this class by name: [gateway.keys.NAME]."""
        if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
            raise ConfigError(f"{key} holds tables, one per name, not {value!r}")
        return {name: cls.from_table(item) for name, item in value.items()}


def _require(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}, allowed are {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig(_Table):
    """A [gateway.keys.NAME] table: who holds this API key, and what they may. `rill key NAME` makes one."""

    sha256: str  # of the key, in hex: the key itself is nowhere on the server
    contexts: int = 0  # at once over all connections; 0: as many as the connections hold
    sockets: int = 0  # at once; 0: no limit of its own
    text_minute: int = 0  # bytes of text a minute; 0: no limit of its own
    voices_minute: int = 30  # recordings; 0: no limit of its own
    unpaced: bool = True  # may ask for `pace: "none"`
    controls: bool = False  # may use control tokens in text
    voices: bool = True  # may register and drop voices

    def __post_init__(self) -> None:
        if len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef"):
            raise ConfigError("[gateway.keys] sha256 is 64 lower-case hex digits, as `rill key` prints them")
        for name in ("contexts", "sockets", "text_minute", "voices_minute"):
            _require(f"[gateway.keys] {name}", getattr(self, name), 0, 2**40)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(_Table):
    """The [gateway] table: where callers come in, and what each may take. Each gateway process counts for itself."""

    host: str = "127.0.0.1"
    port: int = 8020
    socket: str = "run/engine.sock"  # the engine's pipe; relative paths start at the working directory
    processes: int = 1  # gateways at one port and one engine, by SO_REUSEPORT
    contexts: int = 16  # per connection
    connections: int = 1_024
    text_bytes: int = 65_536  # per context, not yet spoken
    window_ms: int = 3_000  # audio a context may be ahead before the first credit
    idle_ms: int = 600_000  # of a connection with nothing open
    context_idle_ms: int = 60_000  # of a context that waits for its client, holding a lane
    age_ms: int = 3_600_000  # of a connection, +-10 %: then `goaway`
    goaway_ms: int = 60_000  # what is open at that age may go on for so long
    stall_ms: int = 10_000  # a socket that takes nothing for so long is aborted
    ping_ms: int = 5_000
    drain_ms: int = 5_000
    origins: tuple[str, ...] = ()  # empty: only the gateway's own
    proxies: tuple[str, ...] = ()  # addresses whose X-Forwarded-For is believed
    keys: dict[str, KeyConfig] = field(default_factory=dict)
    ticket_ms: int = 60_000
    address_sockets: int = 512  # at once, per caller's address
    address_pending: int = 256  # at once, handshakes not finished
    address_handshakes_minute: int = 3_000
    address_text_minute: int = 8_388_608  # bytes
    address_voices_minute: int = 120  # recordings
    log: str = "text"  # or "json": one object per line
    spans: bool = False  # OpenTelemetry; the exporter is set up by the usual OTEL_ variables

    def __post_init__(self) -> None:
        _require("[gateway] port", self.port, 0, 65_535)
        _require("[gateway] processes", self.processes, 1, 256)
        _require("[gateway] contexts", self.contexts, 1, 10_000)
        _require("[gateway] ticket_ms", self.ticket_ms, 1, 60_000)
        for name in ("connections", "address_sockets", "address_pending", "address_handshakes_minute", "age_ms"):
            _require(f"[gateway] {name}", getattr(self, name), 1, 2**40)
        if self.log not in ("text", "json"):
            raise ConfigError(f"[gateway] log is {self.log!r}, allowed are 'text' and 'json'")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(_Table):
    """The [engine] table: the device and how it is shared."""

    device: str = "auto"  # cpu, cuda, cuda:N
    dtype: str = "auto"  # float32 on the CPU, bfloat16 on CUDA
    threads: int = 0  # torch's; 0: one. Two halve the time on idle cores and multiply it by ten on busy ones
    mode: str = "streaming"  # what a context gets; "full": all tokens first, then one flow and one HiFT call
    lanes: int = 16  # contexts that speak at once
    waiting: int = 64  # contexts that may wait for a lane; the next is refused
    waiting_ms: int = 10_000  # how long they may
    rows_per_launch: int = 0  # rows that share a call; 1: a lane sounds the same to the bit, alone or in a crowd
    talker_pages: int = 0  # of 32 rows; 0: enough for every lane
    flow_pages: int = 0  # of 50 frames; 0: enough for every lane, as far as the memory goes
    lookahead_s: float = 2.0  # audio's worth of tokens that a talker may be ahead of its credit
    prefill_rows: int = 512  # of all prompts, in one step
    flow_rows: int = 64  # of one flow launch at most
    flow_rows_least: int = 32  # as few as that, if the most urgent row's listener runs dry soon
    share: float = 0.0  # of the device that listeners may take by measured costs, 0.1 to 1; 0: lanes alone are counted
    overlap: bool = True  # talker and flow run side by side on CUDA; false: their launches take turns
    graphs: bool = True  # captured at the start, on CUDA; false: eager
    last_hop: str = "causal"  # "both_ways": solved with all before it once more, as the reference does
    flow_cache: bool = True  # false: each hop solves prompt and all before it again, which benches compare with
    prompt_remainder: int = 0  # the flow's prompts lose their start, up to n * 25 + this many tokens; 0: they don't
    clause_tokens: int = 400  # text tokens of one clause, prompt not counted
    clauses: int = 512  # waiting in one context
    gauges_ms: int = 1_000
    cloning_threads: int = 1  # of the child that conditions new voices

    def __post_init__(self) -> None:
        if self.mode not in ("streaming", "full"):
            raise ConfigError(f"[engine] mode is {self.mode!r}, allowed are 'streaming' and 'full'")
        if self.last_hop not in ("causal", "both_ways"):
            raise ConfigError(f"[engine] last_hop is {self.last_hop!r}, allowed are 'causal' and 'both_ways'")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16", "float64"):
            raise ConfigError(
                f"[engine] dtype is {self.dtype!r}, allowed are auto, float32, bfloat16, float16, float64"
            )
        if self.device not in ("auto", "cpu", "cuda") and not self.device.startswith("cuda:"):
            raise ConfigError(f"[engine] device is {self.device!r}, allowed are auto, cpu, cuda, cuda:N")
        _require("[engine] lanes", self.lanes, 1, 4_096)
        _require("[engine] waiting", self.waiting, 0, 100_000)
        _require("[engine] lookahead_s", self.lookahead_s, 0.0, 600.0)
        _require("[engine] prompt_remainder", self.prompt_remainder, 0, 24)
        _require("[engine] flow_rows_least", self.flow_rows_least, 1, 4_096)
        _require("[engine] flow_rows", self.flow_rows, self.flow_rows_least, 4_096)
        _require("[engine] share", self.share, 0.1 if self.share else 0.0, 1.0)
        _require("[engine] prefill_rows", self.prefill_rows, 1, 65_536)
        _require("[engine] clause_tokens", self.clause_tokens, 1, 8_192)
        _require("[engine] threads", self.threads, 0, 1_024)

    def resolved(self, *, has_cuda: bool) -> EngineConfig:
        """The same with nothing left to "auto" but the pages, which the memory decides; the result is logged."""
        device = self.device if self.device != "auto" else ("cuda" if has_cuda else "cpu")
        on_cpu = device == "cpu"
        chosen = replace(
            self,
            device=device,
            dtype=self.dtype if self.dtype != "auto" else ("float32" if on_cpu else "bfloat16"),
            threads=self.threads or 1,
            rows_per_launch=self.rows_per_launch or (1 if on_cpu else self.lanes),
        )
        logger.info("engine settings: %s", chosen)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(_Table):
    """The [model] table. One setting serves the official model: checkpoint = "/path/to/Fun-CosyVoice3-0.5B-2512"."""

    checkpoint: str = "embedded"  # a folder in the official layout; "embedded": the one inside the package
    voice: str = ""  # the default voice; empty: the first one there is
    prompts: str = ""  # a folder of recordings, NAME.wav beside NAME.txt, to take up as voices at the start
    voices: str = "run/voices"  # where callers' voices are kept; empty: for as long as the engine runs
    voice_memory_mb: int = 256  # of callers' voices in memory; the longest unused are read from disk again
    voice_disk_mb: int = 1_024  # of callers' voices altogether; the next one is refused
    voices_per_key: int = 100

    def __post_init__(self) -> None:
        _require("[model] voice_memory_mb", self.voice_memory_mb, 1, 1 << 20)
        _require("[model] voice_disk_mb", self.voice_disk_mb, 1, 1 << 20)
        _require("[model] voices_per_key", self.voices_per_key, 0, 200)  # their list must fit one message

    @property
    def folder(self) -> Path:
        if self.checkpoint == "embedded":
            return Path(__file__).parent / "voices" / "embedded"
        return Path(self.checkpoint).expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A profile."""

    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> Self:
        if unknown := tables.keys() - {"gateway", "engine", "model"}:
            raise ConfigError(f"unknown tables {sorted(unknown)}; known are ['engine', 'gateway', 'model']")
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise ConfigError(f"[{name}] is a table, not {table!r}")
        return cls(
            gateway=GatewayConfig.from_table(tables.get("gateway", {})),
            engine=EngineConfig.from_table(tables.get("engine", {})),
            model=ModelConfig.from_table(tables.get("model", {})),
        )


def load(path: Path) -> Config:
    """The profile in a file. Raises ConfigError for a file that can't be read, isn't TOML or holds a wrong key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return Config.from_tables(tables)
