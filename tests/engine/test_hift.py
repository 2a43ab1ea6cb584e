"""HiFT: parity step by step with the reference, and streamed == offline for any cut and any neighbour."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.hift import Hift, HiftShape, HiftState, NoiseTooShort, fold_weight_norm
from tests.golden_fixtures import fixture, hift_noise

GOLDEN = fixture("hift")
# The manifest's advice: F0 in Hz, excitation from the given F0, wave from the given excitation, wave from mel alone.
F0_BOUND, SOURCE_BOUND, DECODE_BOUND, WAVE_BOUND = 0.01, 1e-5, 1e-4, 2e-4
WHOLE = [name for name, about in GOLDEN.cases.items() if "calls" not in about]
CALLS = [name for name, about in GOLDEN.cases.items() if "calls" in about]
LONGEST = max(about["frames"] for about in GOLDEN.cases.values())
SMALL = HiftShape(base=16, f0_channels=12)
EXACT = 1e-9


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


@pytest.fixture(scope="module")
def reference() -> Hift:
    state = fold_weight_norm(GOLDEN.weights)
    hift = Hift(HiftShape.from_state(state), noise=hift_noise(480 * LONGEST)).eval()
    hift.load_state_dict(state)
    return hift


# Parity.


@pytest.mark.golden
@pytest.mark.parametrize("name", WHOLE)
@torch.inference_mode()
def test_f0_source_and_wave_match_the_reference(reference: Hift, name: str) -> None:
    case = GOLDEN.case(name)
    mel, f0, source = case["mel"], case["f0"], case["source"].reshape(1, -1)
    assert error(reference.f0(mel), f0) <= F0_BOUND
    assert error(reference.source(f0), source) <= SOURCE_BOUND
    assert error(reference.decode(mel, source), case["wave"]) <= DECODE_BOUND
    assert error(reference.offline(mel), case["wave"]) <= WAVE_BOUND


@pytest.mark.golden
@pytest.mark.parametrize("name", [name for name in WHOLE if f"{name}/wave_nonfinal" in GOLDEN])
@torch.inference_mode()
def test_unfinished_mel_matches_the_reference(reference: Hift, name: str) -> None:
    case = GOLDEN.case(name)
    assert error(reference.f0(case["mel"], finalize=False), case["f0_nonfinal"]) <= F0_BOUND
    assert error(reference.offline(case["mel"], finalize=False), case["wave_nonfinal"]) <= WAVE_BOUND


@pytest.mark.golden
@pytest.mark.parametrize("name", [name for name in WHOLE if f"{name}/conv_pre" in GOLDEN])
@torch.inference_mode()
def test_intermediates_match_the_reference(reference: Hift, name: str) -> None:
    case = GOLDEN.case(name)
    mel, source = case["mel"], case["source"].reshape(1, -1)
    seen: dict[str, Tensor] = {}

    def keep(key: str):  # type: ignore[no-untyped-def]
        return lambda module, args, out: seen.__setitem__(key, out)

    hooks = [reference.conv_pre.register_forward_hook(keep("conv_pre"))]
    hooks.append(reference.conv_post.register_forward_hook(keep("conv_post")))
    for stage in range(len(reference.ups)):
        hooks.append(reference.source_downs[stage].register_forward_hook(keep(f"source_down{stage}")))
        hooks.append(reference.source_resblocks[stage].register_forward_hook(keep(f"source_res{stage}")))
        block = reference.resblocks[3 * stage]
        hooks.append(block.register_forward_hook(keep(f"stage{stage}_resblock0")))
        hooks.append(
            block.register_forward_pre_hook(
                lambda m, args, s=stage: seen.__setitem__(f"stage{s}_resblock_input", args[0])
            )
        )
    reference.decode(mel, source)
    for hook in hooks:
        hook.remove()
    padded = torch.nn.functional.pad(source[:, None], (8, 8), mode="reflect")[:, 0]
    seen["source_stft"] = reference.spectra(padded)
    for stage in (stage for stage in range(len(reference.ups)) if f"up{stage}" in case):
        up = seen[f"stage{stage}_resblock_input"] - seen[f"source_res{stage}"]
        seen[f"up{stage}"] = up[:, :, up.shape[2] - case[f"up{stage}"].shape[2] :]
    for key in set(case) - {"mel", "source", "f0", "wave", "harmonics", "f0_nonfinal", "wave_nonfinal"}:
        assert error(seen[key], case[key]) <= DECODE_BOUND * max(1.0, float(case[key].abs().max())), key


@pytest.mark.golden
@pytest.mark.parametrize("name", [name for name in WHOLE if f"{name}/harmonics" in GOLDEN])
def test_harmonic_tracks_match_the_reference(reference: Hift, name: str) -> None:
    want = GOLDEN.tensor(f"{name}/harmonics")
    tones, gain, _ = reference.tones(GOLDEN.tensor(f"{name}/f0")[:, : len(want) // 480])
    noise = reference.noise(0, len(want)) * gain[0].repeat_interleave(480)[:, None]
    assert error(tones[0, :, 0].repeat_interleave(480, dim=0) + noise, want) <= SOURCE_BOUND


@pytest.mark.golden
@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_calls_on_a_growing_mel_match_the_reference(reference: Hift, name: str) -> None:
    mel = GOLDEN.tensor(f"{name}/mel")
    for call in GOLDEN.cases[name]["calls"]:
        wave = reference.offline(mel[:, :, : call["mel_end"]], call["finalize"])[:, call["sample_offset"] :]
        assert wave.shape[1] == call["new_samples"]
        assert error(wave, GOLDEN.tensor(call["output"])) <= WAVE_BOUND


@pytest.mark.golden
@pytest.mark.parametrize("name", CALLS)
def test_a_stream_gives_the_samples_of_all_calls(reference: Hift, name: str) -> None:
    want = torch.cat([GOLDEN.tensor(call["output"])[0] for call in GOLDEN.cases[name]["calls"]])
    mel = GOLDEN.tensor(f"{name}/mel")[0]
    assert error(torch.cat(push_all(reference, mel, random_cuts(mel.shape[1], 1))), want) <= WAVE_BOUND


# Properties, in float64 on a small random vocoder.


@pytest.fixture(scope="module", params=[1, 480], ids=["staircase", "sines"])
def small(request: pytest.FixtureRequest) -> Hift:
    torch.manual_seed(3)
    hift = Hift(replace(SMALL, tone_steps=request.param), noise=torch.rand(480 * 160, 9)).double().eval()
    hift.f0_predictor.classifier.bias.data.fill_(0.4)
    hift.f0_predictor.classifier.weight.data.mul_(400)  # F0 crosses the voicing threshold and moves
    for parameter in hift.parameters():
        parameter.requires_grad_(False)
    return hift


def make_mel(frames: int, seed: int) -> Tensor:
    return torch.randn(80, frames, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def push_all(hift: Hift, mel: Tensor, cuts: list[int]) -> list[Tensor]:
    """Pushes the parts one by one; the last is final. Holds the promise of how much is given out at once."""
    state, received, waves = hift.begin(), 0, []
    parts = mel.split(cuts, dim=1)
    for place, part in enumerate(parts):
        is_final = place == len(parts) - 1
        waves += hift.push([state], [part], [is_final])
        received += part.shape[1]
        promised = 480 * received if is_final else max(0, 480 * (received - 4) - 3)
        assert sum(map(len, waves)) == promised
    return waves


def random_cuts(total: int, seed: int) -> list[int]:
    draw, cuts = random.Random(seed), []
    while sum(cuts) < total:
        cuts.append(min(total - sum(cuts), draw.choice([0, 1, 1, 2, 3, 4, 5, 11, 50])))
    return cuts


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 6, 9, 60, 121])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_equals_offline_for_random_cuts(small: Hift, frames: int, seed: int) -> None:
    mel = make_mel(frames, frames)
    streamed = torch.cat(push_all(small, mel, random_cuts(frames, seed)))
    assert error(streamed, small.offline(mel[None])[0]) < EXACT


@pytest.mark.parametrize("frames", [3, 4, 5, 40])
def test_one_frame_pushes_and_an_empty_last_push(small: Hift, frames: int) -> None:
    mel = make_mel(frames, 7)
    streamed = torch.cat(push_all(small, mel, [1] * frames + [0]))
    assert error(streamed, small.offline(mel[None])[0]) < EXACT


def test_nothing_in_nothing_out(small: Hift) -> None:
    assert [len(wave) for wave in small.push([small.begin()], [make_mel(0, 1)], [True])] == [0]


@pytest.mark.parametrize("seed", range(4))
def test_a_lane_in_a_batch_equals_the_lane_alone(small: Hift, seed: int) -> None:
    draw = random.Random(seed)
    mels = [make_mel(frames, frames) for frames in (70, 3, 41, 12)]
    cuts = [random_cuts(mel.shape[1], seed + i) for i, mel in enumerate(mels)]
    parts = [list(mel.split(cut, dim=1)) for mel, cut in zip(mels, cuts, strict=True)]
    states, waves = [small.begin() for _ in mels], [[] for _ in mels]
    while any(parts):
        chosen = [i for i in range(len(mels)) if parts[i] and draw.random() < 0.7]
        pushed = [parts[i].pop(0) for i in chosen]
        out = small.push([states[i] for i in chosen], pushed, [not parts[i] for i in chosen])
        for i, wave in zip(chosen, out, strict=True):
            waves[i].append(wave)
    for mel, wave in zip(mels, waves, strict=True):
        assert error(torch.cat(wave), small.offline(mel[None])[0]) < EXACT


def test_the_end_of_a_neighbour_does_not_reach_a_lane(small: Hift) -> None:
    mel = make_mel(30, 1)
    alone, first = small.begin(), small.begin()
    loud = torch.full((80, 30), 1e6, dtype=torch.float64)
    want = small.push([alone], [mel], [False])[0]
    got = small.push([first, small.begin()], [mel, loud], [False, True])[0]
    assert error(got, want) < EXACT


def test_a_state_stays_small(small: Hift) -> None:
    state = HiftState()
    small.push([state], [make_mel(100, 1)], [False])
    held = [state.mel, state.phase, state.excitation, state.spectra, state.overlap, *state.f0_tails, *state.tails]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held if x is not None}
    # 12 (k-1) per channel and block: 36 + 66 and 216 steps of 8, 4 and 2 channels, and the small rest
    assert sum(storages.values()) < 8 * 8_000


def test_an_ended_lane_takes_no_more(small: Hift) -> None:
    state = small.begin()
    small.push([state], [make_mel(5, 1)], [True])
    with pytest.raises(AssertionError, match="final push"):
        small.push([state], [make_mel(5, 1)], [False])


def test_noise_ends_with_its_name_and_length(small: Hift) -> None:
    with pytest.raises(NoiseTooShort, match="76800"):
        small.offline(make_mel(161, 1)[None])


def test_smooth_tones_are_sines_across_frames_and_pushes() -> None:
    hift = Hift(replace(SMALL, tone_steps=480)).double()
    f0 = torch.tensor([[200.0, 200.0, 0.0, 310.0]], dtype=torch.float64)
    tones, _, sums = hift.tones(f0)
    turns = torch.repeat_interleave(f0[0], 480).cumsum(0) / 24_000
    want = 0.1 * torch.sin(2 * math.pi * turns[:, None] * torch.arange(1, 10))
    want[960:1440] = 0
    assert error(tones.flatten(1, 2)[0], want) < EXACT
    assert error(hift.tones(f0[:, 3:], sums[:, 2])[0], tones[:, 3:]) < EXACT


def test_all_ways_of_saving_weight_norm_fold_to_the_same() -> None:
    gain, direction = torch.rand(4, 1, 1), torch.randn(4, 3, 5)
    plain = {"bias": torch.zeros(4)}
    new = {"X.parametrizations.weight.original0": gain, "X.parametrizations.weight.original1": direction}
    old = {"generator.X.weight_g": gain, "generator.X.weight_v": direction, "discriminator.0.weight": gain}
    a, b = fold_weight_norm({**plain, **new}), fold_weight_norm({**plain, **old})
    assert a.keys() == b.keys() == {"bias", "X.weight"}
    want = gain * direction / direction.norm(dim=(1, 2), keepdim=True)
    assert torch.equal(a["X.weight"], b["X.weight"])
    torch.testing.assert_close(a["X.weight"], want)


def test_f0_stays_in_float64_whatever_the_cast(small: Hift) -> None:
    hift = Hift(SMALL)
    weight = torch.randn_like(hift.f0_predictor.classifier.weight)
    hift.f0_predictor.classifier.weight.data.copy_(weight)
    hift.float().half().float()
    assert torch.equal(hift.f0_predictor.classifier.weight, weight) and weight.dtype == torch.float64
    assert hift.conv_pre.weight.dtype == torch.float32


def test_every_weight_gets_a_gradient_in_a_batch_of_crops() -> None:
    hift = Hift(SMALL).train()
    mel = torch.randn(4, 80, 12)
    f0 = hift.f0(mel, dtype=torch.float32)
    wave = hift.decode(mel, hift.source(f0 * 1000, noise=torch.rand(4, 480 * 12, 9)))
    (wave.square().mean() + f0.mean()).backward()
    assert wave.shape == (4, 480 * 12)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in hift.parameters())


def test_training_goes_on_after_a_look_at_the_stream() -> None:
    hift = Hift(SMALL, noise=torch.rand(480 * 12, 9, dtype=torch.float64))
    hift.push([hift.begin()], [torch.randn(80, 12)], [True])
    hift.decode(torch.randn(1, 80, 12), hift.source(torch.full((1, 12), 200.0))).square().mean().backward()
    assert hift.m_source.l_linear.weight.grad is not None


@pytest.mark.gpu
def test_lanes_on_the_device_match_the_cpu(small: Hift) -> None:
    hift = Hift(small.shape, noise=small.given_noise).double().eval()
    hift.load_state_dict(small.state_dict())
    hift = hift.cuda()
    mels = [make_mel(frames, frames) for frames in (40, 9, 23)]
    states = [hift.begin() for _ in mels]
    first = hift.push(states, [mel[:, :7].cuda() for mel in mels], [False] * 3)
    last = hift.push(states, [mel[:, 7:].cuda() for mel in mels], [True] * 3)
    for mel, a, b in zip(mels, first, last, strict=True):
        assert error(torch.cat((a, b)).cpu(), small.offline(mel[None])[0]) < 1e-7
