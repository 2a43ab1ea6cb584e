"""The bench of the host's cost runs, and what it says hangs together; overload is a queue, on any machine."""

from __future__ import annotations

from tests.bench.scheduler_turn import measure


def test_listeners_are_served_in_time_and_the_host_is_measured() -> None:
    figures = measure(6, 2.0, lanes=8, warm_s=6.0)
    assert figures["C50_%"] == 100
    assert 4.0 < figures["audio_s/s"] < 8.0  # each hears a second a second
    assert figures["first_p50_ms"] < 200
    assert 0 < figures["turn_us"] <= figures["turn_p99_us"]
    device = sum(figures[f"{stage}_%"] for stage in ("talker", "flow", "hift"))
    assert 0 < device <= 101  # its stages take turns


def test_more_listeners_than_lanes_wait_and_those_who_are_seated_hear_no_gap() -> None:
    figures = measure(150, 2.0, lanes=2, pace=0.0, warm_s=6.0)
    assert figures["lanes"] > 1.9
    assert figures["waiting"] > 0
    assert figures["C50_%"] == 100
