"""Inputs that may have killed the engine, known by fingerprints that don't give the text away.

When the engine dies, what it was speaking is suspected. Retries are welcome: what is spoken to its end is cleared.
What is under way at a second death is refused for a while, so that one caller's retries can't keep the engine down.
Suspects are files beside the engine's socket, where every gateway process of one engine finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

STRIKES: Final = 2
MEMORY_S: Final = 600.0
SUSPECTS: Final = 2_000  # what would come beyond them isn't remembered
SWEEP_S: Final = 10.0  # at the least from one sweep to the next: at a death, hundreds of contexts strike
_SECRET: Final = "secret"


@dataclass(frozen=True, slots=True)
class _Suspect:
    strikes: int
    at: float
    engine: str  # the one that died last

    @classmethod
    def read(cls, path: Path) -> _Suspect | None:
        try:
            strikes, at, engine = path.read_text().split(" ", 2)
            return cls(int(strikes), float(at), engine)
        except (OSError, ValueError):
            return None

    def write(self, path: Path) -> None:
        path.write_text(f"{self.strikes} {self.at} {self.engine}")


class Quarantine:
    """One folder's suspects, shared by the processes that use it. The clock is the wall's.

    `engine` is the life of the engine that is being used; whoever connects to it sets it.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self.engine = ""
        self._swept_at = -SWEEP_S

    def fingerprint(self, *parts: str | None) -> str:
        """The same for the same text, voice and instructions, at the processes of one folder alone."""
        made = hashlib.blake2b(key=self._secret, digest_size=16)
        for part in parts:
            data = (part or "").encode()
            made.update(len(data).to_bytes(4, "big") + data)
        return made.hexdigest()

    def strike(self, fingerprints: Iterable[str]) -> None:
        """The engine died over these. One death is one strike, however many contexts and processes said the same."""
        with contextlib.suppress(OSError):  # a full disk forgets; the callers must hear of the death all the same
            for one in fingerprints:
                known = self._known(one)
                if known is None and self._has_room():
                    _Suspect(1, self._clock(), self.engine).write(self._folder / one)
                elif known is not None and known.engine != self.engine:
                    _Suspect(known.strikes + 1, self._clock(), self.engine).write(self._folder / one)

    def clear(self, fingerprint: str) -> None:
        """The engine spoke it to the end."""
        with contextlib.suppress(OSError):
            (self._folder / fingerprint).unlink()

    def is_refused(self, fingerprint: str) -> bool:
        known = self._known(fingerprint)
        return known is not None and known.strikes >= STRIKES

    def _known(self, fingerprint: str) -> _Suspect | None:
        known = _Suspect.read(self._folder / fingerprint)
        return known if known is not None and 0 <= self._clock() - known.at < MEMORY_S else None

    def _has_room(self) -> bool:
        if len(os.listdir(self._folder)) >= SUSPECTS and self._clock() - self._swept_at >= SWEEP_S:  # noqa: PTH208
            self._sweep()
        return len(os.listdir(self._folder)) < SUSPECTS  # noqa: PTH208 - no path objects, it is for speed

    def _sweep(self) -> None:
        self._swept_at = self._clock()
        for path in self._folder.iterdir():
            if path.name != _SECRET and self._known(path.name) is None:
                path.unlink(missing_ok=True)

    @cached_property
    def _secret(self) -> bytes:
        """Of whichever process was first; where nothing can be written, one of our own."""
        try:
            return self._shared_secret()
        except OSError:
            return secrets.token_bytes(32)

    def _shared_secret(self) -> bytes:
        """It appears whole."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft, path = self._folder / f"draft-{os.getpid()}-{secrets.token_hex(4)}", self._folder / _SECRET
        draft.write_bytes(secrets.token_bytes(32))
        draft.chmod(0o600)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
        return path.read_bytes()
