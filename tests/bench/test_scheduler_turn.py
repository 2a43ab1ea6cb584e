"""The bench of a turn's host cost runs, and its parts add up to no more than the whole."""

from __future__ import annotations

from tests.bench.scheduler_turn import measure


def test_a_turn_is_measured_by_its_parts() -> None:
    figures = measure(lanes=8, turns=300)
    parts = ("collect_ms", "launch_ms", "plan_ms", "report_ms")
    assert all(figures[name] > 0 for name in parts)
    assert sum(figures[name] for name in parts) <= figures["turn_ms"]
    assert figures["contexts"] > 8  # some have ended, and others followed
