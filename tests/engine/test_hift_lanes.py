"""HiFT for many lanes at once: what slots, masks and padding give is what offline() gives, on the CPU in float64 and,
with the kernel and in graphs, at full size on CUDA."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from time import perf_counter

import pytest
import torch
from torch import Tensor

from engine.graphs import Graphs
from engine.hift import Hift, HiftShape, HiftState, NoiseTooShort, fold_weight_norm
from engine.hift_lanes import HiftLanes, Plan, SlotState
from tests.golden_fixtures import fixture, hift_noise
from tests.random_checkpoint import FULL, hift_state

SMALL = HiftShape(base=16, f0_channels=12)
EXACT = 1e-9


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


def a_vocoder(tone_steps: int = 1) -> Hift:
    torch.manual_seed(3)
    hift = (
        Hift(replace(SMALL, tone_steps=tone_steps), noise=torch.rand(480 * 160, 9))
        .double()
        .eval()
        .requires_grad_(False)
    )
    hift.f0_predictor.classifier.bias.fill_(0.4)
    hift.f0_predictor.classifier.weight.mul_(400)  # F0 crosses the voicing threshold and moves
    return hift


@pytest.fixture(scope="module", params=[1, 480], ids=["staircase", "sines"])
def small(request: pytest.FixtureRequest) -> Hift:
    return a_vocoder(request.param)


def some_lanes(hift: Hift, lanes: int = 3) -> HiftLanes:
    made = HiftLanes(hift, lanes=lanes, lane_tiers=(1, 2, 4), frame_tiers=(6, 20))
    made.capture(Graphs("cpu"))
    return made


def make_mel(frames: int, seed: int) -> Tensor:
    return torch.randn(80, frames, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_cuts(total: int, seed: int) -> list[int]:
    draw, cuts = random.Random(seed), []
    while sum(cuts) < total:
        cuts.append(min(total - sum(cuts), draw.choice([0, 1, 1, 2, 3, 4, 5, 11, 50])))
    return cuts


@torch.inference_mode()
def push_all(lanes: HiftLanes, mel: Tensor, cuts: list[int]) -> list[Tensor]:
    """Pushes the parts one by one; the last is final. Holds the promise of how much is given out at once."""
    state, received, waves = lanes.begin(), 0, []
    parts = mel.split(cuts, dim=1)
    for place, part in enumerate(parts):
        is_final = place == len(parts) - 1
        waves += lanes.push([state], [part], [is_final])
        received += part.shape[1]
        promised = 480 * received if is_final else max(0, 480 * (received - 4) - 3)
        assert sum(map(len, waves)) == promised
    return waves


@pytest.mark.parametrize("frames", [1, 3, 4, 5, 9, 60])
@pytest.mark.parametrize("seed", range(2))
def test_streamed_equals_offline_for_random_cuts(small: Hift, frames: int, seed: int) -> None:
    mel = make_mel(frames, frames)
    streamed = torch.cat(push_all(some_lanes(small), mel, random_cuts(frames, seed)))
    assert error(streamed, small.offline(mel[None])[0]) < EXACT


def test_one_frame_pushes_and_an_empty_last_push(small: Hift) -> None:
    mel = make_mel(9, 7)
    assert error(torch.cat(push_all(some_lanes(small), mel, [1] * 9 + [0])), small.offline(mel[None])[0]) < EXACT


@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_first_later_and_last_pushes_go_through_together(small: Hift, seed: int) -> None:
    """Five lanes, more than a tier takes, at different places; two of them are given up and their slots reused."""
    lanes, draw = some_lanes(small, lanes=4), random.Random(seed)
    mels = [make_mel(frames, frames) for frames in (70, 3, 41, 12, 33)]
    parts = [list(mel.split(random_cuts(mel.shape[1], seed + i), dim=1)) for i, mel in enumerate(mels)]
    states: list[SlotState] = [lanes.begin() for _ in mels]
    waves: list[list[Tensor]] = [[] for _ in mels]
    for turn in range(1_000):
        chosen = [i for i in range(len(mels)) if parts[i] and (turn < 1 or draw.random() < 0.7)]
        if turn in (1, 3):  # begin again
            given_up = turn
            states[given_up], waves[given_up] = lanes.begin(), []
            parts[given_up] = [mels[given_up]]
        pushed = [parts[i].pop(0) for i in chosen]
        out = lanes.push([states[i] for i in chosen], pushed, [not parts[i] for i in chosen])
        for i, wave in zip(chosen, out, strict=True):
            waves[i].append(wave)
        if not any(parts):
            break
    for mel, wave in zip(mels, waves, strict=True):
        assert error(torch.cat(wave), small.offline(mel[None])[0]) < EXACT


@torch.inference_mode()
def test_a_full_response_of_ragged_lengths_is_one_call(small: Hift) -> None:
    lanes, mels = some_lanes(small), [make_mel(frames, frames) for frames in (44, 2, 21)]
    waves = lanes.push([lanes.begin() for _ in mels], mels, [True] * len(mels))
    for mel, wave in zip(mels, waves, strict=True):
        assert error(wave, small.offline(mel[None])[0]) < EXACT


@torch.inference_mode()
def test_slots_come_back_from_ended_and_forgotten_lanes(small: Hift) -> None:
    lanes = some_lanes(small, lanes=2)
    everything = len(lanes.free)
    ended, cancelled, silent = lanes.begin(), lanes.begin(), lanes.begin()
    mels = [make_mel(8, seed) for seed in range(3)]
    lanes.push([ended, cancelled, silent], [mels[0], mels[1], mels[2][:, :3]], [False] * 3)
    assert len(lanes.free) == everything - 2  # three frames wait outside
    lanes.push([ended], [mels[0]], [True])
    del cancelled
    gc.collect()
    assert len(lanes.free) == everything
    del ended
    gc.collect()
    assert sorted(lanes.free) == list(range(everything))


@torch.inference_mode()
def test_more_states_than_slots_are_refused_by_number(small: Hift) -> None:
    lanes = some_lanes(small, lanes=1)
    states = [lanes.begin() for _ in range(3)]
    with pytest.raises(AssertionError, match="more than 2 vocoder states"):
        for state in states:
            lanes.push([state], [make_mel(8, 1)], [False])


@torch.inference_mode()
def test_a_neighbour_of_no_numbers_does_not_reach_a_lane(small: Hift) -> None:
    lanes, mel = some_lanes(small), make_mel(18, 1)
    broken = torch.full((80, 18), float("nan"), dtype=torch.float64)
    got, lost = lanes.push([lanes.begin(), lanes.begin()], [mel, broken], [True, True])
    assert error(got, small.offline(mel[None])[0]) < EXACT and not lost.isfinite().all()
    again = lanes.push([lanes.begin()], [mel], [True])[0]  # in the broken one's slot
    assert torch.equal(again, got)


@torch.inference_mode()
def test_noise_ends_with_its_name_and_length(small: Hift) -> None:
    lanes = some_lanes(small)
    with pytest.raises(NoiseTooShort, match=r"76800 samples, 77\d\d\d"):
        lanes.push([lanes.begin()], [make_mel(161, 1)], [True])


def test_an_ended_lane_takes_no_more(small: Hift) -> None:
    lanes = some_lanes(small)
    state = lanes.begin()
    with torch.inference_mode():
        lanes.push([state], [make_mel(5, 1)], [True])
    with pytest.raises(AssertionError, match="final push"):
        lanes.push([state], [make_mel(5, 1)], [False])


# On CUDA, at full size.

GOLDEN = fixture("hift")
WHOLE = [name for name, about in GOLDEN.cases.items() if "calls" not in about]
NOISE = 480 * 1_500
GFLOP_PER_SECOND = 33.5  # of audio, the upsampling convolutions not folded
FP32_TFLOPS, TF32_TFLOPS = 67.0, 400.0


def full_size(*, is_exact: bool, dtype: torch.dtype = torch.float32) -> Hift:
    hift = Hift(FULL.hift, noise=torch.rand(NOISE, 9, generator=torch.Generator().manual_seed(5)))
    state = hift_state(FULL.hift, torch.Generator().manual_seed(6))
    state["f0_predictor.classifier.weight"] *= 30  # F0 moves by ten Hz
    hift.load_state_dict(state)
    hift.is_exact = is_exact
    return hift.eval().requires_grad_(False).to("cuda", dtype)


def warm(hift: Hift, *, lanes: int, is_enabled: bool = True) -> Hift:
    graphs = Graphs("cuda", is_enabled=is_enabled)
    hift.warm(graphs, lanes=lanes)
    graphs.close()
    return hift


@pytest.fixture(scope="module")
def ieee() -> Iterator[None]:
    """No TF32 in what PyTorch computes, as in service."""
    kept = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision = kept


@pytest.fixture(scope="module")
def exact(ieee: None) -> Hift:
    return warm(full_size(is_exact=True), lanes=8)


@pytest.fixture(scope="module")
def rounded(ieee: None) -> Hift:
    return warm(full_size(is_exact=False), lanes=128)


@pytest.fixture(scope="module")
def truth(ieee: None) -> Callable[[Tensor], Tensor]:
    """The wave of a mel in float64, but for the phase, which is rounded to float32 where the reference rounds it."""
    wide, narrow = full_size(is_exact=True, dtype=torch.float64), full_size(is_exact=True)

    def wave(mel: Tensor) -> Tensor:
        mel = mel[None].double()
        return wide.decode(mel, narrow.source(wide.f0(mel).float()).double())[0]

    return wave


@cache
def speech(frames: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(80, frames, generator=generator) * 2 - 5).cuda()


def conversation(hift: Hift) -> list[tuple[Tensor, Tensor]]:
    """Mel and wave of five lanes that begin, go on, end and are given up at different times."""
    mels = {name: speech(frames, frames) for name, frames in (("a", 130), ("b", 50), ("c", 7), ("d", 61), ("e", 300))}
    states: dict[str, HiftState] = {}
    waves: dict[str, list[Tensor]] = {name: [] for name in mels}
    gone = hift.begin()
    turns = [
        {"a": (0, 46), "b": (0, 3)},
        {"a": (46, 96), "b": (3, 50), "c": (0, 7)},
        {"a": (96, 97), "d": (0, 30), "e": (0, 300)},
        {"a": (97, 130), "d": (30, 61)},
    ]
    for number, turn in enumerate(turns):
        parts = [mels[name][:, start:stop] for name, (start, stop) in turn.items()]
        finals = [stop == mels[name].shape[1] for name, (_, stop) in turn.items()]
        now = [states.setdefault(name, hift.begin()) for name in turn]
        if number < 2:  # a lane that will be cancelled
            now, parts, finals = [*now, gone], [*parts, mels["d"][:, :20]], [*finals, False]
        for name, wave in zip(turn, hift.push(now, parts, finals), strict=False):
            waves[name].append(wave)
    return [(mels[name], torch.cat(parts)) for name, parts in waves.items()]


def relative(wave: Tensor, truth: Tensor) -> float:
    assert wave.shape == truth.shape, f"{list(wave.shape)} samples, {list(truth.shape)} expected"
    assert bool(wave.isfinite().all()), "samples that are no numbers"
    return float((wave.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "bound"), [("exact", 1e-2), ("rounded", 2e-2)])
@torch.inference_mode()
def test_mixed_lanes_in_graphs_give_the_samples_of_float64(
    name: str, bound: float, truth: Callable[[Tensor], Tensor], request: pytest.FixtureRequest
) -> None:
    """The bounds leave room for what a float32 F0 turns the phase by, and for ten bits in the products."""
    hift: Hift = request.getfixturevalue(name)
    errors = [relative(wave, truth(mel)) for mel, wave in conversation(hift)]
    print(f"{name}: relative RMS by lane", [f"{value:.1e}" for value in errors])
    assert max(errors) <= bound, errors


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_replay_what_the_bodies_do(exact: Hift) -> None:
    eager = warm(full_size(is_exact=True), lanes=8, is_enabled=False)
    for (_, graphed), (_, plain) in zip(conversation(exact), conversation(eager), strict=True):
        assert error(graphed, plain) <= 1e-6


@pytest.mark.gpu
@torch.inference_mode()
def test_the_pitch_is_that_of_float64(rounded: Hift) -> None:
    lanes = rounded._lanes
    assert lanes is not None, "warm() has made them"
    mels = [speech(64, seed) for seed in range(8)]
    nobody = 2 * lanes.nobody
    lanes._stage([(nobody, nobody + 1, 64, 0, 64, 64 * i, 1, 1, 0) for i in range(8)], mels, 64 * 8)
    plan = Plan.of(lanes.table[:8])
    got = lanes._pitch(plan, lanes._take_mel(plan, 64))[:, :64]
    want = full_size(is_exact=True, dtype=torch.float64).f0(torch.stack(mels).double())
    off = error(got.double(), want)
    print(f"F0 off by {off:.1e} Hz, itself {float(want.min()):.0f} to {float(want.max()):.0f}")
    assert off <= 0.01


@pytest.mark.gpu
@pytest.mark.golden
@pytest.mark.parametrize("name", WHOLE)
@torch.inference_mode()
def test_samples_on_cuda_match_the_reference(ieee: None, name: str) -> None:
    """Within what the manifest allows where the phase is not the reference's own to the last bit."""
    state = fold_weight_norm(GOLDEN.weights)
    hift = Hift(HiftShape.from_state(state), noise=hift_noise(480 * 128))
    hift.load_state_dict(state)
    warm(hift.eval().requires_grad_(False).cuda(), lanes=1)
    mel = GOLDEN.tensor(f"{name}/mel")[0].cuda()
    state = hift.begin()
    got = [hift.push([state], [mel[:, :7]], [False])[0], hift.push([state], [mel[:, 7:]], [True])[0]]
    off = error(torch.cat(got).cpu(), GOLDEN.tensor(f"{name}/wave")[0])
    print(f"{name}: off by {off:.1e}")
    assert off <= 5e-3


@pytest.mark.gpu
@torch.inference_mode()
def test_pushes_wait_for_nothing(exact: Hift) -> None:
    conversation(exact)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        conversation(exact)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# In ms, as foreseen: kernels at a third of their ceiling, and 150 launches of two microseconds at the least.
FORESEEN = {(1, 50): 0.9, (8, 50): 1.6, (64, 50): 9.0, (128, 50): 18.0, (64, 244): 45.0}


@pytest.mark.gpu
@pytest.mark.bench
@torch.inference_mode()
def test_pushes_take_the_time_foreseen(rounded: Hift) -> None:
    table = {}
    for (lanes, frames), foreseen in FORESEEN.items():
        took, host = timed(rounded, lanes, frames, is_whole=frames == 244)
        table[f"{lanes} x {frames}"] = took
        work = GFLOP_PER_SECOND * lanes * frames / 50  # GFLOP, so over TFLOP/s in ms
        print(
            f"{lanes:4d} lanes x {frames} frames: {took:6.2f} ms ({host:.2f} on the host), {foreseen} foreseen,"
            f" {lanes * frames / 50 / took * 1e3:7.0f} audio-s/s,"
            f" {100 * work / FP32_TFLOPS / took:.0f} % of FP32's peak, {100 * work / TF32_TFLOPS / took:.0f} of TF32's"
        )
    print(json.dumps(table))
    assert all(table[f"{lanes} x {frames}"] <= 3 * foreseen for (lanes, frames), foreseen in FORESEEN.items())


def timed(hift: Hift, lanes: int, frames: int, *, is_whole: bool, rounds: int = 8) -> tuple[float, float]:
    """ms of one push, and of enqueueing it: of later pushes of streams, or of whole utterances."""
    mels, flags = [speech(frames, 1)] * lanes, [is_whole] * lanes
    states = [hift.begin() for _ in mels]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    host = 0.0
    for number in range(rounds + 2):
        if number == 2:
            torch.cuda.synchronize()
            start.record()
            host = perf_counter()
        hift.push(states, mels, flags)
        if is_whole:
            states = [hift.begin() for _ in mels]
    host = perf_counter() - host
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / rounds, 1e3 * host / rounds
