"""A caller's recording becomes a voice: decoded in one child process, conditioned in another, kept in the store.

1. VoicePut comes over the pipe, with the whole file. 2. Its address, the hash of the bytes, the transcript and all
that turns them into numbers, may be kept already: then the owner has it at once. 3. `decoding` makes samples of the
file, in a child with limits that ends with it. 4. The conditioning child, which holds the two ONNX models and stays,
makes speech tokens, mel and speaker vector. 5. The store keeps them; all links hear of the new list; the asker gets
VoiceKept. Nothing here touches the device or its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import struct
import sys
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import msgpack  # type: ignore[import-untyped]
import torch

from engine.decoding import BadVoice, Floats, decode_in_child
from engine.messages import Failed, Ready, ToGateway, VoiceDrop, VoiceDropped, VoiceKept, VoicePut
from engine.voice_store import StoreFull, VoiceStore
from engine.voices import MEL_BANDS, Voice

if TYPE_CHECKING:
    from engine.conditioning import Conditioner

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

FRONT_END = 2  # grows when a feature, the normaliser or the prompt's form changes: kept voices are made anew then
WAITING = 8  # recordings that may wait for their turn; the next is refused
BUSY_AFTER_MS = 2_000
PATIENCE_S = 180.0  # for one recording: the release's tokenizer takes seconds on a slow core, and its load longer
END_S = 2.0
ROOT = Path(__file__).resolve().parent.parent  # what the child imports this package from

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class CloningModels:
    """The files that a new voice is made with."""

    speech_tokenizer: Path
    speaker_encoder: Path
    tokenizer: Path  # a folder
    reads_ascii: bool = False  # Settings.reads_ascii

    def fingerprint(self) -> str:
        """Names a set of files by their names, sizes and both ends: the largest has a gigabyte."""
        digest = hashlib.sha256()
        for path in (self.speech_tokenizer, self.speaker_encoder, *sorted(self.tokenizer.iterdir())):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name}\0{size}\0".encode())
                for start in (0, max(0, size - 65_536)):
                    file.seek(start)
                    digest.update(file.read(65_536))
        return digest.hexdigest()[:16]


def address(message: VoicePut, fingerprint: str) -> str:
    """What the same recording, transcript and language always get from the same models and front end."""
    head = "\0".join((str(FRONT_END), fingerprint, message.lang, message.transcript))
    return hashlib.sha256(head.encode("utf-8", "surrogatepass") + b"\0" + message.audio).hexdigest()[:24]


class ChildLost(Exception):
    """The conditioning child died or took too long; the next recording gets a new one."""


class Cloning:
    """Serves the voice messages of all links, one recording at a time. Belongs to the event loop.

    models   None: this checkpoint can take up no voice      ready   the greeting that lists the voices as they are now
    """

    def __init__(
        self,
        store: VoiceStore,
        models: CloningModels | None,
        *,
        post: Callable[[list[tuple[int, ToGateway]]], None],
        links: Callable[[], Iterable[int]],
        ready: Callable[[], Ready],
        on_made: Callable[[Voice], None] = lambda voice: None,
        threads: int = 1,
    ) -> None:
        self._store, self._models = store, models
        self._post, self._links, self._ready, self._on_made = post, links, ready, on_made
        self._fingerprint = "" if models is None else models.fingerprint()
        self._child = None if models is None else ConditioningChild(models, threads)
        self._turn = asyncio.Lock()
        self._num_puts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="voices")  # one: what was asked first is done first

    def take(self, link: int, message: VoicePut | VoiceDrop) -> None:
        if isinstance(message, VoiceDrop):
            self._start(self._drop(link, message))
        elif self._child is None:
            self._fail(link, message, "unsupported", "this server's model takes no new voices")
        elif self._num_puts > WAITING:
            self._fail(link, message, "overloaded", f"{WAITING} recordings wait already", after_ms=BUSY_AFTER_MS)
        else:
            self._num_puts += 1
            self._start(self._put(link, message, self._child))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._child is not None:
            await self._child.close()
        self._disk.shutdown(wait=False)

    async def _on_disk(self, change: Callable[..., Result], *arguments: Any) -> Result:
        """A change of the store, off the event loop: a slow disk holds up nobody's speech."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, change, *arguments)

    async def _drop(self, link: int, message: VoiceDrop) -> None:
        """A voice that is gone already, or never was, is dropped as well; one that is there for others is not."""
        answer = VoiceDropped(context=message.context, epoch=message.epoch)
        try:
            is_dropped, is_there = await self._on_disk(self._dropped, message)
        except OSError:
            logger.exception("voice %s was not dropped", message.voice)
            self._fail(link, message, "internal", "the voice could not be removed; try again")
            return
        if is_dropped:
            self._post([*self._news(), (link, answer)])
        elif not is_there:
            self._post([(link, answer)])
        else:
            self._fail(link, message, "unknown_voice", "no voice of yours has this id")

    def _dropped(self, message: VoiceDrop) -> tuple[bool, bool]:
        """Whether the asker has dropped it now, and whether it is there still. On the disk's thread."""
        return self._store.drop(message.voice, message.owner), message.voice in self._store

    async def _put(self, link: int, message: VoicePut, child: ConditioningChild) -> None:
        try:
            kept = self._store.info(await self._kept(message, child))
        except BadVoice as error:
            self._fail(link, message, "bad_voice", str(error))
        except StoreFull as error:
            self._fail(link, message, "quota", str(error))
        except ChildLost as error:
            logger.error("a recording of %d bytes: %s", len(message.audio), error)
            self._fail(link, message, "internal", "the recording could not be worked on; try again")
        except Exception:
            logger.exception("a recording of %d bytes: our bug", len(message.audio))
            self._fail(link, message, "internal", "the recording could not be worked on; try again")
        else:
            answer = VoiceKept(context=message.context, epoch=message.epoch, voice=kept)
            self._post([*self._news(), (link, answer)])
        finally:
            self._num_puts -= 1

    async def _kept(self, message: VoicePut, child: ConditioningChild) -> str:
        """The voice's id once it is kept. Raises BadVoice, StoreFull or ChildLost."""
        key = address(message, self._fingerprint)
        async with self._turn:  # so that the same recording, sent twice at once, is worked on once
            if not await self._on_disk(self._store.claim, key, message.owner, message.name):
                samples, rate_hz = await decode_in_child(message.audio)
                voice = await child.voice(samples, rate_hz, message.transcript, message.lang)
                voice = replace(voice, id=key, name=message.name)
                await self._on_disk(self._store.add, voice, message.owner, message.name)
                self._on_made(voice)
        return key

    def _news(self) -> list[tuple[int, ToGateway]]:
        ready = self._ready()
        return [(link, ready) for link in self._links()]

    def _fail(
        self, link: int, message: VoicePut | VoiceDrop, code: str, why: str, *, after_ms: int | None = None
    ) -> None:
        failed = Failed(
            context=message.context,
            epoch=message.epoch,
            code=code,
            message=why,
            retry=code in ("overloaded", "quota", "internal"),
            after_ms=after_ms,
        )
        self._post([(link, failed)])


# The conditioning child


class ConditioningChild:
    """Started for the first recording; lives until it is closed, dies, or takes longer than PATIENCE_S."""

    def __init__(self, models: CloningModels, threads: int) -> None:
        self._models, self._threads = models, threads
        self._process: asyncio.subprocess.Process | None = None

    async def voice(self, samples: Floats, rate_hz: int, transcript: str, lang: str) -> Voice:
        """Mono samples and their words -> a voice without a name. Raises BadVoice or ChildLost."""
        table = {"samples": samples.astype("<f4").tobytes(), "rate_hz": rate_hz, "transcript": transcript, "lang": lang}
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await self._ask(table)
        except (TimeoutError, OSError, EOFError) as error:
            await self.close()
            raise ChildLost(f"the conditioning child failed: {type(error).__name__}") from error
        except asyncio.CancelledError:
            await self.close()  # its answer would be taken for the next one's
            raise
        if "bad" in answer:
            raise BadVoice(answer["bad"])
        return Voice(
            id="",
            name="",
            lang=lang,
            transcript=answer["transcript"],
            prompt_text=tuple(answer["prompt_text"]),
            tokens=torch.frombuffer(bytearray(answer["tokens"]), dtype=torch.int64),
            mel=torch.frombuffer(bytearray(answer["mel"]), dtype=torch.float32).view(-1, MEL_BANDS),
            embedding=torch.frombuffer(bytearray(answer["embedding"]), dtype=torch.float32),
        )

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)

    async def _ask(self, table: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            self._process = await self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        process.stdin.write(_framed(table))
        await process.stdin.drain()
        (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
        answer: dict[str, Any] = msgpack.unpackb(await process.stdout.readexactly(length))
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        models = self._models
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine.cloning",
            *(str(path) for path in (models.speech_tokenizer, models.speaker_encoder, models.tokenizer)),
            str(int(models.reads_ascii)),
            str(self._threads),
            stdin=asyncio.subprocess.PIPE,  # ends when we do, even if we are killed
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )


def _framed(table: dict[str, Any]) -> bytes:
    body: bytes = msgpack.packb(table)
    return _LENGTH.pack(len(body)) + body


def main(arguments: list[str]) -> int:
    """The child: a request on the standard input, its answer on the standard output, until the input ends."""
    from engine.conditioning import Conditioner
    from engine.frontend import Tokenizer

    os.nice(10)  # speech comes first
    speech_tokenizer, speaker_encoder, folder, reads_ascii, threads = arguments
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    torch.set_num_threads(int(threads))
    tokenizer = Tokenizer(Path(folder), reads_ascii=bool(int(reads_ascii)))
    conditioner = Conditioner(Path(speech_tokenizer), Path(speaker_encoder), tokenizer, threads=int(threads))
    while (request := _read(sys.stdin.buffer)) is not None:
        answers.write(_framed(answer(conditioner, request)))
        answers.flush()
    return 0


def _read(file: BinaryIO) -> dict[str, Any] | None:
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    request: dict[str, Any] = msgpack.unpackb(file.read(_LENGTH.unpack(head)[0]))
    return request


def answer(conditioner: Conditioner, request: dict[str, Any]) -> dict[str, Any]:
    """The child's answer to one request: the voice's parts, or why there is none."""
    from engine.conditioning import Recording
    from engine.frontend import escape_controls

    wave = torch.frombuffer(bytearray(request["samples"]) or bytearray(4), dtype=torch.float32)[None]
    transcript = escape_controls(request["transcript"])
    try:
        with torch.inference_mode():
            voice = conditioner.voice(Recording(wave, request["rate_hz"]), transcript, lang=request["lang"])
    except BadVoice as error:
        return {"bad": str(error)}
    return {
        "transcript": voice.transcript,
        "prompt_text": list(voice.prompt_text),
        "tokens": voice.tokens.numpy().tobytes(),
        "mel": voice.mel.contiguous().numpy().tobytes(),
        "embedding": voice.embedding.numpy().tobytes(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
