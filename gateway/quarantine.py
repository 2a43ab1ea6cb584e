"""Inputs that may have killed the engine, known by fingerprints that don't give the text away.

When the engine dies, what it was speaking is suspected. Retries are welcome: what is spoken to its end is cleared.
What is under way at a second death is refused for a while, so that one caller's retries can't keep the engine down.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

STRIKES: Final = 2
MEMORY_S: Final = 600.0
SUSPECTS: Final = 10_000


@dataclass(slots=True)
class _Suspect:
    strikes: int
    at: float
    epoch: int  # of the engine that died last


class Quarantine:
    """One process's suspects. The clock counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def fingerprint(self, *parts: str | None) -> bytes:
        """The same for the same text, voice and instructions, in this process alone."""
        made = hashlib.blake2b(key=self._secret, digest_size=16)
        for part in parts:
            data = (part or "").encode()
            made.update(len(data).to_bytes(4, "big") + data)
        return made.digest()

    def strike(self, fingerprints: Iterable[bytes], epoch: int) -> None:
        """The engine of this epoch died over these. One death is one strike, however many contexts said the same."""
        now = self._clock()
        for one in fingerprints:
            known = self._suspects.pop(one, None)
            if known is None or now - known.at >= MEMORY_S:
                known = _Suspect(0, now, epoch=-1)
            self._suspects[one] = _Suspect(known.strikes + (known.epoch != epoch), now, epoch)
        while len(self._suspects) > SUSPECTS:
            self._suspects.popitem(last=False)

    def clear(self, fingerprint: bytes) -> None:
        """The engine spoke it to the end."""
        self._suspects.pop(fingerprint, None)

    def is_refused(self, fingerprint: bytes) -> bool:
        known = self._suspects.get(fingerprint)
        return known is not None and known.strikes >= STRIKES and self._clock() - known.at < MEMORY_S
