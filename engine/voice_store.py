"""All voices that the engine knows: those of its checkpoint, and those that callers registered.

A registered voice is kept once, under its content's hash, however many keys registered it; it is gone when the last of
them has dropped it. Its conditioning lies on disk, and in memory as far as `memory_bytes` reach, the longest unused
leaving first. Whoever speaks with a voice holds it, so a drop never takes it from an open context. Any thread may call;
what only looks at memory never waits for a disk.

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.messages import VoiceInfo
from engine.voices import Voice, VoiceFileError, read_voices, write_voices

logger = logging.getLogger(__name__)

MEMORY_BYTES = 256 << 20
DISK_BYTES = 1 << 30
PER_OWNER = 100  # so that the list of one caller's voices fits one message


class StoreFull(Exception):
    """A bound on what may be registered is reached; the text names it."""


@dataclass(frozen=True, slots=True)
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
        self._writing = threading.Lock()  # held over changes on disk, one at a time
        self._lock = threading.Lock()  # of what follows; never held over a file
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

    def in_memory(self, voice: str) -> Voice | None:
        """None: it must be read first. Raises KeyError for one that isn't there, or no more."""
        if voice in self._builtin:
            return self._builtin[voice]
        with self._lock:
            if voice not in self._kept:
                raise KeyError(voice)
            if voice in self._loaded:
                self._loaded.move_to_end(voice)
            return self._loaded.get(voice)

    def get(self, voice: str) -> Voice:
        """From memory or disk. Raises KeyError for one that isn't there, or no more, or can't be read."""
        if (held := self.in_memory(voice)) is not None:
            return held
        try:
            read = read_voices(self._path(voice, ".pt"))[voice]
        except (OSError, VoiceFileError, KeyError) as error:
            logger.error("voice %s can't be read: %s", voice, error)
            raise KeyError(voice) from error
        with self._lock:
            self._load(read)
        return read

    def _load(self, voice: Voice) -> None:
        """Into memory, unless it was dropped meanwhile or is larger than all of it may be."""
        kept = self._kept.get(voice.id)
        if kept is None or kept.num_bytes > self._memory_bytes:
            return
        self._loaded[voice.id] = voice
        used = sum(self._kept[one].num_bytes for one in self._loaded)
        while used > self._memory_bytes:
            oldest, _ = self._loaded.popitem(last=False)
            used -= self._kept[oldest].num_bytes

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
        with self._writing:
            return self._claim(voice, owner, name)

    def _claim(self, voice: str, owner: str, name: str) -> bool:
        with self._lock:
            kept = self._kept.get(voice)
            count = sum(owner in one.owners for key, one in self._kept.items() if key != voice)
        if count >= self._per_owner:
            raise StoreFull(f"{count} voices are registered, at most {self._per_owner} may be")
        if kept is None:
            return False
        self._enter(voice, replace(kept, owners={**kept.owners, owner: name}))
        return True

    def add(self, voice: Voice, owner: str, name: str) -> None:
        """Keep a voice for this owner, or for one more. Raises StoreFull, or OSError with nothing changed."""
        num_bytes = _num_bytes(voice)
        with self._writing:
            if self._claim(voice.id, owner, name):
                return
            with self._lock:
                used = sum(kept.num_bytes for kept in self._kept.values())
            if used + num_bytes > self._disk_bytes:
                raise StoreFull(f"{used} bytes of voices are kept, at most {self._disk_bytes} may be")
            self._write(voice)
            self._enter(voice.id, Kept(voice.lang, voice.prompt_ms, num_bytes, {owner: name}))
            with self._lock:
                self._load(voice)

    def drop(self, voice: str, owner: str) -> bool:
        """The owner gives it up; the last one's drop removes it. False: this owner has not registered it.

        Raises OSError: it is registered still.
        """
        with self._writing:
            with self._lock:
                kept = self._kept.get(voice)
            if kept is None or owner not in kept.owners:
                return False
            others = {key: name for key, name in kept.owners.items() if key != owner}
            if others:
                self._enter(voice, replace(kept, owners=others))
            else:
                self._remove(voice)
            return True

    # ---- on disk

    def _path(self, voice: str, suffix: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rill-voices-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / f"{voice}{suffix}"

    def _write(self, voice: Voice) -> None:
        path = self._path(voice.id, ".pt")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        write_voices(draft, [voice])
        draft.replace(path)

    def _enter(self, voice: str, kept: Kept) -> None:
        """On disk first: what can't be written is not known."""
        path = self._path(voice, ".json")
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(kept)), encoding="utf-8")
        draft.replace(path)
        with self._lock:
            self._kept[voice] = kept

    def _remove(self, voice: str) -> None:
        self._path(voice, ".json").unlink(missing_ok=True)
        with self._lock:
            del self._kept[voice]
            self._loaded.pop(voice, None)
        self._path(voice, ".pt").unlink(missing_ok=True)


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
