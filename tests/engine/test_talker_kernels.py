"""The kernels against plain PyTorch: on CUDA if there is a device, else in Triton's interpreter on tiny shapes."""

from __future__ import annotations

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined
pytest.importorskip("triton")

from engine import talker_paged
from engine.graphs import Graphs
from engine.sampler import LaneDraws, Sampling, drawn
from engine.talker import Limits, Talker, TalkerShape, TalkerStore
from engine.talker_lanes import TalkerLanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = TalkerShape(
    hidden=32, intermediate=80, layers=2, heads=6, kv_heads=2, head_dim=16, text_vocab=100, speech_vocab=461
)
RAS = Sampling()
STANDARD = Sampling(mode="standard", temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.1)
STYLES = [
    RAS,
    STANDARD,
    Sampling(temperature=0.0),
    Sampling(mode="standard", top_k=0, top_p=1.0),
    Sampling(window=40, tau=0.0),
    Sampling(mode="standard", top_k=0, top_p=0.5, temperature=2.0),
    Sampling(top_p=0.0),
    Sampling(window=0),
]


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_drawing_kernel_draws_what_the_sampler_draws(style: Sampling) -> None:
    """Over 5 steps of two lanes, one below its minimum length; scores with ties and with few likely ids."""
    from engine import talker_kernels as kernels

    dice = torch.Generator().manual_seed(3)
    vocab, lanes = 461, 2
    plain, fused = (LaneDraws(lanes, vocab, device=DEVICE) for _ in range(2))
    for draws in (plain, fused):
        for lane in range(lanes):
            draws.seat(lane, style, seed=lane << 40, clause=5, min_len=3 * lane)
    table = torch.zeros(lanes + 1, 4, dtype=torch.int64, device=DEVICE)
    chosen, out = torch.tensor([1, 0, 2], device=DEVICE), torch.full((3,), -7, device=DEVICE)
    for step in range(5):
        logits = (4 * torch.randn(3, vocab, generator=dice)).round(decimals=step % 3).to(DEVICE)
        logits[:, -200:] += 3
        if step == 4:
            logits[0, 5], logits[1] = float("nan"), float("-inf")
        wanted = drawn(logits[:2], plain.lanes(chosen[:2], [1, 0]))
        plain.keep(chosen[:2], wanted)
        kernels.draw[(3,)](
            logits, chosen, fused.record, fused.recent, fused.seen.view(torch.uint8), table, out, lanes, vocab, 4,
            1, BLOCK=512,
        )  # fmt: skip
        assert out[:2].tolist() == wanted.marked().tolist(), f"step {step}"
        if step == 4:
            break
        assert torch.equal(fused.record[:2], plain.record[:2]) and torch.equal(fused.seen[:2], plain.seen[:2])
    assert table[:, 0].tolist() == [5, 5, 0] and not table[:, 1:].any()
    assert out[2] == -7 and torch.equal(fused.record[2], plain.record[2])


@pytest.mark.slow
def test_paged_lanes_speak_as_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged chunked prompts, shared pages, steps of some lanes only, a lane that ends and one that takes its pages."""
    monkeypatch.setattr(talker_paged, "PREFILL_TIERS", (80, 64, 32, 16))  # the interpreter takes its time for a row
    monkeypatch.setattr(talker_paged, "KEY_SPLITS", 2)
    torch.manual_seed(3)
    talker = Talker(SHAPE)
    talker.llm_decoder.weight.data *= 4
    talker = talker.to(DEVICE).eval().requires_grad_(False)
    dice = random.Random(4)
    prompts = [
        talker.prompt_ids([dice.randrange(100) for _ in range(n)], [], [dice.randrange(261)] * 9) for n in (3, 20, 64)
    ]
    prompts += [prompts[2], prompts[1][:20]]
    every = []
    for is_paged in (False, True):
        store = TalkerStore(SHAPE, 16, device=DEVICE, dtype=torch.float32)
        store.kv.fill_(float("nan"))
        lanes = TalkerLanes(talker, store, lanes=3, rows_per_launch=3)
        if is_paged:
            lanes._paged = talker_paged.PagedTalker(talker, store, lanes.draws, lanes=3)
            lanes._paged.warm(Graphs(DEVICE))
        every.append(conversation(lanes, prompts))
    assert every[0] == every[1]
    assert len(set(every[0])) > 12


def conversation(lanes: TalkerLanes, prompts: list[list[int]]) -> list[int | None]:
    heard: list[int | None] = []

    def seat(lane: int, number: int) -> int:
        return lanes.seat(lane, prompts[number], sampling=STYLES[number], seed=number, clause=0, limits=Limits(3, 40))

    for lane in range(3):
        assert seat(lane, lane) == 0
    heard += lanes.prefill([(0, 0, 14), (2, 0, 40)]).fetch()
    heard += lanes.decode([0]).fetch()
    heard += lanes.prefill([(1, 0, 31), (2, 40, 35)]).fetch()
    for _ in range(2):
        heard += lanes.decode([2, 0, 1]).fetch()
    lanes.free(0)
    assert seat(0, 3) == 64
    heard += lanes.prefill([(0, 64, 11)]).fetch()
    lanes.free(1)
    assert seat(1, 4) == 0
    heard += lanes.prefill([(1, 0, 20)]).fetch()
    for chosen in ([0, 1], [2], [1, 2, 0]):
        heard += lanes.decode(chosen).fetch()
    return heard
