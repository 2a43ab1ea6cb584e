"""How many real-time streams one gateway process carries on one core, from the scripted engine.

The gateway has a core to itself (the last one), the scripted engine and the listeners have the others. Every stream is
a socket with one context of 24 kHz s16, 100 ms a message. A gap is how much later than the audio before it lasts a
message comes. `--profile` runs the gateway under cProfile, which makes it about twice as slow, and prints where its
time goes. The ceiling: the streams' bytes are 48 kB/s each, so 300 are 14.4 MB/s, a hundredth of what loopback takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pstats
import struct
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import cast

import uvloop

from gateway.supervisor import READY, child_environment
from tests.gateway.raw_socket import REQUEST, message
from tests.gateway.test_server import get

STEP_S = 0.1
TEXT = "a hundred letters and a space make a sentence that the scripted engine speaks for a long time indeed "
WARM_S = 2.0
GOAL_MS = 20.0


class Listener(asyncio.Protocol):
    """Reads frames as fast as may be: the listeners must not be what is measured."""

    def __init__(self) -> None:
        self.times: list[float] = []  # when each audio message was whole
        self.is_up = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(REQUEST.format(path="/v1/speech").encode())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self.is_up.done():
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            assert self._buffer.startswith(b"HTTP/1.1 101"), bytes(self._buffer[:200])
            del self._buffer[: end + 4]
            self.is_up.set_result(None)
        self._take_frames()

    def _take_frames(self) -> None:
        at, now = 0, time.perf_counter()
        while len(self._buffer) >= at + 4:
            size, head = self._buffer[at + 1], 2
            if size == 126:
                size, head = struct.unpack_from(">H", self._buffer, at + 2)[0], 4
            if len(self._buffer) < at + head + size:
                break
            if size > 4_000:  # audio; everything else is small
                self.times.append(now)
            at += head + size
        del self._buffer[:at]


@contextlib.asynccontextmanager
async def gateway(folder: Path, phases: int, *, is_profiled: bool) -> AsyncIterator[tuple[str, int]]:
    """Address and process id; the scripted engine beside it."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["PYTHONPATH"] = child_environment()["PYTHONPATH"]
    os.environ["SCRIPT"] = json.dumps(
        {"step_s": STEP_S / phases, "phases": phases, "is_steady": True, "is_mute": True, "lanes": 5_000, "waiting": 0}
    )
    pipe = str(folder / "engine.sock")
    profile = folder / "profile.toml"
    profile.write_text("[gateway]\nconnections = 5000\naddress_sockets = 5000\naddress_handshakes_minute = 100000\n")
    words = ["--config", str(profile), "--socket", pipe, "--leashed"]
    prefix = ["-m", "cProfile", "-o", str(folder / "profile.out")] if is_profiled else []
    spawn = partial(asyncio.create_subprocess_exec, sys.executable, stdin=PIPE)
    engine = await spawn("-m", "tests.scripted_engine", *words)
    server = await spawn(*prefix, "-m", "gateway", *words, "--port", "0", stdout=PIPE)
    try:
        os.sched_setaffinity(server.pid, cores[-1:])
        os.sched_setaffinity(engine.pid, cores[:-1] or cores)
        os.sched_setaffinity(0, cores[:-1] or cores)
        assert server.stdout is not None
        line = await server.stdout.readline()
        yield line.decode().strip().removeprefix(READY), server.pid
    finally:
        for process in (server, engine):
            process.terminate()
            await process.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_s(pid: int) -> float:
    """Time in which it could have run and had no core: somebody else's doing."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


async def measure(address: str, pid: int, streams: int, seconds: float) -> dict[str, float]:
    host, port = address.removeprefix("http://").removesuffix("/").split(":")
    loop = asyncio.get_running_loop()
    listeners = []
    for number in range(streams):
        _, listener = await loop.create_connection(Listener, host, int(port))
        await listener.is_up
        listener.transport.write(message("open", c="a", seed=number) + message("text", c="a", n=0, s=TEXT * 20))
        listeners.append(listener)
    await asyncio.sleep(WARM_S)
    for listener in listeners:
        listener.times.clear()
    started, used, waited = time.perf_counter(), cpu_s(pid), waited_s(pid)
    await asyncio.sleep(seconds)
    took, used, waited = time.perf_counter() - started, cpu_s(pid) - used, waited_s(pid) - waited
    gaps = sorted(
        max(later - before - STEP_S, 0.0) * 1000
        for listener in listeners
        for before, later in zip(listener.times, listener.times[1:], strict=False)
    )
    heard = sum(len(listener.times) for listener in listeners)
    lag = await lag_ms(address)
    for listener in listeners:
        listener.transport.abort()
    return {
        "streams": streams,
        "seconds": round(took, 1),
        "share_heard": round(heard / (streams * took / STEP_S), 3),  # 1: nothing is behind
        "gap_p50_ms": round(gaps[len(gaps) // 2], 2),
        "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)], 2),
        "gap_max_ms": round(gaps[-1], 2),
        "core_used": round(used / took, 3),
        "core_waited_for": round(waited / took, 3),
        "loop_lag_p99_ms_at_most": lag,
    }


async def lag_ms(address: str) -> float:
    text = (await get(address + "metrics"))[2].decode()
    lines = [line for line in text.splitlines() if line.startswith("rill_loop_lag_seconds_bucket")]
    counts = [(float(line.split('"')[1]), float(line.split()[-1])) for line in lines]
    return next(edge for edge, count in counts if count >= 0.99 * counts[-1][1]) * 1000


async def run(options: argparse.Namespace) -> int:
    results = []
    with tempfile.TemporaryDirectory(prefix="rill-") as name:
        folder = Path(name)
        for streams in map(int, options.streams.split(",")):
            async with gateway(folder, options.phases, is_profiled=options.profile) as (address, pid):
                results.append(await measure(address, pid, streams, options.seconds))
            print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
        if options.profile:
            pstats.Stats(str(folder / "profile.out")).sort_stats("tottime").print_stats(25)
    print(json.dumps({"goal_gap_p99_ms": GOAL_MS, "results": results}))
    return 0 if all(result["gap_p99_ms"] < GOAL_MS for result in results) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="100,300", help="numbers of streams, with commas between")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--phases", type=int, default=10, help="1: all streams' messages come at the same moment")
    parser.add_argument("--profile", action="store_true")
    return uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
