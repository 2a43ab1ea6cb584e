"""`rill serve`, `rill key`, `rill say`, `rill voices`, `rill bench`, `rill eval`.

`serve` starts the engine and the gateways as child processes, restarts those that die, and ends all in order.
`say` streams text to a WAV file or to a player. Exit codes: 0 done, 1 it failed, 2 wrong usage or configuration, 130
interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import wave
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import uvloop

from engine import config as profiles
from gateway import bench, evaluation
from gateway.admission import digest, make_key
from gateway.client import Client, Context, connect, probe
from gateway.errors import ConfigError, GatewayError
from gateway.server import check_exposure
from gateway.supervisor import READY, Supervisor, complain

DEFAULT_PORT: Final = profiles.GatewayConfig().port
DEFAULT_PROFILE: Final = Path(__file__).resolve().parent.parent / "configs" / "embedded.toml"
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
    complain(error)
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
    key = commands.add_parser("key", help="make an API key")
    key.set_defaults(command=_key)
    key.add_argument("name", help="whose it is; appears in logs and limits")
    say = commands.add_parser("say", help="speak a text")
    say.set_defaults(command=_say)
    say.add_argument("text", help="what to say; - reads it from the standard input, as it comes")
    say.add_argument("-o", "--output", type=Path, help="a WAV file; default: play it")
    say.add_argument("--voice", help="one of `rill voices`")
    say.add_argument("--seed", type=int, help="repeats an utterance exactly")
    say.add_argument("--lang", help="of the text; one that is not the voice's own is spoken with its accent")
    say.add_argument("--by-words", action="store_true", help="speak as the words come, not clause by clause")
    say.add_argument("--instruct", help="how to say it, in words")
    say.add_argument("--clone", type=Path, help="a recording of 3 to 30 s; its voice is kept for later and used now")
    say.add_argument("--transcript", help="the words spoken in the recording")
    say.add_argument("--name", help="what to call its voice; default: the file's name")
    _add_server(say)
    voices = commands.add_parser("voices", help="list the voices")
    voices.set_defaults(command=_voices)
    voices.add_argument("--drop", metavar="ID", help="forget one that was made of a recording")
    _add_server(voices)
    measure = commands.add_parser("bench", help="measure first audio, throughput and underruns under load")
    measure.set_defaults(command=_bench)
    bench.add_arguments(measure, DEFAULT_PROFILE)
    judge = commands.add_parser("eval", help="measure how well a list of texts is spoken (needs the `eval` extra)")
    judge.set_defaults(command=_eval)
    evaluation.add_arguments(judge, DEFAULT_PROFILE)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a server's address; default: the one on this machine, else one for this call")
    parser.add_argument("--key", default=os.environ.get("RILL_KEY"), help="an API key; default: RILL_KEY's value")
    parser.add_argument("--config", type=Path, default=DEFAULT_PROFILE, help="the profile of a server for this call")


# ---- serve


def _serve(options: argparse.Namespace) -> int:
    config = profiles.load(options.config).gateway
    check_exposure(replace(config, host=options.host or config.host), without_keys=options.without_keys)
    return uvloop.run(_serve_until_told(options))


async def _serve_until_told(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Supervisor(
        options.config, host=options.host, port=options.port, open_to_all=options.without_keys
    ) as supervisor:
        has_terminal = sys.stdin is not None and sys.stdin.isatty()  # its end is a hang-up, a daemon's is to read anew
        loop.add_signal_handler(signal.SIGHUP, stop.set if has_terminal else supervisor.reload)
        waiters = [asyncio.create_task(stop.wait()), asyncio.create_task(supervisor.failure())]
        greeter = asyncio.create_task(_print_address(supervisor))
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        for task in (greeter, *waiters):
            task.cancel()
        if not stop.is_set():
            return _complain(GatewayError(await waiters[1]), 1)
    return 0


async def _print_address(supervisor: Supervisor) -> None:
    print(f"{READY}{await supervisor.address()}", flush=True)


# ---- key


def _key(options: argparse.Namespace) -> int:
    """The key goes to the standard output, once; what the server may know goes to the profile."""
    key = make_key()
    print(f"# For the profile; the server keeps no more than this:\n[gateway.keys.{json.dumps(options.name)}]")
    print(f'sha256 = "{digest(key)}"')
    print(f"# For the caller, shown this once:\n# {key}")
    return 0


@contextlib.asynccontextmanager
async def _server(options: argparse.Namespace) -> AsyncIterator[str]:
    """The address to use: the one named, the one on the default port, or that of a server for this call alone."""
    default = f"http://127.0.0.1:{DEFAULT_PORT}/"
    if options.url is not None:
        yield options.url
    elif await probe(default, key=options.key):
        yield default
    else:
        complain("no server is running; starting one for this call")
        async with own_server(options.config) as address:
            yield address


@contextlib.asynccontextmanager
async def own_server(profile: Path) -> AsyncIterator[str]:
    """The address of an engine and a gateway of our own. Raises GatewayError if they never get ready."""
    async with Supervisor(profile, port=0) as supervisor:
        address, failure = asyncio.create_task(supervisor.address()), asyncio.create_task(supervisor.failure())
        await asyncio.wait((address, failure), return_when=asyncio.FIRST_COMPLETED)
        failure.cancel()
        if not address.done():
            address.cancel()
            raise GatewayError(await supervisor.failure())
        yield address.result()


# ---- bench and eval


def _bench(options: argparse.Namespace) -> int:
    return uvloop.run(bench.run(options, own_server))


def _eval(options: argparse.Namespace) -> int:
    return uvloop.run(evaluation.run(options, own_server))


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
    if (options.clone is None) != (options.transcript is None):
        raise ConfigError("--clone FILE and --transcript TEXT go together")
    async with _server(options) as url, connect(url, key=options.key) as client:
        if options.clone is not None:
            options.voice = await _clone(client, options)
        sink = await _sink(options.output)
        try:
            await _stream(client, options, sink)
        finally:
            await sink.close()


async def _clone(client: Client, options: argparse.Namespace) -> str:
    """The id of the recording's voice, which the server has from now on."""
    recording = await asyncio.to_thread(options.clone.read_bytes)
    name = options.name or options.clone.stem
    voice = await client.put_voice(recording, options.transcript, name=name, lang=options.lang)
    print(f"rill: voice {voice.voice}, {voice.name}, {voice.ms / 1000:.1f} s", file=sys.stderr)
    return voice.voice


async def _stream(client: Client, options: argparse.Namespace, sink: WavFile | Player) -> None:
    clock = Clock(time.perf_counter())
    context = await client.open(
        voice=options.voice,
        seed=options.seed,
        lang=options.lang,
        instruct=options.instruct,
        by_words=options.by_words,
    )
    feeder = asyncio.create_task(context.feed(_read_in() if options.text == "-" else options.text), name="feeder")
    try:
        async for pcm in context:
            clock.take(pcm)
            sink.write(pcm)
        await feeder
    finally:
        feeder.cancel()
    print(clock.report(context), file=sys.stderr)


async def _read_in() -> AsyncIterator[str]:
    """The standard input as it comes, which need not be line by line."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := await asyncio.to_thread(os.read, sys.stdin.fileno(), 4096):
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


def _voices(options: argparse.Namespace) -> int:
    return asyncio.run(_list_voices(options))


async def _list_voices(options: argparse.Namespace) -> int:
    async with _server(options) as url, connect(url, key=options.key) as client:
        for voice in await client.voices() if options.drop is None else await client.drop_voice(options.drop):
            seconds = f"{voice.ms / 1000:.1f} s" if voice.ms else ""
            print(f"{voice.id:24} {voice.name:24} {voice.lang or '':8} {seconds}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
