"""Pages are never given out twice, lost, or freed under a holder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache import OutOfPages, PagePool


def test_a_pool_that_is_too_small_gives_out_nothing() -> None:
    pool = PagePool(4)
    kept = pool.take(3)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 4 are free"):
        pool.take(2)
    assert pool.num_free == 1
    pool.release(kept)
    assert (pool.num_free, pool.num_used) == (4, 0)


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    pool = PagePool(2)
    pages = pool.take(2)
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_used == 1
    assert pool.holders(pages[0]) == 1
    pool.release(pages[:1])
    assert pool.num_used == 0


def test_reserved_pages_are_never_given_out() -> None:
    pool = PagePool(3, reserved=1)
    assert sorted(pool.take(2)) == [1, 2]
    assert (pool.num_free, pool.num_used) == (0, 2)


@pytest.mark.parametrize("misuse", ["release", "share"])
def test_a_free_page_can_be_neither_released_nor_shared(misuse: str) -> None:
    pool = PagePool(2)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="is free"):
        getattr(pool, misuse)(pages)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="1 pages, 1 reserved"):
        PagePool(1, reserved=1)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_no_order_of_calls_loses_or_doubles_a_page(calls: list[tuple[str, int]]) -> None:
    pool = PagePool(8)
    held: list[list[int]] = []
    for call, number in calls:
        if call == "take" and number <= pool.num_free:
            taken = pool.take(number)
            assert not set(taken) & {page for pages in held for page in pages}
            held.append(taken)
        elif held and call == "share":
            pages = held[number % len(held)]
            pool.share(pages)
            held.append(list(pages))
        elif held and call == "release":
            pool.release(held.pop(number % len(held)))
        pool.check_integrity()
        assert pool.num_used == len({page for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    assert pool.num_used == 0
