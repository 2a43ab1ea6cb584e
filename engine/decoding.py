"""An uploaded recording -> mono samples, in a process of its own that can't take more than its limits.

The engine runs this file as a child for each recording (`decode_in_child`): the bytes go in by its standard input,
samples or a reason come out. Standard library, numpy and soundfile only, and nothing of this package, so that the
child is small and quick to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
import resource
import struct
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

MIN_SECONDS, MAX_SECONDS = 3.0, 30.0
MIN_RATE_HZ, MAX_RATE_HZ = 16_000, 192_000
MODEL_RATES_HZ = (16_000, 24_000)
MAX_TAPS = 1 << 24  # of a filter from one rate to another; those of 16,001 Hz to 24,000 Hz would fill 3 GB
MAX_CHANNELS = 8
MAX_FILE_BYTES = 10 << 20
BLOCK_FRAMES = 1 << 16  # decoded at once, so that many channels take no more memory than one

MEMORY_BYTES = 1 << 30  # address space of the child; its libraries alone map half of it
PROCESSOR_S = 10
PROGRAM = Path(__file__).resolve()
PATIENCE_S = 30.0  # by the wall clock: the child may have to share a core

_SAMPLES, _REASON = b"s", b"r"
_HEAD = struct.Struct("<cI")  # what follows, and the sample rate


class BadVoice(Exception):
    """A recording can't become a voice; the text names the value and the limit, never the file's content."""

    code, retryable = "bad_voice", False


def decode(data: bytes) -> tuple[Floats, int]:
    """WAV, FLAC, Ogg or MP3 -> mono samples [S] and their rate in Hz.

    Never more than a little over MAX_SECONDS of them, whatever a header claims. Raises BadVoice.
    """
    import soundfile  # type: ignore[import-untyped]  # training runs on machines without it

    check_container(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate_hz, promised = int(file.samplerate), int(file.frames)
            _check_shape(rate_hz, int(file.channels))
            longest = int(MAX_SECONDS * rate_hz) + 1
            samples = _mono(file, min(promised, longest))
    except (soundfile.LibsndfileError, RuntimeError, ValueError, OverflowError, MemoryError) as error:
        raise BadVoice("the file can't be decoded as WAV, FLAC, Ogg or MP3 audio") from error
    if len(samples) < min(promised, longest) or _is_cut_short(data):
        raise BadVoice("the file is truncated: it ends before the audio that its header promises")
    return samples, rate_hz


def check_container(data: bytes) -> None:
    """Raises BadVoice unless the size is allowed and the first bytes are those of one of the four formats.

    The decoder knows many more, which nobody needs here and which only give it more ways to go wrong.
    """
    if not data:
        raise BadVoice("the file is empty: 0 bytes")
    if len(data) > MAX_FILE_BYTES:
        raise BadVoice(f"the file has over {MAX_FILE_BYTES} bytes, the most accepted")
    is_mp3 = data[:3] == b"ID3" or (data[0] == 0xFF and len(data) > 1 and data[1] & 0xE0 == 0xE0)
    if data[:4] not in (b"RIFF", b"RF64", b"fLaC", b"OggS") and not is_mp3:
        raise BadVoice("the file can't be decoded as WAV, FLAC, Ogg or MP3 audio: it begins like none of them")


def _check_shape(rate_hz: int, channels: int) -> None:
    check_rate(rate_hz)
    if channels > MAX_CHANNELS:
        raise BadVoice(f"the recording has {channels} channels; at most {MAX_CHANNELS} are accepted")


def check_rate(rate_hz: int) -> None:
    """Raises BadVoice for a rate that is out of bounds, or whose ratio to a model's is of too large numbers."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise BadVoice(f"the sample rate is {rate_hz} Hz; {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz are accepted")
    for model_hz in MODEL_RATES_HZ:
        if rate_hz * model_hz // math.gcd(rate_hz, model_hz) ** 2 > MAX_TAPS:
            raise BadVoice(f"the sample rate is {rate_hz} Hz; one in a simpler ratio to {model_hz} Hz is accepted")


def _mono(file: object, frames: int) -> Floats:
    """The first frames of an open sound file, mixed down block by block."""
    blocks: list[Floats] = []
    while frames > 0:
        block = file.read(min(frames, BLOCK_FRAMES), dtype="float32", always_2d=True)  # type: ignore[attr-defined]
        if not len(block):
            break
        blocks.append(block.mean(axis=1, dtype=np.float32))
        frames -= len(block)
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _is_cut_short(data: bytes) -> bool:
    """Whether a container says that it is longer than the bytes there; decoders read such files without complaint."""
    if data[:4] == b"RIFF":
        promised = int.from_bytes(data[4:8], "little")
        return promised < 0xFFFFFF00 and promised + 8 > len(data) + 1  # writers to a pipe leave the largest number
    if data[:4] == b"OggS":
        flags = data[data.rfind(b"OggS") + 5 :][:1]
        return not flags or not flags[0] & 4  # the last page of a whole stream says that it is the last
    return False


# In a child


async def decode_in_child(data: bytes) -> tuple[Floats, int]:
    """`decode` in a process of its own, under its limits. Raises BadVoice for what the child finds or can't bear."""
    check_container(data)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # this folder's other files are no modules of the child's
        str(PROGRAM),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer, _ = await child.communicate(data)
    except TimeoutError:
        raise BadVoice(f"decoding took longer than {PATIENCE_S:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return _read_answer(answer, child.returncode)


def _read_answer(answer: bytes, code: int | None) -> tuple[Floats, int]:
    if code != 0 or len(answer) < _HEAD.size:
        limits = f"{PROCESSOR_S} s of a processor and {MEMORY_BYTES >> 20} MiB"
        raise BadVoice(f"the file can't be decoded within {limits}")
    kind, rate_hz = _HEAD.unpack_from(answer)
    body = answer[_HEAD.size :]
    if kind == _REASON:
        raise BadVoice(body.decode())
    return np.frombuffer(body, dtype="<f4"), rate_hz


def _limit() -> None:
    """No more memory, time, files or children than decoding takes; a soft fault in the decoder leaves no core."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # some containers forbid even lowering it
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


def main() -> int:
    os.nice(5)  # speech comes first
    _limit()
    try:
        samples, rate_hz = decode(sys.stdin.buffer.read(MAX_FILE_BYTES + 1))
        answer = _HEAD.pack(_SAMPLES, rate_hz) + samples.astype("<f4").tobytes()
    except BadVoice as reason:
        answer = _HEAD.pack(_REASON, 0) + str(reason).encode()
    sys.stdout.buffer.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
