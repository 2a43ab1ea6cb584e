"""The full-size flow on CUDA: captured launches against eager float32, no waits, and what everything costs.

The times are printed (pytest -s), with what was expected of them and the share of the ceiling that was measured here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.attention import median_ms
from engine.flow import Flow, FlowRow, FlowShape, FlowStore, FlowVoice
from engine.graphs import Graphs
from tests.random_checkpoint import FULL, flow_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch calls its sync debug mode and its profiler prototypes
]

SHAPE = FULL.flow
BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
PLAIN_MS = {1: 1.0, 8: 1.6, 64: 8.8, 256: 33.5}  # one step of plain torch.compile with torch's varlen attention
EXPECTED_WHOLE_MS = {1: 25, 8: 110, 64: 640}  # ten steps of rows of 494 frames; likewise
EXPECTED_MS = {1: 0.75, 8: 1.2, 64: 6.2, 128: 11.5, 256: 22.5}  # written down before the first run


def ops_of_a_unit(shape: FlowShape, keys: int) -> float:
    """Multiplications and additions of one Euler step."""
    block = 4 * shape.dim * shape.heads * shape.head_dim + 2 * shape.dim * shape.ff
    attention = 2 * keys * shape.heads * shape.head_dim
    convs = 2 * shape.dim * shape.dim // shape.conv_groups * shape.conv_kernel
    ends = 2 * shape.mel * shape.dim
    return 2 * 2 * shape.chunk_frames * (shape.depth * (block + attention) + convs + ends)


TIMED = pytest.mark.parametrize("warmed", [torch.bfloat16], ids=["bfloat16"], indirect=True)  # float32: for parity


@pytest.fixture(scope="module", autouse=True)
def without_tf32() -> Iterator[None]:
    conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = conv.fp32_precision, matmul.fp32_precision
    conv.fp32_precision = matmul.fp32_precision = "ieee"
    yield
    conv.fp32_precision, matmul.fp32_precision = before


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return flow_state(SHAPE, torch.Generator().manual_seed(3))


def make_flow(state: dict[str, Tensor], dtype: torch.dtype) -> Flow:
    with torch.device("meta"):
        flow = Flow(SHAPE)
    flow.load_state_dict(
        {key: value.cuda().to(torch.float32 if key.endswith("inv_freq") else dtype) for key, value in state.items()},
        assign=True,
    )
    return flow.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def reference(state: dict[str, Tensor]) -> Flow:
    return make_flow(state, torch.float32)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def warmed(state: dict[str, Tensor], request: pytest.FixtureRequest) -> Iterator[tuple[Flow, FlowStore]]:
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    flow = make_flow(state, request.param)
    is_narrow = request.param == torch.bfloat16
    store = FlowStore(SHAPE, 420 if is_narrow else 60, "cuda", request.param, lanes=256 if is_narrow else 32)
    began, names = time.perf_counter(), list[str]()
    graphs = Graphs("cuda", on_capture=names.append)
    flow.warm(graphs, store)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() / 1e9, torch.cuda.memory_reserved() / 1e9
    print(
        f"\nwarm-up {request.param}: {time.perf_counter() - began:.1f} s, {len(names)} graphs, GB held %.1f/%.1f" % held
    )
    yield flow, store
    del flow, store, graphs
    torch.cuda.empty_cache()


def make_voice(tokens: int, seed: int) -> FlowVoice:
    draw = torch.Generator().manual_seed(seed)
    mel, embedding = torch.randn(2 * tokens, 80, generator=draw), torch.randn(192, generator=draw)
    return FlowVoice(torch.randint(SHAPE.vocab, (tokens,), generator=draw), mel.cuda(), embedding.cuda())


def make_ids(count: int, seed: int) -> list[int]:
    return torch.randint(SHAPE.vocab, (count,), generator=torch.Generator().manual_seed(100 + seed)).tolist()


@dataclass
class Caller:
    """A row that joins at a tick, in hops, and maybe leaves at another."""

    row: FlowRow
    hops: list[list[int]]
    joins: int
    leaves: int = 10**9


def play(flow: Flow, store: FlowStore, *, watch: Callable[[bool], None] = lambda on: None) -> list[Tensor]:
    """Rows of several voices and lengths, at different steps, some sharing a prompt, some leaving in mid-solve."""
    voices = [make_voice(prompt, prompt) for prompt in (103, 37, 0, 60)]
    prefixes = [flow.solve_prefix(voice, store) for voice in voices]
    plans = [(0, [28, 25, 31], 0), (1, [41, 50, 9], 2), (0, [25, 75], 3), (2, [28, 3], 5), (3, [80], 7), (3, [33], 9)]
    callers = [
        Caller(flow.row(voices[i], store, prefixes[i]), [make_ids(n, n) for n in hops], joins)
        for i, hops, joins in plans
    ]
    callers[4].leaves = 12
    pieces: list[list[Tensor]] = [[] for _ in callers]
    watch(True)
    for tick in range(80):
        active = []
        for caller in callers:
            if tick == caller.leaves:
                caller.row.close(store)
            if caller.joins <= tick < caller.leaves and not caller.row.is_closed:
                if not caller.row.is_staged and caller.hops:
                    flow.begin(caller.row, caller.hops.pop(0), is_final=not caller.hops)
                if caller.row.is_staged:
                    active.append(caller.row)
        if active:
            flow.step(active, store)
        for i, caller in enumerate(callers):
            if caller.row.is_staged and caller.row.steps_done == SHAPE.steps:
                pieces[i].append(flow.finish(caller.row, store))
    watch(False)
    heard = [caller for caller in callers if caller.leaves > 80]
    assert all(not caller.hops and not caller.row.is_staged for caller in heard)
    for caller in heard:
        solved = len(caller.row.ids) * 2 - (caller.row.prefix.frames if caller.row.prefix else 0)
        assert caller.row.frames_solved == solved, "a frame was solved twice or never"
        caller.row.close(store)
    for prefix in prefixes:
        store.pool.release(prefix.pages)
    assert store.pool.num_used == store.lanes.num_used == 0
    return [torch.cat(part, dim=1) for part in pieces if part]


def relative_rms(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_captured_rows_match_eager_float32_and_wait_for_nothing(
    reference: Flow, warmed: tuple[Flow, FlowStore]
) -> None:
    flow, store = warmed
    want = play(reference, FlowStore(SHAPE, 40, "cuda"))
    play(flow, store)  # what the allocators still lack
    torch.cuda.synchronize()
    got = play(flow, store, watch=lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default"))
    errors = [relative_rms(a, b) for a, b in zip(got, want, strict=True)]
    print(f"\nmel relative RMS, captured {flow.dtype} against eager float32: {[f'{e:.1e}' for e in errors]}")
    assert max(errors) <= BOUNDS[flow.dtype]


def test_whole_rows_match_the_dense_reference(reference: Flow, warmed: tuple[Flow, FlowStore]) -> None:
    """Captured, in groups of three tiers, one of them with a row beyond SHORT_FRAMES; nothing waits."""
    flow, _ = warmed
    sizes = [(125, 122), (0, 7), (60, 240), (40, 600), (125, 30), (10, 1)]
    requests = [(make_voice(prompt, prompt), make_ids(count, count)) for prompt, count in sizes]
    with torch.inference_mode():
        want = [
            reference.offline(
                torch.tensor([ids]), voice.tokens[None], voice.mel[None], voice.embedding[None],
                streaming=False, finalize=True,
            )[0]
            for voice, ids in requests
        ]  # fmt: skip
    calls = (requests, requests[:3], requests[4:])
    for call in calls:
        flow.offline_all(call)  # what the allocators still lack
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        solved = [flow.offline_all(call) for call in calls]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got, wanted = [mel for mels in solved for mel in mels], [*want, *want[:3], *want[4:]]
    errors = [relative_rms(a, b) for a, b in zip(got, wanted, strict=True)]
    print(f"\nwhole rows {flow.dtype} against dense float32: {[f'{e:.1e}' for e in errors]}")
    assert max(errors) <= BOUNDS[flow.dtype]


def matmul_tflops(rows: int, inner: int, columns: int) -> float:
    a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((rows, inner), (columns, inner)))
    for _ in range(3):
        a @ b.T
    return 2e-9 * rows * inner * columns / median_ms(lambda: a @ b.T, rounds=9)


def kernel_table(run: Callable[[], object], rows: int = 14) -> str:
    """Where the time of a run goes, ms by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    spent, calls = Counter[str](), Counter[str]()
    for event in profile.events():
        spent[event.name] += event.device_time_total / 1e3
        calls[event.name] += 1
    return "\n".join(f"  {ms:8.3f} ms {calls[name]:5d} x {name[:90]}" for name, ms in spent.most_common(rows))


@TIMED
def test_what_a_step_costs(warmed: tuple[Flow, FlowStore]) -> None:
    flow, store = warmed
    graphs = flow._graphs
    assert graphs is not None, "warm() captured nothing"
    ceiling = matmul_tflops(8192, 8192, 8192)
    shown = [
        f"{n}x{k}: {matmul_tflops(25_600, k, n):.0f}"
        for n, k in ((3072, 1024), (1024, 1024), (2048, 1024), (1024, 2048))
    ]
    print(f"\nceiling {ceiling:.0f} TFLOP/s; 25600 rows by [out x in] {shown}")
    print("units  expected  plain compile    here  TFLOP/s  of ceiling")
    for units, expected in EXPECTED_MS.items():
        ms, ops = graphs.step_ms(units), units * ops_of_a_unit(SHAPE, keys=300)
        rate = ops / ms / 1e9
        plain = PLAIN_MS.get(units, float("nan"))
        print(f"{units:5d} {expected:9.2f} {plain:14.1f} {ms:7.2f} {rate:8.0f} {rate / ceiling:10.0%}")
    for units in (1, 64, 256):
        graphs._send(graphs._typical(units, graphs.page_tiers[0]))
        print(f"one step of {units} units:\n{kernel_table(graphs._advance[units, graphs.page_tiers[0]])}")
    assert all(graphs.step_ms(units) < plain for units, plain in PLAIN_MS.items())


@TIMED
def test_what_rows_cost_with_the_host(warmed: tuple[Flow, FlowStore]) -> None:
    flow, store = warmed
    voices = [make_voice(128, seed) for seed in range(32)]
    began = time.perf_counter()
    prefixes = [flow.solve_prefix(voice, store) for voice in voices]
    torch.cuda.synchronize()
    print(f"\n32 prompts of 5 chunks one by one: {1e3 * (time.perf_counter() - began):.0f} ms")
    for count in (1, 8, 64, 128, 256):
        rows = [flow.row(voices[i % 32], store, prefixes[i % 32]) for i in range(count)]
        for i, row in enumerate(rows):
            flow.begin(row, make_ids(25, i), is_final=False)
        torch.cuda.synchronize()
        began = time.perf_counter()
        flow.step(rows, store)
        laid = time.perf_counter()
        for _ in range(SHAPE.steps - 1):
            flow.step(rows, store)
        enqueued = time.perf_counter()
        mels = flow.finish_all(rows, store)
        finished = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        each = (enqueued - laid) / (SHAPE.steps - 1)
        host = [f"{1e3 * seconds:.2f}" for seconds in (laid - began, each, finished - enqueued)]
        print(f"{count:4d} rows, a hop: {1e3 * (ended - began):7.1f} ms; host ms of first step, others, finish: {host}")
        assert all(bool(mel.isfinite().all()) for mel in mels)
        for row in rows:
            row.close(store)
    for prefix in prefixes:
        store.pool.release(prefix.pages)


@TIMED
def test_what_whole_rows_cost(warmed: tuple[Flow, FlowStore]) -> None:
    flow, _ = warmed
    print()
    for count, expected in EXPECTED_WHOLE_MS.items():
        requests = [(make_voice(125, seed), make_ids(122, seed)) for seed in range(count)]
        flow.offline_all(requests)
        torch.cuda.synchronize()
        began = time.perf_counter()
        flow.offline_all(requests)
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        spent, host = ended - began, enqueued - began
        rate = count * SHAPE.steps * ops_of_a_unit(SHAPE, keys=494) * 494 / 50 / spent / 1e12
        print(
            f"{count:3d} whole rows of 494 frames: {1e3 * spent:7.1f} ms, {expected} expected, "
            f"host {1e3 * host:.1f} ms, {count * 4.88 / spent:.0f} audio-s/s of the flow alone, {rate:.0f} TFLOP/s"
        )
    print(kernel_table(lambda: flow.offline_all(requests)))
    assert host < 8e-3, f"{1e3 * host:.1f} ms of the host for {count} rows"
    assert spent < 1.0
