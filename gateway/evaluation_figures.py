"""An evaluation's figures: pure functions of what was heard in each take, and how they are shown.

Intervals are 95 % of a bootstrap over the list's lines: a line is drawn with all its takes, and by the same draws in
every series, so that the difference of two series is a paired one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
ROUNDS: Final = 2_000  # of the bootstrap
INTERVAL: Final = (2.5, 97.5)  # percentiles of its rounds
NAMES: Final = {  # of a metric, how it is shown: by what it is multiplied, digits
    "wer": ("words wrong, %", 100, 2),
    "lost": ("more than half wrong, %", 100, 2),
    "right": ("read back right, %", 100, 1),
    "likeness": ("speaker cosine", 1, 3),
    "nearest": ("own speaker nearest, %", 100, 1),
    "mos": ("DistillMOS", 1, 2),
    "rtf": ("real-time factor", 1, 3),
    "first_p50": ("first audio p50, ms", 1000, 0),
    "first_p99": ("first audio p99, ms", 1000, 0),
}


@dataclass(slots=True, kw_only=True)
class Take:
    """One text as spoken, and what was found in it. Times are seconds, from the request, which for a cold voice is its
    upload, to the first and last audio. None: not known. `failure`: nothing was spoken, which leaves all words wrong.
    """

    line: str
    text: str
    series: str
    voice: str
    seed: int = 0
    path: Path | None = None
    audio_s: float = 0.0
    first_s: float | None = None
    wall_s: float | None = None
    failure: str = ""
    heard: str = ""
    words: int = 0
    errors: int = 0
    is_right: bool = False
    likeness: float | None = None
    is_nearest: bool | None = None
    mos: float | None = None
    embedding: Array | None = field(default=None, repr=False)

    def judge(self, reference: str, heard: str) -> None:
        """Compare texts in one spelling, words between blanks."""
        words, others = reference.split(), heard.split()
        self.words, self.errors = len(words), word_errors(words, others)
        self.is_right = words == others


def word_errors(reference: Sequence[str], heard: Sequence[str]) -> int:
    """The least substitutions, deletions and insertions from one to the other."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]


def liken(takes: Sequence[Take], references: Mapping[str, Array]) -> None:
    """Cosine of each take to its voice's reference, or else to the mean of the series' other takes of that voice; and
    whether no other voice's reference is nearer."""
    known = {voice: vector / np.linalg.norm(vector) for voice, vector in references.items()}
    for take in takes:
        if take.embedding is None:
            continue
        own = take.embedding / np.linalg.norm(take.embedding)
        target = known.get(take.voice)
        if target is None:
            alike = [one for one in takes if one is not take and (one.series, one.voice) == (take.series, take.voice)]
            others = [one.embedding for one in alike if one.embedding is not None]
            if not others:
                continue
            target = np.mean(others, axis=0)
            target = target / np.linalg.norm(target)
        take.likeness = float(own @ target)
        if take.voice in known and len(known) > 1:
            others = [vector for voice, vector in known.items() if voice != take.voice]
            take.is_nearest = bool(take.likeness >= max(own @ vector for vector in others))


# ---- statistics


def draws(lines: int, *, rounds: int = ROUNDS, seed: int = 0) -> Array:
    """How often each line is drawn [1 + rounds, lines]: once each in the first row, which gives the figure itself."""
    drawn = np.random.default_rng(seed).multinomial(lines, [1 / lines] * lines, rounds)
    return np.concatenate((np.ones((1, lines)), drawn), dtype=np.float64)


def statistics(takes: Sequence[Take], weights: Array) -> dict[str, Array]:
    """Each metric [rounds] of takes weighted [rounds, takes]; NaN where nothing is known."""

    def column(values: Sequence[float | None]) -> Array:
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def mean(values: Sequence[float | None]) -> Array:
        return _ratio(column(values), np.ones(len(takes)), weights)

    firsts = column([take.first_s for take in takes])
    walls = column([take.wall_s for take in takes])
    return {
        "wer": _ratio(column([t.errors for t in takes]), column([t.words for t in takes]), weights),
        "lost": mean([take.errors > take.words / 2 for take in takes]),
        "right": mean([take.is_right for take in takes]),
        "likeness": mean([take.likeness for take in takes]),
        "nearest": mean([take.is_nearest for take in takes]),
        "mos": mean([take.mos for take in takes]),
        "rtf": _ratio(walls, column([take.audio_s for take in takes]), weights),
        "first_p50": _quantile(firsts, 0.5, weights),
        "first_p99": _quantile(firsts, 0.99, weights),
    }


def _ratio(above: Array, below: Array, weights: Array) -> Array:
    """Sum over sum, of takes where the upper one is known."""
    known = ~np.isnan(above)
    total = weights[:, known] @ below[known]
    sums: Array = weights[:, known] @ above[known]
    return np.where(total > 0, sums / np.maximum(total, 1e-9), np.nan)


def _quantile(values: Array, share: float, weights: Array) -> Array:
    """Nearest rank: a value that was measured."""
    order = np.argsort(values)[: int((~np.isnan(values)).sum())]  # NaN is last
    if not len(order):
        return np.full(len(weights), np.nan)
    counts = weights[:, order].cumsum(axis=1)
    total = counts[:, -1:]
    found = values[order][np.argmax(counts >= share * total - 1e-9, axis=1)]
    return np.where(total[:, 0] > 0, found, np.nan)


def spans(values: Mapping[str, Array], *, is_spread: bool = True) -> dict[str, dict[str, float]]:
    """Of each metric that is known its value and interval. One line alone has no interval."""
    found = {}
    for name, rounds in values.items():
        if np.isnan(rounds[0]):
            continue
        found[name] = {"value": round(float(rounds[0]), 5)}
        if is_spread:
            low, high = np.nanpercentile(rounds[1:], INTERVAL)
            found[name] |= {"low": round(float(low), 5), "high": round(float(high), 5)}
    return found


# ---- the report


def report(takes: Sequence[Take], *, by_text: bool = False, rounds: int = ROUNDS) -> dict[str, Any]:
    """Series, their differences, voices (the pooled figures of each where there are some), texts."""
    lines = {line: place for place, line in enumerate(dict.fromkeys(take.line for take in takes))}
    drawn = draws(len(lines), rounds=rounds)

    def of(some: Sequence[Take]) -> dict[str, Array]:
        return statistics(some, drawn[:, [lines[take.line] for take in some]])

    def shown(some: Sequence[Take]) -> dict[str, Any]:
        return {
            "takes": len(some),
            "words": sum(take.words for take in some),
            "failed": sum(bool(take.failure) for take in some),
            **spans(of(some), is_spread=len({take.line for take in some}) > 1),
        }

    series = _grouped(takes, "series")
    found: dict[str, Any] = {"lines": len(lines), "series": {name: shown(some) for name, some in series.items()}}
    found["differences"] = {}
    for first, second in _pairs(list(series)):
        one, other = _common(series[first], series[second])
        if one:
            gaps, rest = of(one), of(other)
            gap = {name: gaps[name] - rest[name] for name in gaps}
            about = {"takes": len(one), **spans(gap, is_spread=len({take.line for take in one}) > 1)}
            found["differences"][f"{first} - {second}"] = about
    voices = _grouped([take for take in takes if take.series != "recorded"], "voice")
    if 1 < len(voices) <= 16:
        found["voices"] = {voice: shown(some) for voice, some in voices.items()}
    if by_text:
        found["texts"] = {text: _text(some) for text, some in _grouped(takes, "text").items()}
    return found


def _grouped(takes: Sequence[Take], name: str) -> dict[str, list[Take]]:
    groups: dict[str, list[Take]] = {}
    for take in takes:
        groups.setdefault(getattr(take, name), []).append(take)
    return groups


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Streaming minus full response, and cold minus hot."""
    wanted = [(f"streaming {state}", f"full {state}") for state in ("hot", "cold")]
    wanted += [(f"{mode} cold", f"{mode} hot") for mode in ("streaming", "full")]
    return [pair for pair in wanted if set(pair) <= set(names)]


def _common(one: Sequence[Take], other: Sequence[Take]) -> tuple[list[Take], list[Take]]:
    """The takes of the same line, voice and seed, in one order."""
    named = {(take.line, take.voice, take.seed): take for take in other}
    pairs = [(take, named[key]) for take in one if (key := (take.line, take.voice, take.seed)) in named]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _text(takes: Sequence[Take]) -> dict[str, Any]:
    wrong = Counter(take.heard for take in takes if not take.is_right)
    return {"takes": len(takes), "right": sum(take.is_right for take in takes), "wrong": dict(wrong.most_common(3))}


def table(found: Mapping[str, Any]) -> str:
    """Metrics down; across the series, below them their differences, voices, and texts."""
    rows: list[str] = []
    for part in ("series", "differences", "voices"):
        rows += ["", *_block(found[part])] if found.get(part) else []
    if "texts" in found:
        rows += ["", "right  of   text, and what was heard instead"]
        for text, about in found["texts"].items():
            wrong = ", ".join(f"{heard!r} x{count}" for heard, count in about["wrong"].items())
            rows.append(f"{about['right']:5}  {about['takes']:<4} {text}   {wrong}".rstrip())
    return "\n".join(rows[1:])


def _block(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    width = max(24, *(len(name) + 2 for name in columns))
    rows = ["".join([" " * 24, *(f"{name:>{width}}" for name in columns)])]
    for count in [name for name in ("takes", "words", "failed") if any(name in about for about in columns.values())]:
        rows.append("".join([f"{count:24}", *(f"{about.get(count, ''):>{width}}" for about in columns.values())]))
    for name, (title, factor, digits) in NAMES.items():
        if any(name in about for about in columns.values()):
            cells = [_cell(about.get(name), factor, digits) for about in columns.values()]
            rows.append("".join([f"{title:24}", *(f"{cell:>{width}}" for cell in cells)]))
    return rows


def _cell(span: Mapping[str, float] | None, factor: float, digits: int) -> str:
    if span is None:
        return "-"
    value, *bounds = (f"{factor * one:.{digits}f}" for one in span.values())
    return f"{value} [{', '.join(bounds)}]" if bounds else value


def plain(take: Take) -> dict[str, Any]:
    """A take for JSON."""
    found = asdict(take)
    del found["embedding"]
    return {**found, "path": str(take.path) if take.path else None}


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Each metric of each series with its interval. Needs the `eval` extra."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = found["series"]
    names = [name for name in NAMES if any(name in about for about in series.values())]
    figure, axes = pyplot.subplots(1, len(names), figsize=(2.6 * len(names), 4), squeeze=False)
    for name, axis in zip(names, axes[0], strict=True):
        title, factor, _ = NAMES[name]
        shown = {label: about[name] for label, about in series.items() if name in about}
        for label, span in shown.items():
            low, value, high = (factor * span.get(bound, span["value"]) for bound in ("low", "value", "high"))
            bars, color = [[max(value - low, 0)], [max(high - value, 0)]], f"C{list(series).index(label)}"
            axis.errorbar([label], [value], bars, marker="o", capsize=4, color=color)
        axis.set_title(title, fontsize="small")
        axis.tick_params(axis="x", rotation=60, labelsize="small")
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
