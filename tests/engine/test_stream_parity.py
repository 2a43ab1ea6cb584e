"""Tokens to waveform with the flow and vocoder fixtures: the reference's calls, and our exact incremental total."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.flow import Flow, FlowStore, FlowVoice
from engine.hift import Hift, HiftShape, fold_weight_norm
from tests.golden_fixtures import fixture, fixture_flow, hift_noise

STREAM, HIFT = fixture("stream"), fixture("hift")
LOOKAHEAD = fixture("flow").manifest["hyper_parameters"]["pre_lookahead_len"]
MEL_BOUND, WAVE_BOUND = 2e-4, 1e-3  # the manifest's; a wave from the given mels
pytestmark = pytest.mark.golden


def relative_rms(wave: Tensor, want: Tensor) -> float:
    assert wave.shape == want.shape
    return float((wave - want).square().mean().sqrt() / want.square().mean().sqrt())


def rms_bound(name: str) -> float:
    """A mel's float32 rounding moves F0, and the phases add it up; so end to end only this much can be asked."""
    return max(1e-3, 3 * STREAM.cases[name]["wave_change_for_mel_noise_of_2e-5"]["relative_rms"])


@pytest.fixture(scope="module")
def flow() -> Flow:
    return fixture_flow()


@pytest.fixture(scope="module")
def hift() -> Hift:
    """The vocoder with its fixture's noise, drawn as long as the longest case needs."""
    noise = hift_noise(960 * max(case["tokens"] for case in STREAM.cases.values()))
    state = fold_weight_norm(HIFT.weights)
    hift = Hift(HiftShape.from_state(state), noise=noise).eval()
    hift.load_state_dict(state)
    return hift


@pytest.mark.parametrize("name", STREAM.cases)
@torch.inference_mode()
def test_calls_of_the_reference_schedule(flow: Flow, hift: Hift, name: str) -> None:
    case = STREAM.case(name)
    prompt = (case["prompt_token"], case["prompt_feat"], case["embedding"])
    given, ours, num_samples = torch.empty(1, 80, 0), torch.empty(1, 80, 0), 0
    for index, call in enumerate(STREAM.cases[name]["calls"]):
        streaming, finalize = call["flow_streaming"], call["flow_finalize"]
        mel = flow.offline(case["token"][:, : call["token_end"]], *prompt, streaming=streaming, finalize=finalize)
        new = mel[:, :, given.shape[2] :]
        assert new.shape == case[f"chunk{index}_new_mel"].shape
        assert float((new - case[f"chunk{index}_new_mel"]).abs().max()) <= MEL_BOUND
        given, ours = torch.cat((given, case[f"chunk{index}_new_mel"]), dim=2), torch.cat((ours, new), dim=2)
        assert given.shape[2] == call["mel_frames_to_vocoder"]
        want = case[f"chunk{index}_wave"]
        wave = hift.offline(given, finalize)[:, num_samples:]
        assert wave.shape[1] == call["new_samples"]
        assert float((wave - want).abs().max()) <= WAVE_BOUND
        assert relative_rms(hift.offline(ours, finalize)[:, num_samples:], want) <= rms_bound(name)
        num_samples += wave.shape[1]


@pytest.mark.parametrize("name", STREAM.cases)
def test_call_ends_follow_the_reference_schedule(name: str) -> None:
    about = STREAM.cases[name]
    hop, offset, ends = about["token_hop_at_start"], 0, []
    pad = -about["prompt_tokens"] % hop
    while about["tokens"] - offset >= hop + (0 if offset else pad) + LOOKAHEAD:
        step = hop + (0 if offset else pad)
        ends.append(offset + step + LOOKAHEAD)
        offset, hop = offset + step, min(100, 2 * hop)
    assert [call["token_end"] for call in about["calls"]] == [*ends, about["tokens"]]
    assert hop == about["token_hop_after"]


@pytest.mark.parametrize("name", [name for name in STREAM.cases if f"{name}/offline_wave" in STREAM])
@torch.inference_mode()
def test_one_call_without_streaming(flow: Flow, hift: Hift, name: str) -> None:
    case = STREAM.case(name)
    prompt = (case["prompt_token"], case["prompt_feat"], case["embedding"])
    mel = flow.offline(case["token"], *prompt, streaming=False, finalize=True)
    assert float((mel - case["offline_mel"]).abs().max()) <= MEL_BOUND
    assert float((hift.offline(case["offline_mel"]) - case["offline_wave"]).abs().max()) <= WAVE_BOUND
    assert relative_rms(hift.offline(mel), case["offline_wave"]) <= rms_bound(name)
    for key in (key for key in case if key.startswith("speed_")):
        speed = float(key.split("_")[1])
        faster = F.interpolate(mel, size=int(mel.shape[2] / speed), mode="linear")
        assert float((faster - case[key]).abs().max()) <= MEL_BOUND


@pytest.mark.parametrize("name", [name for name in STREAM.cases if f"{name}/exact_incremental_wave" in STREAM])
@pytest.mark.parametrize("hop", [1, 25, 1000])
def test_incremental_flow_and_vocoder_give_the_exact_total(flow: Flow, hift: Hift, name: str, hop: int) -> None:
    case = STREAM.case(name)
    voice = FlowVoice(case["prompt_token"][0].long(), case["prompt_feat"][0], case["embedding"][0])
    store = FlowStore(flow.shape, flow.pages_for(len(voice.tokens) + case["token"].shape[1]))
    row, lane = flow.row(voice, store, flow.solve_prefix(voice, store)), hift.begin()
    mels, waves = [], []
    parts = case["token"][0].split(hop)
    for place, part in enumerate(parts):
        is_final = place == len(parts) - 1
        if flow.begin(row, part, is_final):
            while row.steps_done < flow.shape.steps:
                flow.step([row], store)
            mels.append(flow.finish(row, store))
            waves += hift.push([lane], [mels[-1]], [is_final])
    assert float((torch.cat(mels, dim=1) - case["exact_incremental_mel"][0]).abs().max()) <= MEL_BOUND
    assert relative_rms(torch.cat(waves), case["exact_incremental_wave"][0]) <= rms_bound(name)
    given = hift.push([hift.begin()], [case["exact_incremental_mel"][0]], [True])[0]
    assert float((given - case["exact_incremental_wave"][0]).abs().max()) <= WAVE_BOUND
