"""A bench's figures: pure functions of what its listeners noted, and how they are shown.

A player is thought of that starts at the first sample and plays in real time. Its underrun is how long it stood still
in all: it never has more than what has come, and whatever comes late it plays late. C50 is the share of answers whose
player stood still for at most 50 ms. An answer that came at once shows nothing about that and is left out of the share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

RATE_HZ: Final = 24_000
JOIN_S: Final = 0.02  # audio messages closer than this are one delivery: the gateway cuts what the engine sent at once


@dataclass(slots=True, kw_only=True)
class Trace:
    """One request as its listener saw it. Times are seconds on this machine's monotonic clock.

    tokens    speech tokens that its text asks for        arrivals  when audio came, and how many samples
    outcome   "done", "cancelled" or an error code        crc       of all its samples
    """

    voice: str
    tokens: int
    sent_s: float
    seed: int = 0
    queued_ms: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    cancel_s: float | None = None
    end_s: float = 0.0
    outcome: str = ""
    crc: int = 0

    @property
    def samples(self) -> int:
        return sum(samples for _, samples in self.arrivals)

    @property
    def audio_s(self) -> float:
        return self.samples / RATE_HZ

    @property
    def first_pcm_s(self) -> float | None:
        """From the request's sending to its first sample."""
        return self.arrivals[0][0] - self.sent_s if self.arrivals else None

    @property
    def is_failed(self) -> bool:
        return self.outcome not in ("done", "cancelled")


def deliveries(arrivals: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The same with messages that came together made one, at the time of the first of them."""
    joined: list[tuple[float, int]] = []
    last_s = -math.inf
    for at_s, samples in arrivals:
        if at_s - last_s < JOIN_S:
            joined[-1] = (joined[-1][0], joined[-1][1] + samples)
        else:
            joined.append((at_s, samples))
        last_s = at_s
    return joined


def underrun_s(arrivals: Sequence[tuple[float, int]]) -> float:
    """How long a real-time player that starts at the first arrival stands still before the last one is played."""
    worst, played = 0.0, 0
    for at_s, samples in arrivals:
        worst = max(worst, at_s - arrivals[0][0] - played / RATE_HZ)
        played += samples
    return worst


def played_out_s(trace: Trace) -> float:
    """When a player has played all of it; the request's end if there is nothing to play."""
    if not trace.arrivals:
        return trace.end_s
    return trace.arrivals[0][0] + underrun_s(trace.arrivals) + trace.audio_s


def gaps_s(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Between the deliveries of one answer."""
    times = [at_s for at_s, _ in deliveries(arrivals)]
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: a value that was measured, never one between two."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of some milliseconds."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        """None where nothing was measured."""
        ms = [1e3 * value for value in seconds]
        if not ms:
            return None
        return cls(
            count=len(ms),
            mean=round(sum(ms) / len(ms), 2),
            p50=round(percentile(ms, 0.5), 2),
            p99=round(percentile(ms, 0.99), 2),
            max=round(max(ms), 2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One point. Spreads are in milliseconds; `continuous` counts the answers that say something about underruns."""

    requests: int
    done: int
    cancelled: int
    errors: dict[str, int]
    wall_s: float
    audio_s: float
    audio_s_per_s: float
    requests_per_s: float
    first_pcm: Spread | None
    answer: Spread | None
    queue: Spread | None
    gap: Spread | None
    underrun: Spread | None
    continuous: int
    c50: float | None
    c100: float | None
    c200: float | None
    rtf: float | None
    cancel_ack: Spread | None
    audio_per_token: float | None  # seconds; 0.04 where the text fixes the length

    @classmethod
    def of(cls, traces: Sequence[Trace], spans: Sequence[tuple[float, float]]) -> Figures:
        """Of the requests sent, and the audio come, within some spans of time that don't overlap."""

        def is_inside(at_s: float) -> bool:
            return any(begin_s <= at_s < end_s for begin_s, end_s in spans)

        chosen = [trace for trace in traces if is_inside(trace.sent_s)]
        done = [trace for trace in chosen if trace.outcome == "done"]
        audio_s = sum(n for trace in traces for at_s, n in trace.arrivals if is_inside(at_s)) / RATE_HZ
        underruns = [underrun_s(trace.arrivals) for trace in done if len(deliveries(trace.arrivals)) > 1]
        broken = sum(trace.is_failed and bool(trace.arrivals) for trace in chosen)
        wall_s = max(sum(end_s - begin_s for begin_s, end_s in spans), 1e-9)
        return cls(
            requests=len(chosen),
            done=len(done),
            cancelled=sum(trace.outcome == "cancelled" for trace in chosen),
            errors=dict(Counter(trace.outcome for trace in chosen if trace.is_failed)),
            wall_s=round(wall_s, 3),
            audio_s=round(audio_s, 3),
            audio_s_per_s=round(audio_s / wall_s, 2),
            requests_per_s=round(sum(is_inside(t.end_s) and t.outcome == "done" for t in traces) / wall_s, 3),
            first_pcm=Spread.of(first for trace in chosen if (first := trace.first_pcm_s) is not None),
            answer=Spread.of(trace.end_s - trace.sent_s for trace in done),
            queue=Spread.of(trace.queued_ms / 1e3 for trace in chosen if not trace.is_failed),
            gap=Spread.of(gap for trace in done for gap in gaps_s(trace.arrivals)),
            underrun=Spread.of(underruns),
            continuous=len(underruns) + broken,
            c50=_share(underruns, 0.05, broken),
            c100=_share(underruns, 0.1, broken),
            c200=_share(underruns, 0.2, broken),
            rtf=_mean([(trace.end_s - trace.sent_s) / trace.audio_s for trace in done if trace.samples]),
            cancel_ack=Spread.of(
                trace.end_s - trace.cancel_s
                for trace in chosen
                if trace.cancel_s is not None and trace.outcome == "cancelled"
            ),
            audio_per_token=_mean([trace.audio_s / trace.tokens for trace in done if trace.tokens]),
        )


def _share(underruns: Sequence[float], most_s: float, broken: int) -> float | None:
    """Of players that stood still for no longer than that; those whose answer broke off stand still for ever."""
    total = len(underruns) + broken
    return round(sum(one <= most_s for one in underruns) / total, 4) if total else None


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


# ---- the table


COLUMNS: Final = (
    ("point", 30),
    ("sent", 6),
    ("done", 6),
    ("errors", 7),
    ("first PCM p50", 13),
    ("p99", 8),
    ("audio-s/s", 9),
    ("C50", 7),
    ("underrun p99", 12),
    ("gap p50", 8),
    ("p99", 8),
    ("cancel p50", 10),
    ("p99", 8),
    ("queue p99", 9),
    ("GPU", 6),
    ("cache", 8),
)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Results as bench.measure gives them; times in milliseconds, the cache in GB."""
    lines = ["  ".join(f"{name:<{width}}" if i == 0 else f"{name:>{width}}" for i, (name, width) in enumerate(COLUMNS))]
    for result in results:
        cells = [result["name"], *_cells(result)]
        widths = [width for _, width in COLUMNS]
        shown = [f"{cells[0]:<{widths[0]}}"] + [f"{cell:>{w}}" for cell, w in zip(cells[1:], widths[1:], strict=True)]
        lines.append("  ".join(shown))
    return "\n".join(lines)


def _cells(result: dict[str, Any]) -> list[str]:
    if "failure" in result:
        return [result["failure"][:40]] + [""] * (len(COLUMNS) - 2)
    figures: Figures = result["figures"]
    gauges, gpu = result["gauges"], result["gpu"]
    cache_bytes = gauges.get("cache_bytes", {}).get("max")
    return [
        str(figures.requests),
        str(figures.done),
        str(sum(figures.errors.values())),
        *_pair(figures.first_pcm),
        f"{figures.audio_s_per_s:.1f}",
        "-" if figures.c50 is None else f"{100 * figures.c50:.1f} %",
        _number(figures.underrun.p99 if figures.underrun else None),
        *_pair(figures.gap),
        *_pair(figures.cancel_ack),
        _number(figures.queue.p99 if figures.queue else None),
        "-" if gpu is None else f"{gpu['busy']:.0f} %",
        "-" if cache_bytes is None else f"{cache_bytes / 1e9:.1f}",
    ]


def _pair(spread: Spread | None) -> tuple[str, str]:
    return (_number(spread.p50), _number(spread.p99)) if spread else ("-", "-")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


# ---- the plot


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """First PCM and C50 against concurrency, a line for each series of closed loops. Needs the `bench` extra."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 8))
    series: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if "figures" in result and result["point"]["kind"] == "closed":
            series.setdefault(result["series"], []).append(result)
    for name, points in series.items():
        points.sort(key=lambda result: result["point"]["streams"])
        heard = [(one["point"]["streams"], one["figures"]) for one in points if one["figures"].first_pcm is not None]
        streams = [count for count, _ in heard]
        (line,) = above.plot(streams, [figures.first_pcm.p50 for _, figures in heard], marker="o", label=f"{name}, p50")
        p99 = [figures.first_pcm.p99 for _, figures in heard]
        above.plot(streams, p99, marker=".", linestyle="--", color=line.get_color(), label=f"{name}, p99")
        shares = [(count, 100 * figures.c50) for count, figures in heard if figures.c50 is not None]
        below.plot([x for x, _ in shares], [y for _, y in shares], marker="o", color=line.get_color(), label=name)
    above.set(ylabel="first PCM, ms", yscale="log")
    below.set(ylabel="C50, % of answers", xlabel="streams at once", ylim=(-3, 103))
    below.set_xscale("log", base=2)
    below.xaxis.set_major_formatter(ScalarFormatter())
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
