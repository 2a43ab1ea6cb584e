"""What the host does for many listeners: the real loop over a device that takes its time and computes nothing.

    python -m tests.bench.scheduler_turn [--listeners 64,128,256,320] [--seconds 10] [--pace 1] [--turns] [--profile]
    python -m tests.bench.scheduler_turn --burst 64 [--cold] [--turns]

Everything of the engine runs but kernels: loop, scheduler, runner, pages, the talker's and flow's tables. Launches take
what they were measured to take on one H200: two streams side by side, each slower while the other one is busy, or, with
--turns, one launch after the other. The clock is the bench's own: it goes on by the processor time of the engine's
thread times `pace`, and jumps where the engine waits; so who is late through the host's slowness is late here too.
With pace 0, as in a burst, a turn that launches takes what it took on the machine measured instead (HOST_S), and the
figures are the same each time. Listeners play at once what they get, with credit as the gateway gives it; each asks
again when its answer has been played, or when it is told to come back. Text work takes TEXT_S of another thread. Left
out: sockets, packing, the interpreter's lock and, unless the pace is 0, what replaying a graph costs.

A burst is so many requests within ARRIVAL_S, with voices that are cached, or cold, each with one of its own; it is told
when each stage of the median one and of the last one was over. JSON on the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import heapq
import itertools
import json
import pstats
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from engine.attention import Columns, Unit, unit_columns
from engine.batch import MODEL_OF
from engine.costs import FLOW, HIFT, PREFILL, TALKER
from engine.flow import FlowStore
from engine.hift import HiftState
from engine.loop import Inbox, Item
from engine.messages import SAMPLE_RATE_HZ, Audio, Credit, Failed
from engine.scheduler import Lane
from engine.streams import Flight
from gateway.context import START_LEAD_S
from tests.engine.speaking import TERMINAL, Speaking
from tests.random_checkpoint import TINY, random_checkpoint

UNITS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)  # of the flow's tiers; 24, 48 and 96 interpolated
ALONE = {  # milliseconds by rows
    TALKER: {1: 1.05, 8: 1.07, 16: 1.08, 32: 1.11, 64: 1.15, 128: 1.28, 256: 1.67},
    PREFILL: {128: 1.6, 256: 1.9, 512: 2.2, 1024: 2.8, 2048: 4.6, 16384: 33.0},
    FLOW: dict(zip(UNITS, (1.2, 1.4, 1.4, 1.65, 2.9, 3.5, 4.4, 6.0, 7.4, 10.2, 12.5, 23.0), strict=True)),
    HIFT: {1: 1.35, 8: 1.4, 16: 1.6, 32: 2.0, 64: 3.9, 128: 7.5},  # 64 and more extrapolated
}
BESIDE = {  # while the other stream is busy too
    TALKER: {1: 1.05, 2: 2.07, 8: 2.3, 32: 2.63, 64: 2.46, 128: 2.7, 256: 3.2},
    PREFILL: {128: 1.7, 256: 2.6, 512: 3.0, 1024: 3.6, 2048: 5.0, 16384: 36.0},
    FLOW: dict(zip(UNITS, (1.45, 2.0, 2.2, 2.2, 3.7, 4.3, 4.9, 6.3, 7.4, 10.5, 13.0, 24.0), strict=True)),
    HIFT: {1: 1.6, 8: 2.0, 16: 2.2, 32: 3.1, 64: 5.5, 128: 10.0},
}
HOST_S = (5e-4, 8e-6)  # of a turn that launches, and of each of its rows
TEXT_S = 3e-4  # of one sentence, on the thread for text work
ARRIVAL_S = 0.01  # the requests of a burst reach the engine within it
CODE = 40  # what every talker says, until its limit
LETTERS = (3, 4, 5, 5, 6, 6, 6, 7, 7, 8, 9)  # of a text; each gives 20 codes, 122 on average
CREDIT_STEP_S = 0.5
MUCH_S = 1_000.0
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


def text_of(context: int) -> str:
    """A text that no other context of a burst begins like."""
    count = LETTERS[context % len(LETTERS)]
    return "".join(chr(ord("b") + context * 7919 // 24**place % 24) for place in range(count))


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


def launch_s(costs: dict[str, dict[int, float]], stage: str, rows: int) -> float:
    """Of the smallest tier that takes the rows."""
    tiers = costs[stage]
    most = max(tiers)
    return tiers[min((tier for tier in tiers if tier >= rows), default=most)] * max(1.0, rows / most) / 1e3


@dataclass(slots=True, eq=False)
class Work:
    flight: Flight[Any]
    begun_s: float
    left: float = 1.0  # of it


class Device:
    """What is launched, in two queues side by side or in one."""

    def __init__(self, clock: Callable[[], float], *, overlaps: bool) -> None:
        self._clock, self._overlaps = clock, overlaps
        self._queues: tuple[deque[Work], deque[Work]] = deque(), deque()
        self._time_s = 0.0

    def add(self, flight: Flight[Any]) -> None:
        self._advance()
        is_talker = MODEL_OF[flight.stage] == TALKER
        self._queues[is_talker and self._overlaps].append(Work(flight, self._time_s))

    def has_landed(self, flight: Flight[Any]) -> bool:
        self._advance()
        return not any(work.flight is flight for queue in self._queues for work in queue)

    def _advance(self) -> None:
        now = self._clock()
        while queues := [queue for queue in self._queues if queue]:
            costs = BESIDE if len(queues) > 1 else ALONE
            needed = [launch_s(costs, queue[0].flight.stage, queue[0].flight.rows) for queue in queues]
            span_s = min(cost * queue[0].left for queue, cost in zip(queues, needed, strict=True))
            if self._time_s + span_s > now:
                for queue, cost in zip(queues, needed, strict=True):
                    queue[0].left -= (now - self._time_s) / cost
                break
            self._time_s += span_s
            for queue, cost in zip(queues, needed, strict=True):
                queue[0].left -= span_s / cost
                if queue[0].left < 1e-9:
                    self._end(queue)
        self._time_s = now

    def _end(self, queue: deque[Work]) -> None:
        work = queue.popleft()
        work.flight.seconds = self._time_s - work.begun_s
        if queue:
            queue[0].begun_s = self._time_s


class House(Inbox, Executor):
    """Time, the listeners, the engine's ear for them, and the thread that does its text work."""

    def __init__(self, speaking: Speaking, pace: float, voices: Sequence[str]) -> None:
        super().__init__()
        self.speaking, self.pace, self.voices = speaking, pace, voices
        self.living: dict[int, Listener] = {}
        self.gone: list[Listener] = []
        self.refusals = 0
        self.plays = True  # each at the speed of speech, and comes back; else they take audio once, as it comes
        self._numbers = itertools.count(1_000)
        self._skipped_s = 0.0
        self._began_s, self._own_s = time.thread_time(), 0.0  # the listeners' time is not the engine's
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._text_until_s = 0.0

    def come(self, listeners: int, within_s: float) -> None:
        for number in range(listeners):
            self._at(self.now() + number / listeners * within_s, self._ask)

    @contextlib.contextmanager
    def aside(self) -> Iterator[float]:
        """What is done within is not the engine's, and takes no time. -> the time."""
        now, entered = self.now(), time.thread_time()
        yield now
        self._own_s += time.thread_time() - entered

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self.aside():
            result = work(*given, **named)
        self._text_until_s = max(self._text_until_s, self.now()) + TEXT_S
        self._at(self._text_until_s, lambda: future.set_result(result))
        return future

    def now(self) -> float:
        return self._skipped_s + self.pace * self.worked_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds

    @property
    def worked_s(self) -> float:
        """Processor time of the engine."""
        return time.thread_time() - self._began_s - self._own_s

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), do))

    def drain(self, wait_s: float) -> list[Item]:
        with self.aside() as now:
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()
            if not self._items and wait_s > 0:
                self._skipped_s += min(wait_s, self._events[0][0] - now) if self._events else wait_s
        return super().drain(0.0)

    def _ask(self) -> None:
        listener = Listener(next(self._numbers), self.now())
        self.living[listener.context] = listener
        self.speaking.open(
            listener.context,
            text_of(listener.context),
            voice=self.voices[listener.context % len(self.voices)],
            seed=listener.context,
        )
        self._give_credit(listener)

    def _give_credit(self, listener: Listener) -> None:
        if listener.context in self.living:
            granted_s = self.now() - listener.asked_s + START_LEAD_S if self.plays else MUCH_S
            samples = int(granted_s * SAMPLE_RATE_HZ)
            self.speaking.tell(Credit(context=listener.context, epoch=0, samples=samples))
            self._at(self.now() + CREDIT_STEP_S, lambda: self._give_credit(listener))

    def hear(self, outgoing: list[tuple[int, Any]]) -> None:
        with self.aside() as now:
            for _, message in outgoing:
                if isinstance(message, Audio):
                    self.living[message.context].hear(len(message.pcm) // 4, now)
                elif isinstance(message, TERMINAL) and message.context in self.living:
                    self._end(self.living.pop(message.context), message, now)

    def _end(self, listener: Listener, message: Any, now: float) -> None:
        if isinstance(message, Failed):
            self.refusals += 1
            self._at(now + (message.after_ms or 0) / 1e3, self._ask)
            return
        self.gone.append(listener)
        assert listener.first_s is not None, "an answer without a sample"
        if self.plays:
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


@contextlib.contextmanager
def opened_house(*, lanes: int, pace: float, overlaps: bool, voices: Sequence[str]) -> Iterator[tuple[House, Counts]]:
    """An engine whose launches take their time, and nobody there yet. -> its house, and what is counted."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder), TINY, prompt_tokens=125, voices=tuple(voices))
        speaking = Speaking(
            checkpoint, lanes=lanes, rows_per_launch=lanes, prefill_rows=2048, waiting=512, flow_pages=FLOW_PAGES,
            prompt_remainder=15, overlap=overlaps, share=0.95,
        )  # fmt: skip
    compute_nothing(speaking)
    engine, runner = speaking.engine, speaking.runner
    house, counts = House(speaking, pace, voices), Counts()
    engine.inbox, engine.clock, engine.deliver, engine.gauges_s = house, house.now, house.hear, 1.0
    engine.reader.worker, engine._is_warm = house, True
    engine.scheduler.costs = runner.costs
    for costs in (ALONE, BESIDE) if overlaps else (ALONE,):
        for stage, known in costs.items():
            for rows, ms in known.items():
                for _ in range(5):
                    runner.costs.add(stage, rows, ms / 1e3)
    for stream in (runner._talking, runner._sounding):
        stream.clock = house.now
    device = Device(house.now, overlaps=overlaps)
    launch, launched = runner.launch, runner._launched

    def counted(plan: Any) -> Any:
        counts.launches += not plan.is_empty
        counts.talker_rows += len(plan.talker)
        counts.flow_rows += len(plan.flow)
        if not pace and not plan.is_empty:
            house.skip(HOST_S[0] + HOST_S[1] * (len(plan.talker) + len(plan.flow) + len(plan.hift)))
        return launch(plan)

    @contextlib.contextmanager
    def timed(stage: str, rows: int) -> Iterator[Flight[Any]]:
        with launched(stage, rows) as flight:
            yield flight
        device.add(flight)

    runner.launch, runner._launched = counted, timed  # type: ignore[method-assign]
    with mock.patch.object(Flight, "has_landed", lambda flight: device.has_landed(flight)):
        yield house, counts


def measure(
    listeners: int,
    seconds: float,
    *,
    lanes: int = 256,
    pace: float = 1.0,
    warm_s: float = 8.0,
    overlaps: bool = True,
    num_voices: int = 2,
) -> dict[str, float]:
    """Figures of so many seconds with so many listeners, after the first of them have come and gone."""
    voices = [f"voice-{number}" for number in range(num_voices)]
    with opened_house(lanes=lanes, pace=pace, overlaps=overlaps, voices=voices) as (house, counts):
        engine, runner = house.speaking.engine, house.speaking.runner
        house.come(listeners, within_s=5.0)
        _run(house, counts, until_s=warm_s)
        counts.__init__()  # type: ignore[misc]
        device_s, gone, refused, began = dict(runner.seconds), len(house.gone), house.refusals, house.now()
        lanes_used, blocked = _run(house, counts, until_s=began + seconds)
        took = house.now() - began
    heard = house.gone[gone:]
    unheard = [one for one in house.living.values() if one.first_s is None]
    firsts = sorted(one.first_s - one.asked_s for one in heard if one.first_s is not None) or [float("inf")]
    audio_s = sum(one.heard for one in heard) / SAMPLE_RATE_HZ
    runner.talkers.store.pool.check_integrity()
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


def _run(house: House, counts: Counts, until_s: float) -> tuple[float, float]:
    """-> lanes used and contexts that lack flow pages, on average."""
    engine, lanes, blocked = house.speaking.engine, 0, 0
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


# ---- a burst

STAGES = ("text", "wait", "prompt", "tokens", "wait for flow", "steps", "wait for HiFT", "HiFT")  # each ends at a mark


class Trail:
    """When each stage of each context's first sound was over."""

    def __init__(self, house: House) -> None:
        self.marks: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._house, self._scheduler = house, house.speaking.engine.scheduler
        for method, stage in {
            "prepared": "text",
            "fed": "wait",
            "talked": "prompt",
            "solved": "wait for flow",
            "voiced": "wait for HiFT",
            "sounded": "HiFT",
        }.items():
            setattr(self._scheduler, method, self._marking(getattr(self._scheduler, method), stage))

    def _marking(self, method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def marking(what: Any, *given: Any, **named: Any) -> Any:
            with self._house.aside() as now:
                context = self._scheduler._tenant(what if isinstance(what, Lane) else what.lane)
                marks = self.marks[context.key.context]
                marks.setdefault(stage, now)
                if stage == "wait for flow" and named["has_mel"]:
                    marks.setdefault("steps", now)
            result = method(what, *given, **named)
            with self._house.aside() as now:
                if stage == "prompt" and context.runs and context.runs[0].is_hop_due:
                    marks.setdefault("tokens", now)
            return result

        return marking

    def stages(self, listener: Listener) -> dict[str, float]:
        """Milliseconds of each stage."""
        ends = [self.marks[listener.context][stage] for stage in STAGES]
        starts = (listener.asked_s, *ends)
        return {stage: 1e3 * (end - start) for stage, start, end in zip(STAGES, starts, ends, strict=False)}


def measure_burst(
    streams: int, *, is_cold: bool = False, lanes: int = 256, overlaps: bool = True
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """-> figures, and where the time to the first sound went: on average, of the median one, of the last one."""
    voices = [f"voice-{number}" for number in range(streams if is_cold else 1)]
    with opened_house(lanes=lanes, pace=0.0, overlaps=overlaps, voices=voices) as (house, counts):
        house.plays = False
        if not is_cold:
            house.come(1, within_s=0.0)
            _run(house, counts, until_s=3.0)
        trail = Trail(house)
        warmed, began = len(house.gone), house.now()
        house.come(streams, within_s=ARRIVAL_S)
        while len(house.gone) < warmed + streams:
            _run(house, counts, until_s=house.now() + 0.05)
        took = house.now() - began
    heard = sorted(house.gone[warmed:], key=lambda one: (one.first_s or 0.0) - one.asked_s)
    firsts = [1e3 * ((one.first_s or 0.0) - one.asked_s) for one in heard]
    stages = [trail.stages(one) for one in heard]
    return {
        "first_p50_ms": statistics.median(firsts),
        "first_p99_ms": firsts[int(0.99 * len(firsts))],
        "first_mean_ms": statistics.mean(firsts),
        "audio_s/s": sum(one.heard for one in heard) / SAMPLE_RATE_HZ / took,
        "C50_%": 100 * statistics.mean(one.late_s <= LATE_S for one in heard),
    }, {
        "mean": {name: statistics.mean(one[name] for one in stages) for name in STAGES},
        "median": stages[len(stages) // 2],
        "last": stages[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the host's cost of many listeners")
    parser.add_argument("--listeners", default="64,128,256,320")
    parser.add_argument("--lanes", type=int, default=256)
    parser.add_argument("--voices", type=int, default=2, help="of the listeners, in turn")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pace", type=float, default=1.0, help="the host is so many times slower than this processor")
    parser.add_argument("--turns", action="store_true", help="talker and flow take turns on the device")
    parser.add_argument("--burst", type=int, default=0, help="so many at once, instead of listeners")
    parser.add_argument("--cold", action="store_true", help="of the burst, each with a voice of its own")
    parser.add_argument("--profile", action="store_true", help="print where the time went, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.burst:
        print_burst(given)
    else:
        print_listeners(given)


def print_burst(given: argparse.Namespace) -> None:
    figures, stages = measure_burst(given.burst, is_cold=given.cold, lanes=given.lanes, overlaps=not given.turns)
    print(" ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    print(" " * 10 + "".join(f"{name:>15}" for name in STAGES))
    for name, found in stages.items():
        print(f"{name:<10}" + "".join(f"{found[stage]:>15.1f}" for stage in STAGES))
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def print_listeners(given: argparse.Namespace) -> None:
    found = {}
    for listeners in map(int, given.listeners.split(",")):
        profile = cProfile.Profile() if given.profile else None
        if profile is not None:
            profile.enable()
        found[listeners] = measure(
            listeners,
            given.seconds,
            lanes=given.lanes,
            pace=given.pace,
            overlaps=not given.turns,
            num_voices=given.voices,
        )
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    for name in next(iter(found.values())):
        print(f"{name:<18}" + "".join(f"{figures[name]:>10.2f}" for figures in found.values()))
    print(json.dumps({str(n): {name: round(value, 3) for name, value in one.items()} for n, one in found.items()}))


if __name__ == "__main__":
    main()
