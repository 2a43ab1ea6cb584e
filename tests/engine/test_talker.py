"""The talker: parity with the fixtures, the paged path against the dense one, text that arrives in pieces."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cache import OutOfPages
from engine.sampler import Mask
from engine.talker import Limits, SilentRunFilter, Span, SpecialIds, Talker, TalkerShape, TalkerStore
from engine.text_stream import TextStream
from tests.golden_fixtures import Fixture

LOGITS_TOLERANCE = 1e-3  # the manifest's advice; measured rounding of the reference itself is 1.8e-5
END_OF_PROMPT = 151646
TALKER, SAMPLER = Fixture("talker"), Fixture("sampler")
PLAIN = [name for name in TALKER.cases if "sampler_returns" not in TALKER.cases[name]]
WOVEN = [name for name in TALKER.cases if "sampler_returns" in TALKER.cases[name]]
SPECIAL = SpecialIds.after(TALKER.manifest["hyper_parameters"]["speech_token_size"])


def filled_talker(fixture: Fixture) -> Talker:
    """The fixture's talker; of the text embedding only the rows that its cases read are given."""
    state = dict(fixture.weights)
    name = "llm.model.model.embed_tokens.weight"
    if name not in state:
        state[name] = torch.zeros(fixture.manifest["all_state_dict_keys"][name])
        state[name][fixture.tensor("embed_rows/ids").long()] = fixture.tensor("embed_rows/rows")
    talker = Talker(TalkerShape.from_state(state, fixture.manifest["hyper_parameters"]["qwen2"]))
    talker.load_state_dict(state)
    return talker.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def golden_talker() -> Talker:
    return filled_talker(TALKER)


@pytest.fixture(scope="module")
def small_talker() -> Talker:
    torch.manual_seed(3)
    shape = TalkerShape(hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=8, text_vocab=100)
    return Talker(shape).double().eval().requires_grad_(False)


def store_for(talker: Talker, num_pages: int = 64) -> TalkerStore:
    """Full of NaN: whatever is read before it was written shows."""
    weight = talker.speech_embedding.weight
    store = TalkerStore(talker.shape, num_pages, device=weight.device, dtype=weight.dtype)
    store.kv.fill_(float("nan"))
    return store


class PagedLane:
    """One utterance of a store."""

    def __init__(self, talker: Talker, store: TalkerStore) -> None:
        self.talker, self.store = talker, store
        self.pages: list[int] = []
        self.length = 0

    def span(self, count: int) -> Span:
        self.store.cover(self.pages, self.length + count)
        self.length += count
        return Span(self.pages, self.length - count, count)

    def feed(self, rows: Tensor) -> Tensor:
        """Logits [V] after these rows."""
        return self.talker.logits(self.talker.extend(rows, [self.span(len(rows))], self.store))[0]


@pytest.mark.golden
@pytest.mark.parametrize("name", PLAIN)
def test_prefill_rows_are_the_reference_rows(golden_talker: Talker, name: str) -> None:
    case = TALKER.case(name)
    rows = golden_talker.prefill_rows(case["prompt_text"], case["text"], case["prompt_speech_token"])
    torch.testing.assert_close(rows, case["prefill_embeds"][0], rtol=0, atol=0)


@pytest.mark.golden
@pytest.mark.parametrize("path", ["dense", "paged"])
@pytest.mark.parametrize("name", PLAIN)
def test_logits_are_the_reference_logits(golden_talker: Talker, name: str, path: str) -> None:
    case = TALKER.case(name)
    rows = golden_talker.prefill_rows(case["prompt_text"], case["text"], case["prompt_speech_token"])
    fed = golden_talker.speech_rows(case["forced_tokens"][:-1].long())
    if path == "dense":
        hidden = golden_talker.hidden(torch.cat([rows, fed])[None])
        logits = golden_talker.logits(hidden[0, len(rows) - 1 :])
    else:
        lane = PagedLane(golden_talker, store_for(golden_talker))
        logits = torch.stack([lane.feed(rows), *(lane.feed(row[None]) for row in fed)])
    torch.testing.assert_close(logits, case["logits"], rtol=0, atol=LOGITS_TOLERANCE)
    assert torch.equal(logits.argmax(1), case["logits"].argmax(1))
    assert torch.equal(logits.topk(25).indices, case["logits"].topk(25).indices)


@pytest.mark.golden
@pytest.mark.parametrize("name", PLAIN)
def test_lengths_and_stops_are_the_reference_s(name: str) -> None:
    case, table = TALKER.case(name), TALKER.cases[name]
    limits = Limits.of(len(case["text"]))
    assert (limits.min_len, limits.max_len) == (table["min_len"], table["max_len"])
    spoken: list[int] = []
    masks = []
    for token in case["forced_tokens"].tolist():
        masks.append(limits.mask(len(spoken), reference_exact=True))
        if token >= SPECIAL.sos:
            break
        spoken.append(token)
        if limits.is_over(len(spoken)):
            break
    assert spoken == case["yielded"].tolist()
    assert masks.count(Mask.SOS) == table["steps_with_mask"]


@pytest.mark.golden
@pytest.mark.parametrize("name", WOVEN)
def test_reference_exact_weaving_feeds_the_reference_rows(golden_talker: Talker, name: str) -> None:
    table, first_text = TALKER.cases[name], golden_talker.shape.speech_vocab
    stream = woven_stream(golden_talker.shape, table, reference_exact=True)
    answers, pieces = iter(table["sampler_returns"]), iter(table["text_chunks"])
    calls: list[list[int]] = []
    drawn: list[int] = []
    while not stream.is_through:
        if (piece := next(pieces, None)) is None:
            stream.end()
        else:
            stream.push(piece)
        if (turn := stream.next_turn(drawn)) is None:
            continue
        assert turn.rows[: len(drawn)] == drawn
        calls += [[code] for code in drawn] + [turn.rows[len(drawn) :]]
        drawn = list(islice(answers, turn.num_codes))
    *spoken, stop = drawn
    calls += [[code] for code in spoken]
    rows = [[i + first_text * (kind == "text") for kind, i in call] for call in table["rows_fed_at_each_call"]]
    assert calls == rows
    assert stop == SPECIAL.eos and next(answers, None) is None
    assert [i for call in calls[1:] for i in call[:1] if i < SPECIAL.sos and len(call) == 1] == table["yielded"]
    lane = PagedLane(golden_talker, store_for(golden_talker))
    logits = [lane.feed(golden_talker.rows_of(torch.tensor(call))) for call in calls]
    checked = torch.stack([logits[i] for i in table["logits_at_calls"]])
    torch.testing.assert_close(checked, TALKER.tensor(f"{name}/logits"), rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.golden
def test_weaving_as_served_feeds_the_reference_rows_but_for_the_one_fed_twice(golden_talker: Talker) -> None:
    table, first_text = TALKER.cases["bistream_A"], golden_talker.shape.speech_vocab
    rows = [i + first_text * (kind == "text") for call in table["rows_fed_at_each_call"] for kind, i in call]
    again = next(at for at, (one, other) in enumerate(itertools.pairwise(rows)) if one == other)
    stream, answers = woven_stream(golden_talker.shape, table, reference_exact=False), iter(table["sampler_returns"])
    for piece in table["text_chunks"]:
        stream.push(piece)
    stream.end()
    fed: list[int] = []
    drawn: list[int] = []
    while (turn := stream.next_turn(drawn)) is not None:
        fed += turn.rows
        drawn = list(islice(answers, turn.num_codes))
    upto = again + 7  # all five text ids before the task, after which the original had no turn left to draw
    assert rows[upto] == SPECIAL.task
    assert fed[: upto - 1] == [*rows[:again], *rows[again + 1 : upto]]


def woven_stream(shape: TalkerShape, table: dict[str, Any], *, reference_exact: bool) -> TextStream:
    return TextStream(
        shape,
        table["prompt_text"],
        table["prompt_speech_token"],
        END_OF_PROMPT,
        mix=tuple(TALKER.manifest["hyper_parameters"]["mix_ratio"]),
        reference_exact=reference_exact,
    )


@pytest.mark.golden
@pytest.mark.parametrize("number", range(len(SAMPLER.manifest["silent_filter"]["sequences"])))
def test_silent_runs_are_cut_as_in_the_reference(number: int) -> None:
    table = SAMPLER.manifest["silent_filter"]
    sequence = table["sequences"][number]
    silence = SilentRunFilter(table["silent_ids"])
    assert [code for code in sequence["raw"] if silence.keep(code)] == sequence["kept"]


# --- the paged path --------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[90], [1] * 90, [40, 1, 1, 30, 18], [31, 1, 1, 32, 25]], ids=lambda c: str(c[:5]))
def test_extend_equals_hidden_for_any_cut(small_talker: Talker, cuts: list[int]) -> None:
    rows = small_talker.speech_rows(torch.randint(0, 6561, (sum(cuts),)))
    expected = small_talker.logits(small_talker.hidden(rows[None])[0])
    lane = PagedLane(small_talker, store_for(small_talker))
    ends = [end - 1 for end in itertools.accumulate(cuts)]
    found = torch.stack([lane.feed(part) for part in rows.split(cuts)])
    torch.testing.assert_close(found, expected[ends], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_lane_alone_equals_lane_in_a_crowd_that_comes_and_goes(small_talker: Talker, seed: int) -> None:
    """Ragged prefill and decode, lanes that start late, end early, and leave NaN in pages that others then take."""
    dice = random.Random(seed)
    store = store_for(small_talker, num_pages=24)
    lengths = [dice.randint(20, 120) for _ in range(8)]
    inputs = [small_talker.speech_rows(torch.randint(0, 6561, (n,))) for n in lengths]
    alone = [small_talker.hidden(rows[None])[0] for rows in inputs]
    waiting, running = list(range(8)), {}
    num_checked = 0
    while waiting or running:
        while waiting and len(running) < 4:
            running[waiting.pop(0)] = PagedLane(small_talker, store)
        chosen = {i: min(dice.choice([1, 1, 1, 7, 33]), lengths[i] - lane.length) for i, lane in running.items()}
        parts = [inputs[i][running[i].length :][:count] for i, count in chosen.items()]
        spans = [running[i].span(count) for i, count in chosen.items()]
        hidden = small_talker.extend(torch.cat(parts), spans, store)
        for i, row in zip(chosen, hidden, strict=True):
            torch.testing.assert_close(row, alone[i][running[i].length - 1], rtol=0, atol=1e-12)
            num_checked += 1
        for i in [i for i, lane in running.items() if lane.length == lengths[i] or dice.random() < 0.02]:
            pages = running.pop(i).pages
            store.kv[:, :, pages] = float("nan")
            store.pool.release(pages)
    assert store.pool.num_used == 0 and num_checked > 20


def test_poisoned_lane_leaves_its_neighbours_alone(small_talker: Talker) -> None:
    rows = small_talker.speech_rows(torch.randint(0, 6561, (60,)))
    store = store_for(small_talker)
    sick, well = PagedLane(small_talker, store), PagedLane(small_talker, store)
    start = torch.cat([torch.full_like(rows[:40], float("nan")), rows[:20]])
    small_talker.extend(start, [sick.span(40), well.span(20)], store)
    hidden = small_talker.extend(rows[20:22].flip(0), [sick.span(1), well.span(1)], store)
    assert hidden[0].isnan().all()
    torch.testing.assert_close(hidden[1], small_talker.hidden(rows[None, :21])[0, -1], rtol=0, atol=1e-12)


def test_fused_weights_follow_the_parameters(small_talker: Talker) -> None:
    talker = Talker(small_talker.shape).double().eval().requires_grad_(False)
    rows = talker.speech_rows(torch.randint(0, 6561, (6,)))
    before = PagedLane(talker, store_for(talker)).feed(rows)
    talker.load_state_dict(small_talker.state_dict())
    after = PagedLane(talker, store_for(talker)).feed(rows)
    expected = talker.logits(talker.hidden(rows[None])[0, -1])
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)


def test_cover_takes_only_what_is_missing_and_refuses_whole(small_talker: Talker) -> None:
    store = TalkerStore(small_talker.shape, 3, device="cpu", dtype=torch.float64)
    pages: list[int] = []
    for rows, count in ((1, 1), (32, 1), (33, 2)):
        store.cover(pages, rows)
        assert len(pages) == count == store.pool.num_used
    with pytest.raises(OutOfPages):
        store.cover(pages, 129)
    assert len(pages) == 2 and store.pool.num_used == 2


def test_positions_past_the_first_rotary_table_are_exact(small_talker: Talker) -> None:
    rows = small_talker.speech_rows(torch.randint(0, 6561, (1100,)))
    lane = PagedLane(small_talker, store_for(small_talker))
    lane.feed(rows[:500])
    lane.feed(rows[500:1099])
    found = lane.feed(rows[1099:])
    expected = small_talker.logits(small_talker.hidden(rows[None])[0, -1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_hidden_carries_gradients_and_ignores_padding_on_the_right(small_talker: Talker) -> None:
    talker = Talker(small_talker.shape).double()
    short = talker.prefill_rows(torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5, 6]))
    assert short.shape == (1 + 2 + 1 + 1 + 3, talker.shape.hidden)
    both = torch.stack([short, torch.cat([short[:5], torch.randn(3, 32, dtype=torch.float64)])])
    hidden = talker.hidden(both)
    torch.testing.assert_close(hidden[1, :5], hidden[0, :5], rtol=0, atol=1e-12)
    talker.logits(hidden[0]).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in talker.parameters())


def test_shape_is_read_off_tensors_and_config(small_talker: Talker) -> None:
    config = {"num_attention_heads": 4, "rope_parameters": {"rope_theta": 1e4}, "rms_norm_eps": 1e-5}
    shape = TalkerShape.from_state(small_talker.state_dict(), config)
    assert shape == replace(small_talker.shape, rope_theta=1e4, eps=1e-5)


@pytest.mark.bench
def test_time_of_one_decode_step_on_the_cpu() -> None:
    shape = TalkerShape(hidden=256, intermediate=1024, layers=6, heads=4, kv_heads=2, head_dim=64, text_vocab=1000)
    talker = Talker(shape).eval().requires_grad_(False)
    lane = PagedLane(talker, store_for(talker))
    rows = talker.speech_rows(torch.randint(0, 6561, (300,)))
    lane.feed(rows[:100])
    start = time.perf_counter()
    for row in rows[100:]:
        lane.feed(row[None])
    print(f"{(time.perf_counter() - start) / 200 * 1e3:.2f} ms a token")


def test_limits_hold_the_minimum_unless_asked_for_the_reference() -> None:
    limits = Limits.of(3)
    assert [limits.mask(step) for step in (0, 5, 6)] == [Mask.CONTROLS, Mask.CONTROLS, Mask.NOTHING]
    assert limits.mask(0, reference_exact=True) == Mask.SOS
    assert [limits.is_over(step) for step in (59, 60)] == [False, True]


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-2), (torch.bfloat16, 0.5)], ids=str
)
def test_crowd_on_cuda_equals_dense_path(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(5)
    shape = TalkerShape(hidden=128, intermediate=256, layers=3, heads=4, kv_heads=2, head_dim=32, text_vocab=100)
    talker = Talker(shape).cuda().eval().requires_grad_(False)
    ids = torch.randint(0, 6561, (6, 120), device="cuda")
    wanted = talker.double().logits(talker.hidden(talker.speech_rows(ids)))
    talker = talker.to(dtype)
    store = store_for(talker)
    lanes = [PagedLane(talker, store) for _ in ids]
    starts = [10 * (i + 1) for i in range(6)]
    rows = [talker.speech_rows(line) for line in ids]
    spans = [lane.span(n) for lane, n in zip(lanes, starts, strict=True)]
    talker.extend(torch.cat([line[:n] for line, n in zip(rows, starts, strict=True)]), spans, store)
    for _ in range(50):
        at = [lane.length for lane in lanes]
        fed = torch.stack([line[n] for line, n in zip(rows, at, strict=True)])
        logits = talker.logits(talker.extend(fed, [lane.span(1) for lane in lanes], store))
        for i, n in enumerate(at):
            torch.testing.assert_close(logits[i].double(), wanted[i, n], rtol=0, atol=tolerance)


@pytest.mark.gpu
def test_dense_path_trains_compiled_in_bfloat16() -> None:
    shape = TalkerShape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, text_vocab=100)
    talker = Talker(shape).cuda()
    hidden = torch.compile(talker.hidden)
    rows = talker.speech_rows(torch.randint(0, 6561, (3, 64), device="cuda")).detach()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = talker.logits(hidden(rows)).float().logsumexp(-1).mean()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in talker.parameters())
    assert talker.llm_decoder.weight.grad is not None
