"""What the host does for many listeners: the real loop over a device that takes its time and computes nothing.

    python -m tests.bench.scheduler_turn [--listeners 64,128,256,320] [--seconds 10] [--pace 1] [--profile]

Everything of the engine runs but kernels: loop, scheduler, runner, pages, the talker's and flow's tables. Launches take
what they were measured to take on one H200 (COSTS), one after the other. The clock is the bench's own: it goes on by
the processor time of the engine's thread times `pace`, and jumps where the engine waits; so who is late through the
host's slowness is late here too. Listeners play at once what they get, with credit as the gateway gives it; each asks
again when its answer has been played, or when it is told to come back. Left out: sockets, packing, text work, the
interpreter's lock, what replaying a graph costs. JSON on the last line.
"""

from __future__ import annotations

import argparse
import cProfile
import heapq
import itertools
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from engine.attention import Columns, Unit, unit_columns
from engine.costs import FLOW, HIFT, PREFILL, TALKER
from engine.flow import FlowStore
from engine.hift import HiftState
from engine.loop import Inbox, Item
from engine.messages import SAMPLE_RATE_HZ, Audio, Credit, Failed
from engine.streams import Flight
from gateway.context import START_LEAD_S
from tests.engine.speaking import TERMINAL, Speaking
from tests.random_checkpoint import TINY, random_checkpoint

COSTS = {  # milliseconds by rows
    TALKER: {1: 1.06, 8: 1.07, 16: 1.08, 32: 1.11, 64: 1.17, 128: 1.29, 256: 1.73},
    PREFILL: {256: 2.0, 512: 2.4, 1024: 3.0, 2048: 5.0, 16384: 33.0},
    FLOW: {1: 1.17, 2: 1.24, 4: 1.38, 8: 1.66, 16: 2.4, 32: 4.1, 64: 7.48, 128: 13.7, 256: 26.3},
    HIFT: {1: 1.31, 2: 1.43, 4: 1.7, 8: 2.17, 16: 3.4, 32: 5.8, 64: 10.6, 128: 20.3},  # 2, 4, 16 and 32 interpolated
}
CODE = 40  # what every talker says, until its limit
LETTERS = (3, 4, 5, 5, 6, 6, 6, 7, 7, 8, 9)  # of a text; each gives 20 codes, 122 on average
CREDIT_STEP_S = 0.5
LATE_S = 0.05
FLOW_PAGES = 1_100  # of 90 MB: what an H200 holds beside the models


@dataclass(slots=True)
class Listener:
    context: int
    asked_s: float
    first_s: float | None = None
    heard: int = 0
    late_s: float = 0.0

    def hear(self, samples: int, now: float) -> None:
        if self.first_s is None:
            self.first_s = now
        self.late_s = max(self.late_s, now - self.first_s - self.heard / SAMPLE_RATE_HZ)
        self.heard += samples


class PagedNothing:
    """A talker's kernels: every draw is the same."""

    max_rows = 100_000

    def seat(self, lane: int, pages: Sequence[int], rows: int) -> None:
        pass

    def decode(self, lanes: Sequence[int]) -> Tensor:
        return torch.full((len(lanes),), CODE)

    def chunks(self, lane: int, start: int, ids: Sequence[int], *, is_end: bool) -> Iterator[bool]:
        yield is_end

    def launches(self, chunks: Iterator[bool]) -> Iterator[list[bool]]:
        yield list(chunks)

    def prefill(self, chunks: list[bool]) -> Tensor:
        return torch.full((sum(chunks),), CODE)


@dataclass
class FlowNothing:
    """A flow's graphs: tables are made and thrown away."""

    store: FlowStore

    def lay(self, columns: Columns) -> None:
        np.concatenate((columns, columns), axis=1)

    def advance(self, units: list[Unit]) -> None:
        unit_columns(units, self.store.nobody, len(units), max(8, *(len(unit.pages) for unit in units)))


def compute_nothing(speaking: Speaking) -> None:
    """The models of this engine take and give what real ones would."""

    def push(states: Sequence[HiftState], mels: Sequence[Tensor], finals: Sequence[bool]) -> list[Tensor]:
        return [torch.zeros(480 * mel.shape[1]) for mel in mels]

    runner, models = speaking.runner, speaking.runner.models
    runner.talkers._paged = PagedNothing()  # type: ignore[assignment]
    models.flow._graphs = FlowNothing(models.flow_store)  # type: ignore[assignment]
    models.flow_store.health.zero_()
    models.hift.push = push  # type: ignore[method-assign]


class House(Inbox):
    """Time, the listeners, and the engine's ear for them."""

    def __init__(self, speaking: Speaking, listeners: int, pace: float) -> None:
        super().__init__()
        self.speaking, self.pace = speaking, pace
        self.living: dict[int, Listener] = {}
        self.gone: list[Listener] = []
        self.refusals = 0
        self._numbers = itertools.count(1_000)
        self._skipped_s = 0.0
        self._began_s, self._own_s = time.thread_time(), 0.0  # the listeners' time is not the engine's
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for number in range(listeners):
            self._at(number / listeners * 5.0, self._ask)

    def now(self) -> float:
        return self._skipped_s + self.pace * self.worked_s

    @property
    def worked_s(self) -> float:
        """Processor time of the engine."""
        return time.thread_time() - self._began_s - self._own_s

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), do))

    def drain(self, wait_s: float) -> list[Item]:
        began, entered = self.now(), time.thread_time()
        while self._events and self._events[0][0] <= began:
            heapq.heappop(self._events)[2]()
        if not self._items and wait_s > 0:
            self._skipped_s += min(wait_s, self._events[0][0] - began) if self._events else wait_s
        self._own_s += time.thread_time() - entered
        return super().drain(0.0)

    def _ask(self) -> None:
        listener = Listener(next(self._numbers), self.now())
        self.living[listener.context] = listener
        self.speaking.open(
            listener.context,
            "a" * LETTERS[listener.context % len(LETTERS)],
            voice=("anna", "bert")[listener.context % 2],
            seed=listener.context,
        )
        self._give_credit(listener)

    def _give_credit(self, listener: Listener) -> None:
        if listener.context in self.living:
            granted_s = self.now() - listener.asked_s + START_LEAD_S
            samples = int(granted_s * SAMPLE_RATE_HZ)
            self.speaking.tell(Credit(context=listener.context, epoch=0, samples=samples))
            self._at(self.now() + CREDIT_STEP_S, lambda: self._give_credit(listener))

    def hear(self, outgoing: list[tuple[int, Any]]) -> None:
        began, entered = self.now(), time.thread_time()
        for _, message in outgoing:
            if isinstance(message, Audio):
                self.living[message.context].hear(len(message.pcm) // 4, began)
            elif isinstance(message, TERMINAL) and message.context in self.living:
                self._end(self.living.pop(message.context), message, began)
        self._own_s += time.thread_time() - entered

    def _end(self, listener: Listener, message: Any, now: float) -> None:
        if isinstance(message, Failed):
            self.refusals += 1
            self._at(now + (message.after_ms or 0) / 1e3, self._ask)
        else:
            self.gone.append(listener)
            assert listener.first_s is not None, "an answer without a sample"
            self._at(max(now, listener.first_s + listener.heard / SAMPLE_RATE_HZ), self._ask)


@dataclass
class Counts:
    """Of the engine's work between two moments."""

    turns: int = 0
    launches: int = 0
    talker_rows: int = 0
    flow_rows: int = 0
    host_s: float = 0.0
    turns_s: list[float] = field(default_factory=list)


def measure(
    listeners: int, seconds: float, *, lanes: int = 256, pace: float = 1.0, warm_s: float = 8.0
) -> dict[str, float]:
    """Figures of so many seconds with so many listeners, after the first of them have come and gone."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder), TINY, prompt_tokens=125, voices=("anna", "bert"))
        speaking = Speaking(
            checkpoint, lanes=lanes, rows_per_launch=lanes, prefill_rows=2048, waiting=512, flow_pages=FLOW_PAGES,
            prompt_remainder=15, overlap=False, share=0.95,
        )  # fmt: skip
    compute_nothing(speaking)
    engine, runner = speaking.engine, speaking.runner
    house = House(speaking, listeners, pace)
    engine.inbox, engine.clock, engine.deliver, engine.gauges_s = house, house.now, house.hear, 1.0
    engine._is_warm = True
    for stage, known in COSTS.items():
        for rows, ms in known.items():
            for _ in range(20):
                runner.costs.add(stage, rows, ms / 1e3)
    runner.costs.add = lambda *given: None  # type: ignore[method-assign]
    for stream in (runner._talking, runner._sounding):
        stream.clock = house.now
    counts = Counts()
    launch = runner.launch

    def counted(plan: Any) -> Any:
        counts.launches += not plan.is_empty
        counts.talker_rows += len(plan.talker)
        counts.flow_rows += len(plan.flow)
        return launch(plan)

    def has_landed(flight: Flight[Any]) -> bool:
        flight.seconds = runner.costs.of(flight.stage, flight.rows) or 0.0
        return house.now() >= flight.due_s

    runner.launch = counted  # type: ignore[method-assign]
    with mock.patch.object(Flight, "has_landed", has_landed):
        _run(speaking, house, counts, until_s=warm_s)
        counts.__init__()  # type: ignore[misc]
        device_s, gone, refused, began = dict(runner.seconds), len(house.gone), house.refusals, house.now()
        lanes_used, blocked = _run(speaking, house, counts, until_s=began + seconds)
        took = house.now() - began
    heard = house.gone[gone:]
    unheard = [one for one in house.living.values() if one.first_s is None]
    firsts = sorted(one.first_s - one.asked_s for one in heard if one.first_s is not None) or [float("inf")]
    audio_s = sum(one.heard for one in heard) / SAMPLE_RATE_HZ
    speaking.runner.talkers.store.pool.check_integrity()
    engine.scheduler.check_integrity()
    return {
        "host_%": 100 * counts.host_s / took,
        "turns/s": counts.turns / took,
        "launches/s": counts.launches / took,
        "turn_us": 1e6 * counts.host_s / max(1, counts.turns),
        "turn_p99_us": 1e6 * sorted(counts.turns_s)[int(0.99 * len(counts.turns_s))],
        "lane_step_us": 1e6 * counts.host_s / max(1, counts.talker_rows + counts.flow_rows),
        "host_ms/audio_s": 1e3 * counts.host_s / max(audio_s, 1e-9),
        "talker_rows": counts.talker_rows / max(1, counts.launches),
        "flow_rows": counts.flow_rows / max(1, counts.launches),
        "audio_s/s": audio_s / took,
        "C50_%": 100 * statistics.mean([one.late_s <= LATE_S for one in heard] or [0.0]),
        "first_p50_ms": 1e3 * statistics.median(firsts),
        "first_p99_ms": 1e3 * firsts[int(0.99 * len(firsts))],
        "talker_%": 100 * (runner.seconds[TALKER] - device_s[TALKER]) / took,
        "flow_%": 100 * (runner.seconds[FLOW] - device_s[FLOW]) / took,
        "hift_%": 100 * (runner.seconds[HIFT] - device_s[HIFT]) / took,
        "lanes": lanes_used,
        "blocked": blocked,
        "waiting": float(len(unheard)),
        "places": float(engine.scheduler.places),
        "refused/s": (house.refusals - refused) / took,
        "pages": float(runner.flow_pages),
    }


def _run(speaking: Speaking, house: House, counts: Counts, until_s: float) -> tuple[float, float]:
    """-> lanes used and contexts that lack flow pages, on average."""
    engine, lanes, blocked = speaking.engine, 0, 0
    while house.now() < until_s:
        worked_s = house.worked_s
        engine.step()
        spent = house.pace * (house.worked_s - worked_s)
        counts.turns += 1
        counts.host_s += spent
        counts.turns_s.append(spent)
        lanes += engine.scheduler.lanes_used
        blocked += sum(context.lacks_flow_pages for context in engine.scheduler._order)
    return lanes / max(1, counts.turns), blocked / max(1, counts.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description="the host's cost of many listeners")
    parser.add_argument("--listeners", default="64,128,256,320")
    parser.add_argument("--lanes", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pace", type=float, default=1.0, help="the host is so many times slower than this processor")
    parser.add_argument("--profile", action="store_true", help="print where the time went, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for listeners in map(int, given.listeners.split(",")):
        profile = cProfile.Profile() if given.profile else None
        if profile is not None:
            profile.enable()
        found[listeners] = measure(listeners, given.seconds, lanes=given.lanes, pace=given.pace)
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    for name in next(iter(found.values())):
        print(f"{name:<18}" + "".join(f"{figures[name]:>10.2f}" for figures in found.values()))
    print(json.dumps({str(n): {name: round(value, 3) for name, value in one.items()} for n, one in found.items()}))


if __name__ == "__main__":
    main()
