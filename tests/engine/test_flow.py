"""Flow: parity with the reference, and streamed == offline for any cut, neighbour and sharing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import engine.attention as attention
from engine.cache import OutOfPages
from engine.costs import EULER_STEPS
from engine.flow import Flow, FlowPrefix, FlowRow, FlowShape, FlowStore, FlowVoice, TooManyFrames, groups_of
from engine.flow_graphs import FlowGraphs, cheapest
from engine.flow_whole import WholeGraphs
from engine.graphs import Graphs
from engine.noise import flow_noise
from engine.scheduler import HOP_TOKENS, LOOKAHEAD_TOKENS, Lengths
from tests.golden_fixtures import fixture, fixture_flow

GOLDEN = fixture("flow")
MEL_BOUND = 2e-4  # the manifest's advice for mel outputs and for one estimator call in float32
SMALL = FlowShape(dim=32, depth=2, heads=2, head_dim=16, ff=64, lookahead_channels=24, vocab=40, conv_groups=4)
EXACT = 1e-10  # algebra is exact; kernels of other shapes round differently in float64


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


@pytest.fixture(scope="module")
def reference() -> Flow:
    return fixture_flow()


def voice_of(case: dict[str, Tensor]) -> FlowVoice:
    return FlowVoice(case["prompt_token"][0].long(), case["prompt_feat"][0], case["embedding"][0])


def solve(flow: Flow, row: FlowRow, store: FlowStore) -> Tensor:
    while row.steps_done < flow.shape.steps:
        flow.step([row], store)
    return flow.finish(row, store)


def stream(
    flow: Flow, row: FlowRow, store: FlowStore, tokens: Tensor, cuts: list[int], *, is_final: bool = True
) -> list[Tensor]:
    """mel pieces for tokens that arrive in the given cuts; the last one is final unless told otherwise."""
    parts = tokens.split(cuts)
    pieces = []
    for place, part in enumerate(parts):
        if flow.begin(row, part, is_final=is_final and place == len(parts) - 1):
            pieces.append(solve(flow, row, store))
    return pieces


# Parity.


@pytest.mark.golden
@pytest.mark.parametrize("name", [group for group in GOLDEN.groups() if f"{group}/t" in GOLDEN])
@pytest.mark.parametrize("mode", ["streaming", "nonstreaming"])
@torch.inference_mode()
def test_one_estimator_call_matches_the_reference(reference: Flow, name: str, mode: str) -> None:
    case = GOLDEN.case(name)
    seen: dict[str, Tensor] = {}
    net = reference.estimator
    hooks = [net.time_embed.register_forward_hook(lambda *a: seen.__setitem__("time_embed", a[2]))]
    first = net.transformer_blocks[0]
    hooks.append(first.register_forward_pre_hook(lambda _, args: seen.__setitem__("input_embed", args[0])))
    hooks.append(first.attn.register_forward_hook(lambda *a: seen.__setitem__("block0_attn_out", a[2])))
    for index, block in enumerate(net.transformer_blocks):
        hooks.append(block.register_forward_hook(lambda *a, i=index: seen.__setitem__(f"block{i}", a[2])))
    mask = reference.chunk_mask(case["x"].shape[2]) if mode == "streaming" else None
    seen["out"] = reference.estimate(*(case[key] for key in ("x", "mu", "spks", "cond", "t")), mask)
    for hook in hooks:
        hook.remove()
    given = {key.removeprefix(mode + "_"): value for key, value in case.items() if key.startswith(mode + "_")}
    assert "out" in given and given.keys() <= seen.keys()
    for key, value in given.items():
        assert error(seen[key], value) <= MEL_BOUND, key


@pytest.mark.golden
def test_mask_and_angles_match_the_reference(reference: Flow) -> None:
    masks = [key for key in GOLDEN.keys if key.endswith("/chunk_mask")]
    angles = [key for key in GOLDEN.keys if key.endswith("/rope_angles")]
    assert masks and angles
    for key in masks:
        want = GOLDEN.tensor(key).bool()
        assert torch.equal(reference.chunk_mask(len(want))[0], want)
    for key in angles:
        want = GOLDEN.tensor(key)[0, :, ::2]
        cos, sin = reference.estimator.rotary_embed.table(torch.arange(len(want)))
        torch.testing.assert_close((cos, sin), (want.cos(), want.sin()))


@pytest.mark.golden
@pytest.mark.parametrize("name", [name for name in GOLDEN.cases if f"{name}/mu" in GOLDEN])
@torch.inference_mode()
def test_conditioning_and_each_euler_step_match_the_reference(reference: Flow, name: str) -> None:
    case = GOLDEN.case(name)
    tokens = torch.cat((case["prompt_token"], case["token"]), dim=1)
    mu, spk = reference.conditioning(tokens, case["embedding"])
    assert error(mu, case["mu"]) <= 1e-5 and error(spk, case["spk"]) <= 1e-5
    assert error(mu[:, :, ::2].transpose(1, 2), case["prelookahead_final"]) <= 1e-5
    end = case["prelookahead_call0"].shape[1] + reference.shape.lookahead
    early, _ = reference.conditioning(tokens[:, :end], case["embedding"], finalize=False)
    assert error(early[:, :, ::2].transpose(1, 2), case["prelookahead_call0"]) <= 1e-5
    torch.testing.assert_close(reference.grid(), case["t_span"], rtol=0, atol=1e-7)
    assert torch.equal(flow_noise(mu.shape[2])[None], case["noise"])

    times, spans = reference.times()
    cond = torch.zeros_like(mu)
    cond[:, :, : case["prompt_feat"].shape[1]] = case["prompt_feat"].transpose(1, 2)
    for mode in ("streaming", "nonstreaming"):
        torch.testing.assert_close(times, case[f"{mode}_t"], rtol=0, atol=2e-7)
        mask = reference.chunk_mask(mu.shape[2]) if mode == "streaming" else None
        before = case[f"{mode}_x_before_step"]
        for step in range(len(before) - 1):
            x = before[step : step + 1]
            moved = x + spans[step] * reference.guided(x, mu, spk, cond, times[step], mask)
            assert error(moved[0], before[step + 1]) <= MEL_BOUND, (mode, step)


@pytest.mark.golden
@pytest.mark.parametrize("name", GOLDEN.cases)
@torch.inference_mode()
def test_offline_and_reference_calls_match(reference: Flow, name: str) -> None:
    case, about = GOLDEN.case(name), GOLDEN.cases[name]

    def run(end: int, *, streaming: bool, finalize: bool) -> Tensor:
        prompt = (case["prompt_token"], case["prompt_feat"], case["embedding"])
        return reference.offline(case["token"][:, :end], *prompt, streaming=streaming, finalize=finalize)

    num_tokens = about["tokens"]
    assert error(run(num_tokens, streaming=False, finalize=True), case["full_nonstreaming"]) <= MEL_BOUND
    assert error(run(num_tokens, streaming=True, finalize=True), case["full_streaming"]) <= MEL_BOUND
    for call in about["calls"]:
        mel = run(call["token_end"], streaming=call["streaming"], finalize=call["finalize"])
        assert error(mel[:, :, 2 * call["token_offset"] :], GOLDEN.tensor(call["output"])) <= MEL_BOUND, call
    if "misaligned_prefix" in case:
        end = about["misaligned_prefix_token_end"]
        assert error(run(end, streaming=True, finalize=False), case["misaligned_prefix"]) <= MEL_BOUND


@pytest.mark.golden
@pytest.mark.parametrize("name", GOLDEN.cases)
@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared-prefix"])
def test_streamed_total_matches_the_chunk_masked_reference(reference: Flow, name: str, is_shared: bool) -> None:
    case = GOLDEN.case(name)
    voice = voice_of(case)
    store = FlowStore(reference.shape, reference.pages_for(len(voice.tokens) + case["token"].shape[1]))
    prefix = reference.solve_prefix(voice, store) if is_shared else None
    row = reference.row(voice, store, prefix)
    mel = torch.cat(stream(reference, row, store, case["token"][0], [1] * case["token"].shape[1]), dim=1)
    assert error(mel[None], case["full_streaming"]) <= MEL_BOUND


# Properties, in float64 on a small random flow.


@pytest.fixture(scope="module")
def small() -> Flow:
    torch.manual_seed(11)
    flow = Flow(SMALL).double().eval()
    for parameter in flow.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.mul_(1.7)  # default weights mix frames too faintly to notice a wrong mask
    return flow


def make_voice(num_tokens: int, seed: int) -> FlowVoice:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SMALL.vocab, (num_tokens,), generator=draw)
    mel = torch.randn(2 * num_tokens, 80, generator=draw, dtype=torch.float64)
    return FlowVoice(tokens, mel, torch.randn(192, generator=draw, dtype=torch.float64))


def make_tokens(count: int, seed: int) -> Tensor:
    return torch.randint(SMALL.vocab, (count,), generator=torch.Generator().manual_seed(1000 + seed))


def make_store(num_pages: int = 64) -> FlowStore:
    store = FlowStore(SMALL, num_pages, dtype=torch.float64)
    store.data.fill_(float("nan"))  # a read of a page nobody wrote shows at once
    return store


@torch.inference_mode()
def offline(flow: Flow, voice: FlowVoice, tokens: Tensor, *, streaming: bool = True) -> Tensor:
    prompt = (voice.tokens[None], voice.mel[None], voice.embedding[None])
    return flow.offline(tokens[None], *prompt, streaming=streaming, finalize=True)[0]


def cut(total: int, seed: int) -> list[int]:
    draw, cuts = random.Random(seed), []
    while sum(cuts) < total:
        cuts.append(min(total - sum(cuts), draw.choice([0, 1, 2, 7, 25, 26, 60])))
    return cuts


@pytest.mark.parametrize(("prompt", "count"), [(0, 1), (0, 60), (3, 28), (24, 4), (25, 53), (37, 90), (78, 30)])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_equals_offline_and_each_frame_is_solved_once(small: Flow, prompt: int, count: int, seed: int) -> None:
    voice, tokens, store = make_voice(prompt, seed), make_tokens(count, seed), make_store()
    row = small.row(voice)
    mel = torch.cat(stream(small, row, store, tokens, cut(count, seed)), dim=1)
    assert error(mel, offline(small, voice, tokens)) < EXACT
    assert row.frames_solved == 2 * (prompt + count)
    assert len(row.pages) == small.pages_for(prompt + count) == store.pool.num_used
    row.close(store)
    row.close(store)
    assert store.pool.num_used == 0


def test_whole_chunks_alone_are_solved_before_the_end(small: Flow) -> None:
    row, store = small.row(make_voice(20, 1)), make_store()
    assert small.begin(row, make_tokens(7, 1), is_final=False) == 0  # chunk 0 needs 25 + 3 tokens
    assert small.begin(row, make_tokens(1, 2), is_final=False) == 50
    assert solve(small, row, store).shape == (80, 10)


@pytest.mark.parametrize("prompt", range(0, 80, 7))
def test_a_hop_as_the_scheduler_counts_it_is_just_enough(small: Flow, prompt: int) -> None:
    hop = Lengths(0, prompt).first_hop
    early, row = (small.row(make_voice(prompt, 1)) for _ in range(2))
    assert small.begin(early, make_tokens(hop + LOOKAHEAD_TOKENS - 1, 1), is_final=False) < 2 * (prompt + hop)
    assert small.begin(row, make_tokens(hop + LOOKAHEAD_TOKENS, 1), is_final=False) == 2 * (prompt + hop)
    solve(small, row, make_store())
    assert small.begin(row, make_tokens(HOP_TOKENS - 1, 2), is_final=False) == 0
    assert small.begin(row, make_tokens(1, 3), is_final=False) == 2 * HOP_TOKENS
    assert (small.shape.steps, small.shape.lookahead) == (EULER_STEPS, LOOKAHEAD_TOKENS)


@pytest.mark.parametrize("prompt", [0, 27, 28, 53, 103])
def test_shared_prefix_gives_the_same_mel_and_is_not_solved_again(small: Flow, prompt: int) -> None:
    voice, store = make_voice(prompt, 5), make_store()
    prefix = small.solve_prefix(voice, store)
    assert prefix.frames == max(0, prompt - 3) // 25 * 50
    kept = [store.data[:, :, :, :, page].clone() for page in prefix.pages]
    for seed in (1, 2):
        tokens, row = make_tokens(40, seed), small.row(voice, store, prefix)
        mel = torch.cat(stream(small, row, store, tokens, [13, 27]), dim=1)
        assert error(mel, offline(small, voice, tokens)) < EXACT
        assert row.frames_solved == 2 * (prompt + 40) - prefix.frames
        row.close(store)
    assert all(torch.equal(a, store.data[:, :, :, :, page]) for a, page in zip(kept, prefix.pages, strict=True))
    assert store.pool.num_used == len(prefix.pages)


@pytest.mark.parametrize("is_padded", [False, True], ids=["each", "padded"])
def test_neighbours_that_join_and_leave_change_nothing(
    small: Flow, monkeypatch: pytest.MonkeyPatch, is_padded: bool
) -> None:
    monkeypatch.setattr(attention, "gathers", lambda device: is_padded)
    voices = [make_voice(prompt, prompt) for prompt in (37, 5, 80, 0)]
    streams = [make_tokens(count, count) for count in (60, 83, 9, 31)]
    store, prefixes = make_store(), list[FlowPrefix | None]([None] * 4)
    prefixes[2] = small.solve_prefix(voices[2], store)
    rows = [small.row(voice, store, prefix) for voice, prefix in zip(voices, prefixes, strict=True)]
    doomed = small.row(make_voice(40, 9), store)
    small.begin(doomed, make_tokens(30, 9), is_final=True)
    pieces: list[list[Tensor]] = [[] for _ in rows]
    sent = [0] * 4
    for tick in range(200):
        active = [row for i, row in enumerate(rows) if tick >= 3 * i and feed(small, row, streams[i], sent, i)]
        if tick < 4:
            active.insert(1, doomed)
        elif tick == 4:
            doomed.close(store)
        if not active:
            break
        small.step(active, store)
        for i, row in enumerate(rows):
            if row.is_staged and row.steps_done == SMALL.steps:
                pieces[i].append(small.finish(row, store))
    for i, row in enumerate(rows):
        assert error(torch.cat(pieces[i], dim=1), offline(small, voices[i], streams[i])) < EXACT
        row.close(store)
    assert store.pool.num_used == 3 and doomed.is_closed


def capture(flow: Flow, store: FlowStore) -> FlowStore:
    """Launches go through tiers of at most four units; on the CPU their bodies run as they are."""
    flow._graphs = FlowGraphs(flow, store, Graphs("cpu"), most_units=4, clock=lambda run: (run(), 1.0)[1])
    return store


@pytest.fixture
def captured(small: Flow) -> Iterator[FlowStore]:
    yield capture(small, make_store())
    small.forget_tables()


@torch.inference_mode()
def test_a_store_of_one_page_is_captured_and_solves_what_fits(small: Flow) -> None:
    store, voice, tokens = capture(small, make_store(1)), make_voice(5, 1), make_tokens(9, 1)
    row = small.row(voice)
    small.begin(row, tokens, is_final=True)
    while row.steps_done < SMALL.steps:
        small.step([row], store)
    assert error(small.finish(row, store), offline(small, voice, tokens)) < EXACT
    row.close(store)
    small.forget_tables()


def test_launches_by_tier_give_the_same_mel(small: Flow, captured: FlowStore) -> None:
    voices, streams = [make_voice(prompt, prompt) for prompt in (130, 37, 0)], [make_tokens(n, n) for n in (60, 83, 9)]
    rows = [small.row(voice) for voice in voices]
    pieces: list[list[Tensor]] = [[] for _ in rows]
    sent = [0] * 3
    for tick in range(100):
        active = [row for i, row in enumerate(rows) if tick >= 3 * i and feed(small, row, streams[i], sent, i)]
        if not active:
            break
        small.step(active, captured)
        for i, row in enumerate(rows):
            if row.is_staged and row.steps_done == SMALL.steps:
                pieces[i].append(small.finish(row, captured))
    for i, row in enumerate(rows):
        assert error(torch.cat(pieces[i], dim=1), offline(small, voices[i], streams[i])) < EXACT
        row.close(captured)
    assert captured.pool.num_used == captured.lanes.num_used == 0


def test_units_are_split_where_two_launches_cost_less_than_a_padded_one() -> None:
    best = cheapest({1: 1.0, 8: 2.0, 16: 4.0})
    assert [best[count] for count in (1, 2, 8, 9, 10, 16)] == [
        (1.0, 1), (2.0, 2), (2.0, 8), (3.0, 8), (4.0, 10), (4.0, 16)
    ]  # fmt: skip


def feed(flow: Flow, row: FlowRow, tokens: Tensor, sent: list[int], i: int) -> bool:
    """Gives the row its next hop when it has none staged; False when it has ended."""
    if not row.is_staged and sent[i] < len(tokens):
        part = tokens[sent[i] : sent[i] + HOP_TOKENS]
        sent[i] += len(part)
        flow.begin(row, part, is_final=sent[i] == len(tokens))
    return row.is_staged


@pytest.mark.parametrize("most", [1, 150, 1_000])
@pytest.mark.parametrize("count", [1, 3])
def test_whole_rows_laid_end_to_end_equal_each_alone(
    small: Flow, count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.flow.WHOLE_FRAMES", most)
    sizes = [(37, 60), (0, 5), (80, 1)][:count]
    requests = [(make_voice(prompt, prompt), make_tokens(tokens, tokens)) for prompt, tokens in sizes]
    mels = small.offline_all([(voice, tokens.tolist()) for voice, tokens in requests])
    for mel, (voice, tokens) in zip(mels, requests, strict=True):
        assert error(mel, offline(small, voice, tokens, streaming=False)) < EXACT


@pytest.mark.parametrize("most_rows", [2, 3, 9])
def test_whole_rows_by_tier_equal_each_alone(small: Flow, most_rows: int) -> None:
    """On the CPU the bodies run as they are, filled up with rows of nobody; one row is longer than the largest tier."""
    small._whole = WholeGraphs(small, Graphs("cpu"), tiers=(300, 250, 40), most_rows=most_rows, short=100)
    sizes = [(37, 60), (0, 5), (80, 1), (9, 200), (3, 8), (11, 50)]
    requests = [(make_voice(prompt, prompt), make_tokens(tokens, tokens)) for prompt, tokens in sizes]
    for _ in range(2):  # what is left of one group harms none behind it
        mels = small.offline_all([(voice, tokens.tolist()) for voice, tokens in requests])
        for mel, (voice, tokens) in zip(mels, requests, strict=True):
            assert error(mel, offline(small, voice, tokens, streaming=False)) < EXACT
    small.forget_tables()


def test_whole_rows_are_grouped_by_what_memory_is_meant_for() -> None:
    assert list(groups_of([5, 3, 9, 1, 1], 8, 9)) == [slice(0, 2), slice(2, 3), slice(3, 5)]
    assert list(groups_of([1, 1, 1, 9, 1], 12, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_a_last_hop_may_look_both_ways_as_the_reference_does(small: Flow) -> None:
    store, voices, streams = make_store(), [make_voice(p, p) for p in (30, 10)], [make_tokens(n, n) for n in (50, 9)]
    rows = [small.row(voice) for voice in voices]
    played = torch.cat(stream(small, rows[0], store, streams[0][:30], [23, 7], is_final=False), dim=1)
    assert played.shape == (80, 40)
    small.begin(rows[0], streams[0][30:].tolist(), is_final=True)
    small.begin(rows[1], streams[1].tolist(), is_final=True)
    for row, mel, start, tokens in zip(rows, small.finish_whole(rows), (40, 0), streams, strict=True):
        assert error(mel, offline(small, row.voice, tokens, streaming=False)[:, start:]) < EXACT
        assert not row.is_staged and row.is_ended
        row.close(store)
    assert store.pool.num_used == store.lanes.num_used == 0


def test_too_long_a_whole_row_is_refused(small: Flow) -> None:
    with pytest.raises(TooManyFrames, match="15002"):
        small.offline_all([(make_voice(10, 1), [1] * 7491)])


def test_a_prompt_solved_among_others_serves_as_prefix(small: Flow) -> None:
    store, voice, tokens = make_store(), make_voice(60, 4), make_tokens(30, 4)
    asked, other = small.row(voice), small.row(make_voice(30, 6))
    small.begin(asked, (), is_final=False)
    small.begin(other, make_tokens(8, 6), is_final=True)
    for _ in range(SMALL.steps):
        small.step([other, asked], store)
    small.finish(asked, store)
    row = small.row(voice, store, small.prefix(asked, store))
    assert store.lanes.num_used == 1
    mel = torch.cat(stream(small, row, store, tokens, [30]), dim=1)
    assert error(mel, offline(small, voice, tokens)) < EXACT


def test_a_value_that_is_not_finite_marks_its_own_row_alone(small: Flow) -> None:
    store, (good, bad) = make_store(), (make_voice(30, seed) for seed in (1, 2))
    bad.embedding[3] = torch.inf
    rows = [small.row(voice) for voice in (good, bad)]
    for row in rows:
        small.begin(row, make_tokens(30, 1), is_final=True)
    for _ in range(SMALL.steps):
        small.step(rows, store)
    assert [bool(fault == 0) for fault in small.faults(rows, store)] == [True, False]
    assert error(small.finish(rows[0], store), offline(small, good, make_tokens(30, 1))) < EXACT


def test_lanes_are_given_back_and_too_few_leave_the_row_as_it_was(small: Flow) -> None:
    store = FlowStore(SMALL, 8, dtype=torch.float64, lanes=1)
    first, second = (small.row(make_voice(30, seed)) for seed in (1, 2))
    for row in (first, second):
        small.begin(row, make_tokens(30, 1), is_final=True)
    small.step([first], store)
    with pytest.raises(OutOfPages):
        small.step([second], store)
    first.close(store)
    assert error(solve(small, second, store), offline(small, second.voice, make_tokens(30, 1))) < EXACT
    second.close(store)
    assert store.lanes.num_used == store.pool.num_used == 0


def test_a_mel_of_other_length_than_the_prompt_moves_the_start(small: Flow) -> None:
    voice = make_voice(30, 3)
    longer = FlowVoice(voice.tokens, torch.cat((voice.mel, voice.mel[:3])), voice.embedding)
    tokens, store = make_tokens(33, 3), make_store()
    mel = torch.cat(stream(small, small.row(longer), store, tokens, [5, 28]), dim=1)
    assert mel.shape[1] == 63 and error(mel, offline(small, longer, tokens)) < EXACT


def test_too_many_frames_and_too_few_pages_leave_the_row_as_it_was(small: Flow) -> None:
    row, store = small.row(make_voice(10, 1)), make_store(num_pages=2)
    with pytest.raises(TooManyFrames, match="15002"):
        small.begin(row, make_tokens(7491, 1), is_final=True)
    assert len(row.ids) == 10 and not row.is_staged
    small.begin(row, make_tokens(60, 1), is_final=True)
    with pytest.raises(OutOfPages):
        small.step([row], store)
    assert row.steps_done == 0 and store.pool.num_used == 0


def test_bfloat16_weights_keep_state_and_times_in_float32(small: Flow) -> None:
    flow = Flow(SMALL)
    flow.load_state_dict(small.state_dict())
    inv_freq = flow.estimator.rotary_embed.inv_freq.clone()
    flow = flow.bfloat16().eval()
    flow.estimator.rotary_embed.inv_freq = inv_freq  # a checkpoint's loader leaves it in float32
    voice, tokens = make_voice(30, 2), make_tokens(40, 2)
    store = FlowStore(SMALL, 8, dtype=torch.bfloat16)
    mel = torch.cat(stream(flow, flow.row(voice), store, tokens, [40]), dim=1)
    want = offline(small, voice, tokens)
    assert mel.dtype == flow.times()[0].dtype == torch.float32
    assert error(mel.double(), want) < 0.03 * float(want.abs().max())
    assert error(mel, offline(flow, voice, tokens)) < 0.03 * float(want.abs().max())


def test_nothing_follows_the_final_tokens(small: Flow) -> None:
    row, store = small.row(make_voice(10, 1)), make_store()
    small.begin(row, make_tokens(5, 1), is_final=True)
    solve(small, row, store)
    with pytest.raises(AssertionError, match="final tokens"):
        small.begin(row, make_tokens(5, 2), is_final=True)


def test_a_failed_prefix_keeps_no_page(small: Flow) -> None:
    store = make_store(num_pages=2)
    with pytest.raises(OutOfPages):
        small.solve_prefix(make_voice(103, 1), store)
    assert store.pool.num_used == 0


def test_constants_follow_the_weights(small: Flow) -> None:
    flow = Flow(SMALL).double().eval()
    voice, tokens = make_voice(10, 1), make_tokens(30, 1)
    for source in (flow.state_dict(), small.state_dict()):
        flow.load_state_dict(source)
        store = make_store()
        mel = torch.cat(stream(flow, flow.row(voice), store, tokens, [30]), dim=1)
        assert error(mel, offline(flow, voice, tokens)) < EXACT


def test_estimate_has_gradients_for_every_weight_and_takes_padding(small: Flow) -> None:
    flow = Flow(SMALL).train()
    tokens = torch.randint(SMALL.vocab, (3, 20))
    mu, spk = flow.conditioning(tokens, torch.randn(3, 192))
    x, cond = torch.randn(2, 3, 80, 40)
    real = torch.arange(40)[None, None] < torch.tensor([40, 31, 12])[:, None, None]
    velocity = flow.estimate(x, mu, spk, cond, torch.rand(3), real & flow.chunk_mask(40))
    (velocity * real).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in flow.parameters())
    shorter = flow.estimate(x[1:2, :, :31], mu[1:2, :, :31], spk[1:2], cond[1:2, :, :31], torch.zeros(1), None)
    whole = flow.estimate(x[1:2], mu[1:2], spk[1:2], cond[1:2], torch.zeros(1), real[1:2])
    assert error(F.pad(shorter, (0, 9)) * real[1:2], whole * real[1:2]) < 1e-5


@pytest.mark.gpu
def test_packed_rows_on_the_device_match_the_cpu(small: Flow) -> None:
    flow = Flow(SMALL).double().eval()
    flow.load_state_dict(small.state_dict())
    flow = flow.cuda()
    store = FlowStore(SMALL, 32, device="cuda", dtype=torch.float64)
    voices, streams = [make_voice(p, p) for p in (30, 0, 61)], [make_tokens(n, n) for n in (40, 25, 77)]
    rows = [flow.row(voice) for voice in voices]
    for row, tokens in zip(rows, streams, strict=True):
        flow.begin(row, tokens.cuda(), is_final=True)
    for _ in range(SMALL.steps):
        flow.step(rows, store)
    for row, voice, tokens in zip(rows, voices, streams, strict=True):
        assert error(flow.finish(row, store).cpu(), offline(small, voice, tokens)) < 1e-8
