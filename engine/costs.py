"""What the steps of each stage cost, as measured, and what follows from it: how many streams a device can play.

Two stages run on two CUDA streams, each of which does one thing after another; what the other stream's work adds to a
launch is part of the launch's measured time. So a stream's share of a second is its launches' time, and a number of
listeners can be served if neither share passes the limit, or, where the streams take turns, their sum doesn't.
Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

TOKENS_PER_S = 25
EULER_STEPS = 10  # of the official release
WEIGHT = 0.1  # of a new measurement in a mean
FIRST_WEIGHTS = 4  # measurements that count alike before that
SLOW_WEIGHT = 0.02  # of a new measurement in the least one, if it isn't less

# Stages: a token for every lane, rows of prompts, an Euler step, whole rows (all steps of full responses), vocoder.
TALKER, PREFILL, FLOW, WHOLE, HIFT = "talker", "prefill", "flow", "whole", "hift"


class Mean:
    """A mean that follows what it measures."""

    __slots__ = ("count", "value")

    def __init__(self, value: float = 0.0) -> None:
        """value: what it is before anything was measured."""
        self.value, self.count = value, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(WEIGHT, 1 / (1 + min(self.count - 1, FIRST_WEIGHTS))) * (value - self.value)


class Costs:
    """Seconds of a launch by stage and tier; a tier holds the numbers of rows up to a power of two.

    euler_steps: launches that solve a hop of the flow.
    """

    def __init__(self, euler_steps: int = EULER_STEPS) -> None:
        self.euler_steps = euler_steps
        self._tiers: defaultdict[str, dict[int, Mean]] = defaultdict(dict)
        self._least: dict[tuple[str, int], float] = {}

    def add(self, stage: str, rows: int, seconds: float) -> None:
        self._tiers[stage].setdefault(tier(rows), Mean()).add(seconds)
        least = self._least.setdefault((stage, tier(rows)), seconds)
        self._least[stage, tier(rows)] = min(seconds, least + SLOW_WEIGHT * (seconds - least))

    def soonest(self, stage: str, rows: int) -> float:
        """Seconds that a launch takes at least: lately, in the same tier, with the other stream idle. 0: not known."""
        return self._least.get((stage, tier(rows)), 0.0)

    def of(self, stage: str, rows: int) -> float | None:
        """Expected seconds of a launch. A tier not measured yet costs what the next larger one does, or else as many
        times the next smaller one as it is larger. None: nothing is known of the stage."""
        tiers, wanted = self._tiers[stage], tier(rows)
        if (larger := min((one for one in tiers if one >= wanted), default=None)) is not None:
            return tiers[larger].value
        if (smaller := max(tiers, default=None)) is not None:
            return tiers[smaller].value * (1 << (wanted - smaller))
        return None

    def launch_rows(self, stage: str, *, least: int, most: int, slack_s: float, steps: int) -> int:
        """The most rows, a power of two times `least`, of which `steps` launches fit the slack; `least` in any case."""
        rows = least
        while rows < most:
            cost = self.of(stage, min(2 * rows, most))
            if cost is not None and steps * cost > slack_s:
                break
            rows *= 2
        return min(rows, most)

    def playable(self, *, lanes: int, flow_rows: int, share: float, overlaps: bool = True) -> int:
        """How many of `lanes` listeners can be kept in audio, at least one; flow launches have up to flow_rows.

        overlaps: the streams run side by side, and each has a second a second; else they take turns and share it.
        """
        whole = max if overlaps else sum
        return 1 + bisect_left(range(2, lanes + 1), True, key=lambda count: whole(self.load(count, flow_rows)) > share)

    def load(self, listeners: int, flow_rows: int) -> tuple[float, float]:
        """Shares of a second that so many listeners take: of the talker's stream, of the flow's and HiFT's."""
        rows = min(listeners, flow_rows)
        talker = TOKENS_PER_S * (self.of(TALKER, listeners) or 0.0)
        flow = self.euler_steps * (self.of(FLOW, rows) or 0.0) + (self.of(HIFT, rows) or 0.0)
        return talker, flow * listeners / rows

    def table(self) -> dict[str, dict[int, float]]:
        """Mean milliseconds by stage and largest number of rows."""
        return {
            stage: {1 << one: round(1e3 * mean.value, 3) for one, mean in sorted(tiers.items())}
            for stage, tiers in self._tiers.items()
        }


def tier(rows: int) -> int:
    return max(0, rows - 1).bit_length()
