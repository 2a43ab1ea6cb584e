"""The sampler: parity with the fixtures, its distribution, and independence of who else is being served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampler import Draw, Lanes, Mask, Sampling, candidates, key, masked, pick, sample, triggers, uniform
from tests.golden_fixtures import Fixture

PROBABILITY_TOLERANCE = 1e-6  # the manifest's; candidate ids and triggers are exact
SAMPLER = Fixture("sampler")
CPU = torch.device("cpu")
NUM_CODES, VOCAB = 6561, 6761
RAS = Sampling()
STANDARD = Sampling(mode="standard", temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.1)


def given_sampling(table: dict[str, Any]) -> Sampling:
    p = table["parameters"]
    return Sampling(top_p=p["top_p"], top_k=p["top_k"], window=p["win_size"], tau=p["tau_r"])


def draw(sampling: Sampling = RAS, history: list[int] | None = None, *, step: int = 0, **kw: Any) -> Draw:
    return Draw(sampling, history or [], kw.get("seed", 1), kw.get("clause", 0), step, kw.get("mask", Mask.NOTHING))


def flat(scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.golden
@pytest.mark.parametrize("name", SAMPLER.cases)
def test_first_draw_is_over_the_reference_nucleus(name: str) -> None:
    case = SAMPLER.case(name)
    lanes = Lanes.of([draw(given_sampling(SAMPLER.cases[name]), case["history"].tolist())], VOCAB, CPU)
    found = candidates(case["logp"][None], lanes)
    is_kept = found.logp[0] > -torch.inf
    assert found.ids[0, is_kept].tolist() == case["candidate_ids"].tolist()
    probs = found.logp[0, is_kept].softmax(0)
    torch.testing.assert_close(probs, case["candidate_probs"], rtol=0, atol=PROBABILITY_TOLERANCE)
    assert triggers(found.ids, lanes)[0, is_kept].tolist() == case["triggers"].bool().tolist()


@pytest.mark.golden
@pytest.mark.parametrize("name", [n for n, t in SAMPLER.cases.items() if t["triggers_any"]])
def test_redraw_follows_the_reference_distribution(name: str) -> None:
    """The distribution itself, then the shares of 800 redraws: never the repeated id, the others as given."""
    case, table = SAMPLER.case(name), SAMPLER.cases[name]
    repeated = int(case["candidate_ids"][table["second_draw_of_candidate"]])
    expected = case["second_draw_probs"]
    rest = case["logp"].clone()
    rest[repeated] = -torch.inf
    # In float64, and the fixture brought to a sum of one: float32 sums are off by up to 1e-5, each CPU in its own way.
    exact = expected.double() / expected.double().sum()
    torch.testing.assert_close(rest.double().softmax(0), exact, rtol=0, atol=PROBABILITY_TOLERANCE)
    keys = torch.tensor([[key(5, 0, step, 1)] for step in range(800)])
    ids = pick(rest.expand(800, -1), torch.arange(len(rest)), keys)
    assert repeated not in ids.tolist()
    top = expected.argsort(descending=True)[:20]
    shares = (ids[:, None] == top).float().mean(0)
    torch.testing.assert_close(shares, expected[top], rtol=0, atol=0.08)


@pytest.mark.parametrize("sampling", [RAS, STANDARD], ids=["ras", "standard"])
def test_draws_match_the_distribution(sampling: Sampling) -> None:
    logits = flat(4.0)
    num = 4000
    lanes = Lanes.of([draw(sampling)], VOCAB, CPU)
    wanted = candidates(logits / lanes.temperature, lanes)
    ids = torch.cat([sample(logits.expand(500, -1), [draw(sampling, step=s + 500 * r) for s in range(500)]).ids
                     for r in range(num // 500)])  # fmt: skip
    assert set(ids.tolist()) <= set(wanted.ids[0, wanted.logp[0] > -torch.inf].tolist())
    is_drawn = wanted.logp[0] > -20  # the others' shares are nothing
    p = wanted.logp[0].softmax(0)[is_drawn]
    shares = (ids[:, None] == wanted.ids[0, is_drawn]).double().mean(0)
    spread = (p * (1 - p) / num).sqrt()
    assert ((shares - p).abs() <= 4.5 * spread + 1e-4).all()
    chi_square = ((shares - p)[p > 1e-3] ** 2 / p[p > 1e-3]).sum() * num
    assert chi_square < 3 * (p > 1e-3).sum()


def test_ras_redraws_a_repeated_id_and_only_that() -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, 17] = 0.0
    assert sample(logits, [draw(history=[])]).fetch() == [17]
    assert sample(logits, [draw(history=[17, *range(20, 30)])]).fetch() == [17]  # just outside the window
    assert sample(logits, [draw(history=[17, *range(20, 29)])]).fetch() != [17]
    assert sample(logits, [draw(Sampling(mode="standard"), history=[17, 17])]).fetch() == [17]


def test_redraw_with_nothing_else_left_keeps_the_only_id() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 17] = 0.0
    assert sample(logits, [draw(history=[17])]).fetch() == [17]


@pytest.mark.parametrize("sampling", [RAS, STANDARD, replace(STANDARD, top_k=0, top_p=1.0)])
def test_no_stop_below_the_minimum_length(sampling: Sampling) -> None:
    """Even where every stop id towers above every code, and on the redraw over the whole vocabulary."""
    logits = flat()
    logits[0, NUM_CODES:] += 30.0
    history = list(range(10))
    batch = logits.expand(300, -1)
    ids = sample(batch, [draw(sampling, history, step=s, mask=Mask.CONTROLS) for s in range(300)]).ids
    assert ids.max() < NUM_CODES
    assert sample(batch, [draw(sampling, history, step=s) for s in range(300)]).ids.min() >= NUM_CODES


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        (Mask.NOTHING, set(range(200))),
        (Mask.SOS, set(range(200)) - {0}),
        (Mask.CONTROLS, set()),
    ],
)
def test_each_mask_leaves_the_control_ids_it_names(mask: Mask, allowed: set[int]) -> None:
    scores, is_faulty = masked(flat(), Lanes.of([draw(mask=mask)], VOCAB, CPU))
    assert set(scores[0, NUM_CODES:].isfinite().nonzero()[:, 0].tolist()) == allowed
    assert scores[0, :NUM_CODES].isfinite().all() and not is_faulty.any()


def test_standard_keeps_control_ids_whatever_the_cuts() -> None:
    """Codes are cut to two; stop ids far below them stay candidates, unpenalised."""
    sampling = Sampling(mode="standard", top_k=2, top_p=1.0, repetition_penalty=5.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 4]] = 6.0
    logits[0, NUM_CODES:] = -100.0
    logits[0, NUM_CODES + 1] = 4.0
    ids = sample(logits.expand(2000, -1), [draw(sampling, [6562], step=s) for s in range(2000)]).ids
    assert set(ids.tolist()) == {3, 4, NUM_CODES + 1}
    share = float((ids == NUM_CODES + 1).float().mean())
    assert abs(share - 1 / (1 + 2 * 7.389)) < 0.03


def test_repetition_penalty_lowers_generated_codes_only() -> None:
    sampling = Sampling(mode="standard", temperature=0.0, repetition_penalty=2.0)
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 3], logits[0, 4] = 2.0, 1.5
    assert sample(logits, [draw(sampling, [])]).fetch() == [3]
    assert sample(logits, [draw(sampling, [3])]).fetch() == [4]
    logits[0, NUM_CODES + 1] = 3.0
    assert sample(logits, [draw(sampling, [3, NUM_CODES + 1])]).fetch() == [NUM_CODES + 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-45, 1e-38, 9e-6, 2e-5])
def test_however_cold_the_best_id_is_drawn_and_no_masked_one(temperature: float) -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, NUM_CODES + 1], logits[0, 4], logits[0, 3] = 9.0, 8.0, 7.0
    for mask, wanted in ((Mask.NOTHING, NUM_CODES + 1), (Mask.CONTROLS, 4)):
        cold = replace(RAS, temperature=temperature, tau=1.0)
        assert sample(logits, [Draw(cold, [], 0, 0, 0, mask)]).fetch() == [wanted]


def test_equal_scores_go_to_the_lower_id_first() -> None:
    lanes = Lanes.of([draw(Sampling(top_k=3, top_p=1.0))], VOCAB, CPU)
    assert candidates(torch.zeros(1, VOCAB), lanes).ids[0, :3].tolist() == [0, 1, 2]
    scores = torch.full((1, VOCAB), -3.0)
    assert candidates(scores, lanes).ids[0, :3].tolist() == [0, 1, 2]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([RAS, STANDARD, replace(RAS, top_k=5), replace(STANDARD, temperature=0.0)]),
                min_size=2, max_size=9), st.integers(0, 2**62))  # fmt: skip
def test_lane_alone_draws_what_it_draws_in_any_batch(modes: list[Sampling], seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(modes), VOCAB, generator=dice)
    draws = []
    for i, mode in enumerate(modes):
        history = logits[i, :NUM_CODES].topk(3 * i).indices.tolist()  # likely ids, so that the rules strike
        draws.append(Draw(mode, history, seed - i, i % 3, 7 * i, Mask(i % 3)))
    together = sample(logits, draws).fetch()
    assert together == [sample(logits[i : i + 1], [draws[i]]).fetch()[0] for i in range(len(modes))]
    assert together[::-1] == sample(logits.flip(0), draws[::-1]).fetch()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_faulty_lane_is_reported_and_its_neighbours_are_not(poison: float) -> None:
    logits = flat().repeat(4, 1)
    logits[1, 100] = poison
    logits[3] = -torch.inf
    draws = [draw(step=i) for i in range(4)]
    found = sample(logits, draws).fetch()
    assert found[1] is None and found[3] is None
    assert found[0] == sample(logits[:1], draws[:1]).fetch()[0] and found[2] is not None


def test_lane_with_finite_control_ids_only_is_faulty_under_the_mask() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, NUM_CODES + 1] = 0.0
    assert sample(logits, [draw(mask=Mask.CONTROLS)]).fetch() == [None]
    assert sample(logits, [draw()]).fetch() == [NUM_CODES + 1]


def test_each_word_of_the_key_changes_the_draw() -> None:
    words = [(1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 0, 0), (-1, 0, 0, 0)]
    keys = [key(*w) for w in words]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= k < 2**63 for k in keys)
    ids = torch.arange(4096)
    rows = uniform(torch.tensor(keys)[:, None], ids)
    spread = torch.corrcoef(rows) - torch.eye(len(keys))
    assert spread.abs().max() < 0.07


def test_uniforms_are_what_the_integer_recipe_says() -> None:
    """Written out in Python's integers, so that a device whose shifts or products differ is found."""
    word = (1 << 64) - 1
    wanted = []
    for i in (0, 1, 77, 6760):
        x = key(9, 8, 7, 1) + i * 0x9E3779B97F4A7C15 & word
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        wanted.append((((x ^ x >> 31) >> 41) + 0.5) / 2**23)
    found = uniform(torch.tensor([[key(9, 8, 7, 1)]]), torch.tensor([0, 1, 77, 6760]))
    assert found[0].tolist() == wanted
    many = uniform(torch.tensor([[3]]), torch.arange(200_000))
    assert many.min() > 0 and many.max() < 1 and abs(float(many.mean()) - 0.5) < 0.003


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "greedy"}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 1.5}, {"top_k": -1}],
)
def test_settings_out_of_bounds_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.gpu
def test_cuda_uniforms_equal_cpu_uniforms() -> None:
    keys, ids = torch.tensor([[key(1, 2, s, 0)] for s in range(16)]), torch.arange(VOCAB)
    assert torch.equal(uniform(keys.cuda(), ids.cuda()).cpu(), uniform(keys, ids))
    logits = 3 * torch.randn(16, VOCAB)
    draws = [draw((RAS, STANDARD)[s % 2], [s], step=s) for s in range(16)]
    assert sample(logits.cuda(), draws).fetch() == sample(logits, draws).fetch()
