"""What a turn of the loop costs the host at many lanes: plan, launch and report, with models that only count.

    python -m tests.bench.scheduler_turn [--lanes 256] [--turns 2000]

Everything of the engine runs but the models' arithmetic: the scheduler, the runner with its lanes, pages and segments,
the loop's reports and messages. Time is the bench's own: a turn takes TURN_S of it, so that listeners run dry as they
would. Prints milliseconds of processor time a turn, and JSON on the last line. The ceiling: at 25 tokens a second from
one stream of the device, a turn has 40 ms for all lanes at once; two to three leave the device busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.flow import FlowRow, FlowStore
from engine.hift import HiftState
from tests.engine.speaking import Speaking
from tests.random_checkpoint import TINY, random_checkpoint

TURN_S = 0.01
CODE = 40  # what every talker says
CONTEXT_TOKENS = 120


class Ids:
    """A ticket that has landed."""

    def __init__(self, count: int) -> None:
        self.ids: list[int | None] = [CODE] * count

    def fetch(self) -> list[int | None]:
        return self.ids


class CountingTalkers:
    """Takes the place of TalkerLanes: pages and draws are left out, rows are counted."""

    max_rows = 100_000

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.num_pages = 0

    def seat(self, lane: int, prompt: list[int], **settings: Any) -> int:
        self.left[lane] = len(prompt)
        return 0

    def free(self, lane: int) -> None:
        del self.left[lane]

    def prefill(self, chunks: Sequence[tuple[int, int, int]]) -> Ids:
        for lane, _, count in chunks:
            self.left[lane] -= count
        return Ids(sum(not self.left[lane] for lane, _, _ in chunks))

    def decode(self, lanes: Sequence[int]) -> Ids:
        return Ids(len(lanes))


def count_only(speaking: Speaking) -> None:
    """The models of this engine take and give what real ones would, and compute nothing."""
    runner, flow, hift = speaking.runner, speaking.runner.models.flow, speaking.runner.models.hift
    health = torch.zeros(())

    def step(rows: Sequence[FlowRow], store: FlowStore) -> None:
        for row in rows:
            flow.reserve(row, store)
            row.steps_done += 1

    def finish(row: FlowRow, store: FlowStore) -> Tensor:
        assert row.staged is not None
        staged, row.staged = row.staged, None
        row.frames = staged.end
        return torch.empty(flow.shape.mel, max(0, staged.end - max(staged.start, row.prompt_frames)))

    def push(states: Sequence[HiftState], mels: Sequence[Tensor], finals: Sequence[bool]) -> list[Tensor]:
        return [torch.zeros(480 * mel.shape[1]) for mel in mels]

    runner.talkers = CountingTalkers()  # type: ignore[assignment]
    flow.step, flow.finish, hift.push = step, finish, push  # type: ignore[method-assign]
    flow.finish_all = lambda rows, store: [finish(row, store) for row in rows]  # type: ignore[method-assign]
    flow.faults = lambda rows, store: [health for _ in rows]  # type: ignore[method-assign]


class Stopwatch:
    """Seconds spent in methods, by name and turn."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: object, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent[name] += time.thread_time() - started

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent


def measure(lanes: int, turns: int) -> dict[str, float]:
    """Milliseconds a turn with every lane taken by a listener, and contexts that end and follow each other."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder), TINY, voices=("anna", "bert"))
        speaking = Speaking(checkpoint, lanes=lanes, rows_per_launch=lanes, prefill_rows=4096)
    count_only(speaking)
    now, watch, engine = 0.0, Stopwatch(), speaking.engine
    engine.clock = lambda: now
    for method in ("plan", "take"):
        watch.watch(engine.scheduler, method, method)
    watch.watch(speaking.runner, "launch", "launch")
    watch.watch(engine, "_report_landed", "report")
    watch.watch(engine, "_report_launched", "report")
    watch.watch(speaking.runner, "collect", "collect")
    context, spent, whole = 0, defaultdict(list), []
    for turn in range(turns):
        for _ in range(min(lanes - engine.scheduler.num_contexts, max(1, lanes // 16))):
            speaking.open(context, "a" * (CONTEXT_TOKENS // 20), voice=("anna", "bert")[context % 2])
            context += 1
        started = time.thread_time()
        engine.step()
        elapsed = time.thread_time() - started
        now += TURN_S
        if turn >= 100:  # the first contexts have all begun
            whole.append(elapsed)
            for name, seconds in watch.take().items():
                spent[name].append(seconds)
        else:
            watch.take()
    speaking.said.clear()
    figures = {f"{name}_ms": 1e3 * sum(seconds) / len(whole) for name, seconds in sorted(spent.items())}
    return figures | {
        "turn_ms": 1e3 * statistics.mean(whole),
        "turn_p50_ms": 1e3 * statistics.median(whole),
        "turn_p99_ms": 1e3 * sorted(whole)[int(0.99 * len(whole))],
        "contexts": float(context),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the host's cost of a turn")
    parser.add_argument("--lanes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(given.lanes, given.turns)
    for name, value in figures.items():
        print(f"{name:<14} {value:8.3f}")
    print(json.dumps({"lanes": given.lanes, **{name: round(value, 4) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
