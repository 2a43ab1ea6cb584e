"""A child process that ends with its parent, however that ended. Standard library only; the gateway uses it too."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable


def on_parent_gone(stop: Callable[[], None]) -> None:
    """Calls `stop` once the standard input ends: the parent holds its other end open and never closes it.

    Unlike a signal, this also tells of a parent that was killed. Needs a pipe or a socket, and a running loop.
    """
    loop = asyncio.get_running_loop()
    leash = sys.stdin.fileno()

    def read() -> None:
        if not os.read(leash, 64):
            loop.remove_reader(leash)
            stop()

    loop.add_reader(leash, read)
