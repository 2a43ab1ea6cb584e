"""`rill serve`, `rill say`, `rill voices`, `rill bench`.

`serve` starts the engine and the gateway as child processes, restarts an engine that dies, and ends both in order.
`say` streams text to a WAV file or to a player. Exit codes: 0 done, 1 it failed, 2 wrong usage or configuration, 130
interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import wave
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import uvloop

from engine import config as profiles
from gateway import bench
from gateway.client import Client, Context, connect, probe
from gateway.errors import ConfigError, GatewayError
from gateway.server import check_exposure

DEFAULT_PORT: Final = profiles.GatewayConfig().port
DEFAULT_PROFILE: Final = Path(__file__).resolve().parent.parent / "configs" / "embedded.toml"
BACKOFF_S: Final = (0.1, 5.0)  # first and longest wait before a dead engine is started again
STEADY_S: Final = 10.0  # an engine that lived so long starts the back-off anew
END_S: Final = 5.0  # for the engine to go after SIGTERM, before it is killed
PLAYERS: Final = (
    (
        "ffplay",
        ("-nodisp", "-autoexit", "-loglevel", "quiet", "-f", "s16le", "-ar", "24000", "-ch_layout", "mono", "-"),
    ),
    ("aplay", ("-q", "-t", "raw", "-f", "S16_LE", "-r", "24000", "-c", "1", "-")),
    ("paplay", ("--raw", "--format=s16le", "--rate=24000", "--channels=1")),
    ("play", ("-q", "-t", "raw", "-r", "24000", "-e", "signed", "-b", "16", "-c", "1", "-")),
)
RATE_HZ: Final = 24_000


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (ConfigError, profiles.ConfigError) as error:
        return _complain(error, 2)
    except (GatewayError, OSError) as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130


def _complain(error: Exception, code: int) -> int:
    print(f"rill: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rill", description="Text in, streamed speech out.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the page and the speech socket")
    serve.set_defaults(command=_serve)
    serve.add_argument("--config", type=Path, default=DEFAULT_PROFILE, help="the profile; default: the embedded voice")
    serve.add_argument("--host", help="where to listen; default: the profile's")
    serve.add_argument("--port", type=int, help="0: any free port; default: the profile's")
    serve.add_argument("--without-keys", action="store_true", help="let others than this machine in without a key")
    say = commands.add_parser("say", help="speak a text")
    say.set_defaults(command=_say)
    say.add_argument("text", help="what to say; - reads it from the standard input, as it comes")
    say.add_argument("-o", "--output", type=Path, help="a WAV file; default: play it")
    say.add_argument("--voice", help="one of `rill voices`")
    say.add_argument("--seed", type=int, help="repeats an utterance exactly")
    _add_server(say)
    voices = commands.add_parser("voices", help="list the voices")
    voices.set_defaults(command=_voices)
    _add_server(voices)
    measure = commands.add_parser("bench", help="measure first audio, throughput and underruns under load")
    measure.set_defaults(command=_bench)
    bench.add_arguments(measure, DEFAULT_PROFILE)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a server's address; default: the one on this machine, else one for this call")
    parser.add_argument("--config", type=Path, default=DEFAULT_PROFILE, help="the profile of a server for this call")


# ---- serve


def _serve(options: argparse.Namespace) -> int:
    config = profiles.load(options.config).gateway
    check_exposure(options.host or config.host, without_keys=options.without_keys)
    return uvloop.run(_serve_until_told(options))


async def _serve_until_told(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pair = ServerPair(options.config, _gateway_arguments(options))
    async with pair:
        waiters = [asyncio.create_task(stop.wait()), asyncio.create_task(pair.failure())]
        greeter = asyncio.create_task(_print_address(pair))
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        for task in (greeter, *waiters):
            task.cancel()
        if not stop.is_set():
            return _complain(GatewayError(await waiters[1]), 1)
    return 0


async def _print_address(pair: ServerPair) -> None:
    print(f"Rill is ready at {await pair.address()}", flush=True)


def _gateway_arguments(options: argparse.Namespace) -> list[str]:
    named = [("--host", options.host), ("--port", options.port)]
    arguments = [word for name, value in named if value is not None for word in (name, str(value))]
    return arguments + (["--without-keys"] if options.without_keys else [])


class ServerPair:
    """An engine and a gateway of our own, as child processes: `async with` starts and ends them.

    The engine is started again with back-off when it dies, unless it never got ready: then there is no point. The
    gateway is ended first, so that callers are told, and then the engine.
    """

    def __init__(self, profile: Path, gateway_arguments: list[str]) -> None:
        self._profile = profile
        self._gateway_arguments = gateway_arguments
        self._folder = tempfile.TemporaryDirectory(prefix="rill-")
        self._socket = str(Path(self._folder.name) / "engine.sock")
        self._engine: asyncio.subprocess.Process | None = None
        self._gateway: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        self._address: asyncio.Future[str] = loop.create_future()
        self._failure: asyncio.Future[str] = loop.create_future()

    async def __aenter__(self) -> Self:
        self._engine = await self._start("engine")
        self._gateway = await self._start("gateway", *self._gateway_arguments, stdout=asyncio.subprocess.PIPE)
        self._tasks = [
            asyncio.create_task(self._keep_engine(self._engine), name="keep-engine"),
            asyncio.create_task(self._watch_gateway(self._gateway), name="watch-gateway"),
        ]
        return self

    async def __aexit__(self, *details: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._gateway is not None:
            await _end(self._gateway, profiles.load(self._profile).gateway.drain_ms / 1000 + END_S)
        if self._engine is not None:
            await _end(self._engine, END_S)
        self._folder.cleanup()

    async def address(self) -> str:
        """The page's address, once the engine is ready to speak."""
        return await asyncio.shield(self._address)

    async def failure(self) -> str:
        """Why there is no point in going on; waits until there is a reason."""
        return await asyncio.shield(self._failure)

    async def _start(self, module: str, *arguments: str, stdout: int | None = None) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            "--config",
            str(self._profile),
            "--socket",
            self._socket,
            "--leashed",
            *arguments,
            stdin=asyncio.subprocess.PIPE,  # ends when we do, even if we are killed
            stdout=sys.stderr.fileno() if stdout is None else stdout,
            start_new_session=True,  # a Ctrl-C reaches us alone; we end them in order
            env=_child_environment(),
        )

    async def _keep_engine(self, engine: asyncio.subprocess.Process) -> None:
        wait_s = BACKOFF_S[0]
        while True:
            started = time.monotonic()
            code = await engine.wait()
            if not self._address.done():
                self._fail(f"the engine ended with code {code} before it was ready")
                return
            wait_s = BACKOFF_S[0] if time.monotonic() - started > STEADY_S else min(2 * wait_s, BACKOFF_S[1])
            print(f"rill: the engine ended with code {code}; starting it again in {wait_s:.1f} s", file=sys.stderr)
            await asyncio.sleep(wait_s)
            engine = self._engine = await self._start("engine")

    async def _watch_gateway(self, gateway: asyncio.subprocess.Process) -> None:
        assert gateway.stdout is not None
        async for line in gateway.stdout:
            words = line.decode().split()
            if words and not self._address.done():
                self._address.set_result(words[-1])
        self._fail(f"the gateway ended with code {await gateway.wait()}")

    def _fail(self, why: str) -> None:
        if not self._failure.done():
            self._failure.set_result(why)


def _child_environment() -> dict[str, str]:
    """The same, with this package's own folder importable wherever we were started."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def _server(options: argparse.Namespace) -> AsyncIterator[str]:
    """The address to use: the one named, the one on the default port, or that of a server for this call alone."""
    default = f"http://127.0.0.1:{DEFAULT_PORT}/"
    if options.url is not None:
        yield options.url
    elif await probe(default):
        yield default
    else:
        print("rill: no server is running; starting one for this call", file=sys.stderr)
        async with own_server(options.config) as address:
            yield address


@contextlib.asynccontextmanager
async def own_server(profile: Path) -> AsyncIterator[str]:
    """The address of an engine and a gateway of our own. Raises GatewayError if they never get ready."""
    async with ServerPair(profile, ["--port", "0"]) as pair:
        address, failure = asyncio.create_task(pair.address()), asyncio.create_task(pair.failure())
        await asyncio.wait((address, failure), return_when=asyncio.FIRST_COMPLETED)
        failure.cancel()
        if not address.done():
            address.cancel()
            raise GatewayError(await pair.failure())
        yield address.result()


# ---- bench


def _bench(options: argparse.Namespace) -> int:
    return uvloop.run(bench.run(options, own_server))


# ---- say and voices


@dataclass(slots=True)
class Clock:
    """When the text went out, when audio came first and last, how much came."""

    started: float
    first: float | None = None
    last: float = 0.0
    num_bytes: int = 0

    def take(self, pcm: bytes) -> None:
        self.last = time.perf_counter()
        self.first = self.last if self.first is None else self.first
        self.num_bytes += len(pcm)

    def report(self, context: Context) -> str:
        if self.first is None:
            return f"nothing to say   seed {context.seed}"
        audio_s = self.num_bytes / 2 / RATE_HZ
        return (
            f"first audio {1000 * (self.first - self.started):.0f} ms   "
            f"real-time factor {(self.last - self.started) / audio_s:.2f}   {audio_s:.2f} s of speech   "
            f"voice {context.settings.voice}   seed {context.seed}"
        )


class WavFile:
    """Takes samples into a WAV file."""

    def __init__(self, path: Path) -> None:
        self._bytes = path.open("wb")
        self._file = wave.open(self._bytes, "wb")  # noqa: SIM115 - closed by `close`
        self._file.setnchannels(1)
        self._file.setsampwidth(2)
        self._file.setframerate(RATE_HZ)

    def write(self, pcm: bytes) -> None:
        self._file.writeframes(pcm)

    async def close(self) -> None:
        self._file.close()
        self._bytes.close()


class Player:
    """Takes samples into a player's standard input, which reads them as it plays."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def write(self, pcm: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(pcm)

    async def close(self) -> None:
        """Until all has been played."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def _sink(output: Path | None) -> WavFile | Player:
    if output is not None:
        return WavFile(output)
    for name, arguments in PLAYERS:
        if (path := shutil.which(name)) is not None:
            return Player(await asyncio.create_subprocess_exec(path, *arguments, stdin=asyncio.subprocess.PIPE))
    print(f"rill: no player found ({', '.join(name for name, _ in PLAYERS)}); writing rill.wav", file=sys.stderr)
    return WavFile(Path("rill.wav"))


def _say(options: argparse.Namespace) -> int:
    asyncio.run(_say_once(options))
    return 0


async def _say_once(options: argparse.Namespace) -> None:
    async with _server(options) as url, connect(url) as client:
        sink = await _sink(options.output)
        try:
            await _stream(client, options, sink)
        finally:
            await sink.close()


async def _stream(client: Client, options: argparse.Namespace, sink: WavFile | Player) -> None:
    clock = Clock(time.perf_counter())
    context = await client.open(voice=options.voice, seed=options.seed)
    feeder = asyncio.create_task(context.feed(_read_lines() if options.text == "-" else options.text), name="feeder")
    try:
        async for pcm in context:
            clock.take(pcm)
            sink.write(pcm)
        await feeder
    finally:
        feeder.cancel()
    print(clock.report(context), file=sys.stderr)


async def _read_lines() -> AsyncIterator[str]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line


def _voices(options: argparse.Namespace) -> int:
    return asyncio.run(_list_voices(options))


async def _list_voices(options: argparse.Namespace) -> int:
    async with _server(options) as url, connect(url) as client:
        for voice in await client.voices():
            print(f"{voice.id:24} {voice.name:24} {voice.lang or ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
