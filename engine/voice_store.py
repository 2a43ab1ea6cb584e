"""All voices that the engine knows: those of its checkpoint, and those that callers registered.

A registered voice is kept once, under its content's hash, however many keys registered it; it is gone when the last of
them has dropped it. Its conditioning lies on disk, and in memory as far as `memory_bytes` reach, the longest unused
leaving first. Whoever speaks with a voice holds it, so a drop never takes it from an open context. Any thread may call.

    FOLDER/ID.json   language, length, size, the owners with the name that each gave; written last, removed first
    FOLDER/ID.pt     the conditioning, in the layout of `spk2info.pt`
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.messages import VoiceInfo
from engine.voices import Voice, VoiceFileError, read_voices, write_voices

logger = logging.getLogger(__name__)

MEMORY_BYTES = 256 << 20
DISK_BYTES = 1 << 30
PER_OWNER = 100  # so that the list of one caller's voices fits one message


class StoreFull(Exception):
    """A bound on what may be registered is reached; the text names it."""


@dataclass(slots=True)
class Kept:
    """What is known of a registered voice without its conditioning."""

    lang: str
    ms: int
    num_bytes: int
    owners: dict[str, str] = field(default_factory=dict)  # owner -> the name that it gave


class VoiceStore:
    """`builtin` voices are everyone's and can't be dropped. Without a `folder` the others last as long as the store."""

    def __init__(
        self,
        builtin: Mapping[str, Voice],
        folder: Path | None = None,
        *,
        memory_bytes: int = MEMORY_BYTES,
        disk_bytes: int = DISK_BYTES,
        per_owner: int = PER_OWNER,
    ) -> None:
        self._builtin = dict(builtin)
        self._folder = folder
        self._memory_bytes, self._disk_bytes, self._per_owner = memory_bytes, disk_bytes, per_owner
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, Voice] = OrderedDict()  # the last used last
        self._kept = {} if folder is None else _read_folder(folder)

    @property
    def builtin(self) -> Mapping[str, Voice]:
        return self._builtin

    @property
    def num_loaded_bytes(self) -> int:
        with self._lock:
            return sum(self._kept[voice].num_bytes for voice in self._loaded)

    def __contains__(self, voice: object) -> bool:
        return voice in self._builtin or voice in self._kept

    def __len__(self) -> int:
        return len(self._builtin) + len(self._kept)

    def get(self, voice: str) -> Voice:
        """Raises KeyError for one that isn't there, or no more."""
        if voice in self._builtin:
            return self._builtin[voice]
        with self._lock:
            if voice not in self._kept:
                raise KeyError(voice)
            if voice not in self._loaded:
                self._loaded[voice] = self._read(voice)
            self._loaded.move_to_end(voice)
            self._forget_oldest()
            return self._loaded.get(voice) or self._read(voice)  # one voice may be larger than the memory allowed

    def infos(self) -> list[VoiceInfo]:
        """The checkpoint's own first, then the registered ones in the order of their ids."""
        own = [VoiceInfo(id=key, name=one.name, lang=one.lang, ms=one.prompt_ms) for key, one in self._builtin.items()]
        with self._lock:
            return own + [self._info(key) for key in sorted(self._kept)]

    def info(self, voice: str) -> VoiceInfo:
        """Of a registered voice. Raises KeyError."""
        with self._lock:
            return self._info(voice)

    def _info(self, voice: str) -> VoiceInfo:
        kept = self._kept[voice]
        name = next(iter(kept.owners.values()), voice)
        return VoiceInfo(id=voice, name=name, lang=kept.lang, ms=kept.ms, owners=dict(kept.owners))

    def claim(self, voice: str, owner: str, name: str) -> bool:
        """The owner registers what is kept already, maybe under a new name. False: not kept. Raises StoreFull."""
        with self._lock:
            return self._claim(voice, owner, name)

    def _claim(self, voice: str, owner: str, name: str) -> bool:
        count = sum(owner in kept.owners for key, kept in self._kept.items() if key != voice)
        if count >= self._per_owner:
            raise StoreFull(f"{count} voices are registered, at most {self._per_owner} may be")
        if voice not in self._kept:
            return False
        self._kept[voice].owners[owner] = name
        self._write_entry(voice)
        return True

    def add(self, voice: Voice, owner: str, name: str) -> None:
        """Keep a voice for this owner, or for one more. Raises StoreFull."""
        num_bytes = _num_bytes(voice)
        with self._lock:
            if self._claim(voice.id, owner, name):
                return
            used = sum(kept.num_bytes for kept in self._kept.values())
            if used + num_bytes > self._disk_bytes:
                raise StoreFull(f"{used} bytes of voices are kept, at most {self._disk_bytes} may be")
            self._write(voice)
            self._kept[voice.id] = Kept(voice.lang, voice.prompt_ms, num_bytes, {owner: name})
            self._write_entry(voice.id)
            self._loaded[voice.id] = voice
            self._forget_oldest()

    def drop(self, voice: str, owner: str) -> bool:
        """The owner gives it up; the last one's drop removes it. False: this owner has not registered it."""
        with self._lock:
            kept = self._kept.get(voice)
            if kept is None or kept.owners.pop(owner, None) is None:
                return False
            if kept.owners:
                self._write_entry(voice)
            else:
                self._remove(voice)
            return True

    def _forget_oldest(self) -> None:
        used = sum(self._kept[voice].num_bytes for voice in self._loaded)
        while used > self._memory_bytes:
            voice, _ = self._loaded.popitem(last=False)
            used -= self._kept[voice].num_bytes

    # ---- on disk

    def _path(self, voice: str, suffix: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rill-voices-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / f"{voice}{suffix}"

    def _read(self, voice: str) -> Voice:
        return read_voices(self._path(voice, ".pt"))[voice]

    def _write(self, voice: Voice) -> None:
        path = self._path(voice.id, ".pt")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        write_voices(draft, [voice])
        draft.replace(path)

    def _write_entry(self, voice: str) -> None:
        path = self._path(voice, ".json")
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self._kept[voice])), encoding="utf-8")
        draft.replace(path)

    def _remove(self, voice: str) -> None:
        self._path(voice, ".json").unlink(missing_ok=True)
        self._path(voice, ".pt").unlink(missing_ok=True)
        del self._kept[voice]
        self._loaded.pop(voice, None)


def _num_bytes(voice: Voice) -> int:
    return sum(part.numel() * part.element_size() for part in (voice.tokens, voice.mel, voice.embedding))


def _read_folder(folder: Path) -> dict[str, Kept]:
    """The voices that were registered earlier; what a crash left half written is removed. Raises VoiceFileError."""
    kept: dict[str, Kept] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            kept[path.stem] = Kept(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise VoiceFileError(f"{path} is no entry of a voice") from error
    for path in folder.glob("*"):
        if path.suffix == ".draft" or (path.suffix == ".pt" and path.stem not in kept):
            path.unlink()
    lost = [voice for voice in kept if not os.access(folder / f"{voice}.pt", os.R_OK)]
    for voice in lost:
        logger.warning("voice %s has lost its conditioning; it is left out", voice)
        del kept[voice]
    return kept
