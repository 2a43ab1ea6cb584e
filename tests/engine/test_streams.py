"""Launches land in their order, by their own events."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from engine.streams import Stream

CPU = torch.device("cpu")


def test_on_the_cpu_a_launch_has_landed_when_it_returns() -> None:
    stream: Stream[list[str]] = Stream(CPU)
    heard: list[str] = []
    for name in ("flow", "hift"):
        with stream.launch(name, rows=3) as flight:
            flight.land = lambda results, name=name: results.append(name)  # type: ignore[misc]
    assert (stream.in_flight("flow"), stream.in_flight("talker"), stream.is_idle) == (1, 0, False)
    for flight in stream.landed():
        assert flight.seconds > 0
        assert flight.rows == 3
        assert flight.land is not None
        flight.land(heard)
    assert heard == ["flow", "hift"]
    assert stream.is_idle


def test_a_launch_that_raises_is_not_in_flight() -> None:
    stream: Stream[None] = Stream(CPU)
    with pytest.raises(ValueError, match="no width"), stream.launch("flow", rows=1):
        raise ValueError("no width")
    assert stream.is_idle


@pytest.mark.gpu
def test_on_a_gpu_each_stream_retires_by_its_own_events() -> None:
    device = torch.device("cuda")
    slow: Stream[None] = Stream(device)
    quick: Stream[None] = Stream(device, priority=-1)
    with slow.current():
        big, small = torch.randn(8_192, 8_192, device=device), torch.ones(8, device=device)
        big = big @ big * 1e-4  # a kernel's first launch loads it, and waits for all that runs
        copied = torch.empty(8, pin_memory=True).copy_(small + 1, non_blocking=True)
    torch.cuda.synchronize()
    with slow.launch("flow", rows=1):
        for _ in range(20):
            big = big @ big * 1e-4
    with quick.launch("talker", rows=1):
        copied.copy_(small + 1, non_blocking=True)
    deadline = time.monotonic() + 10
    while not (landed := list(quick.landed())):
        assert time.monotonic() < deadline, "the quick launch never landed"
    was_slow_there = bool(list(slow.landed()))
    assert copied.tolist() == [2.0] * 8
    while not slow.is_idle and time.monotonic() < deadline:
        for flight in slow.landed():
            print(f"\nquick {1e3 * landed[0].seconds:.3f} ms, slow {1e3 * flight.seconds:.1f} ms")
            assert flight.seconds > landed[0].seconds
    assert slow.is_idle
    assert not was_slow_there, "the quick launch waited for the slow one"


@pytest.mark.gpu
def test_on_a_gpu_streams_that_take_turns_never_overlap() -> None:
    device = torch.device("cuda")
    one: Stream[None] = Stream(device)
    other: Stream[None] = Stream(device, priority=-1)
    with one.current():
        x = torch.randn(8_192, 8_192, device=device)
        x = x @ x * 1e-4
    torch.cuda.synchronize()
    one.take_turns_with(other)
    flights = []
    for stream in (one, other, one):
        with stream.launch("flow", rows=1) as flight:
            x = x @ x * 1e-4
        flights.append(flight)
    torch.cuda.synchronize()
    for before, after in pairwise(flights):
        assert before.events is not None and after.events is not None
        assert before.events[1].elapsed_time(after.events[0]) >= 0, "the next one began before this one had ended"
