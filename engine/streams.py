"""CUDA streams and what is in flight on them.

A launch enqueues work and returns; it has landed when its event says so, and then its results are on the host. Each
stream retires by its own events: nobody waits for one to look at the other. On the CPU a launch has landed when it
returns, through the same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

Results = TypeVar("Results")


@dataclass(slots=True, eq=False)
class Flight(Generic[Results]):
    """One launch: what it computes and what to do when that is there."""

    stage: str
    rows: int
    land: Callable[[Results], None] | None = None
    due_s: float = 0.0  # when it may have landed, by the stream's clock
    seconds: float = 0.0  # of the device, once landed
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = field(default=None)

    def has_landed(self) -> bool:
        if self.events is None:
            return True
        begin, end = self.events
        if not end.query():
            return False
        self.seconds = begin.elapsed_time(end) / 1e3
        return True


class Stream(Generic[Results]):
    """A queue of the device: what is launched on it runs in order. A lower priority number goes first."""

    def __init__(self, device: torch.device, *, priority: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.cuda = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self._flights: deque[Flight[Results]] = deque()
        self._last: torch.cuda.Event | None = None  # the end of the latest launch
        self._partner: Stream[Results] | None = None
        self._busy_until_s = 0.0  # at least

    def take_turns_with(self, partner: Stream[Results]) -> None:
        """From now on a launch on either begins when what the other had been given before has ended.

        Two chains of small and large kernels side by side cost more than one after the other: each small kernel waits
        for a large one to leave a multiprocessor.
        """
        self._partner, partner._partner = partner, self

    def current(self) -> AbstractContextManager[object]:
        """Within it, work goes to this stream."""
        return nullcontext() if self.cuda is None else torch.cuda.stream(self.cuda)

    @contextmanager
    def launch(self, stage: str, rows: int, least_s: float = 0.0) -> Iterator[Flight[Results]]:
        """What is enqueued within is one flight, which takes least_s at least; one that raises is not kept."""
        flight: Flight[Results] = Flight(stage, rows)
        if self.cuda is None:
            started = time.perf_counter()
            yield flight
            flight.seconds = time.perf_counter() - started
        else:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self.cuda):
                if self._partner is not None and self._partner._last is not None:
                    self.cuda.wait_event(self._partner._last)
                begin.record()
                yield flight
                end.record()
            flight.events = begin, end
            self._last = end
        flight.due_s = self._busy_until_s = self._begins_s() + least_s
        self._flights.append(flight)

    def _begins_s(self) -> float:
        partner_s = self._partner._busy_until_s if self._partner is not None else 0.0
        return max(self.clock(), self._busy_until_s, partner_s)

    @property
    def next_due_s(self) -> float:
        """When the first of what is in flight may have landed; never, if nothing is."""
        return self._flights[0].due_s if self._flights else float("inf")

    def landed(self) -> Iterator[Flight[Results]]:
        """Takes off what has landed, in the order of launch."""
        while self._flights and self._flights[0].has_landed():
            yield self._flights.popleft()

    def in_flight(self, stage: str) -> int:
        return sum(flight.stage == stage for flight in self._flights)

    @property
    def is_idle(self) -> bool:
        return not self._flights
