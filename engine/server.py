"""The engine's process: the pipe on the event loop, the device on its own thread, text work on another.

Each gateway link has an outbox; all that a step has to say to it leaves as one message. What a context may have in an
outbox is bounded by its credit; a link that stops reading altogether is cut at OUTBOX_BYTES.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket as sockets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import msgpack  # type: ignore[import-untyped]
import torch
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed

from engine import checkpoint as checkpoints
from engine.batch import PREFIX_ROWS, Models, Runner
from engine.cloning import Cloning, CloningModels
from engine.conditioning import Conditioner
from engine.config import Config, ConfigError, EngineConfig
from engine.costs import Costs
from engine.decoding import BadVoice
from engine.flow import FlowStore
from engine.frontend import Tokenizer
from engine.leash import on_parent_gone
from engine.loop import Deliver, Engine, Inbox, LinkClosed, LinkOpened, Reader, Said, Stop, VoiceMade
from engine.messages import SAMPLE_RATE_HZ, Audio, ToEngine, ToGateway, VoiceDrop, VoicePut, pack, unpack
from engine.scheduler import Limits, Scheduler
from engine.talker import TalkerStore
from engine.voice_store import VoiceStore
from engine.voices import Voice, read_voices

logger = logging.getLogger(__name__)

OUTBOX_BYTES = 256 << 20
MESSAGE_BYTES = 16 << 20  # from a gateway
BAD_MESSAGE = 4400
GOING_AWAY = 1001
RESTARTING = 1012
FLUSH_S = 2.0

TALKER_PAGES_PER_LANE = 48
FLOW_PAGES_PER_LANE = 24
GATHER_S = 20e-6  # of each listener: a turn for 256 of them has 5 ms, unless somebody runs dry
SWITCH_S = 5e-4  # that the other threads may keep the interpreter from the device's
SHARE_OF_RAM = 0.25
SHARE_OF_GPU = 0.8


# The pipe


class Link:
    """One gateway's connection and what waits for it."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.num_bytes = 0
        self._outbox: asyncio.Queue[list[ToGateway]] = asyncio.Queue()

    def put(self, messages: list[ToGateway]) -> None:
        self.num_bytes += _weight(messages)
        if self.num_bytes > OUTBOX_BYTES:
            logger.error("a gateway lets %d bytes wait, the limit is %d: its link is cut", self.num_bytes, OUTBOX_BYTES)
            self.connection.transport.abort()
        else:
            self._outbox.put_nowait(messages)

    async def pump_out(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                messages = await self._outbox.get()
                await self.connection.send(msgpack.packb([pack(message) for message in messages]))
                self.num_bytes -= _weight(messages)
                self._outbox.task_done()

    async def flush(self) -> None:
        await self._outbox.join()


def _weight(messages: list[ToGateway]) -> int:
    return sum(len(message.pcm) if isinstance(message, Audio) else 64 for message in messages)


class Pipe:
    """All links. `post` may be called from any thread, the rest belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.inbox: Inbox | None = None  # the engine's, once there is one
        self.cloning: Cloning | None = None  # likewise
        self._loop = loop
        self._links: dict[int, Link] = {}
        self._numbers = count()

    @property
    def links(self) -> list[int]:
        return list(self._links)

    def post(self, outgoing: list[tuple[int, ToGateway]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(self._spread, outgoing)

    def _spread(self, outgoing: list[tuple[int, ToGateway]]) -> None:
        shares: defaultdict[int, list[ToGateway]] = defaultdict(list)
        for number, message in outgoing:
            shares[number].append(message)
        for number, messages in shares.items():
            if (link := self._links.get(number)) is not None:
                link.put(messages)

    async def handle(self, connection: ServerConnection) -> None:
        assert self.inbox is not None, "the pipe opens after the engine is warm"
        number, link = next(self._numbers), Link(connection)
        self._links[number] = link
        sender = asyncio.create_task(link.pump_out(), name=f"link-{number}-out")
        self.inbox.put(LinkOpened(number))
        try:
            await self._pump_in(number, link, self.inbox)
        finally:
            del self._links[number]
            self.inbox.put(LinkClosed(number))
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sender

    async def _pump_in(self, number: int, link: Link, inbox: Inbox) -> None:
        try:
            async for data in link.connection:
                inbox.put(*self._sort(number, read(data)))
        except ConnectionClosed:
            logger.info("link %d was lost", number)
        except (ValueError, msgpack.UnpackException) as error:
            logger.error("link %d sent what is no message: %s", number, error)
            await link.connection.close(BAD_MESSAGE, "not a message of the pipe")

    def _sort(self, number: int, messages: Iterable[ToEngine]) -> Iterator[Said]:
        """What the engine's loop is to hear; recordings go elsewhere."""
        for message in messages:
            if isinstance(message, VoicePut | VoiceDrop):
                assert self.cloning is not None, "the pipe opens after the engine is warm"
                self.cloning.take(number, message)
            else:
                yield Said(number, message)

    async def close(self, code: int) -> None:
        """Send what waits, for FLUSH_S at most, and end every link."""
        links = list(self._links.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await asyncio.gather(*(link.flush() for link in links))
        await asyncio.gather(*(link.connection.close(code) for link in links))


def read(data: bytes | str) -> Iterator[ToEngine]:
    """The messages of one pipe message. Raises ValueError for anything else."""
    if isinstance(data, str):
        raise ValueError("a text frame")
    tables = msgpack.unpackb(data)
    if not isinstance(tables, list):
        raise ValueError(f"a list of messages was due, this is {type(tables).__name__}")
    for table in tables:
        message = unpack(table)
        if not isinstance(message, ToEngine):
            raise ValueError(f"{type(message).__name__} is no message to the engine")
        yield message


# Building


def forbid_tf32() -> None:
    """float32 means float32 on CUDA too: ten bits of a convolution's input would be heard in a float32 profile."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def build(config: Config, deliver: Deliver, worker: Executor) -> Engine:
    """A cold engine: models loaded, caches laid out. Runs on the device's thread, whose settings it changes."""
    settings = config.engine.resolved(has_cuda=torch.cuda.is_available())
    torch.set_num_threads(settings.threads)
    forbid_tf32()
    checkpoint = checkpoints.load(config.model.folder, settings.device, getattr(torch, settings.dtype))
    models = with_caches(checkpoint, settings)
    tokenizer = checkpoint.tokenizer()
    voices = voice_store(known_voices(checkpoint, config, tokenizer), config)
    reader = Reader(
        tokenizer,
        voices,
        worker=worker,
        sampling=checkpoint.settings.sampling,
        code_ratios=checkpoint.settings.code_ratios,
        default_voice=config.model.voice or next(iter(voices.builtin), ""),
        clause_tokens=settings.clause_tokens,
        can_stream=settings.mode == "streaming",
        mix=checkpoint.settings.mix,
    )
    if reader.default_voice not in voices.builtin:
        raise ConfigError(f"[model] voice is {reader.default_voice!r}, known are {sorted(voices.builtin)}")
    costs = Costs(models.flow.shape.steps)
    return Engine(
        Runner(
            models,
            lanes=settings.lanes,
            rows_per_launch=settings.rows_per_launch,
            prompt_remainder=settings.prompt_remainder,
            keeps_flow=settings.flow_cache,
            is_final_causal=settings.last_hop == "causal",
            overlaps=settings.overlap,
            costs=costs,
        ),
        Scheduler(limits(settings), costs),
        reader,
        deliver=deliver,
        model=config.model.folder.name,
        gauges_s=settings.gauges_ms / 1e3,
    )


def limits(settings: EngineConfig) -> Limits:
    return Limits(
        lanes=settings.lanes,
        waiting=settings.waiting,
        waiting_s=settings.waiting_ms / 1e3,
        is_serial=settings.rows_per_launch == 1,
        lookahead_samples=int(settings.lookahead_s * SAMPLE_RATE_HZ),
        prefill_rows=settings.prefill_rows,
        flow_rows=settings.flow_rows,
        flow_rows_least=settings.flow_rows_least,
        share=settings.share,
        overlaps=settings.overlap,
        gather_s=GATHER_S if settings.rows_per_launch > 1 else 0.0,
        clauses=settings.clauses,
    )


def with_caches(checkpoint: checkpoints.Checkpoint, settings: EngineConfig) -> Models:
    talker, flow = checkpoint.talker, checkpoint.flow
    device, dtype = flow.device, flow.dtype
    talker_pages = settings.talker_pages or settings.lanes * TALKER_PAGES_PER_LANE
    talker_store = TalkerStore(talker.shape, talker_pages, device=device, dtype=dtype)
    page_bytes = FlowStore.page_bytes(flow.shape, dtype)
    flow_pages = settings.flow_pages or pages_that_fit(page_bytes, settings.lanes * FLOW_PAGES_PER_LANE, device)
    logger.info("%d talker pages, %d flow pages of %d bytes", talker_pages, flow_pages, page_bytes)
    return Models(
        talker=talker,
        flow=flow,
        hift=checkpoint.hift,
        talker_store=talker_store,
        flow_store=FlowStore(flow.shape, flow_pages, device=device, dtype=dtype, lanes=settings.lanes + PREFIX_ROWS),
        silent_ids=checkpoint.settings.silent_ids,
    )


def pages_that_fit(page_bytes: int, wanted: int, device: torch.device) -> int:
    """As many as wanted, or as a fixed share of the memory holds. On the CPU an untouched page costs nothing."""
    if device.type == "cuda":
        room = SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]
    else:
        room = SHARE_OF_RAM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(wanted, int(room) // page_bytes))


def known_voices(checkpoint: checkpoints.Checkpoint, config: Config, tokenizer: Tokenizer) -> dict[str, Voice]:
    """The checkpoint's own voices, and one per recording in the folder of prompts. Raises ConfigError."""
    voices = read_voices(checkpoint.spk2info) if checkpoint.spk2info is not None else {}
    if config.model.prompts:
        conditioner = Conditioner(*checkpoint.cloning_models(), tokenizer)
        for wave in sorted(Path(config.model.prompts).expanduser().glob("*.wav")):
            try:
                transcript = wave.with_suffix(".txt").read_text(encoding="utf-8")
                voices[wave.stem] = conditioner.voice(wave, transcript, name=wave.stem)
            except (BadVoice, OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"[model] prompts: {wave.name}: {error}") from error
    if not voices:
        raise ConfigError(f"{checkpoint.folder} holds no voices; name a folder of recordings in [model] prompts")
    return voices


def voice_store(builtin: dict[str, Voice], config: Config) -> VoiceStore:
    """With the voices that callers registered earlier with the same models. Raises VoiceFileError.

    The profile's default voice is listed first: gateways take the first one for a caller who names none.
    """
    models, folder = cloning_models(config.model.folder), config.model.voices
    first = {key: builtin[key] for key in (config.model.voice,) if key in builtin}
    return VoiceStore(
        {**first, **builtin},
        Path(folder).expanduser() / models.fingerprint() if models is not None and folder else None,
        memory_bytes=config.model.voice_memory_mb << 20,
        disk_bytes=config.model.voice_disk_mb << 20,
        per_owner=config.model.voices_per_key,
    )


def cloning_models(folder: Path) -> CloningModels | None:
    """None where the checkpoint lacks one of the two encoders."""
    tokenizer, encoder = (checkpoints.found(folder / name) for name in (checkpoints.TOKENIZER, checkpoints.ENCODER))
    if tokenizer is None or encoder is None:
        return None
    settings = checkpoints.read_settings(folder / checkpoints.SETTINGS_FILE)
    return CloningModels(tokenizer, encoder, folder / checkpoints.BACKBONE, settings.reads_ascii)


# The process


class StartCancelled(Exception):
    """Somebody stopped the engine before it was warm."""


class WarmUp:
    """Shows how far the start has come: a bar on a terminal, else a line of the log for each stage."""

    STAGES = ("talker", "flow", "hift", "speak")

    def __init__(self, is_stopping: Callable[[], bool] = lambda: False, shown: TextIO = sys.stderr) -> None:
        self._is_stopping = is_stopping
        self._shown, self._is_terminal = shown, shown.isatty()
        self._started = time.perf_counter()
        self._num_done, self._stage = 0, ""

    def __call__(self, name: str) -> None:
        """`name` comes next; its first word is its stage. Raises StartCancelled, on the thread that warms up."""
        if self._is_stopping():
            raise StartCancelled
        stage = name.split()[0].rstrip(":")
        if self._is_terminal:
            done = self.STAGES.index(stage) if stage in self.STAGES else 0
            bar = "#" * 5 * done + "." * 5 * (len(self.STAGES) - done)
            self._shown.write(f"\r\x1b[2Kwarming up [{bar}] {self._seconds:.0f} s, {self._num_done} ready, next {name}")
            self._shown.flush()
        elif stage != self._stage:
            logger.info("warming up, %s: %d ready after %.0f s", stage, self._num_done, self._seconds)
        self._num_done, self._stage = self._num_done + 1, stage

    def end(self) -> None:
        if self._is_terminal:
            self._shown.write("\r\x1b[2K")
        logger.info("warm-up ended after %.1f s", self._seconds)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started


async def serve(
    config: Config, socket: Path, on_ready: Callable[[], None] = lambda: None, *, is_leashed: bool = False
) -> int:
    """Load, warm up, open the pipe, speak until SIGTERM or SIGINT or, leashed, the parent's end. -> the exit code.

    The socket appears when the engine is warm, so a gateway that reaches it is served at once.
    """
    _claim(socket)
    sys.setswitchinterval(SWITCH_S)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if is_leashed:
        on_parent_gone(stopping.set)
    device = ThreadPoolExecutor(1, thread_name_prefix="device")
    text = ThreadPoolExecutor(1, thread_name_prefix="text")
    try:
        return await _serve(config, socket, on_ready, stopping, device, text)
    finally:
        text.shutdown(wait=False, cancel_futures=True)
        device.shutdown(wait=True)
        _discard(socket)


async def _serve(
    config: Config,
    socket: Path,
    on_ready: Callable[[], None],
    stopping: asyncio.Event,
    device: ThreadPoolExecutor,
    text: ThreadPoolExecutor,
) -> int:
    loop = asyncio.get_running_loop()
    pipe = Pipe(loop)
    engine = await loop.run_in_executor(device, build, config, pipe.post, text)
    warm_up = WarmUp(stopping.is_set)
    has_graphs = config.engine.graphs
    try:
        await loop.run_in_executor(device, lambda: engine.warm(has_graphs=has_graphs, on_progress=warm_up))
    except StartCancelled:
        logger.info("stopped before it was ready")
        return 0
    finally:
        warm_up.end()
    pipe.inbox = engine.inbox
    pipe.cloning = cloning = Cloning(
        engine.reader.voices,
        cloning_models(config.model.folder),
        post=pipe.post,
        links=lambda: pipe.links,
        ready=engine.ready,
        on_made=lambda voice: engine.inbox.put(VoiceMade(voice)),
        threads=config.engine.cloning_threads,
    )
    server = await unix_serve(
        pipe.handle, str(socket), compression=None, max_size=MESSAGE_BYTES, ping_interval=None, close_timeout=FLUSH_S
    )
    running: asyncio.Future[None] = loop.run_in_executor(device, engine.run)
    stop = asyncio.create_task(stopping.wait(), name="stop-signal")
    logger.info("ready: %s at %s", engine.model, socket)
    on_ready()
    first: list[asyncio.Future[Any]] = [running, stop]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    engine.inbox.put(Stop())
    await asyncio.wait([running])
    fault = running.exception()
    if fault is not None:
        logger.critical("the device loop has failed", exc_info=fault)
        engine.abandon()
    await cloning.close()
    await asyncio.sleep(0)  # let the loop's last posts reach the outboxes
    await pipe.close(GOING_AWAY if fault is None else RESTARTING)
    server.close()
    await server.wait_closed()
    return 0 if fault is None else 1


def _claim(socket: Path) -> None:
    """A dead engine's socket may be replaced, a living one's may not. Raises ConfigError.

    Whoever may enter the folder may speak, so a folder that is made here is its owner's alone.
    """
    with contextlib.closing(sockets.socket(sockets.AF_UNIX)) as probe:
        try:
            probe.connect(str(socket))
        except OSError:
            socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
    raise ConfigError(f"another engine listens at {socket}")


def _discard(socket: Path) -> None:
    socket.unlink(missing_ok=True)
