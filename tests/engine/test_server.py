"""The real engine process on a tiny checkpoint, spoken to over its pipe."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed

from engine import checkpoint as checkpoints
from engine.config import Config, ConfigError, EngineConfig, ModelConfig
from engine.messages import (
    Audio,
    Cancel,
    Cancelled,
    Clause,
    Done,
    End,
    Failed,
    Gauges,
    Message,
    Open,
    Opened,
    Ready,
    ToEngine,
    pack,
    unpack,
)
from engine.server import WarmUp, _claim, _serve, known_voices, read
from tests.random_checkpoint import TINY, random_checkpoint

DEADLINE_S = 60


class Process:
    """`python -m engine` with a socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "run" / "engine.sock"
        profile = folder / "profile.toml"
        random_checkpoint(folder / "voice", TINY)
        profile.write_text(
            f'[engine]\ndevice = "cpu"\nthreads = 1\nlanes = 4\nwaiting = 2\ngauges_ms = 200\n'
            f'[model]\ncheckpoint = "{folder / "voice"}"\n'
        )
        command = [sys.executable, "-m", "engine", "--config", str(profile), "--socket", str(self.socket)]
        self.popen = subprocess.Popen([*command, "--log", "WARNING"], stderr=subprocess.PIPE, text=True)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.socket.exists():
            assert self.popen.poll() is None, "the engine ended before it was ready"
            assert time.monotonic() < deadline, "the engine isn't ready in time"
            time.sleep(0.05)  # another process: no clock of ours to turn

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        self.popen.send_signal(number)
        _, errors = self.popen.communicate(timeout=DEADLINE_S)
        return self.popen.returncode, errors


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("engine"))
    try:
        process.wait_ready()
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


class Gateway:
    """One link, with all that came over it."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.heard: list[Message] = []

    async def tell(self, *messages: ToEngine) -> None:
        await self.connection.send(msgpack.packb([pack(message) for message in messages]))

    async def until(self, is_it: Callable[[Message], bool]) -> Message:
        """Read on to the first such message."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                tables = msgpack.unpackb(await self.connection.recv())
                messages = [unpack(table) for table in tables]
                self.heard += messages
                for message in messages:
                    if is_it(message):
                        return message

    async def speak(self, context: int, text: str, *, seed: int = 1) -> bytes:
        await self.tell(
            Open(context=context, epoch=0, voice="", seed=seed),
            Clause(context=context, epoch=0, index=0, text=text),
            End(context=context, epoch=0),
        )
        await self.until(lambda message: isinstance(message, Done | Failed) and message.context == context)
        return self.pcm(context)

    def pcm(self, context: int) -> bytes:
        return b"".join(m.pcm for m in self.heard if isinstance(m, Audio) and m.context == context)


@contextlib.asynccontextmanager
async def linked(process: Process) -> AsyncIterator[Gateway]:
    async with unix_connect(str(process.socket), compression=None, max_size=None) as connection:
        yield Gateway(connection)


def is_free(message: Message) -> bool:
    return isinstance(message, Gauges) and message.contexts == message.lanes_used == message.flow_pages == 0


async def test_the_first_message_is_ready_with_the_voices(process: Process) -> None:
    async with linked(process) as gateway:
        await gateway.until(lambda message: True)
        ready = gateway.heard[0]
        assert isinstance(ready, Ready)
        assert [voice.id for voice in ready.voices] == ["anna"]
        assert (ready.sample_rate, ready.lanes) == (24_000, 4)


async def test_a_context_is_spoken_and_repeats_itself(process: Process) -> None:
    async with linked(process) as gateway:
        first = await gateway.speak(1, "Hi.", seed=3)
        assert len(first) > 24_000
        assert first == await gateway.speak(2, "Hi.", seed=3)
        assert first != await gateway.speak(3, "Hi.", seed=4)


async def test_two_gateways_may_use_the_same_numbers(process: Process) -> None:
    async with linked(process) as one, linked(process) as two:
        alone = await one.speak(7, "Hi.", seed=5)
        both = await asyncio.gather(one.speak(8, "Yes.", seed=5), two.speak(8, "Hi.", seed=5))
        assert both[1] == alone
        assert both[0] != alone


async def test_cancel_is_answered_and_nothing_follows(process: Process) -> None:
    async with linked(process) as gateway:
        await gateway.tell(
            Open(context=1, epoch=4, voice="", seed=1), Clause(context=1, epoch=4, index=0, text="Hello there, you.")
        )
        await gateway.until(lambda message: isinstance(message, Audio))
        await gateway.tell(Cancel(context=1, epoch=4))
        await gateway.until(lambda message: isinstance(message, Cancelled))
        await gateway.until(is_free)
        kinds = [type(m) for m in gateway.heard if getattr(m, "context", None) == 1]
        assert kinds[0] is Opened
        assert kinds[-1] is Cancelled


async def test_a_lost_link_frees_its_contexts(process: Process) -> None:
    async with linked(process) as watcher:
        async with linked(process) as gateway:
            for context in range(6):
                await gateway.tell(
                    Open(context=context, epoch=0, voice="", seed=1),
                    Clause(context=context, epoch=0, index=0, text="Hello there, you."),
                )
            await gateway.until(lambda message: isinstance(message, Audio))
            await watcher.until(lambda message: isinstance(message, Gauges) and message.contexts == 6)
            gateway.connection.transport.abort()
        await watcher.until(is_free)


async def test_overload_is_refused_with_a_retry(process: Process) -> None:
    async with linked(process) as gateway:
        await gateway.tell(*(Open(context=context, epoch=0, voice="", seed=1) for context in range(8)))
        failed = await gateway.until(lambda message: isinstance(message, Failed))
        assert isinstance(failed, Failed)
        assert (failed.code, failed.retry) == ("overloaded", True)


@pytest.mark.parametrize("data", ["text", b"\xc1", b"\x80", b"\x91\x01", b"\x91\x80"], ids=repr)
async def test_what_is_no_message_ends_its_own_link_only(process: Process, data: str | bytes) -> None:
    async with linked(process) as good, linked(process) as bad:
        with pytest.raises(ConnectionClosed) as closed:
            await bad.connection.send(data)
            await bad.until(lambda message: False)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4400
        assert len(await good.speak(1, "Hi.")) > 0


def test_a_message_for_a_gateway_is_none_for_the_engine() -> None:
    with pytest.raises(ValueError, match="Opened is no message to the engine"):
        list(read(msgpack.packb([pack(Opened(context=1, epoch=1))])))


def test_a_living_engines_socket_is_not_taken_over(process: Process) -> None:
    with pytest.raises(ConfigError, match="another engine listens"):
        _claim(process.socket)


@pytest.mark.slow
async def test_sigterm_ends_it_cleanly_and_every_context_is_told(tmp_path: Path) -> None:
    process = Process(tmp_path)
    try:
        process.wait_ready()
        async with linked(process) as gateway:
            await gateway.tell(
                Open(context=1, epoch=0, voice="", seed=1),
                Clause(context=1, epoch=0, index=0, text="Hello there, you and you and you."),
            )
            await gateway.until(lambda message: isinstance(message, Audio))
            stopped = asyncio.create_task(asyncio.to_thread(process.stop, signal.SIGTERM))
            failed = await gateway.until(lambda message: isinstance(message, Failed))
            assert isinstance(failed, Failed)
            assert (failed.code, failed.retry) == ("engine_restart", True)
            with pytest.raises(ConnectionClosed):
                await gateway.until(lambda message: False)
        code, errors = await stopped
        assert (code, errors) == (0, "")
        assert not process.socket.exists()
    finally:
        process.popen.kill()


async def test_a_stop_before_it_is_warm_ends_the_start(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "voice", TINY)
    config = Config(model=ModelConfig(checkpoint=str(tmp_path / "voice")), engine=EngineConfig(device="cpu", lanes=2))
    stopping, socket = asyncio.Event(), tmp_path / "engine.sock"
    stopping.set()
    with ThreadPoolExecutor(1) as device, ThreadPoolExecutor(1) as text:
        code = await _serve(config, socket, lambda: pytest.fail("it was ready"), stopping, device, text)
    assert code == 0 and not socket.exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_start_shows_a_bar_on_a_terminal_and_lines_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    names = ["talker step 64", "flow: step 64, 8 pages", "flow: step 32, 8 pages", "hift 64 x 64", "speak as anna"]
    shown = Terminal()
    bar = WarmUp(shown=shown)
    for name in names:
        bar(name)
    bar.end()
    steps = shown.getvalue().split("\r\x1b[2K")[1:]
    assert [step.partition("]")[0] for step in steps] == [
        "warming up [....................",
        "warming up [#####...............",
        "warming up [#####...............",
        "warming up [##########..........",
        "warming up [###############.....",
        "",
    ]
    assert steps[2].endswith("2 ready, next flow: step 32, 8 pages")
    caplog.set_level("INFO", logger="engine.server")
    log = io.StringIO()
    lines = WarmUp(shown=log)
    for name in names:
        lines(name)
    lines.end()
    assert log.getvalue() == ""
    assert [record.message.split(":")[0] for record in caplog.records[-5:-1]] == [
        f"warming up, {stage}" for stage in WarmUp.STAGES
    ]


@pytest.mark.parametrize(("suffix", "why"), [(".txt", "the file can't be decoded"), (".no", ".*ann.txt")])
def test_a_prompt_without_sound_or_words_is_named(suffix: str, why: str, tmp_path: Path) -> None:
    for name in (".wav", suffix):
        (tmp_path / f"ann{name}").write_bytes(b"RIFF")
    config = Config(model=ModelConfig(prompts=str(tmp_path)))
    checkpoint = checkpoints.load(config.model.folder, "cpu")
    with pytest.raises(ConfigError, match=rf"\[model\] prompts: ann.wav: {why}"):
        known_voices(checkpoint, config, checkpoint.tokenizer())


def test_a_checkpoint_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text('[model]\ncheckpoint = "/nowhere"\n')
    command = [sys.executable, "-m", "engine", "--config", str(profile), "--socket", str(tmp_path / "s")]
    done = subprocess.run([*command, "--log", "ERROR"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert done.stderr == "engine: no checkpoint folder /nowhere\n"
