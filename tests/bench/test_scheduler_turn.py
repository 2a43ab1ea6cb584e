"""The bench of the host's cost runs, and what it says hangs together; bursts and overload are the same anywhere."""

from __future__ import annotations

import pytest

from tests.bench.scheduler_turn import STAGES, measure, measure_burst


def test_listeners_are_served_in_time_and_the_host_is_measured() -> None:
    figures = measure(6, 2.0, lanes=8, warm_s=6.0, overlaps=False)
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


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_burst_says_where_the_time_to_the_first_sound_went(is_cold: bool) -> None:
    figures, stages = measure_burst(4, is_cold=is_cold, lanes=8)
    assert (figures, stages) == measure_burst(4, is_cold=is_cold, lanes=8)
    assert sum(stages["last"].values()) == pytest.approx(figures["first_p99_ms"])
    assert all(stages["mean"][stage] >= 0 for stage in STAGES)
    assert stages["mean"]["tokens"] > 12  # twelve steps of the talker behind the prompt's own id
    assert stages["mean"]["steps"] > 10  # nine more of the flow, which take more than a millisecond each


def test_launches_that_are_quicker_while_the_other_stream_is_idle_are_looked_for_sooner() -> None:
    _, stages = measure_burst(4, lanes=8)
    assert stages["mean"]["tokens"] < 22  # twelve steps of 1.07 ms, and what the host takes between them


def test_launches_are_filled_up_with_the_prompts_of_new_voices() -> None:
    """32 prompts of four chunks and 32 first hops are 1600 chunks' steps: 185 ms in launches of 64."""
    figures, _ = measure_burst(32, is_cold=True, lanes=32)
    assert figures["first_p99_ms"] < 300
