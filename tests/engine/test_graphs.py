"""Graphs: what runs where nothing can be captured, and replay against the plain body where it can."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from engine.graphs import CaptureAfterStart, Graphs, garbage_kept


def add_one(x: Tensor) -> None:
    x.add_(1)


class Ring:
    """What only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def copy_twice(x: Tensor, out: Tensor) -> None:
    out.copy_(2 * x)


def test_without_cuda_the_body_is_run_as_it_is_and_only_when_asked() -> None:
    x = torch.zeros(3)
    graphs = Graphs("cpu")
    run = graphs.capture("add", lambda: add_one(x))
    assert not graphs.is_capturing and x.sum() == 0
    run()
    run()
    assert x.tolist() == [2, 2, 2]


def test_bodies_run_without_gradients() -> None:
    weight, out = torch.ones(2, requires_grad=True), torch.zeros(2)
    Graphs("cpu").capture("copy", lambda: copy_twice(weight, out))()
    assert out.tolist() == [2, 2] and not out.requires_grad


def test_nothing_is_captured_after_the_start() -> None:
    seen: list[str] = []
    graphs = Graphs("cpu", on_capture=seen.append)
    graphs.capture("flow 8", lambda: None)
    graphs.close()
    with pytest.raises(CaptureAfterStart, match="flow 16.*flow 8"):
        graphs.capture("flow 16", lambda: None)
    assert seen == graphs.names == ["flow 8"]


@pytest.mark.parametrize("is_collecting", [True, False])
def test_no_garbage_is_freed_during_a_capture(is_collecting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.isenabled", lambda: is_collecting)
    enabled: list[bool] = []
    monkeypatch.setattr("gc.enable", lambda: enabled.append(True))
    try:
        with garbage_kept():
            ring = weakref.ref(Ring())
            _kept = [[] for _ in range(20 * gc.get_threshold()[0])]
            assert ring() is not None
    finally:
        monkeypatch.undo()
        gc.enable()
    assert enabled == [True] * is_collecting
    gc.collect()
    assert ring() is None


@pytest.mark.gpu
@pytest.mark.parametrize("is_enabled", [True, False])
def test_replay_gives_what_the_body_gives(is_enabled: bool) -> None:
    weight, x, out = (torch.randn(256, 256, device="cuda") for _ in range(3))
    graphs = Graphs("cuda", is_enabled=is_enabled)

    def body(rows: int) -> None:
        out[:rows] = (x[:rows] @ weight).relu()

    runs = {rows: graphs.capture(f"rows {rows}", lambda rows=rows: body(rows)) for rows in (256, 16)}
    for rows, run in runs.items():
        x.normal_()
        out.zero_()
        run()
        torch.testing.assert_close(out[:rows], (x[:rows] @ weight).relu())
        assert not out[rows:].any()
