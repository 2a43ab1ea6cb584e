"""What launches cost, and how many listeners follow from it."""

from __future__ import annotations

import pytest

from engine.costs import FLOW, HIFT, TALKER, Costs, Mean, tier


def costs_of(stage: str, milliseconds: dict[int, float]) -> Costs:
    costs = Costs()
    for rows, cost in milliseconds.items():
        costs.add(stage, rows, cost / 1e3)
    return costs


def test_a_mean_follows_what_it_measures_and_the_first_ones_count_alike() -> None:
    mean = Mean(7.0)
    assert mean.value == 7.0
    for value in (1.0, 3.0, 2.0):
        mean.add(value)
    assert mean.value == pytest.approx(2.0)
    for _ in range(200):
        mean.add(10.0)
    assert mean.value == pytest.approx(10.0, abs=1e-3)


@pytest.mark.parametrize(("rows", "power"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_a_tier_holds_the_rows_up_to_a_power_of_two(rows: int, power: int) -> None:
    assert tier(rows) == power


def test_the_soonest_is_the_least_of_the_tier_and_is_forgotten_slowly() -> None:
    costs = costs_of(TALKER, {64: 1.1})
    costs.add(TALKER, 60, 2.5e-3)
    assert 1.1e-3 < costs.soonest(TALKER, 33) < 1.2e-3
    assert costs.soonest(TALKER, 32) == 0.0
    for _ in range(400):
        costs.add(TALKER, 64, 2.5e-3)
    assert costs.soonest(TALKER, 64) == pytest.approx(2.5e-3, rel=1e-2)
    costs.add(TALKER, 64, 1.0e-3)
    assert costs.soonest(TALKER, 64) == 1.0e-3


def test_a_tier_not_measured_costs_what_a_larger_one_does_or_a_multiple_of_a_smaller_one() -> None:
    costs = costs_of(FLOW, {8: 2.0, 64: 9.0})
    assert costs.of(FLOW, 5) == pytest.approx(2e-3)
    assert costs.of(FLOW, 16) == costs.of(FLOW, 64) == pytest.approx(9e-3)
    assert costs.of(FLOW, 256) == pytest.approx(36e-3)
    assert costs.of(HIFT, 1) is None


def test_a_launch_is_as_large_as_the_slack_allows_and_never_below_the_least() -> None:
    costs = costs_of(FLOW, {32: 5.0, 64: 9.0, 128: 17.0})
    rows = [costs.launch_rows(FLOW, least=32, most=128, slack_s=slack, steps=10) for slack in (-1.0, 0.05, 0.1, 0.2)]
    assert rows == [32, 32, 64, 128]
    assert Costs().launch_rows(FLOW, least=32, most=128, slack_s=0.0, steps=10) == 128  # nothing measured yet


def test_listeners_are_playable_while_no_stream_of_the_device_is_full() -> None:
    costs = costs_of(FLOW, {64: 9.0})
    costs.add(HIFT, 64, 11e-3)
    costs.add(TALKER, 256, 3e-3)
    talker, sounding = costs.load(256, flow_rows=64)
    assert talker == pytest.approx(25 * 3e-3)
    assert sounding == pytest.approx(4 * (10 * 9e-3 + 11e-3))
    assert costs.playable(lanes=512, flow_rows=64, share=0.9) == 512  # 0.81 of a second's time
    assert costs.playable(lanes=1_000, flow_rows=64, share=0.9) == 570
    assert costs.playable(lanes=512, flow_rows=64, share=0.9, overlaps=False) == 475  # 0.15 more for the talker
    costs.add(TALKER, 1_024, 40e-3)
    assert (
        costs.playable(lanes=1_000, flow_rows=64, share=0.9) == 256
    )  # what is not known costs what the next tier does
    assert costs.playable(lanes=1_000, flow_rows=64, share=1e-6) == 1
