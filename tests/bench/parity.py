"""The fast paths at full size against the eager float32 model: does packing, caching, capturing change what is said?

    python -m tests.bench.parity MODEL [--out FOLDER]

MODEL is a full-size random checkpoint (tests/bench/full_size.py). Flow: rows of several voices and lengths, streamed
hop by hop in packed calls from pages, eager and captured, and whole in packed calls, against dense attention over
everything, float32 without TF32. Talker: the same lanes alone and in crowds. At the end one table of what was found and
what is allowed; JSON on the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine import checkpoint as checkpoints
from engine.checkpoint import Checkpoint
from engine.flow import Flow, FlowStore, FlowVoice
from engine.graphs import Graphs
from engine.hift import Hift
from engine.noise import flow_noise
from engine.sampler import Sampling
from engine.server import forbid_tf32
from engine.talker import Limits, Talker, TalkerStore
from engine.talker_lanes import TalkerLanes
from engine.voices import read_voices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (122, 60, 181, 28, 3, 97, 140, 25)  # tokens of the rows under comparison
HOP = 25
MEL_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative RMS
STEPS = 40  # of the talker
CROWDS = (8, 64, 128, 256) if DEVICE == "cuda" else (2, 4)
EQUAL_UPTO = 64  # lanes, whose steps are products of one shape
FEW = min(16, CROWDS[-1])  # lanes that are compared


def flow_rows(checkpoint: Checkpoint) -> list[tuple[FlowVoice, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    voices = list(read_voices(checkpoint.spk2info).values())[:4]
    rows = []
    for number, length in enumerate(LENGTHS):
        voice = voices[number % len(voices)]
        given = FlowVoice(voice.tokens, voice.mel.to(DEVICE), voice.embedding.to(DEVICE))
        rows.append((given, torch.randint(0, 6561, (length,), generator=generator).tolist()))
    return rows


@torch.inference_mode()
def dense(flow: Flow, voice: FlowVoice, tokens: Sequence[int], *, streaming: bool) -> Tensor:
    """[M, 2N], all at once."""
    prompt = (voice.tokens[None], voice.mel[None], voice.embedding[None])
    return flow.offline(torch.tensor([tokens], device=DEVICE), *prompt, streaming=streaming, finalize=True)[0]


@torch.inference_mode()
def streamed(flow: Flow, store: FlowStore, rows: Sequence[tuple[FlowVoice, list[int]]]) -> list[Tensor]:
    """[M, 2N] of each, hop by hop, all rows in each call; they join one step apart, so that steps mix."""
    waiting = [[flow.row(voice, store, flow.solve_prefix(voice, store)), list(tokens), []] for voice, tokens in rows]
    turn = 0
    while any(row.is_staged or not row.is_ended for row, _, _ in waiting):
        for row, tokens, _ in waiting[: turn + 1]:
            while not row.is_staged and not row.is_ended:
                hop, tokens[:HOP] = tokens[:HOP], []
                flow.begin(row, hop, is_final=not tokens)
        staged = [one for one in waiting if one[0].is_staged]
        flow.step([row for row, _, _ in staged], store)
        for row, _, mels in staged:
            if row.steps_done == flow.shape.steps:
                mels.append(flow.finish(row, store))
        turn += 1
    for row, _, _ in waiting:
        row.close(store)
    return [torch.cat(mels, dim=1) for _, _, mels in waiting]


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape, f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    return float(((found.double() - wanted.double()).square().mean() / wanted.double().square().mean()).sqrt())


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What the eager float32 model makes of some rows."""

    rows: list[tuple[FlowVoice, list[int]]]
    causal: list[Tensor]  # mels [M, 2N], each frame seeing no further than its chunk
    whole: list[Tensor]  # attention in both directions
    waves: list[Tensor]  # [S] of the first causal mels

    @classmethod
    def of(cls, exact: Checkpoint) -> Wanted:
        rows = flow_rows(exact)
        causal = [dense(exact.flow, *row, streaming=True) for row in rows]
        whole = [dense(exact.flow, *row, streaming=False) for row in rows]
        with torch.inference_mode():
            waves = [exact.hift.offline(mel[None]).flatten() for mel in causal[:4]]
        return cls(rows, causal, whole, waves)


class Parity:
    """Loads what it needs, one dtype after another, and collects what it finds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, float | str] = {}
        self.allowed: dict[str, float] = {}

    def run(self) -> None:
        exact = checkpoints.load(self.folder, DEVICE, torch.float32)
        wanted = Wanted.of(exact)
        self._compare(exact, wanted, torch.float32)
        del exact
        self._compare(checkpoints.load(self.folder, DEVICE, torch.bfloat16), wanted, torch.bfloat16)

    def _compare(self, checkpoint: Checkpoint, wanted: Wanted, dtype: torch.dtype) -> None:
        name, limit = str(dtype).removeprefix("torch."), MEL_LIMITS[dtype]

        def flow_packed() -> None:
            mels = streamed(checkpoint.flow, a_store(checkpoint.flow, wanted.rows, dtype), wanted.rows)
            self._say(f"flow packed and cached, eager, {name}", farthest(mels, wanted.causal), limit)

        def flow_captured() -> None:
            store = a_store(checkpoint.flow, wanted.rows, dtype)
            with warming() as graphs:
                checkpoint.flow.warm(graphs, store)
                mels = streamed(checkpoint.flow, store, wanted.rows)
            self._say(f"flow packed and cached, captured, {name}", farthest(mels, wanted.causal), limit)
            strict = farthest(moved(mels, wanted.rows), moved(wanted.causal, wanted.rows))
            self._say(f"flow: of what the steps add to the noise, {name}", strict, math.inf)

        def flow_whole() -> None:
            mels = checkpoint.flow.offline_all(wanted.rows)  # by the launches that the check before has captured
            self._say(f"flow whole, packed, {name}", farthest(mels, wanted.whole), limit)

        def hift_pushed() -> None:
            with warming() as graphs:
                checkpoint.hift.warm(graphs, lanes=4)
                waves = pushed(checkpoint.hift, wanted.causal[:4])
            self._say(f"hift pushed, {name}", farthest(waves, wanted.waves), 2e-2)

        def talker_lanes() -> None:
            with warming() as graphs:
                lanes = all_lanes(checkpoint.talker, dtype, graphs)
                alone = ids_of(lanes, 1, FEW)
                crowds = {size: ids_of(lanes, size, max(size, FEW)) for size in CROWDS}
            for size, got in crowds.items():
                share = sum(a != b for a, b in zip(alone, got[:FEW], strict=True)) / FEW
                most = 0.0 if size <= EQUAL_UPTO else math.inf
                self._say(f"talker: share of lanes that say other ids among {size} than alone, {name}", share, most)

        for check in (flow_packed, flow_captured, flow_whole, hift_pushed, talker_lanes):
            self._try(f"{check.__name__}, {name}", check)

    def _try(self, name: str, check: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            check()
        except Exception:  # the other checks still have something to tell
            self.found[name] = "failed"
            print(f"{name}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
        gc.collect()
        print(f"    {time.monotonic() - started:.1f} s", flush=True)

    def _say(self, name: str, value: float, limit: float) -> None:
        self.found[name], self.allowed[name] = value, limit
        print(self.line(name), flush=True)

    def line(self, name: str) -> str:
        value = self.found[name]
        if isinstance(value, str):
            return f"{name:<72}{value:>10}"
        limit = self.allowed[name]
        return f"{name:<72}{value:>10.2e}{limit:>10.0e}  {'ok' if value <= limit else 'TOO FAR'}"

    def table(self) -> str:
        head = f"{'relative RMS, or share':<72}{'found':>10}{'allowed':>10}"
        return "\n".join(["", head, *map(self.line, self.found)])


def a_store(flow: Flow, rows: Sequence[tuple[FlowVoice, list[int]]], dtype: torch.dtype) -> FlowStore:
    pages = sum(flow.pages_for(len(voice.tokens) + len(tokens)) for voice, tokens in rows)
    return FlowStore(flow.shape, pages + 4, device=torch.device(DEVICE), dtype=dtype)


@contextlib.contextmanager
def warming() -> Iterator[Graphs]:
    """Graphs, and within it their stream; at its end what ran on it is there for everyone."""
    graphs = Graphs(DEVICE)
    with torch.cuda.stream(graphs.stream) if DEVICE == "cuda" else contextlib.nullcontext():
        yield graphs
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def all_lanes(talker: Talker, dtype: torch.dtype, graphs: Graphs) -> TalkerLanes:
    store = TalkerStore(talker.shape, CROWDS[-1] * 16, device=torch.device(DEVICE), dtype=dtype)
    lanes = TalkerLanes(talker, store, lanes=CROWDS[-1], rows_per_launch=CROWDS[-1])
    lanes.warm(graphs)
    return lanes


@torch.inference_mode()
def pushed(hift: Hift, mels: Sequence[Tensor]) -> list[Tensor]:
    """[S] of each, in pieces of 50 frames, all lanes that have one in each call."""
    states, pieces = [hift.begin() for _ in mels], [list(mel.split(50, dim=1)) for mel in mels]
    waves: list[list[Tensor]] = [[] for _ in mels]
    while any(pieces):
        due = [number for number, left in enumerate(pieces) if left]
        parts = [pieces[number].pop(0) for number in due]
        finals = [not pieces[number] for number in due]
        for number, wave in zip(due, hift.push([states[i] for i in due], parts, finals), strict=True):
            waves[number].append(wave.clone())
    return [torch.cat(wave) for wave in waves]


def moved(mels: Sequence[Tensor], rows: Sequence[tuple[FlowVoice, list[int]]]) -> list[Tensor]:
    """The mels without the noise that they began as: a random flow moves it little, which would hide its errors."""
    starts = [len(voice.mel) for voice, _ in rows]
    return [mel - flow_noise(at + mel.shape[1])[:, at:].to(mel) for mel, at in zip(mels, starts, strict=True)]


def farthest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative RMS error of one of them."""
    return max(relative_rms(a, b) for a, b in zip(found, wanted, strict=True))


def ids_of(lanes: TalkerLanes, size: int, count: int) -> list[list[int | None]]:
    """STEPS ids of each of the first lanes, so many of them, `size` lanes in a call; each prompt is fed alone and
    whole."""
    while lanes.prompts.evict():
        pass
    generator = torch.Generator().manual_seed(3)
    said: list[list[int | None]] = []
    for lane in range(count):
        text = torch.randint(0, 256, (20 + lane % 7,), generator=generator).tolist()
        speech = torch.randint(0, 6561, (125,), generator=generator).tolist()
        prompt = lanes.talker.prompt_ids(text[:10], text[10:], speech)
        start = lanes.seat(lane, prompt, sampling=Sampling(), seed=lane, clause=0, limits=Limits(2 * STEPS, 2 * STEPS))
        said.append(lanes.prefill([(lane, start, len(prompt) - start)]).fetch())
    for group in groups(range(count), size):
        for _ in range(STEPS):
            for lane, code in zip(group, lanes.decode(group).fetch(), strict=True):
                said[lane].append(code)
    for lane in range(count):
        lanes.free(lane)
    return said


def groups(lanes: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (lanes[start : start + size] for start in range(0, len(lanes), size))


def main() -> None:
    parser = argparse.ArgumentParser(description="compare the fast paths with the eager float32 model")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, help="a folder for parity.json")
    options = parser.parse_args()
    forbid_tf32()
    parity = Parity(options.model)
    parity.run()
    print(parity.table())
    if options.out is not None:
        (options.out / "parity.json").write_text(json.dumps(parity.found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(parity.found))


if __name__ == "__main__":
    main()
