from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ConfigError, load
from gateway import bench, cli, figures
from gateway.bench import Bench, BenchError, Point
from gateway.client import speech_url
from gateway.decks import NoSuchVoice, Request, Writer, deck, spread, voice_order
from gateway.figures import RATE_HZ, Figures, Trace, deliveries, gaps_s, percentile, played_out_s, underrun_s
from gateway.listeners import Answer, Line
from tests.gateway.conftest import Stack, StackMaker
from tests.scripted_engine import Script

PATIENCE_S = 20.0
TENTH = RATE_HZ // 10


def letters(text: str) -> int:
    """A tokenizer, as good as any: the scripted engine gives 1200 samples, a tenth of two, for each letter."""
    return sum(letter.isalnum() for letter in text)


def trace(*arrivals: tuple[float, int], outcome: str = "done", **more: Any) -> Trace:
    last_s = arrivals[-1][0] if arrivals else 0.0
    return Trace(
        **{"voice": "ada", "tokens": 0, "sent_s": 0.0, "end_s": last_s, **more},
        arrivals=list(arrivals),
        outcome=outcome,
    )


# ---- the statistics


def test_a_player_stands_still_for_what_comes_late_and_only_once() -> None:
    on_time = [(1.0, TENTH), (1.1, TENTH), (1.15, TENTH)]
    assert underrun_s(on_time) == pytest.approx(0.0)
    late = [(1.0, TENTH), (1.18, TENTH), (1.2, TENTH), (1.3, TENTH)]  # dry from 1.1 to 1.18, then with a tenth in hand
    assert underrun_s(late) == pytest.approx(0.08)
    twice = [*late, (1.53, TENTH)]  # due at 1.0 + 0.4 + 0.08
    assert underrun_s(twice) == pytest.approx(0.13)
    assert played_out_s(trace(*twice)) == pytest.approx(1.0 + 0.5 + 0.13)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 2 * RATE_HZ)), min_size=1, max_size=20))
def test_the_underrun_is_that_of_a_player_simulated_step_by_step(steps: list[tuple[float, int]]) -> None:
    arrivals, now = [], 0.0
    for wait_s, samples in steps:
        now += wait_s
        arrivals.append((now, samples))
    stalled, dry_at = 0.0, arrivals[0][0]
    for at_s, samples in arrivals:
        stalled += max(0.0, at_s - dry_at)
        dry_at = max(dry_at, at_s) + samples / RATE_HZ
    assert underrun_s(arrivals) == pytest.approx(stalled, abs=1e-9)


def test_messages_that_come_together_are_one_delivery() -> None:
    arrivals = [(1.0, 10), (1.001, 20), (1.015, 30), (1.2, 5), (1.5, 5), (1.51, 5)]
    assert deliveries(arrivals) == [(1.0, 60), (1.2, 5), (1.5, 10)]
    assert gaps_s(arrivals) == pytest.approx([0.2, 0.3])


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(one) for one in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.99) == 7.0


def test_the_share_without_underruns_leaves_out_answers_that_came_at_once() -> None:
    at_once = trace((0.1, TENTH), (0.11, 9 * TENTH))
    smooth = trace((0.1, TENTH), (0.15, TENTH))
    late = trace((0.1, TENTH), (0.27, TENTH))  # 70 ms
    broken = trace((0.1, TENTH), (0.15, TENTH), outcome="engine_error")
    cut = trace((0.1, TENTH), (0.9, TENTH), outcome="cancelled", cancel_s=0.85)
    found = Figures.of([at_once, smooth, late, broken, cut], [(0.0, 1.0)])
    assert (found.continuous, found.c50, found.c100) == (3, round(1 / 3, 4), round(2 / 3, 4))
    assert found.errors == {"engine_error": 1}
    assert (found.requests, found.done, found.cancelled) == (5, 3, 1)
    assert found.cancel_ack is not None and found.cancel_ack.max == 50.0
    assert found.first_pcm is not None and found.first_pcm.count == 5 and found.first_pcm.p50 == 100.0


def test_a_window_counts_the_requests_sent_and_the_audio_come_in_it() -> None:
    early = trace((0.5, TENTH), (1.5, TENTH), (2.5, TENTH), sent_s=0.2)
    inside = trace((1.4, TENTH), (1.6, TENTH), sent_s=1.2, queued_ms=30)
    found = Figures.of([early, inside], [(1.0, 1.3), (1.3, 2.0)])
    assert (found.requests, found.done) == (1, 1)
    assert found.audio_s == pytest.approx(0.3) and found.audio_s_per_s == pytest.approx(0.3)
    assert found.queue is not None and found.queue.p50 == 30.0
    assert found.requests_per_s == 1.0


def test_a_point_without_answers_has_a_row_too() -> None:
    found = Figures.of([trace(outcome="overloaded")], [(0.0, 1.0)])
    assert found.first_pcm is None and found.c50 is None and found.errors == {"overloaded": 1}
    result = {
        "name": "closed 1 hot",
        "figures": found,
        "gauges": {"cache_bytes": {"max": 2.5e9}},
        "gpu": {"busy": 93.4},
    }
    failed = {"name": "burst 9 cold", "failure": "no voices"}
    head, row, failure = figures.table([result, failed]).splitlines()
    assert len(head) == len(row) and row.split()[-3:] == ["93", "%", "2.5"]
    assert failure.startswith("burst 9 cold") and "no voices" in failure


# ---- what is asked for


def test_lengths_are_those_of_seed_tts() -> None:
    lengths = spread(64)
    assert sum(lengths) / 64 == pytest.approx(122, abs=1)
    assert [lengths[3], lengths[-4]] == pytest.approx([77, 181], abs=3)
    assert lengths == sorted(lengths)


@given(st.integers(2, 400), st.integers(0, 1000))
def test_a_text_has_the_tokens_that_it_should(tokens: int, seed: int) -> None:
    text = Writer(lambda some: len(some.split()) + some.count("."), seed).text(tokens)
    assert len(text.split()) + text.count(".") == tokens


def test_every_sentence_of_a_long_text_is_one_clause() -> None:
    text = Writer(letters, 3).text(900)
    assert letters(text) == 900
    assert max(map(len, text.split(". "))) < 200


def test_a_deck_follows_from_its_seed_and_cuts_its_share() -> None:
    def one() -> list[Request]:
        voices = voice_order("pooled", ["a", "b", "c"], 5)
        return deck(Writer(letters, 1), lengths=spread(40), ratio=2.0, voices=voices, cancels=0.3, seed=9)

    cards = one()
    assert cards == one()
    assert sum(card.cut is not None for card in cards) == 12
    assert any(card.cut == 0 for card in cards) and all(0 <= card.cut < 1 for card in cards if card.cut is not None)
    assert {card.voice for card in cards} == {"a", "b", "c"}
    assert all(card.tokens == 2 * letters(card.text) for card in cards)
    assert sorted(card.tokens for card in cards) == pytest.approx(spread(40), abs=1)


def test_cold_voices_come_once_and_hot_ones_again() -> None:
    assert list(voice_order("cold", ["a", "b"], 0)) == ["a", "b"]
    hot = voice_order("hot", ["a", "b"], 0)
    assert [next(hot), next(hot), next(hot)] == ["a", "a", "a"]
    assert next(voice_order("b", ["a", "b"], 0)) == "b"
    with pytest.raises(NoSuchVoice, match="lukewarm"):
        voice_order("lukewarm", ["a"], 0)


def test_the_loads_of_a_point_share_it_out() -> None:
    def shares(point: Point, processes: int = 3) -> list[Any]:
        return bench.loads(point, "ws://x", Writer(letters, 0), 1.0, [f"v{i}" for i in range(20)], processes)

    closed = shares(Point(streams=8, seconds=9, listens=True))
    assert [len(one.offsets) for one in closed] == [3, 3, 2] and all(one.is_endless for one in closed)
    assert sorted(at_s for one in closed for at_s in one.offsets) == [3.0 * i / 8 for i in range(8)]
    assert [card.text for card in closed[0].deck] != [card.text for card in closed[1].deck]
    burst = shares(Point(kind="burst", streams=7, voices="cold"))
    assert [len(one.deck) for one in burst] == [3, 2, 2]
    assert len({card.voice for one in burst for card in one.deck}) == 7
    poisson = shares(Point(kind="poisson", rate=50, seconds=20))
    times = sorted(at_s for one in poisson for at_s in one.offsets)
    assert 800 < len(times) < 1200 and times[-1] < 20
    with pytest.raises(BenchError, match="rate"):
        shares(Point(kind="poisson"))
    with pytest.raises(BenchError, match="siege"):
        shares(Point(kind="siege"))


def test_points_follow_from_the_options() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser, cli.DEFAULT_PROFILE)
    assert [point.name for point in bench.points(parser.parse_args([]))] == [f"closed {n} hot" for n in (1, 4, 16, 64)]
    words = [
        "--concurrency",
        "2",
        "--burst",
        "3,5",
        "--rate",
        "0.5",
        "--voices",
        "hot,cold",
        "--cancels",
        "0.3",
        "--listen",
    ]
    names = [point.name for point in bench.points(parser.parse_args(words))]
    assert names[0] == "closed 2 hot listening 30 % cut" and names[1:4] == [
        "burst 3 hot 30 % cut",
        "burst 5 hot 30 % cut",
        "poisson 0.5/s hot 30 % cut",
    ]
    assert names[4].startswith("closed 2 cold")


def test_a_profile_is_altered_key_by_key(tmp_path: Path) -> None:
    profile = tmp_path / "own.toml"
    profile.write_text('[engine]\nlanes = 3\nwaiting = 7\n[model]\ncheckpoint = "a \\"b\\""\n')
    found = load(bench.altered(profile, tmp_path, {"lanes": 1}, {"voice": "b"}))
    assert (found.engine.lanes, found.engine.waiting) == (1, 7)
    assert (found.model.checkpoint, found.model.voice) == ('a "b"', "b")
    with pytest.raises(ConfigError, match="lains"):
        bench.altered(profile, tmp_path, {"lains": 1})


# ---- one listener, by a clock of our own


class Turnstile(asyncio.Event):
    """The scripted engine's gate: each `let` lets one step through and waits until it has been made."""

    def __init__(self) -> None:
        super().__init__()
        self._passes = asyncio.Semaphore(0)
        self._is_waiting = asyncio.Event()

    async def wait(self) -> Any:
        self._is_waiting.set()
        await self._passes.acquire()
        return True

    async def let(self) -> None:
        await self._is_waiting.wait()
        self._is_waiting.clear()
        self.open()
        await self._is_waiting.wait()

    def open(self) -> None:
        self._passes.release()


@contextlib.asynccontextmanager
async def a_line(stack: Stack, now: list[float]) -> AsyncIterator[Line]:
    line, _ = await Line.open(speech_url(stack.address), clock=lambda: now[0])
    try:
        yield line
    finally:
        await line.close()


async def spoken(stack: Stack, gate: Turnstile, request: Request, times: list[float]) -> Answer:
    """The answer whose pieces of audio leave the engine, and come, at these times."""
    now = [10.0]
    async with asyncio.timeout(PATIENCE_S), a_line(stack, now) as line:
        asking = asyncio.create_task(line.ask(request, now[0]))
        answer = await until(lambda: next(iter(line.answers.values()), None))
        for number, at_s in enumerate(times):
            now[0] = 10.0 + at_s
            while stack.engine.num_samples <= number * TENTH:
                await gate.let()
                await until(lambda: answer.trace.samples == stack.engine.num_samples)
        while not asking.done():
            gate.open()
            await asyncio.sleep(0)
        return await asking


async def until(found: Callable[[], Any]) -> Any:
    while not (value := found()):  # noqa: ASYNC110 - what is waited for lies in three tasks, none of which is ours
        await asyncio.sleep(0)
    return value


async def test_figures_follow_from_the_times_of_a_known_schedule(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_samples=TENTH)) as stack:
        stack.engine.script.gate = gate = Turnstile()
        request = Request(voice="ada", text="so it is", tokens=12, seed=4)  # six letters: three tenths
        answer = await spoken(stack, gate, request, [0.3, 0.38, 0.58])
    assert [(round(at_s - 10, 3), n) for at_s, n in answer.trace.arrivals] == [
        (0.3, TENTH),
        (0.38, TENTH),
        (0.58, TENTH),
    ]
    found = Figures.of([answer.trace], [(10.0, 11.0)])
    assert found.first_pcm is not None and found.first_pcm.p50 == pytest.approx(300)
    assert found.gap is not None and (found.gap.count, found.gap.max) == (2, pytest.approx(200))
    assert found.underrun is not None and found.underrun.max == pytest.approx(80)
    assert (found.c50, found.c100) == (0.0, 1.0)
    assert found.audio_s_per_s == pytest.approx(0.3)
    assert found.audio_per_token == pytest.approx(0.025)


async def test_a_cut_comes_with_the_sample_that_it_waits_for(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_samples=TENTH, step_s=0.01)) as stack, a_line(stack, [0.0]) as line:
        async with asyncio.timeout(PATIENCE_S):
            long = Request(voice="ada", text="a" * 190, tokens=237, seed=4, cut=0.05)  # of 9.5 seconds
            answer = await line.ask(long, 0.0)
            soon = Request(voice="ada", text="STALL", tokens=10, seed=4, cut=0)
            silent = await line.ask(soon, 0.0)
    assert answer.trace.outcome == silent.trace.outcome == "cancelled"
    assert 0.05 * 9.48 <= answer.trace.audio_s < 5
    assert silent.trace.samples == 0 and silent.trace.cancel_s is not None
    assert line.num_stray == 0


async def test_errors_come_by_their_codes(make_stack: StackMaker) -> None:
    async with make_stack() as stack, a_line(stack, [0.0]) as line, asyncio.timeout(PATIENCE_S):
        for text, code in (("FAULT", "engine_error"), ("BUSY", "overloaded")):
            answer = await line.ask(Request(voice="ada", text=text, tokens=1, seed=0), 0.0)
            assert answer.trace.outcome == code
        late = await line.ask(Request(voice="ada", text="STALL", tokens=1, seed=0), 0.0, patience_s=0.05)
        assert late.trace.outcome == "silent"
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: not stack.engine.num_contexts)
        await stack.server.stop()
        gone = await line.ask(Request(voice="ada", text="Hello", tokens=1, seed=0), 0.0)
        assert gone.trace.outcome == "disconnected"


def test_lost_audio_is_no_answer() -> None:
    answer = Answer(Request(voice="ada", text="", tokens=1, seed=0), 0.0)
    assert not answer.take({"t": "audio", "pos": 0, "d": b"\0" * 960}, 1.0)
    assert answer.take({"t": "done", "samples": 481}, 2.0)
    assert answer.trace.outcome == "lost_audio"
    torn = Answer(Request(voice="ada", text="", tokens=1, seed=0), 0.0)
    assert torn.take({"t": "audio", "pos": 480, "d": b"\0" * 960}, 1.0) and torn.trace.outcome == "lost_audio"


# ---- the whole command, its listeners in their own processes


async def test_the_bench_measures_a_running_server(
    make_stack: StackMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    words = "--burst 3 --rounds 2 --concurrency 2 --seconds 1 --tokens 25 --ratio 6 --seed 2 --cancels 0.4"
    async with make_stack(Script(step_s=0.01, lanes=2, waiting=0)) as stack:
        arguments = ["bench", "--url", stack.address, "--json", str(path), *words.split()]
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread(cli.main, arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("point") and lines[1].startswith("closed 2 hot 25 tokens 40 % cut")
    closed, burst = json.loads(lines[-1])
    assert [closed, burst] == json.loads(path.read_text())
    assert burst["figures"]["errors"] == {"overloaded": 2}  # of two rounds, each of three
    assert burst["figures"]["done"] + burst["figures"]["cancelled"] == 4
    assert closed["figures"]["requests"] > 2 and closed["figures"]["cancel_ack"]["p50"] < 1_000
    assert closed["gauges"]["lanes"]["max"] == 2 and closed["left"] == {} and closed["client"]["stray"] == 0


async def test_a_cold_point_wants_voices_that_nobody_has_used(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_s=0.0)) as stack, asyncio.timeout(PATIENCE_S):
        cold = Bench(stack.address, count=letters, ratio=1.0)
        await cold.say(Point(tokens=3))
        with pytest.raises(BenchError, match="needs 2 voices not used yet, 1 are left"):
            await cold.measure(Point(kind="burst", streams=2, voices="cold", tokens=3))
        result = await bench.attempt(cold, Point(kind="burst", streams=9, voices="cold"))
        assert "9 voices" in result["failure"]


async def test_listeners_that_cannot_connect_end_the_point_alone() -> None:
    lost = Bench("http://127.0.0.1:9/", count=letters, ratio=1.0)
    started = time.monotonic()
    result = await bench.attempt(lost, Point())
    assert result["failure"] and time.monotonic() - started < PATIENCE_S
    assert await bench.gauges("http://127.0.0.1:9/") == {}


def test_the_moments_of_a_poisson_load_are_as_random_as_they_should_be() -> None:
    point = Point(kind="poisson", rate=20, seconds=200, tokens=5)
    (share,) = bench.loads(point, "ws://x", Writer(letters, 0), 1.0, ["v"], 1)
    waits = [later - earlier for earlier, later in zip(share.offsets, share.offsets[1:], strict=False)]
    mean = sum(waits) / len(waits)
    deviation = (sum((wait - mean) ** 2 for wait in waits) / len(waits)) ** 0.5
    assert mean == pytest.approx(0.05, rel=0.1) and deviation == pytest.approx(mean, rel=0.1)
