"""Lists in the format of Seed-TTS-eval: `id|prompt text|prompt wav|text` a line, and a fifth field, a recording of the
text, where there is one. UTF-8; paths are relative to the list; both prompt fields may be empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.errors import ConfigError


class ListError(ConfigError):
    """Names the file, the line and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One text to speak: with the voice of `prompt`, a WAV file in which `prompt_text` is spoken, if there is one."""

    id: str
    text: str
    prompt_text: str = ""
    prompt: Path | None = None
    recording: Path | None = None


def read_list(path: Path) -> list[Line]:
    """Raises ListError, and OSError if the list can't be read."""
    found: dict[str, Line] = {}
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            line = _line(raw.decode().rstrip("\r"), path.parent)
            if line.id in found:
                raise ValueError(f"id {line.id!r} is there before")
        except ValueError as error:  # UnicodeDecodeError is one
            raise ListError(f"{path}:{number}: {error}") from error
        found[line.id] = line
    if not found:
        raise ListError(f"{path}: no line")
    return list(found.values())


def _line(row: str, folder: Path) -> Line:
    fields = [field.strip() for field in row.split("|")]
    if len(fields) not in (4, 5):
        raise ValueError(f"{len(fields)} fields, not 4 or 5: {row!r}")
    name, prompt_text, prompt, text = fields[:4]
    if not name or not text:
        raise ValueError(f"no {'text' if name else 'id'}: {row!r}")
    if bool(prompt_text) != bool(prompt):
        raise ValueError(f"prompt text and prompt wav go together: {prompt_text!r}, {prompt!r}")
    recording = _wav(folder, fields[4]) if fields[4:] and fields[4] else None
    wav = _wav(folder, prompt) if prompt else None
    return Line(id=name, text=text, prompt_text=prompt_text, prompt=wav, recording=recording)


def _wav(folder: Path, name: str) -> Path:
    path = folder / name
    try:
        with path.open("rb") as file:
            head = file.read(12)
    except OSError as error:
        raise ValueError(f"can't read {name!r}: {error.strerror}") from error
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise ValueError(f"{name!r} is no WAV file")
    return path
