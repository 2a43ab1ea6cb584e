"""`rill bench`: a real client over the real gateway, and what it finds.

Three kinds of load, each over hot, cold or pooled voices:

    closed   so many listeners, each with a request on its way at all times, or, listening, one after another as played
    burst    so many requests at the same moment
    poisson  requests at random moments, at a given rate; timed from their moment, however late we are

hot: one voice, used before. cold: each request a voice that this server has not spoken with. pooled: any of a pool of
voices, each cold when it is first drawn. Times are taken in processes of their own (gateway/listeners.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from websockets.exceptions import WebSocketException

from engine import config as profiles
from engine.messages import Gauges
from gateway import figures as shown
from gateway.client import speech_url
from gateway.decks import Request, Writer, deck, spread, voice_order
from gateway.errors import GatewayError
from gateway.figures import Figures, Trace
from gateway.listeners import Line, Load, Seen

ROOT: Final = Path(__file__).resolve().parent.parent
STREAMS_PER_PROCESS: Final = 32
LINES_PER_PROCESS: Final = 32  # of a Poisson load, whose requests share connections
DECK: Final = 64  # requests of a closed loop's deck, in each process
RAMP: Final = (0.2, 3.0)  # share of a closed loop's time that is not counted, and the most seconds of it
GAUGES: Final = frozenset(one.name for one in fields(Gauges))
GAUGES_S: Final = 0.25
IDLE_S: Final = 10.0  # for the engine to be empty after a point
CONNECT_S: Final = 60.0
RESULT_BYTES: Final = 1 << 30
FAR_GATE: Final[dict[str, Any]] = {  # a bench is one address with hundreds of listeners
    "connections": 65_536,
    "contexts": 64,
    "address_sockets": 65_536,
    "address_pending": 65_536,
    "address_handshakes_minute": 1_000_000,
    "address_text_minute": 1 << 40,
}
QUICK_GAUGES: Final[dict[str, Any]] = {"gauges_ms": 200}
BASELINES: Final[dict[str, dict[str, Any]]] = {
    "prefix recomputed": {"flow_cache": False},
    "one at a time": {"lanes": 1, "waiting": 4_096, "waiting_ms": 600_000},
}

Serve = Callable[[Path], AbstractAsyncContextManager[str]]
"""A profile -> a server of that profile, by its address."""


class BenchError(GatewayError):
    """A point that can't be measured: the text says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load. voices: hot, cold, pooled or the name of one. tokens: speech tokens of each text; 0: the spread of
    Seed-TTS EN. cancels: share that is cut. listens: audio is taken as a player plays it; a closed loop waits for that.
    rounds: of a burst, each when the one before is over.
    """

    kind: str = "closed"
    streams: int = 1
    rate: float = 0.0  # requests a second
    seconds: float = 20.0
    rounds: int = 1
    voices: str = "hot"
    pool: int = 32
    tokens: int = 0
    cancels: float = 0.0
    listens: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        words = [self.kind, f"{self.rate:g}/s" if self.kind == "poisson" else str(self.streams), self.voices]
        words += ["listening"] if self.listens else []
        words += [f"{self.tokens} tokens"] if self.tokens else []
        words += [f"{100 * self.cancels:.0f} % cut"] if self.cancels else []
        return " ".join(words)


# ---- the loads of a point


def loads(point: Point, url: str, writer: Writer, ratio: float, voices: Sequence[str], processes: int) -> list[Load]:
    """The point's load, in shares for so many processes."""
    chance = random.Random(point.seed)
    match point.kind:
        case "closed":
            spans = (
                min(5.0, point.seconds / 3) if point.listens else 0.0
            )  # so that listeners don't all ask at the same moment for ever
            offsets = [spans * i / point.streams for i in range(point.streams)]
        case "burst":
            offsets = [0.0] * point.streams
        case "poisson":
            if point.rate <= 0:
                raise BenchError(f"a Poisson load needs a rate above 0, not {point.rate:g}")
            times = itertools.accumulate(chance.expovariate(point.rate) for _ in itertools.count())
            offsets = list(itertools.takewhile(lambda at_s: at_s < point.seconds, times))
        case _:
            raise BenchError(f"a load is closed, burst or poisson, not {point.kind!r}")
    order = voice_order(point.voices, voices, point.seed)
    shares = [share for i in range(processes) if (share := offsets[i::processes])]
    counts = [_num_cards(point, len(share), len(voices)) for share in shares]
    lengths = [[point.tokens] * count if point.tokens else spread(count) for count in counts]
    seeds = [chance.getrandbits(32) for _ in shares]
    decks = [
        deck(writer, lengths=some, ratio=ratio, voices=order, cancels=point.cancels, seed=seed)
        for some, seed in zip(lengths, seeds, strict=True)
    ]
    return [_load(point, url, cards, share) for cards, share in zip(decks, shares, strict=True)]


def _num_cards(point: Point, listeners: int, num_voices: int) -> int:
    """Requests in the deck of so many listeners."""
    if point.kind != "closed":
        return listeners
    return num_voices * listeners // point.streams if point.voices == "cold" else DECK


def _load(point: Point, url: str, cards: list[Request], offsets: list[float]) -> Load:
    is_looped = point.kind == "closed"
    return Load(
        url=url,
        lines=min(len(offsets), LINES_PER_PROCESS) if point.kind == "poisson" else len(offsets),
        deck=cards,
        offsets=offsets,
        is_looped=is_looped,
        is_endless=is_looped and point.voices != "cold",
        listens=point.listens,
        pace="listen" if point.listens else "none",
        stop_s=point.seconds,
    )


def window(point: Point, begin_s: float, traces: Sequence[Trace]) -> tuple[float, float]:
    """From when to when the point is counted."""
    last_s = max((trace.end_s for trace in traces), default=begin_s) + 1e-3
    if point.kind == "burst":
        return begin_s, last_s
    share, most_s = RAMP
    ramp_s = min(share * point.seconds, most_s) if point.kind == "closed" else 0.0
    return begin_s + ramp_s, min(begin_s + point.seconds, last_s)


# ---- listeners in processes of their own


class Crew:
    """One process for each load. `async with` starts and connects them; `run` has them all begin at one moment."""

    def __init__(self, shares: Sequence[Load]) -> None:
        self._shares = shares
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Crew:
        try:
            for _ in self._shares:
                self._processes.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "gateway.listeners",
                        cwd=ROOT,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        limit=RESULT_BYTES,
                    )
                )
            async with asyncio.timeout(CONNECT_S):
                await asyncio.gather(*map(self._prepare, self._processes, self._shares))
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._end()

    async def _end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _prepare(self, process: asyncio.subprocess.Process, load: Load) -> None:
        await self._tell(process, json.dumps(asdict(load)))
        if await self._hear(process) != "ready":
            raise BenchError("a listener's process could not connect")

    async def run(self, begin_s: float) -> list[Seen]:
        for process in self._processes:
            await self._tell(process, repr(begin_s))
        return [Seen.read(text) for text in await asyncio.gather(*map(self._hear, self._processes))]

    async def _tell(self, process: asyncio.subprocess.Process, line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()

    async def _hear(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise BenchError(f"a listener's process ended with code {await process.wait()}")
        return line.decode().strip()


# ---- what the server and the GPU say meanwhile


async def gauges(url: str) -> dict[str, float]:
    """The engine's own figures, from the server's /metrics; empty if it gives none."""
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:
        return {}
    try:
        writer.write(f"GET /metrics HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        text = (await reader.read()).decode()
    except OSError:
        return {}
    finally:
        writer.close()
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if (name := name.removeprefix("rill_engine_")) in GAUGES:
            found[name] = float(value)
    return found


@dataclass(slots=True)
class Watch:
    """Reads the server's gauges and the GPU's while a point runs."""

    url: str
    readings: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    gpu_readings: list[tuple[float, float, float]] = field(default_factory=list)  # when, busy %, MiB

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Watch]:
        tasks = [asyncio.create_task(self._read_gauges()), asyncio.create_task(self._read_gpu())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_gauges(self) -> None:
        while True:
            if found := await gauges(self.url):
                self.readings.append((time.monotonic(), found))
            await asyncio.sleep(GAUGES_S)

    async def _read_gpu(self) -> None:
        if (program := shutil.which("nvidia-smi")) is None:
            return
        query = "--query-gpu=utilization.gpu,memory.used"
        process = await asyncio.create_subprocess_exec(
            program, query, "--format=csv,noheader,nounits", "-lms", "200", "-i", "0", stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                with contextlib.suppress(ValueError):
                    busy, memory = map(float, line.decode().split(","))
                    self.gpu_readings.append((time.monotonic(), busy, memory))
        finally:
            process.kill()
            await process.wait()

    def gauges(self, begin_s: float, end_s: float) -> dict[str, dict[str, float]]:
        """For each gauge its largest value and mean, and by how much it grew in a second."""
        inside = [(at_s, found) for at_s, found in self.readings if begin_s <= at_s <= end_s + GAUGES_S]
        names = inside[-1][1].keys() if inside else ()
        span_s = inside[-1][0] - inside[0][0] if inside else 0.0
        return {name: _summary([found.get(name, 0.0) for _, found in inside], span_s) for name in names}

    def gpu(self, begin_s: float, end_s: float) -> dict[str, float] | None:
        inside = [(busy, memory) for at_s, busy, memory in self.gpu_readings if begin_s <= at_s <= end_s]
        if not inside:
            return None
        busy, memory = zip(*inside, strict=True)
        return {"busy": round(sum(busy) / len(busy), 1), "memory_mib": max(memory)}


def _summary(values: Sequence[float], span_s: float) -> dict[str, float]:
    return {
        "max": round(max(values), 3),
        "mean": round(sum(values) / len(values), 3),
        "per_s": round((values[-1] - values[0]) / span_s, 4) if span_s else 0.0,
    }


# ---- a point, measured


class Bench:
    """One server under measurement. `count` counts text tokens, `ratio` is the speech tokens that each gives."""

    def __init__(
        self, url: str, *, count: Callable[[str], int], ratio: float, series: str = "rill", processes: int = 0
    ) -> None:
        self.url, self.series, self.ratio = url, series, ratio
        self.voices: list[str] = []
        self.traces: list[Trace] = []  # of the last point
        self._processes = processes
        self._writer = Writer(count, seed=len(series))
        self._used: set[str] = set()

    async def measure(self, point: Point) -> dict[str, Any]:
        """The point's result, ready for figures.table. Raises BenchError, OSError or WebSocketException."""
        await self._meet()
        watch, seen, spans = Watch(self.url), list[Seen](), list[tuple[float, float]]()
        async with watch.running():
            for number in range(point.rounds if point.kind == "burst" else 1):
                some, span = await self._run(replace(point, seed=point.seed + number))
                seen += some
                spans.append(span)
            left = await self._until_idle()
        self.traces = sorted((trace for one in seen for trace in one.traces), key=lambda trace: trace.sent_s)
        begin_s, end_s = spans[0][0], spans[-1][1]
        return {
            "name": point.name if self.series == "rill" else f"{self.series}: {point.name}",
            "series": self.series,
            "point": asdict(point),
            "figures": Figures.of(self.traces, spans),
            "gauges": watch.gauges(begin_s, end_s),
            "gpu": watch.gpu(begin_s, end_s),
            "left": left,
            "client": {
                "processes": self._num_processes(point),
                "late_ms": round(1e3 * max(one.lag_s for one in seen), 2),
                "stray": sum(one.stray for one in seen),
            },
        }

    async def _run(self, point: Point) -> tuple[list[Seen], tuple[float, float]]:
        """The point's load, once. -> what the listeners saw, and from when to when it counts."""
        voices = await self._voices_for(point)
        shares = loads(point, speech_url(self.url), self._writer, self.ratio, voices, self._num_processes(point))
        async with Crew(shares) as crew:
            begin_s = time.monotonic() + 0.3
            seen = await crew.run(begin_s)
        traces = [trace for one in seen for trace in one.traces]
        self._used |= {trace.voice for trace in traces}
        return seen, window(point, begin_s, traces)

    async def say(self, point: Point, count: int = 1) -> list[Trace]:
        """Some requests of the point, one after another, from this process."""
        await self._meet()
        order = voice_order(point.voices, self.voices, point.seed)
        lengths = [point.tokens] * count if point.tokens else spread(count)
        line, _ = await Line.open(speech_url(self.url))
        try:
            cards = deck(self._writer, lengths=lengths, ratio=self.ratio, voices=order, cancels=0, seed=point.seed)
            answers = [await line.ask(card, time.monotonic()) for card in cards]
        finally:
            await line.close()
        self._used |= {card.voice for card in cards}
        return [answer.trace for answer in answers]

    async def _meet(self) -> None:
        """Learn the voices, at the first call."""
        if not self.voices:
            line, ready = await Line.open(speech_url(self.url))
            await line.close()
            self.voices = [voice.id for voice in ready.voices]

    async def _voices_for(self, point: Point) -> list[str]:
        if point.voices == "pooled":
            return self.voices[: point.pool]
        if point.voices != "cold":
            voice = next(voice_order(point.voices, self.voices, point.seed))
            if voice not in self._used:
                await self.say(Point(voices=voice))
            return [voice]
        unused = [voice for voice in reversed(self.voices) if voice not in self._used]  # warm-ups use the first ones
        if len(unused) < point.streams:
            raise BenchError(f"{point.name} needs {point.streams} voices not used yet, {len(unused)} are left")
        return unused

    def _num_processes(self, point: Point) -> int:
        """As many as carry the streams, and leave the server most of the cores."""
        streams = point.streams if point.kind != "poisson" else math.ceil(4 * point.rate)
        return self._processes or max(1, min(math.ceil(streams / STREAMS_PER_PROCESS), (os.cpu_count() or 1) // 3))

    async def _until_idle(self) -> dict[str, float]:
        """What the engine still holds once it should hold nothing; without gauges, nothing is known."""
        names = ("contexts", "lanes_used", "talker_pages", "flow_pages", "hift_states")
        deadline_s = time.monotonic() + IDLE_S
        while True:
            found = await gauges(self.url)
            left = {name: found[name] for name in names if found.get(name)}
            if not left or time.monotonic() > deadline_s:
                return left
            await asyncio.sleep(GAUGES_S)


# ---- profiles


def altered(profile: Path, folder: Path, engine: dict[str, Any], model: dict[str, Any] | None = None) -> Path:
    """A copy of a profile in `folder` that lets a bench in, with some keys of its tables changed."""
    tables = tomllib.loads(profile.read_text(encoding="utf-8"))
    for table, values in {"gateway": FAR_GATE, "engine": QUICK_GAUGES | engine, "model": model or {}}.items():
        tables.setdefault(table, {}).update(values)
    path = folder / "bench.toml"
    path.write_text("".join(_toml(title, table) for title, table in tables.items()), encoding="utf-8")
    profiles.load(path)  # a wrong key is named here, not by a child
    return path


def _toml(title: str, table: dict[str, Any]) -> str:
    """JSON's scalars and lists are TOML's; tables inside come last."""
    plain = [f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, dict)]
    inner = [_toml(f"{title}.{key}", value) for key, value in table.items() if isinstance(value, dict)]
    return f"[{title}]\n" + "".join(plain) + "".join(inner)


def text_counter(profile: Path) -> Callable[[str], int]:
    """Counts as the profile's checkpoint does."""
    from engine.frontend import Tokenizer

    return Tokenizer(profiles.load(profile).model.folder / "CosyVoice-BlankEN").count


# ---- the command


def add_arguments(parser: argparse.ArgumentParser, default_profile: Path) -> None:
    parser.add_argument("--url", help="a running server's address; default: a server of our own, by --config")
    parser.add_argument("--config", type=Path, default=default_profile, help="the profile; default: the embedded voice")
    parser.add_argument("--concurrency", type=_numbers, help="closed loops, such as 1,4,16,64 (the default)")
    parser.add_argument("--burst", type=_numbers, default=(), help="so many requests at the same moment")
    parser.add_argument("--rate", type=float, nargs="+", default=(), help="requests a second, at random moments")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each point; default 20")
    parser.add_argument("--rounds", type=int, default=1, help="of each burst; default 1")
    parser.add_argument(
        "--voices", type=_words, default=("hot",), help="hot, cold, pooled or a name, by commas; default hot"
    )
    parser.add_argument("--pool", type=int, default=32, help="voices of a pool; default 32")
    parser.add_argument("--tokens", type=int, default=0, help="speech tokens of each text; default: as Seed-TTS EN")
    parser.add_argument("--ratio", type=float, default=6.0, help="speech tokens for each text token; default 6")
    parser.add_argument("--cancels", type=float, default=0.0, help="share of the requests that is cut; default 0")
    parser.add_argument("--listen", action="store_true", help="closed loops ask again when the answer has been played")
    parser.add_argument("--baselines", action="store_true", help="the same with no cache, and with one request at once")
    parser.add_argument("--processes", type=int, default=0, help="of listeners; default: by the streams and the cores")
    parser.add_argument("--seed", type=int, default=0, help="of texts, voices and moments")
    parser.add_argument("--json", type=Path, help="where the results go, besides the last line")
    parser.add_argument("--plot", type=Path, help="a picture of first PCM and C50 (needs the `bench` extra)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def points(options: argparse.Namespace) -> list[Point]:
    """The points that the options ask for, in the order of their kinds."""
    shape = Point(
        seconds=options.seconds,
        rounds=options.rounds,
        pool=options.pool,
        tokens=options.tokens,
        cancels=options.cancels,
        seed=options.seed,
    )
    concurrency = options.concurrency
    if concurrency is None:
        concurrency = () if options.burst or options.rate else (1, 4, 16, 64)
    found = []
    for voices in options.voices:
        one = replace(shape, voices=voices)
        found += [replace(one, streams=streams, listens=options.listen) for streams in concurrency]
        found += [replace(one, kind="burst", streams=streams) for streams in options.burst]
        found += [replace(one, kind="poisson", rate=rate) for rate in options.rate]
    return found


async def run(options: argparse.Namespace, serve: Serve) -> int:
    """Measure, print the table, and JSON on the last line. -> 1 if a point failed."""
    if options.url is not None and options.baselines:
        raise BenchError("baselines need servers of our own: name a profile, not an address")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rill-bench-") as folder:
        for series, changes in {"rill": {}, **(BASELINES if options.baselines else {})}.items():
            try:
                async with _server(options, serve, Path(folder), changes) as url:
                    count = text_counter(options.config)
                    bench = Bench(url, count=count, ratio=options.ratio, series=series, processes=options.processes)
                    for point in points(options):
                        results.append(await attempt(bench, point))
            except GatewayError as error:
                results.append({"name": series, "series": series, "failure": str(error)})
    report(results, options.json, options.plot)
    return int(any("failure" in result for result in results))


@contextlib.asynccontextmanager
async def _server(
    options: argparse.Namespace, serve: Serve, folder: Path, changes: dict[str, Any]
) -> AsyncIterator[str]:
    if options.url is not None:
        yield options.url
        return
    async with serve(altered(options.config, folder, changes)) as url:
        yield url


async def attempt(bench: Bench, point: Point) -> dict[str, Any]:
    """The point's result; one that can't be measured says why."""
    print(f"{bench.series}: {point.name} ...", file=sys.stderr, flush=True)
    try:
        result = await bench.measure(point)
    except (GatewayError, OSError, TimeoutError, WebSocketException) as error:
        why = str(error) or type(error).__name__
        return {"name": point.name, "series": bench.series, "point": asdict(point), "failure": why}
    print(shown.table([result]).splitlines()[-1], file=sys.stderr, flush=True)
    return result


def report(results: Sequence[dict[str, Any]], json_path: Path | None, plot_path: Path | None) -> None:
    """The table, and JSON on the last line."""
    print(shown.table(results))
    plain = [{**one, "figures": asdict(one["figures"])} if "figures" in one else one for one in results]
    if json_path is not None:
        json_path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    if plot_path is not None:
        shown.plot(results, plot_path)
    print(json.dumps(plain), flush=True)
