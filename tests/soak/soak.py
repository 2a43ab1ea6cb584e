"""Callers of all kinds, for minutes, over real processes: `make soak`, or `python tests/soak/soak.py --seconds 300`.

Many connections, so many at a time, each with a few turns: spoken to the end, cancelled before or amid the audio, two
at once, flushed, or dropped with everything open. In the second half ten clients never read. The checks:

    every context that wasn't dropped has exactly one terminal message, and its audio has no gap and no repetition
    nothing is left at the gateway or at the engine when all have gone
    the processes' memory is back within 10 % of what it was after a first, shorter round
    a cancel is answered within 50 ms, at the 99th percentile
    those who never read don't change the others' gaps

First over the scripted engine, then a fifth of it over the embedded voice. One table at the end, a column per engine;
the figures as JSON on the last line; exit code 1 if a check failed. The processes' logs go to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from gateway.supervisor import Supervisor, child_environment
from tests.gateway.raw_socket import message, raw_socket
from tests.gateway.test_server import get

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (
    "Good morning. ",
    "The boat went down the river. ",
    "Could you tell me when the next train leaves? ",
    "It is a quarter past nine, and the rain has stopped. ",
)
TERMINAL = ("done", "cancelled", "error")
STEP_S = 0.1  # of the scripted engine: real time
THINK_S = 1.0  # between turns, at most
DEAF = 10
ACK_MS = 50.0
RSS_SLACK, RSS_FLOOR = 0.10, 4 << 20  # of the process, and bytes that are nobody's leak


@dataclass
class Figures:
    """What the callers saw."""

    connections: int = 0
    contexts: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    acks_ms: list[float] = field(default_factory=list)
    gaps_ms: dict[str, list[float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    phase: str = "readers alone"

    def gap(self, ms: float) -> None:
        self.gaps_ms.setdefault(self.phase, []).append(ms)


@dataclass
class Use:
    """One use of a context's id, as its caller sees it."""

    is_open: bool = False
    num_audio: int = 0
    num_bytes: int = 0
    heard_at: float | None = None
    asked_at: float | None = None  # when it was cancelled
    end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Caller:
    """One connection; `listen` checks every message as it comes."""

    def __init__(self, socket: ClientConnection, figures: Figures) -> None:
        self.socket, self.figures = socket, figures
        self.uses: dict[str, Use] = {}

    async def say(self, t: str, **fields: Any) -> None:
        await self.socket.send(msgpack.packb({"t": t, **fields}))

    async def open(self, c: str, **settings: Any) -> Use:
        use = self.uses[c] = Use()
        self.figures.contexts += 1
        await self.say("open", c=c, **settings)
        return use

    async def cancel(self, c: str) -> None:
        self.uses[c].asked_at = time.perf_counter()
        await self.say("cancel", c=c)

    async def listen(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                heard: dict[str, Any] = msgpack.unpackb(await self.socket.recv())
                if (c := heard.get("c")) is not None:
                    self.take(self.uses[c], heard)

    def take(self, use: Use, heard: dict[str, Any]) -> None:
        now, t = time.perf_counter(), heard["t"]
        if use.end.done():
            self.figures.faults.append(f"{t} after {use.end.result()}")
        elif t == "opened":
            self.expect(not use.is_open, "opened twice")
            use.is_open = True
        elif t == "audio":
            self.expect(use.is_open, "audio before opened")
            self.expect(heard["q"] == use.num_audio, "audio out of order")
            self.expect(heard["pos"] * 2 == use.num_bytes, "audio with a gap")
            if use.heard_at is not None:
                self.figures.gap((now - use.heard_at) * 1000)
            use.num_audio, use.num_bytes, use.heard_at = use.num_audio + 1, use.num_bytes + len(heard["d"]), now
        elif t == "flushed":
            use.heard_at = None  # the next wait is the caller's own
        elif t in TERMINAL:
            self.finish(use, heard, now)

    def finish(self, use: Use, heard: dict[str, Any], now: float) -> None:
        self.expect(heard.get("samples") in (None, use.num_bytes // 2), "samples told are not those sent")
        if heard["t"] == "cancelled" and use.asked_at is not None:
            self.figures.acks_ms.append((now - use.asked_at) * 1000)
        name = heard["code"] if heard["t"] == "error" else heard["t"]
        self.figures.ends[name] += 1
        use.end.set_result(name)

    def expect(self, holds: bool, fault: str) -> None:
        if not holds:
            self.figures.faults.append(fault)


class Crowd:
    """Callers of all kinds."""

    def __init__(self, address: str, figures: Figures, seed: int, patience_s: float) -> None:
        self.url = address.replace("http", "ws", 1) + "v1/speech"
        self.figures = figures
        self.chance = random.Random(seed)
        self.patience_s = patience_s

    async def run(self, connections: int, sockets: int, seconds: float) -> None:
        """So many connections, so many at a time, spread over the time."""
        left, life_s = iter(range(connections)), seconds * sockets / connections

        async def keep(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            for _ in left:
                await self.call(life_s * self.chance.uniform(0.7, 1.1))

        await asyncio.gather(*(keep(life_s * number / sockets) for number in range(sockets)))

    async def call(self, life_s: float) -> None:
        deadline = time.perf_counter() + life_s
        async with connect(self.url, subprotocols=["rill.v1"], compression=None, proxy=None, close_timeout=2) as socket:  # type: ignore[list-item]
            self.figures.connections += 1
            caller = Caller(socket, self.figures)
            listener = asyncio.create_task(caller.listen())
            turns = [self.speak, self.speak, self.cut_in, self.change_mind, self.flush, self.two]
            number = 0
            while time.perf_counter() < deadline:
                number += 1
                if not await self.turn(self.chance.choice(turns)(caller, f"c{number}")):
                    break
                await asyncio.sleep(self.chance.uniform(0, THINK_S))
            if self.chance.random() < 0.3:
                await self.drop(caller)
            else:
                await socket.close()
            await listener

    async def turn(self, turn: Any) -> bool:
        try:
            async with asyncio.timeout(self.patience_s):
                await turn
        except TimeoutError:
            self.figures.faults.append("no terminal message in time")
            return False
        except ConnectionClosed as error:
            self.figures.faults.append(f"the connection was closed: {error}")
            return False
        return True

    async def text(self, caller: Caller, c: str) -> None:
        for n, piece in enumerate(self.chance.choice(SENTENCES).split(" ")[:-1]):
            await caller.say("text", c=c, n=n, s=piece + " ")

    async def speak(self, caller: Caller, c: str) -> None:
        use = await caller.open(c, seed=self.chance.randrange(100))
        await self.text(caller, c)
        await caller.say("end", c=c)
        await use.end

    async def cut_in(self, caller: Caller, c: str) -> None:
        use = await caller.open(c)
        await self.text(caller, c)
        await asyncio.sleep(self.chance.uniform(0, 1.0))
        await caller.cancel(c)
        await caller.cancel(c)
        await use.end

    async def change_mind(self, caller: Caller, c: str) -> None:
        use = await caller.open(c)
        await caller.cancel(c)
        await use.end

    async def flush(self, caller: Caller, c: str) -> None:
        use = await caller.open(c)
        await self.text(caller, c)
        await caller.say("flush", c=c, f=0)
        await asyncio.sleep(self.chance.uniform(0, 0.3))
        await caller.say("end", c=c)
        await use.end

    async def two(self, caller: Caller, c: str) -> None:
        await asyncio.gather(self.speak(caller, c + "-one"), self.cut_in(caller, c + "-two"))

    async def drop(self, caller: Caller) -> None:
        """Go without a word, with contexts open."""
        for c in ("x", "y"):
            await caller.open(c)
            await self.text(caller, c)
        await asyncio.sleep(self.chance.uniform(0, 0.5))
        caller.socket.transport.abort()
        self.figures.ends["dropped"] += sum(not caller.uses[c].end.done() for c in "xy")


async def stay_deaf(address: str) -> None:
    """Opens much, reads nothing, and comes again when it is thrown out."""
    while True:
        async with raw_socket(address, receive_bytes=4_096) as deaf:
            for c in "abcd":
                deaf.send(message("open", c=c, pace="none", fmt={"enc": "f32le", "rate": 48_000}))
                deaf.send(message("text", c=c, n=0, s=SENTENCES[3] * 5))
            with contextlib.suppress(ConnectionError):
                while not deaf.reader.at_eof() and deaf.writer.transport.get_write_buffer_size() == 0:
                    deaf.send(message("ping", x=0))
                    await asyncio.sleep(0.5)
                    deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def deaf_clients(address: str, count: int) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(stay_deaf(address)) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- what the processes say


def rss(pid: int) -> int:
    """Bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def series(address: str) -> dict[str, float]:
    text = (await get(address + "metrics"))[2].decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def settled(address: str) -> dict[str, float]:
    """The series once nobody is left, or after a while."""
    for _ in range(150):
        table = await series(address)
        if left_behind(table) == 0:
            break
        await asyncio.sleep(0.1)
    return table


def left_behind(table: dict[str, float]) -> float:
    names = ("rill_sessions", "rill_engine_contexts", "rill_engine_lanes_used")
    return sum(table.get(name, 0) for name in names) + sum(
        v for k, v in table.items() if k.startswith("rill_contexts{")
    )


def bound_ms(table: dict[str, float], name: str, share: float) -> float:
    """The upper edge of the histogram's bucket that holds this quantile."""
    buckets = {k: v for k, v in table.items() if k.startswith(name + "_bucket")}
    edges = sorted((float(k.split('"')[1]), v) for k, v in buckets.items())
    return next(edge for edge, count in edges if count >= share * edges[-1][1]) * 1000


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


# ---- the whole


def profile(folder: Path, lanes: int) -> Path:
    path = folder / "profile.toml"
    path.write_text(
        "[gateway]\ndrain_ms = 500\nconnections = 2000\naddress_sockets = 2000\nstall_ms = 5000\n"
        f"[engine]\ndevice = 'cpu'\nlanes = {lanes}\nwaiting = 4000\nwaiting_ms = 600000\nthreads = 1\n"
    )
    return path


@dataclass
class Result:
    """One engine's soak: what its callers and its processes said."""

    figures: Figures
    table: dict[str, float]
    before: dict[str, int]
    after: dict[str, int]
    is_scripted: bool

    def checks(self) -> dict[str, tuple[str, bool]]:
        """By name: what was seen, and whether that is right."""
        figures = self.figures
        ack_ms, alone, beset = (
            quantile(figures.acks_ms, 0.99),
            self.gap_ms("readers alone"),
            self.gap_ms("with deaf ones"),
        )
        left = left_behind(self.table)
        return {
            "faults, of contexts": (f"{len(figures.faults)} of {figures.contexts}", not figures.faults),
            "contexts with one end": (str(figures.ends.total()), figures.ends.total() == figures.contexts),
            "left behind": (f"{left:.0f}", left == 0),
            f"cancel ack p99, at most {ACK_MS:.0f} ms": (f"{ack_ms:.1f} ms", ack_ms <= ACK_MS),
            "gap p99 alone, beside deaf ones": (
                f"{alone:.0f}, {beset:.0f} ms",
                not self.is_scripted or beset <= alone * 1.25 + 10,
            ),
            **{f"RSS of the {name}, MiB": self.memory(name) for name in self.before},
        }

    def gap_ms(self, phase: str) -> float:
        return quantile(self.figures.gaps_ms.get(phase, []), 0.99)

    def memory(self, name: str) -> tuple[str, bool]:
        before, after = self.before[name], self.after[name]
        return f"{before >> 20} -> {after >> 20}", after <= before * (1 + RSS_SLACK) + RSS_FLOOR

    def numbers(self) -> dict[str, Any]:
        return {
            "connections": self.figures.connections,
            "contexts": self.figures.contexts,
            **self.figures.ends,
            "cancel ack p50, ms": round(quantile(self.figures.acks_ms, 0.5), 2),
            "cancel ack at the gateway p99, ms at most": bound_ms(self.table, "rill_cancel_ack_seconds", 0.99),
            "engine abort p99, ms at most": bound_ms(self.table, "rill_engine_abort_seconds", 0.99),
            "loop lag p99, ms at most": bound_ms(self.table, "rill_loop_lag_seconds", 0.99),
            "sockets aborted unread": self.table.get("rill_stalled_writers_total", 0.0),
        }


async def soak(options: argparse.Namespace, engine: str) -> Result:
    is_scripted = engine == "scripted"
    share = 1 if is_scripted else 5
    connections, sockets = options.connections // share, max(options.sockets // share, 1)
    seconds = options.seconds / share if options.seconds >= 60 else options.seconds
    os.environ["SCRIPT"] = json.dumps({"step_s": STEP_S, "step_samples": 2_400, "lanes": 2_000, "waiting": 2_000})
    os.environ["PYTHONPATH"] = child_environment()["PYTHONPATH"]
    module = "tests.scripted_engine" if is_scripted else "engine"
    with tempfile.TemporaryDirectory(prefix="rill-") as folder:
        async with Supervisor(profile(Path(folder), 2_000 if is_scripted else 16), port=0, engine=module) as supervisor:
            address = await supervisor.address()
            pids = {name: supervisor.pids(name)[0] for name in ("gateway", "engine")}
            patience_s = 60.0 if is_scripted else 600.0
            first = Crowd(address, Figures(), options.seed, patience_s)
            async with deaf_clients(address, DEAF):
                await first.run(max(connections // 5, sockets), sockets, seconds / 5)
            await settled(address)
            before = {name: rss(pid) for name, pid in pids.items()}
            figures = Figures()
            crowd = Crowd(address, figures, options.seed + 1, patience_s)
            await crowd.run(connections // 2, sockets, seconds / 2)
            figures.phase = "with deaf ones"
            async with deaf_clients(address, DEAF):
                await crowd.run(connections // 2, sockets, seconds / 2)
            table = await settled(address)
            await asyncio.sleep(1.0)
            after = {name: rss(pid) for name, pid in pids.items()}
    return Result(figures, table, before, after, is_scripted)


def report(results: dict[str, Result]) -> int:
    checks = {engine: result.checks() for engine, result in results.items()}
    numbers = {engine: result.numbers() for engine, result in results.items()}
    print("".join(f"{word:>24}" for word in ("", "", *results)))
    for name in next(iter(checks.values())):
        cells = (f"{'ok' if holds else 'FAIL'}  {seen}" for seen, holds in (one[name] for one in checks.values()))
        print(f"{name:48}" + "".join(f"{cell:>24}" for cell in cells))
    for name in dict.fromkeys(name for one in numbers.values() for name in one):
        print(f"{name:48}" + "".join(f"{one.get(name, 0):>24}" for one in numbers.values()))
    for engine, result in results.items():
        for fault, count in Counter(result.figures.faults).most_common(10):
            print(f"{engine}: {count} x {fault}")
    table = {engine: {**numbers[engine], **{k: seen for k, (seen, _) in checks[engine].items()}} for engine in results}
    print(json.dumps(table))
    return 0 if all(holds for one in checks.values() for _, holds in one.values()) else 1


async def run(options: argparse.Namespace) -> int:
    engines = ("scripted", "embedded") if options.engine == "both" else (options.engine,)
    with open_log() as log:
        results = {engine: await soak(options, engine) for engine in engines}
    print(f"the processes' log is {log}")
    return report(results)


@contextlib.contextmanager
def open_log() -> Iterator[str]:
    """Our standard error, which the processes inherit, is a file meanwhile: their lines would bury the table."""
    ours = os.dup(2)
    with tempfile.NamedTemporaryFile(prefix="rill-soak-", suffix=".log", delete=False) as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file.name
        finally:
            os.dup2(ours, 2)
            os.close(ours)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--connections", type=int, default=2_000)
    parser.add_argument("--sockets", type=int, default=200, help="at a time")
    parser.add_argument(
        "--engine", choices=("scripted", "embedded", "both"), default="both", help="embedded: a fifth of all"
    )
    parser.add_argument("--seed", type=int, default=1)
    return uvloop.run(run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
