"""The Hopper run's own logic, over the scripted engine. What the GPU does is another matter."""

from __future__ import annotations

import asyncio
import contextlib
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine.config import load
from gateway.bench import Point
from gateway.errors import GatewayError
from tests.bench import hopper
from tests.bench.hopper import RATIO, Hopper, Stage
from tests.gateway.conftest import StackMaker, make_stack, socket_path  # noqa: F401 - fixtures
from tests.scripted_engine import Script

PATIENCE_S = 40.0
SHORT = Point(kind="burst", streams=2, tokens=30)


def letters(text: str) -> int:
    return sum(letter.isalnum() for letter in text)


def test_stages_that_follow_each_other_share_a_server() -> None:
    named = list(hopper.stages(12.0, 60.0).items())
    groups = [[name for name, _ in group] for group in hopper._sharing_a_server(named)]
    assert groups[0] == ["streaming", "listen", "churn", "shapes"]
    assert groups[1:] == [["turns"], ["full"], ["recompute"], ["serial"], ["pressure"], ["poisson"]]


@pytest.fixture
def a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hopper]:
    """A run whose profiles and checkpoint are stand-ins."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "spk2info.pt").touch()
    for name in ("hopper-streaming.toml", "hopper-full.toml"):
        (tmp_path / name).write_text("[engine]\nlanes = 3\n")
    monkeypatch.setattr(hopper, "CONFIGS", tmp_path)
    monkeypatch.setattr(hopper, "text_counter", lambda profile: letters)

    def make(seconds: float) -> Hopper:
        given = {"out": tmp_path, "model": tmp_path / "model", "parity": 0.0, "only": None}
        return Hopper(Namespace(seconds=seconds, point_seconds=1.0, churn_seconds=1.0, **given))

    return make


async def test_what_fails_is_told_and_the_rest_goes_on(
    a_run: Callable[..., Hopper],
    make_stack: StackMaker,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages = {
        "broken": Stage(series="full", profile="hopper-full.toml", points=(SHORT,)),
        "sound": Stage(points=(Point(kind="siege"), SHORT, Point(kind="burst", streams=9, voices="cold"))),
    }
    monkeypatch.setattr(hopper, "stages", lambda *_: stages)
    seen = []

    @contextlib.asynccontextmanager
    async def own_server(profile: Path) -> AsyncIterator[str]:
        seen.append(load(profile).engine.lanes)
        if len(seen) == 1:
            raise GatewayError("the engine ended with code 1")
        async with make_stack(Script(samples_per_char=int(RATIO * 960), step_samples=48_000)) as stack:
            yield stack.address

    monkeypatch.setattr(hopper, "own_server", own_server)
    run = a_run(seconds=600.0)
    (run.out / "servers.log").write_text("a gateway INFO line\nthe reason\n")
    async with asyncio.timeout(PATIENCE_S):
        await run.run()
    run.report()
    said = capsys.readouterr().out
    assert seen == [3, 3]
    assert "FAILED full: no server (the engine ended with code 1)\n--- the servers' last words\nthe reason" in said
    kinds = ["failure" if "failure" in one else "figures" for one in run.results]
    assert kinds == ["failure", "failure", "figures", "failure"]
    found = run.results[2]["figures"]
    assert found.done == 2 and found.audio_per_token == pytest.approx(0.04) and not hopper.faults(run.results[2])
    written = json.loads((run.out / "hopper.json").read_text())
    assert [one["name"] for one in written["results"]] == [one["name"] for one in run.results]
    assert said.rindex("burst 9 cold") > said.rindex("marks of the design")


async def test_no_point_is_begun_that_there_is_no_time_for(
    a_run: Callable[..., Hopper], capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(seconds=20.0)
    async with asyncio.timeout(PATIENCE_S):
        await run.run()
    assert run.results == [] and "no time left for streaming" in capsys.readouterr().out
