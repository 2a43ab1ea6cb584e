"""TalkerLanes: against the dense path and the host-described sampler, alone and in a crowd, shared prompts, pages."""

from __future__ import annotations

import random

import pytest
import torch

from engine.cache import OutOfPages, PagePool
from engine.sampler import Draw, Mask, Sampling, sample
from engine.talker import PAGE_ROWS, Limits, Talker, TalkerShape, TalkerStore
from engine.talker_lanes import PromptPages, TalkerLanes, page_names

RAS = Sampling()
STANDARD = Sampling(mode="standard", temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.1)
STYLES = [RAS, STANDARD, Sampling(temperature=0.0), Sampling(mode="standard", top_k=0, top_p=1.0), Sampling(window=40)]
SHAPE = TalkerShape(hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=8, text_vocab=100)


def small(dtype: torch.dtype = torch.float32) -> Talker:
    torch.manual_seed(3)
    talker = Talker(SHAPE)
    talker.llm_decoder.weight.data *= 4  # scores with some spread: repetitions occur
    return talker.to(dtype).eval().requires_grad_(False)


def lanes_of(talker: Talker, *, lanes: int = 8, rows_per_launch: int = 1, num_pages: int = 200) -> TalkerLanes:
    """Pages full of NaN: whatever is read before it was written shows."""
    weight = talker.speech_embedding.weight
    store = TalkerStore(talker.shape, num_pages, device=weight.device, dtype=weight.dtype)
    store.kv.fill_(float("nan"))
    return TalkerLanes(talker, store, lanes=lanes, rows_per_launch=rows_per_launch)


def prompt_of(talker: Talker, length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    text = [dice.randrange(100) for _ in range(length // 2)]
    return talker.prompt_ids(text, [], [dice.randrange(6561) for _ in range(length - 2 - len(text))])


def style(number: int) -> Sampling:
    return STYLES[number % len(STYLES)]


def seat(lanes: TalkerLanes, lane: int, number: int, *, length: int = 0, limits: Limits | None = None) -> int:
    """Tenant `number`: its prompt, seed and style follow from the number."""
    prompt = prompt_of(lanes.talker, length or 20 + 17 * number % 90, number)
    limits = limits or Limits(5, 60)
    return lanes.seat(lane, prompt, sampling=style(number), seed=number << 40, clause=3, limits=limits)


def alone(talker: Talker, number: int, steps: int) -> list[int | None]:
    lanes = lanes_of(talker)
    seat(lanes, 0, number)
    return spoken(lanes, 0, number, steps)


def spoken(lanes: TalkerLanes, lane: int, number: int, steps: int) -> list[int | None]:
    length = 20 + 17 * number % 90
    ids = lanes.prefill([(lane, 0, length)]).fetch()
    return ids + [i for _ in range(steps - 1) for i in lanes.decode([lane]).fetch()]


@pytest.mark.parametrize("number", range(5))
def test_ids_are_those_of_the_dense_path_and_the_host_described_sampler(number: int) -> None:
    talker, limits = small(torch.float64), Limits(5, 60)
    prompt = prompt_of(talker, 20 + 17 * number % 90, number)
    found = alone(talker, number, 60)
    rows, history = talker.rows_of(torch.tensor(prompt)), []
    for step in range(60):
        scores = talker.logits(talker.hidden(rows[None])[0, -1:])
        draw = Draw(style(number), history, number << 40, 3, step, limits.mask(step))
        history.append(sample(scores, [draw]).fetch()[0])
        rows = torch.cat([rows, talker.speech_rows(torch.tensor(history[-1:]))])
    assert found == history
    assert number in (2, 3) or len(set(history)) > 10, "such a history tests nothing"


@pytest.mark.parametrize("rows_per_launch", [1, 8])
@pytest.mark.parametrize("seed", range(2))
def test_lane_draws_the_same_alone_and_in_a_crowd_that_comes_and_goes(rows_per_launch: int, seed: int) -> None:
    """Chunked prefill, lanes that start late and end early; with one row per launch the cache is equal to the bit."""
    dice = random.Random(seed)
    talker = small(torch.float32 if rows_per_launch == 1 else torch.float64)
    wanted = {number: alone(talker, number, 60) for number in range(12)}
    lanes = lanes_of(talker, lanes=5, rows_per_launch=rows_per_launch, num_pages=40)
    waiting, running, fed, heard = list(range(12)), {}, {}, {number: [] for number in range(12)}
    while waiting or running:
        for lane in {0, 1, 2, 3, 4} - running.keys():
            if waiting:
                running[lane] = waiting.pop(0)
                fed[lane] = seat(lanes, lane, running[lane])
        length = {lane: 20 + 17 * number % 90 for lane, number in running.items()}
        cuts = [200, 200, 7, 33] if rows_per_launch > 1 else [200]
        chunks = [
            (lane, fed[lane], min(length[lane] - fed[lane], dice.choice(cuts)))
            for lane in running
            if fed[lane] < length[lane]
        ]
        decoding = [lane for lane in running if fed[lane] == length[lane] and dice.random() < 0.8]
        first, more = lanes.prefill(chunks), lanes.decode(decoding)
        ended = [lane for lane, start, count in chunks if start + count == length[lane]]
        for lane, _start, count in chunks:
            fed[lane] += count
        for lane, i in zip(ended + decoding, first.fetch() + more.fetch(), strict=True):
            heard[running[lane]].append(i)
        for lane in list(running):
            if len(heard[running[lane]]) == 60 or dice.random() < 0.003:
                del running[lane]
                lanes.free(lane)
    assert sum(len(ids) == 60 for ids in heard.values()) > 4
    for number, ids in heard.items():
        assert ids == wanted[number][: len(ids)]
    assert lanes.num_pages == 0
    lanes.store.pool.check_integrity()


def test_no_control_id_below_the_minimum_length() -> None:
    talker = small()
    talker.llm_decoder.weight.data[6561:] *= 50  # some of them tower above every code
    lanes = lanes_of(talker)
    lanes.seat(0, prompt_of(talker, 10, 0), sampling=RAS, seed=1, clause=0, limits=Limits(30, 40))
    ids = lanes.prefill([(0, 0, 10)]).fetch() + [lanes.decode([0]).fetch()[0] for _ in range(39)]
    assert max(ids[:30]) < 6561 <= min(ids[30:])


@pytest.mark.parametrize("rows_per_launch", [1, 8])
def test_a_lane_that_is_fed_more_rows_goes_on_as_the_dense_path_does(rows_per_launch: int) -> None:
    talker = small(torch.float64)
    lanes = lanes_of(talker, rows_per_launch=rows_per_launch)
    prompt, history = prompt_of(talker, 40, 3), []
    rows = prompt
    lanes.seat(0, rows, sampling=RAS, seed=9, clause=3, limits=Limits(1 << 30, 15))
    for turn, num_codes in enumerate((15, 15, 40)):
        start = len(rows) - 6 if turn else 0
        codes = lanes.prefill([(0, start, len(rows) - start)]).fetch()
        codes += [lanes.decode([0]).fetch()[0] for _ in range(num_codes - 1)]
        fed = talker.rows_of(torch.tensor(rows))
        for code in codes:
            scores = talker.logits(talker.hidden(fed[None])[0, -1:])
            draw = Draw(RAS, history, 9, 3, len(history), Mask.NOTHING if turn == 2 else Mask.CONTROLS)
            assert sample(scores, [draw]).fetch() == [code]
            history.append(code)
            fed = torch.cat([fed, talker.speech_rows(torch.tensor([code]))])
        rows = [*rows, *codes, *(6761 + i for i in range(turn, turn + 5))]
        if turn < 2:
            lanes.extend(0, rows, limits=(Limits(1 << 30, 15), Limits(0, 40))[turn])
    lanes.free(0)
    assert lanes.num_pages == 0


def test_faulty_lane_is_reported_and_its_neighbour_is_not() -> None:
    talker = small()
    lanes = lanes_of(talker, rows_per_launch=8)
    for lane, number in ((0, 0), (1, 5)):
        seat(lanes, lane, number)
    lanes.prefill([(0, 0, 20), (1, 0, 105)])
    lanes.store.kv[:, :, lanes._tenants[0].pages[0], 3] = float("nan")
    found = lanes.decode([0, 1]).fetch()
    assert found[0] is None and found[1] == alone(talker, 5, 2)[1]


def test_next_tenant_of_a_lane_starts_afresh() -> None:
    talker = small()
    lanes = lanes_of(talker)
    seat(lanes, 2, 1)
    spoken(lanes, 2, 1, 40)
    lanes.free(2)
    seat(lanes, 2, 6)
    assert spoken(lanes, 2, 6, 40) == alone(talker, 6, 40)


# --- pages ----------------------------------------------------------------------------------------


def test_equal_prompts_share_their_whole_pages_once_they_are_fed() -> None:
    talker = small(torch.float64)
    lanes = lanes_of(talker, rows_per_launch=8)
    assert [seat(lanes, 0, 4, length=88), seat(lanes, 1, 4, length=88)] == [0, 0]
    first = lanes.prefill([(0, 0, 40)])
    assert first.fetch() == []
    assert seat(lanes, 2, 4, length=88) == 32
    lanes.prefill([(0, 40, 48), (1, 0, 88), (2, 32, 56)])
    assert seat(lanes, 3, 4, length=88) == 64
    assert seat(lanes, 4, 4, length=64) == 32, "the same text in its first page, then other rows"
    lanes.prefill([(3, 64, 24)])
    ids = [lanes.decode([0, 1, 2, 3]).fetch() for _ in range(30)]
    assert all(len(set(step)) == 1 for step in ids)
    for lane in range(5):
        lanes.free(lane)
    assert lanes.num_pages == 0 and lanes.store.pool.num_used == 2


def test_kept_prompts_make_room_oldest_first_and_never_while_held() -> None:
    talker = small()
    lanes = lanes_of(talker, rows_per_launch=8, num_pages=11)
    limits = Limits(0, 8)
    for number in (0, 1):
        seat(lanes, number, number, length=88, limits=limits)
        lanes.prefill([(number, 0, 88)])
    lanes.free(0)
    assert (lanes.num_pages, lanes.prompts.num_unheld) == (3, 2)
    for lane in (2, 3):  # 3 pages each: 6 are free, beside the 2 of prompt 0
        assert seat(lanes, lane, lane, length=88, limits=limits) == 0
    with pytest.raises(OutOfPages):
        seat(lanes, 4, 4, length=88, limits=limits)
    assert lanes.prompts.num_unheld == 0, "prompt 0 made room, in vain"
    assert seat(lanes, 4, 1, length=88, limits=limits) == 64, "prompt 1 is held by lane 1 and was kept"
    lanes.store.pool.check_integrity()


def test_prompts_share_nothing_where_lanes_must_be_equal_to_the_bit() -> None:
    lanes = lanes_of(small(), rows_per_launch=1)
    for lane in (0, 1):
        assert seat(lanes, lane, 4, length=88) == 0
        lanes.prefill([(lane, 0, 88)])
    assert lanes.prompts.num_unheld == 0 and lanes.num_pages == lanes.store.pool.num_used


def test_page_names_tell_beginnings_apart_and_leave_the_last_row_out() -> None:
    first = page_names(range(65))
    assert len(first) == 2 and len(page_names(range(64))) == 1 and page_names([]) == []
    assert page_names(range(96))[:2] == first
    assert page_names([9, *range(1, 65)])[1] != first[1]


def test_a_page_outlives_those_that_follow_it() -> None:
    pool = PagePool(8)
    prompts, names = PromptPages(pool), page_names(range(97))
    pages = pool.take(3)
    for count in (1, 2, 3):
        prompts.keep(names[:count], pages[:count])
    pool.release(pages)
    for left in (2, 1, 0):
        assert prompts.evict()
        found = prompts.find(names)
        assert found == pages[:left]
        pool.release(found)
    assert not prompts.evict() and pool.num_used == 0


def test_asking_for_more_rows_than_were_seated_is_found() -> None:
    lanes = lanes_of(small())
    seat(lanes, 0, 0, limits=Limits(0, 2))
    spoken(lanes, 0, 0, 3)
    with pytest.raises(AssertionError, match="22"):
        lanes.decode([0])
    assert PAGE_ROWS == 32
