"""What a part may take of the device, and how voices' prompts share and give up their pages."""

from __future__ import annotations

import pytest
import torch

from engine.batch import Claim, Prefixes, Segment, Utterance, most_held, part_limits
from engine.checkpoint import Settings
from engine.flow import Flow, FlowRow, FlowStore
from engine.frontend import Prompt
from engine.noise import MAX_FRAMES
from engine.sampler import Sampling
from engine.scheduler import Part, TextTooLong
from engine.talker import Limits, SilentRunFilter
from engine.voices import Voice
from tests.random_checkpoint import TINY, flow_state, random_voice


def a_voice(name: str = "anna", tokens: int = 60) -> Voice:
    return random_voice(name, tokens, torch.Generator().manual_seed(len(name)))


def an_utterance(*, text: int = 4, has_prompt_speech: bool = True) -> Utterance:
    prompt = Prompt(
        prompt_text=(1, 2, 3), text=tuple(range(text)), has_prompt_speech=has_prompt_speech, num_target=text
    )
    voice = a_voice()
    limits = part_limits(text, voice, Settings().code_ratios)
    return Utterance(voice=voice, prompt=prompt, limits=limits, sampling=Sampling(), seed=9, is_streaming=True)


def test_the_prefill_is_sos_prompt_text_text_task_and_prompt_speech() -> None:
    assert an_utterance().prefill_rows == 1 + 3 + 4 + 1 + 60
    assert an_utterance(has_prompt_speech=False).prefill_rows == 1 + 3 + 4 + 1
    assert an_utterance().most_rows == 69 + 80


def test_a_part_has_room_for_the_steps_behind_a_prompt_that_has_not_landed() -> None:
    assert part_limits(1, a_voice(), (0.5, 1.0)).max_len == 2
    assert part_limits(9, a_voice(tokens=7_498), (2.0, 20.0)).max_len == 2
    with pytest.raises(TextTooLong, match="a voice of 7499 tokens"):
        part_limits(9, a_voice(tokens=7_499), (2.0, 20.0))


@torch.inference_mode()
def test_voices_whose_prompts_hold_no_pages_are_not_kept_forever(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.batch.MAX_VOICES", 3)
    prefixes.begin(a_voice("anna"))
    solve(prefixes)
    for number in range(9):
        prefixes.begin(a_voice(f"short {number}", tokens=12))
    assert len(prefixes._solved) == 3
    assert prefixes.row(a_voice("anna")) is not None


@torch.inference_mode()
def test_a_rows_own_prompt_is_no_room_for_it(prefixes: Prefixes) -> None:
    for name in ("anna", "berta"):
        prefixes.begin(a_voice(name))
        solve(prefixes)
    pages = prefixes.pages_of(a_voice("anna"))
    assert pages and prefixes.num_unused_pages(a_voice("anna")) == pages
    assert prefixes.num_unused_pages(a_voice("carola")) == 2 * pages


def test_a_part_is_limited_by_its_text_and_by_the_fixed_noise() -> None:
    official = Settings().code_ratios
    assert part_limits(10, a_voice(), official) == Limits(20, 200)
    assert part_limits(10, a_voice(), (3.0, 3.0)) == Limits(30, 30)
    assert part_limits(1_000, a_voice(), official).max_len == MAX_FRAMES // 2 - 60


def test_draws_count_on_across_dropped_silence_and_tell_parts_apart() -> None:
    first, second = (Segment(an_utterance(), Part(3, number), SilentRunFilter([1])) for number in (0, 1))
    for code in [1] * 8 + [40]:
        first.add(code)
    assert first.tokens == [1] * 5 + [40]
    assert (first.clause, first.num_drawn) == (3, 9)
    assert second.clause != first.clause


def test_a_talker_that_has_only_silence_to_give_is_stopped() -> None:
    segment = Segment(an_utterance(text=40), Part(0, 0), SilentRunFilter([1]))
    count = 0
    while not segment.is_over:
        segment.add(1)
        count += 1
    assert count == 80
    assert len(segment.tokens) == 5


@pytest.mark.parametrize(
    ("claims", "most"),
    [
        ([(0, 5)], 5),
        ([(3, 0)], 3),
        ([(0, 4), (0, 4), (0, 4)], 12),  # side by side
        ([(0, 4), (3, 1)], 5),  # the second is through when the first has one page
        ([(0, 4), (3, 1), (3, 1)], 9),
        ([(0, 6), (1, 5), (2, 4), (3, 3), (4, 2), (5, 1)], 21),  # one after the other, each a page further on
    ],
    ids=str,
)
def test_rows_that_end_make_room_for_those_that_go_on(claims: list[tuple[int, int]], most: int) -> None:
    assert most_held([Claim(*claim) for claim in claims]) == most
    simulated, time = 0, 0
    while any(to_come >= time for _, to_come in claims):
        simulated = max(simulated, sum(held + time for held, to_come in claims if to_come >= time))
        time += 1
    assert simulated == most


@pytest.fixture
def prefixes() -> Prefixes:
    flow = Flow(TINY.flow)
    flow.load_state_dict(flow_state(TINY.flow, torch.Generator().manual_seed(0)))
    return Prefixes(flow.eval().requires_grad_(False), FlowStore(TINY.flow, 4))


def solve(prefixes: Prefixes) -> None:
    """Launch after launch until no prompt is under way."""
    while prefixes.is_solving:
        if rows := prefixes.under_way():
            prefixes.flow.step(rows, prefixes.store)
        prefixes.settle()


def born(prefixes: Prefixes, voice: Voice) -> FlowRow:
    if (row := prefixes.row(voice)) is None:
        solve(prefixes)
        row = prefixes.row(voice)
    assert row is not None, "no pages for its prompt"
    return row


@torch.inference_mode()
def test_the_oldest_unused_prompt_is_given_up_and_a_used_one_never(prefixes: Prefixes) -> None:
    pool = prefixes.store.pool
    anna, bert, carl = (a_voice(name) for name in ("anna", "berta", "carola"))  # two whole chunks each
    used = born(prefixes, anna)
    born(prefixes, bert).close(prefixes.store)
    assert (prefixes.num_pages, pool.num_free) == (4, 0)
    held = born(prefixes, carl)  # bert's pages go
    assert pool.num_free == 0
    assert prefixes.row(bert) is None
    solve(prefixes)
    assert prefixes.row(bert) is None  # it found no pages
    used.close(prefixes.store)
    born(prefixes, bert).close(prefixes.store)
    held.close(prefixes.store)
    assert pool.num_used == prefixes.num_pages == 4
    pool.check_integrity()
    prefixes.store.lanes.check_integrity()
    assert prefixes.store.lanes.num_used == 0


def test_as_many_prompts_are_under_way_as_a_launch_has_room_for_and_one_at_least(prefixes: Prefixes) -> None:
    for name in ("anna", "berta"):
        prefixes.begin(a_voice(name))  # two whole chunks each
    counts = [len(prefixes.under_way(most_units=most)) for most in (0, 3, 4, 64)]
    assert counts == [1, 1, 2, 2]


@torch.inference_mode()
def test_prompts_solved_side_by_side_are_those_solved_alone(prefixes: Prefixes) -> None:
    together, alone = Prefixes(prefixes.flow, FlowStore(TINY.flow, 8)), Prefixes(prefixes.flow, FlowStore(TINY.flow, 8))
    voices = [a_voice(name, tokens) for name, tokens in (("anna", 60), ("berta", 80), ("carola", 24))]
    for voice in voices:
        together.begin(voice)
    solve(together)
    for voice in voices:
        rows = [born(each, voice) for each in (together, alone)]
        assert len(rows[0].pages) == len(rows[1].pages) == len(voice.tokens) // 25
        for page, other in zip(rows[0].pages, rows[1].pages, strict=True):
            one, two = (each.store.data[:, :, :, :, at] for each, at in ((together, page), (alone, other)))
            torch.testing.assert_close(one, two, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_prompt_begun_for_nobody_takes_no_kept_ones_pages(prefixes: Prefixes) -> None:
    anna, bert, carl = (a_voice(name) for name in ("anna", "berta", "carola"))
    for voice in (anna, bert, carl):
        prefixes.begin(voice)
        solve(prefixes)
    assert prefixes.row(carl) is None
    assert prefixes.row(anna) is not None and prefixes.row(bert) is not None


@pytest.mark.parametrize(("tokens", "kept"), [(105, 88), (111, 88), (88, 88), (87, 63), (13, 13), (12, 12), (0, 0)])
def test_a_prompt_loses_its_start_so_that_it_ends_before_a_chunk_does(
    prefixes: Prefixes, tokens: int, kept: int
) -> None:
    trimming = Prefixes(prefixes.flow, prefixes.store, remainder=13)
    voice = a_voice(tokens=tokens)
    assert trimming.prompt_tokens(voice) == kept
    assert prefixes.prompt_tokens(voice) == tokens
    short, whole = trimming.voice(voice), trimming.whole(voice)
    assert (len(short.tokens), len(short.mel)) == (kept, 2 * kept)
    assert torch.equal(short.tokens, voice.tokens[tokens - kept :])
    assert torch.equal(short.mel, voice.mel[2 * (tokens - kept) :])
    assert len(whole.tokens) == tokens
