"""The engine with and without the flow's cache: the same audio, at another price."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.speaking import Speaking
from tests.random_checkpoint import random_checkpoint

TEXT = "So it goes, on and on."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model"), stop_scale=1.0, prompt_tokens=40)


def spoken(folder: Path, *, flow_cache: bool) -> tuple[np.ndarray, Speaking]:
    """Two contexts at once. -> float32 [S] of the first, and the engine."""
    speaking = Speaking(folder, flow_cache=flow_cache, rows_per_launch=8, dtype="float64")
    for context in range(2):
        speaking.open(context, TEXT, seed=context)
    speaking.finish(range(2))
    speaking.assert_empty()
    return np.frombuffer(speaking.pcm(0), dtype="<f4"), speaking


def test_solving_everything_again_at_each_hop_changes_no_sample(folder: Path) -> None:
    kept, with_cache = spoken(folder, flow_cache=True)
    again, without = spoken(folder, flow_cache=False)
    assert len(again) == len(kept) > 24_000
    assert np.abs(again - kept).max() <= 1e-6 * np.abs(kept).max()
    assert with_cache.gauges[-1].voice_pages > 0
    last = without.gauges[-1]
    assert (last.voice_pages, last.flow_pages, last.talker_pages, last.lanes_used) == (0, 0, 0, 0)
