"""The attention back ends agree, installed or played by stand-ins; the choice takes the quickest that is right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import (
    Angles,
    EachPaged,
    EachRow,
    FlashPaged,
    GatheredPaged,
    RowsChoice,
    Unit,
    Units,
    VarlenRows,
    Whole,
    fastest,
    is_installed,
    unit_columns,
)

HEADS, WIDTH, PAGE = 2, 8, 5
NOBODY = Unit(3, 0, 0, PAGE, [8], 0, is_last=True)


@pytest.fixture
def angles() -> Angles:
    turn = torch.arange(100, dtype=torch.float64)[:, None] * torch.linspace(0.1, 1, WIDTH // 2, dtype=torch.float64)
    return Angles(turn.cos(), turn.sin())


def draw(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size)), dtype=torch.float64)


def read_pages(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, *, cache_seqlens: Tensor, page_table: Tensor
) -> tuple[Tensor, None]:
    """What flash_attn_with_kvcache promises: q [B, w, H, E], pages [pages, W, H, E], table [B, P]."""
    assert cache_seqlens.dtype == page_table.dtype == torch.int32
    out = []
    for asked, keys, listed in zip(q, cache_seqlens.tolist(), page_table.tolist(), strict=True):
        k, v = (pages[listed].flatten(0, 1)[:keys].transpose(0, 1) for pages in (k_pages, v_pages))
        out.append(F.scaled_dot_product_attention(asked.transpose(0, 1), k, v).transpose(0, 1))
    return torch.stack(out), None


def test_paged_back_ends_agree(angles: Angles, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("flash_attn_interface")
    stand_in.flash_attn_with_kvcache = read_pages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    listed = [
        Unit(lane=0, step=3, start=10, frames=5, pages=[4, 2, 7], fresh=0, is_last=True),
        Unit(lane=1, step=0, start=0, frames=5, pages=[5], fresh=0, is_last=False),
        Unit(lane=1, step=0, start=5, frames=2, pages=[5, 0], fresh=1, is_last=True),
        NOBODY,
    ]
    units = Units.of(torch.from_numpy(unit_columns(listed[:3], NOBODY, 4, 4)), PAGE)
    before, qkv = draw(4, 2, 3, 2, 9, PAGE, HEADS, WIDTH), draw(4, 2, PAGE, 3, HEADS, WIDTH)
    written = before.clone()
    want = EachPaged(written, units, listed, angles)(1, qkv.clone())
    for back_end in (GatheredPaged, FlashPaged):
        data = before.clone()
        torch.testing.assert_close(back_end(data, units, angles)(1, qkv.clone()), want)
        torch.testing.assert_close(data, written)


def attend_ragged(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, q_longest: int, k_longest: int
) -> Tensor:
    """What the varlen functions promise."""
    lengths = q_ends.diff().tolist()
    assert q_ends.dtype == torch.int32 and torch.equal(q_ends, k_ends)
    assert q_longest == k_longest == max(lengths)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    out = [F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts]
    return torch.cat(out)


def test_back_ends_over_whole_rows_agree(angles: Angles) -> None:
    whole = Whole.of([7, 1, 30], torch.device("cpu"))
    qkv = draw(1, 2, 38, 3, HEADS, WIDTH)
    want = EachRow(whole, angles)(0, qkv.clone())
    assert want.shape == (1, 2, 38, HEADS * WIDTH)
    torch.testing.assert_close(VarlenRows(whole, angles, attend_ragged)(0, qkv), want)


def test_the_quickest_right_one_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    def fails(qkv: Tensor) -> Tensor:
        raise RuntimeError("not on this chip")

    spent = iter([2.0, 1.0])  # of the two that are right

    def clock(run: Callable[[], object]) -> float:
        run()
        return next(spent)

    attempts = {"plain": lambda x: x.add_(1), "wrong": lambda x: x + 1.1, "broken": fails, "quick": lambda x: x.add_(1)}
    assert fastest(attempts, draw(3), "of a test", clock) == "quick", "an attempt may overwrite what it is given"
    assert "wrong is left out: off by" in caplog.text and "broken is left out: not on this chip" in caplog.text


def test_rows_take_what_was_quickest_near_their_size() -> None:
    choice = RowsChoice({500: EachRow, 32_000: VarlenRows})  # type: ignore[dict-item]
    assert choice.of(600) is EachRow and choice.of(12_000) is VarlenRows


def test_a_package_that_is_not_there_is_not_installed() -> None:
    assert is_installed("torch.nn.functional")
    assert not is_installed("no_such_package.inside") and not is_installed("no_such_package")
