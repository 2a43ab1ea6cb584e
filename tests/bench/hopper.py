"""All that is measured on one Hopper GPU, in one call that ends in time: the most important first.

    python -m tests.bench.hopper --seconds 540 --out FOLDER [--only streaming,full] [--model FOLDER]

Writes the full-size random checkpoint (once), then, stage by stage, starts a server of the stage's profile and measures
its points through the real gateway. A point or a server that fails is told, with the end of the servers' log, and the
rest goes on; what has no time left is named. Everything goes to FOLDER (default $OUT): hopper.json, servers.log, a
picture where matplotlib is. The last lines are the tables: points, where the time went, the marks of the design.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from engine.voices import read_voices, write_voices
from gateway import figures
from gateway.bench import BASELINES, Bench, Point, altered, attempt, text_counter
from gateway.cli import own_server
from gateway.errors import GatewayError
from tests.bench.full_size import full_size, random_voices

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RATIO = 6.0  # speech tokens for each text token: a sentence of twenty text tokens is then as long as Seed-TTS EN's
VOICES, PROMPT_TOKENS = 200, 125
LONG_PROMPT, LONG_TOKENS, LONG_PLACE = "long-prompt", 750, 40  # beyond a pool of 32, and far from the cold ones' end
START_S = 240.0  # for a server to load, capture and be ready
SPARE_S = 12.0  # a point isn't begun with less than its own time and this
DRAIN_S = 45.0  # for the answers that are under way at a point's end
TAIL_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Points over one server; stages with the same profile and changes that follow each other share it."""

    points: tuple[Point, ...]
    profile: str = "hopper-streaming.toml"
    series: str = "rill"
    changes: dict[str, Any] = field(default_factory=dict)


def stages(seconds: float, churn_s: float) -> dict[str, Stage]:
    """By name, in order of importance; `seconds` of each closed loop."""
    hot = Point(seconds=seconds)
    burst = replace(hot, kind="burst", rounds=3)
    listening = replace(hot, listens=True, seconds=max(seconds, 15.0))
    crowd = replace(listening, streams=256, voices="pooled")
    return {
        "streaming": Stage(
            points=(
                replace(hot, streams=1, seconds=min(seconds, 6.0)),
                replace(burst, streams=64),
                replace(hot, streams=64),
                replace(hot, streams=128),
                replace(hot, streams=256),
                replace(burst, streams=64, voices="cold", rounds=2),
            )
        ),
        "listen": Stage(points=tuple(replace(listening, streams=streams) for streams in (128, 256, 320))),
        "churn": Stage(points=(crowd, replace(crowd, cancels=0.3, seconds=churn_s))),
        "shapes": Stage(
            points=(
                replace(burst, streams=4, tokens=1500, rounds=1),
                replace(burst, streams=8, tokens=int(2 * RATIO)),  # a word and its full stop
                replace(burst, streams=4, voices=LONG_PROMPT, rounds=1),
                replace(hot, streams=64, voices="pooled", pool=64),
                replace(hot, streams=16),
                replace(hot, streams=4, seconds=min(seconds, 6.0)),
            )
        ),
        "turns": Stage(
            series="taking turns",
            changes={"overlap": False},
            points=(replace(burst, streams=64), replace(hot, streams=64)),
        ),
        "full": Stage(
            profile="hopper-full.toml", series="full", points=(replace(hot, streams=64), replace(burst, streams=64))
        ),
        "recompute": Stage(
            series="prefix recomputed",
            changes=BASELINES["prefix recomputed"],
            points=(replace(burst, streams=64), replace(hot, streams=64), replace(hot, streams=1, seconds=4.0)),
        ),
        "serial": Stage(
            series="one at a time",
            changes=BASELINES["one at a time"],
            points=(replace(burst, streams=64, rounds=1),),
        ),
        "pressure": Stage(
            series="few pages", changes={"flow_pages": 100}, points=(replace(hot, streams=64, seconds=8.0),)
        ),
        "poisson": Stage(
            points=tuple(replace(listening, kind="poisson", rate=rate, listens=True) for rate in (10.0, 20.0, 40.0))
        ),
    }


class Hopper:
    """One run: its clock, its folder, what it has found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.results: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []
        self._ends_at = time.monotonic() + options.seconds
        self._log = self.out / "servers.log"

    @property
    def left_s(self) -> float:
        return self._ends_at - time.monotonic()

    async def run(self) -> None:
        self._write_checkpoint()
        await self._check_parity()
        chosen = stages(self.options.point_seconds, self.options.churn_seconds)
        names = self.options.only or list(chosen)
        for group in _sharing_a_server([(name, chosen[name]) for name in names]):
            await self._run_group(group)

    def _write_checkpoint(self) -> None:
        folder = self.options.model
        started = time.monotonic()
        if not (folder / "spk2info.pt").exists():
            full_size(folder, voices=VOICES, prompt_tokens=PROMPT_TOKENS, ratio=RATIO)
            add_long_prompt(folder)
            say(f"checkpoint in {folder}, {time.monotonic() - started:.1f} s")

    async def _check_parity(self) -> None:
        """In a process of its own, whose memory on the GPU goes with it."""
        if not self.options.parity:
            return
        command = [sys.executable, "-m", "tests.bench.parity", str(self.options.model), "--out", str(self.out)]
        process = await asyncio.create_subprocess_exec(*command)
        try:
            async with asyncio.timeout(min(self.options.parity, self.left_s)):
                say(f"parity ended with code {await process.wait()}")
        except TimeoutError:
            process.kill()
            await process.wait()
            say(f"parity was not through after {self.options.parity:.0f} s")

    async def _run_group(self, group: Sequence[tuple[str, Stage]]) -> None:
        names, stage = [name for name, _ in group], group[0][1]
        if self.left_s < START_S / 4 + SPARE_S:
            say(f"no time left for {', '.join(names)}")
            return
        async with AsyncExitStack() as stack:
            try:
                url = await self._start(stack, names, stage)
            except (GatewayError, OSError, TimeoutError) as error:
                self._tell_failure(f"{stage.series}: no server ({error or type(error).__name__})")
                self.results.append({"name": f"{stage.series}: server", "series": stage.series, "failure": str(error)})
                return
            bench = self._bench(url, stage.series)
            for _, one in group:
                for point in one.points:
                    await self._measure(bench, point)

    async def _start(self, stack: AsyncExitStack, names: Sequence[str], stage: Stage) -> str:
        started = time.monotonic()
        profile = altered(
            CONFIGS / stage.profile, self.out, stage.changes, {"checkpoint": str(self.options.model), "voices": ""}
        )
        async with asyncio.timeout(min(START_S, self.left_s)):
            url = await stack.enter_async_context(own_server(profile))
        start_s = round(time.monotonic() - started, 1)
        self.starts.append({"stages": list(names), "profile": stage.profile, "changes": stage.changes, "s": start_s})
        say(f"server of {stage.profile} {stage.changes or ''} ready in {start_s} s, {self.left_s:.0f} s left")
        return url

    def _bench(self, url: str, series: str) -> Bench:
        return Bench(url, count=text_counter(self.out / "bench.toml"), ratio=RATIO, series=series)

    async def _measure(self, bench: Bench, point: Point) -> None:
        seconds = point.seconds if point.kind != "burst" else 5.0 * point.rounds
        if self.left_s < seconds + SPARE_S:
            self.results.append(_failed(bench, point, "no time left"))
            return
        try:
            async with asyncio.timeout(min(seconds + DRAIN_S, self.left_s)):
                result = await attempt(bench, point)
        except TimeoutError:
            result = _failed(bench, point, f"not through {DRAIN_S:.0f} s after its end")
        except Exception:  # a bug of ours must not cost the points behind it
            result = _failed(bench, point, traceback.format_exc(limit=-3))
        self.results.append(result)
        if "failure" in result:
            self._tell_failure(f"{result['name']}: {result['failure']}")
        elif wrong := faults(result):
            self._tell_failure(f"{result['name']}: {wrong}")
        else:
            say(figures.table([result]).splitlines()[-1])
        self.write()

    def _tell_failure(self, what: str) -> None:
        say(f"FAILED {what}\n--- the servers' last words")
        with contextlib.suppress(OSError):
            say("\n".join(self._log_lines()[-TAIL_LINES:]))
        say("---")

    def _log_lines(self) -> list[str]:
        """Of the servers, but for the gateways' line for each context and connection."""
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if " gateway INFO " not in line]

    def write(self) -> None:
        """All that is known so far."""
        plain = [{**one, "figures": asdict(one["figures"])} if "figures" in one else one for one in self.results]
        table = {"starts": self.starts, "results": plain, "argv": sys.argv[1:]}
        (self.out / "hopper.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")

    def report(self) -> None:
        self.write()
        measured = [one for one in self.results if "figures" in one]
        with contextlib.suppress(OSError):
            lines = [line for line in self._log_lines() if "cost" in line.lower()]
            say("\n".join(["", "what the engines said of their costs", *lines[-6:]]))
        say("\nwhere the time went: % of the wall by stage, and ms of it for a second of audio\n" + breakdown(measured))
        say("\nmarks of the design\n" + marks(measured))
        say("\n" + figures.table(self.results))
        if measured and importlib.util.find_spec("matplotlib") is not None:
            figures.plot(measured, self.out / "hopper.png")


def add_long_prompt(folder: Path) -> None:
    """A voice whose recording took 30 s, among the others."""
    path = folder / "spk2info.pt"
    voices = list(read_voices(path).values())
    (made,) = random_voices(folder, 1, LONG_TOKENS, seed=7)
    voices.insert(LONG_PLACE, replace(made, id=LONG_PROMPT, name=LONG_PROMPT))
    write_voices(path, voices)


def faults(result: dict[str, Any]) -> str:
    """What a point that was measured shouldn't have; empty if there is nothing."""
    found, seconds = result["figures"], result["figures"].audio_per_token
    wrong = [f"errors {found.errors}"] if found.errors else []
    wrong += [f"{seconds} s of audio for each token"] if seconds is not None and abs(seconds - 0.04) > 1e-4 else []
    wrong += [f"left behind {result['left']}"] if result["left"] else []
    stray = result["client"]["stray"]
    return ", ".join(wrong + ([f"{stray} messages of contexts that had ended"] if stray else []))


def _failed(bench: Bench, point: Point, why: str) -> dict[str, Any]:
    return {
        "name": f"{bench.series}: {point.name}",
        "series": bench.series,
        "point": asdict(point),
        "failure": why,
    }


def _sharing_a_server(named: Sequence[tuple[str, Stage]]) -> Iterator[list[tuple[str, Stage]]]:
    group: list[tuple[str, Stage]] = []
    for name, stage in named:
        if group and (stage.profile, stage.changes) != (group[0][1].profile, group[0][1].changes):
            yield group
            group = []
        group.append((name, stage))
    if group:
        yield group


# ---- tables

STAGES = ("talker", "flow", "hift", "host")
FULLEST = ("lanes_used", "places", "waiting", "flow_pages", "voice_pages")  # gauges whose largest values are shown


def breakdown(results: Sequence[dict[str, Any]]) -> str:
    """Of each point, from the engine's own sums; a device stage's time holds what it waited beside the other's work."""
    heads = "".join(f"{name + ' %':>10}{'ms/s':>7}" for name in STAGES)
    lines = [f"{'point':<34}{heads}{'turns/s':>9}" + "".join(f"{name:>13}" for name in FULLEST)]
    for result in results:
        gauges, audio = result["gauges"], result["figures"].audio_s_per_s
        cells = []
        for name in STAGES:
            share = gauges.get(f"{name}_s", {}).get("per_s", 0.0)
            cells.append(f"{100 * share:>10.1f}" + (f"{1e3 * share / audio:>7.2f}" if audio else f"{'-':>7}"))
        turns = gauges.get("steps", {}).get("per_s", 0.0)
        fullest = "".join(f"{gauges.get(name, {}).get('max', 0.0):>13g}" for name in FULLEST)
        lines.append(f"{result['name'][:33]:<34}" + "".join(cells) + f"{turns:>9.0f}" + fullest)
    return "\n".join(lines)


def marks(results: Sequence[dict[str, Any]]) -> str:
    """What the design asks for, its first mark and its goal, beside what was found."""
    found = {result["name"]: result["figures"] for result in results}
    rows: list[tuple[str, str, float | None, float, float, bool]] = []

    def add(what: str, name: str, value: Any, mark: float, goal: float, *, is_least: bool = False) -> None:
        figure = found.get(name)
        rows.append((what, name, value(figure) if figure is not None else None, mark, goal, is_least))

    one, burst = "closed 1 hot", "burst 64 hot"
    add("first PCM p50, one stream, ms", one, lambda f: f.first_pcm and f.first_pcm.p50, 100, 50)
    add("first PCM p50, 64 at once, ms", burst, lambda f: f.first_pcm and f.first_pcm.p50, 250, 120)
    add("first PCM p99, 64 at once, ms", burst, lambda f: f.first_pcm and f.first_pcm.p99, 500, 200)
    add("first PCM p50, 64 new voices, ms", "burst 64 cold", lambda f: f.first_pcm and f.first_pcm.p50, 600, 300)
    add(
        "full response, 64 at once, audio-s/s",
        "full: closed 64 hot",
        lambda f: f.audio_s_per_s,
        250,
        400,
        is_least=True,
    )
    for streams in (128, 256, 320):
        name = f"closed {streams} hot listening"
        add(f"C50 of {streams} listeners, %", name, lambda f: f.c50 and 100 * f.c50, 100, 100, is_least=True)
    churn = "closed 256 pooled listening 30 % cut"
    add("cancel ack p99 under churn, ms", churn, lambda f: f.cancel_ack and f.cancel_ack.p99, 50, 50)
    lines = [f"{'what':<40}{'found':>10}{'mark':>8}{'goal':>8}"]
    for what, _, value, mark, goal, is_least in rows:
        if value is None:
            lines.append(f"{what:<40}{'-':>10}{mark:>8g}{goal:>8g}")
            continue
        reached = [(value >= bar) if is_least else (value <= bar) for bar in (mark, goal)]
        verdict = "goal" if reached[1] else "mark" if reached[0] else "missed"
        lines.append(f"{what:<40}{value:>10.1f}{mark:>8g}{goal:>8g}  {verdict}")
    return "\n".join(lines) + _ratios(found)


def _ratios(found: dict[str, figures.Figures]) -> str:
    """Against the baselines of this run."""
    lines = []
    for name in ("closed 64 hot", "burst 64 hot"):
        for series in BASELINES:
            ours, theirs = found.get(name), found.get(f"{series}: {name}")
            if ours is None or theirs is None or ours.first_pcm is None or theirs.first_pcm is None:
                continue
            lines.append(
                f"{name} against {series}: {ours.audio_s_per_s / theirs.audio_s_per_s:.2f} x the audio, "
                f"first PCM p50 {theirs.first_pcm.p50 / ours.first_pcm.p50:.2f} x sooner"
            )
    return "\n" + "\n".join(lines) if lines else ""


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="measure everything on one Hopper GPU")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything; default 540")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp/hopper")))
    parser.add_argument("--model", type=Path, default=Path("/tmp/full-size"), help="written if it is not there")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help=f"of {', '.join(stages(1, 1))}, in this order"
    )
    parser.add_argument("--point-seconds", type=float, default=12.0, help="of each closed loop; default 12")
    parser.add_argument("--churn-seconds", type=float, default=60.0, help="default 60; the issue asks for 120")
    parser.add_argument("--parity", type=float, default=60.0, help="seconds for the parity checks; 0: none")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run = Hopper(options)
    log = os.open(options.out / "servers.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, sys.stderr.fileno())  # the servers inherit it
    try:
        uvloop.run(run.run())
    finally:
        run.report()


if __name__ == "__main__":
    main()
