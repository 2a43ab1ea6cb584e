"""The fixed noises: official values, lazily drawn, nobody's generator disturbed."""

from __future__ import annotations

import hashlib

import pytest
import torch

import engine.noise as noise_module
from engine.flow import Flow, FlowShape
from engine.hift import Hift, HiftShape, fold_weight_norm
from engine.noise import flow_noise, vocoder_noise
from tests.golden_fixtures import fixture

GOLDEN = fixture("release_noise")


def full_size(part: str) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(shape, device="meta") for key, shape in GOLDEN.manifest["full_size_state_dict"][part].items()
    }


@pytest.mark.golden
def test_heads_and_the_end_of_the_flow_noise_are_official() -> None:
    head, tail = GOLDEN.tensor("flow_noise_head"), GOLDEN.tensor("flow_noise_tail")
    assert torch.equal(flow_noise(head.shape[1]), head)
    assert torch.equal(flow_noise(15_000)[:, -tail.shape[1] :], tail)
    digest = hashlib.sha256(flow_noise(15_000).contiguous().numpy().tobytes()).hexdigest()
    assert digest == GOLDEN.manifest["sha256"]["flow_noise"]
    head = GOLDEN.tensor("sine_noise_head")
    assert torch.equal(vocoder_noise(len(head)), head)


@pytest.mark.golden
@pytest.mark.slow
def test_all_blocks_together_are_the_official_vocoder_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, start in (("_vocoder", torch.empty(0, 9)), ("_generator_state", None), ("_flow", None)):
        monkeypatch.setattr(noise_module, name, start)
    vocoder_noise(1)
    vocoder_noise(2 * noise_module.BLOCK_SAMPLES + 7)
    noise = vocoder_noise(noise_module.MAX_SAMPLES)
    tail = GOLDEN.tensor("sine_noise_tail")
    assert torch.equal(noise[-len(tail) :], tail)
    assert hashlib.sha256(noise.numpy().tobytes()).hexdigest() == GOLDEN.manifest["sha256"]["vocoder_noise"]


def test_blocks_continue_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "BLOCK_SAMPLES", 1_001)
    monkeypatch.setattr(noise_module, "_vocoder", torch.empty(0, 9))
    monkeypatch.setattr(noise_module, "_generator_state", torch.Generator().manual_seed(5).get_state())
    grown = [vocoder_noise(n).clone() for n in (10, 1_500, 3_003)]
    whole = torch.rand(3_003, 9, generator=torch.Generator().manual_seed(5))
    assert all(torch.equal(part, whole[: len(part)]) for part in grown)


def test_only_the_blocks_asked_for_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "_vocoder", torch.empty(0, 9))
    monkeypatch.setattr(noise_module, "_generator_state", torch.Generator().manual_seed(5).get_state())
    assert vocoder_noise(10).untyped_storage().nbytes() == noise_module.BLOCK_SAMPLES * 9 * 4


def test_the_callers_generator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "_flow", None)
    torch.manual_seed(77)
    want = torch.rand(3)
    torch.manual_seed(77)
    flow_noise(5)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize(("ask", "limit"), [(flow_noise, 15_000), (vocoder_noise, 7_200_000)])
def test_past_the_end_is_named(ask, limit: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=f"{limit}.*{limit + 1}"):
        ask(limit + 1)


@pytest.mark.golden
def test_full_size_flow_has_the_official_names_and_shapes() -> None:
    state = full_size("flow")
    shape = FlowShape.from_state(state)
    with torch.device("meta"):
        flow = Flow(shape)
    assert {key: value.shape for key, value in flow.state_dict().items()} == {k: v.shape for k, v in state.items()}
    assert shape.chunk_frames == 50 and shape.heads * shape.head_dim == shape.dim


@pytest.mark.golden
def test_full_size_hift_has_the_official_names_and_shapes() -> None:
    state = fold_weight_norm(full_size("hift"))
    hift = Hift(HiftShape.from_state(state))
    assert {key: value.shape for key, value in hift.state_dict().items()} == {k: v.shape for k, v in state.items()}
