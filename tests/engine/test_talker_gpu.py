"""The talker at full size on CUDA: graphs against plain PyTorch, tokens alone and in a crowd, no waits, and times.

Random weights. `pytest -q -s tests/engine/test_talker_gpu.py` prints what was measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median

import pytest
import torch
from torch import Tensor

from engine.graphs import Graphs
from engine.sampler import Draw, Mask, Sampling, sample
from engine.talker import Limits, Talker, TalkerShape, TalkerStore
from engine.talker_lanes import TalkerLanes

pytestmark = pytest.mark.gpu

SHAPE = TalkerShape(
    hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, text_vocab=151_936, speech_vocab=6761
)
RAS = Sampling()
STANDARD = Sampling(mode="standard", temperature=0.8, top_p=0.9, top_k=30, repetition_penalty=1.2)
LIMITS = Limits(0, 400)
HBM_BYTES_S = 4.2e12  # a copy's rate, measured
MATMUL_FLOPS = 786e12  # bfloat16, measured


@cache
def full_size(dtype: torch.dtype) -> Talker:
    torch.manual_seed(1)
    with torch.device("cuda"):
        talker = Talker(SHAPE)
    talker.llm_decoder.weight.data *= 10  # scores spread as a trained talker's do, so that draws repeat and cuts bite
    return talker.to(dtype).eval().requires_grad_(False)


def lanes_of(dtype: torch.dtype, num: int, *, graphs: bool = True, paged: bool = True) -> TalkerLanes:
    talker = full_size(dtype)
    store = TalkerStore(SHAPE, 24 * num + 16, device="cuda", dtype=dtype)
    store.kv.fill_(float("nan"))
    lanes = TalkerLanes(talker, store, lanes=num, rows_per_launch=num)
    if paged:
        lanes.warm(Graphs("cuda", is_enabled=graphs))
        assert lanes._paged is not None, "the kernels don't run here; the log says why"
    return lanes


def prompt_of(number: int) -> list[int]:
    dice = random.Random(number)
    text = [dice.randrange(151_643) for _ in range(dice.randint(20, 60))]
    return full_size(torch.float32).prompt_ids(text, [], [dice.randrange(6561) for _ in range(dice.randint(90, 170))])


def seated(lanes: TalkerLanes, numbers: list[int], *, fed_together: bool = True) -> list[int | None]:
    """Tenants in lanes 0, 1, ..., their prompts fed in one call or one by one. -> first ids."""
    chunks = []
    for lane, number in enumerate(numbers):
        prompt, style = prompt_of(number), (RAS, STANDARD)[number % 2]
        start = lanes.seat(lane, prompt, sampling=style, seed=number << 33, clause=1, limits=LIMITS)
        chunks.append((lane, start, len(prompt) - start))
    calls = [chunks] if fed_together else [[chunk] for chunk in chunks]
    return [i for call in calls for i in lanes.prefill(call).fetch()]


def speak(lanes: TalkerLanes, numbers: list[int], steps: int, *, fed_together: bool = True) -> list[list[int | None]]:
    """Ids [tenant][step]; the lanes are free afterwards. Prompts fed one by one are fed whole, known beginnings too."""
    while not fed_together and lanes.prompts.evict():
        pass
    ids = [seated(lanes, numbers, fed_together=fed_together)]
    order = list(range(len(numbers)))
    tickets = [lanes.decode(order) for _ in range(steps - 1)]  # launched ahead: nothing comes from the host
    ids += [ticket.fetch() for ticket in tickets]
    for lane in order:
        lanes.free(lane)
    return [list(line) for line in zip(*ids, strict=True)]


@torch.inference_mode()
def dense_ids(dtype: torch.dtype, number: int, heard: list[int | None]) -> tuple[list[int | None], Tensor]:
    """What the dense path draws at each step, given what was heard before it. -> ids, scores [steps, V]"""
    talker, prompt = full_size(dtype), prompt_of(number)
    rows = torch.cat([torch.tensor(prompt), torch.tensor(heard[:-1])]).cuda()
    scores = talker.logits(talker.hidden(talker.rows_of(rows)[None])[0, len(prompt) - 1 :])
    style = (RAS, STANDARD)[number % 2]
    draws = [Draw(style, heard[:step], number << 33, 1, step, LIMITS.mask(step)) for step in range(len(heard))]
    return sample(scores, draws).fetch(), scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_draw_what_the_dense_path_draws(dtype: torch.dtype) -> None:
    numbers, steps = list(range(6)), 60
    heard = speak(lanes_of(dtype, 8), numbers, steps)
    assert all(i is not None for line in heard for i in line), "scores that are not finite"
    same = [a == b for n in numbers for a, b in zip(heard[n], dense_ids(dtype, n, heard[n])[0], strict=True)]
    repeated = sum(len(line) - len(set(line)) for line in heard)
    print(f"\n{dtype}: {sum(same)} of {len(same)} ids as the dense path draws them; {repeated} repetitions")
    assert sum(same) >= len(same) * (0.995 if dtype == torch.float32 else 0.8), f"only {sum(same)} of {len(same)}"
    assert repeated > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_graphs_go_on_behind_more_rows_as_the_dense_path_does(dtype: torch.dtype) -> None:
    """Text that comes word by word: codes of a block, the next five text ids, and so on."""
    lanes, talker, same = lanes_of(dtype, 8), full_size(dtype), []
    order = list(range(6))
    rows = [prompt_of(n) for n in order]
    heard: list[list[int]] = [[] for _ in order]
    for n in order:
        lanes.seat(n, rows[n], sampling=RAS, seed=n, clause=1, limits=Limits(1 << 30, 15))
    starts = [0 for _ in order]
    for turn in range(3):
        first = lanes.prefill([(n, starts[n], len(rows[n]) - starts[n]) for n in order])
        tickets = [first, *(lanes.decode(order) for _ in range(14))]
        codes = list(zip(*(ticket.fetch() for ticket in tickets), strict=True))
        for n in order:
            fed = torch.tensor([*rows[n], *codes[n][:-1]]).cuda()
            scores = talker.logits(talker.hidden(talker.rows_of(fed)[None])[0, len(rows[n]) - 1 :])
            known = [*heard[n], *codes[n]]
            steps = range(len(heard[n]), len(known))
            draws = [Draw(RAS, known[:step], n, 1, step, Mask.CONTROLS) for step in steps]
            same += [a == b for a, b in zip(codes[n], sample(scores, draws).fetch(), strict=True)]
            heard[n], starts[n] = known, len(rows[n]) + 14
            rows[n] = [*rows[n], *codes[n], *(SHAPE.speech_vocab + 100 * turn + i for i in range(5))]
            lanes.extend(n, rows[n], limits=Limits(1 << 30, 15))
    print(f"\n{dtype}: {sum(same)} of {len(same)} ids as the dense path draws them")
    assert sum(same) >= len(same) * (0.995 if dtype == torch.float32 else 0.8), f"only {sum(same)} of {len(same)}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cached_rows_are_no_worse_than_plain_pytorch_s(dtype: torch.dtype) -> None:
    """Keys and values of the last layer after a prompt and 20 forced steps, against float32 in plain PyTorch."""
    found = {}
    for name, kind, is_paged in (("truth", torch.float32, False), ("plain", dtype, False), ("kernels", dtype, True)):
        lanes = lanes_of(kind, 4, paged=is_paged)
        seated(lanes, [0, 1, 2, 3])
        for step in range(20):
            lanes.draws.record[:4, 1] = torch.tensor([(97 * step + lane) % 6561 for lane in range(4)]).cuda()
            lanes.decode([0, 1, 2, 3])
        held = [(t.pages, t.length) for t in lanes._tenants if t is not None]
        kv = lanes.store.kv[-1].double()
        found[name] = torch.cat([kv[:, pages].flatten(1, 2)[:, :length] for pages, length in held], 1)
    scale = found["truth"].pow(2).mean().sqrt()
    error = {name: float((rows - found["truth"]).pow(2).mean().sqrt() / scale) for name, rows in found.items()}
    print(f"\n{dtype}: relative error of the last layer's keys and values: {error}")
    assert error["kernels"] <= 2 * error["plain"] + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ids_alone_and_in_crowds(dtype: torch.dtype) -> None:
    """Steps of up to 64 lanes are the same products; larger ones, and prompts fed together, are others, which bfloat16
    may feel."""
    steps, watched = 48, [0, 1, 2, 3]
    lanes = lanes_of(dtype, 256)
    alone = {n: speak(lanes, [n], steps)[0] for n in watched}
    shares = {}
    for size in (8, 64, 128, 256):
        for fed_together in (False, True):
            crowd = speak(lanes, list(range(size)), steps, fed_together=fed_together)
            same = [a == b for n in watched for a, b in zip(alone[n], crowd[n], strict=True)]
            shares[size, fed_together] = sum(same) / len(same)
    print(f"\n{dtype}: share of ids equal to those of the lane alone, by (crowd, prompts fed together): {shares}")
    promised = [size <= 64 and (dtype == torch.float32 or not together) for size, together in shares]
    assert all(share == 1 for share, is_promised in zip(shares.values(), promised, strict=True) if is_promised), shares


def test_launches_do_not_wait_for_the_device() -> None:
    lanes = lanes_of(torch.bfloat16, 8)
    seated(lanes, [0, 1, 2])
    lanes.decode([0, 1, 2]).fetch()
    prompt = prompt_of(9)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        start = lanes.seat(4, prompt, sampling=RAS, seed=4, clause=0, limits=LIMITS)
        tickets = [lanes.prefill([(4, start, len(prompt) - start)])]
        tickets += [lanes.decode([0, 4, 2]) for _ in range(20)]
        lanes.free(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(ticket.fetch()) for ticket in tickets] == [1] + [3] * 20


def test_plain_launches_on_cuda_give_the_same_ids() -> None:
    """The same bodies without graphs, and the path without Triton."""
    wanted = speak(lanes_of(torch.float32, 4), [0, 1, 2], 24)
    assert speak(lanes_of(torch.float32, 4, graphs=False), [0, 1, 2], 24) == wanted
    assert speak(lanes_of(torch.float32, 4, paged=False), [0, 1, 2], 24) == wanted


# --- times ------------------------------------------------------------------------------------------


def device_ms(run: Callable[[], object], rounds: int = 30) -> float:
    run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in times)


def floor_ms(lanes: int, history: int) -> float:
    """Weights and caches once through memory, or the products at the full rate: whichever takes longer."""
    weights = sum(p.numel() for p in full_size(torch.bfloat16).decoder.layers.parameters()) + 6761 * 896
    rows = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * history * lanes
    return 1e3 * max(2 * (weights + rows) / HBM_BYTES_S, 2 * weights * lanes / MATMUL_FLOPS)


def breakdown(run: Callable[[], object]) -> Iterator[str]:
    """Where the device's time goes in one call."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    for event in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:9]:
        yield f"      {event.self_device_time_total:8.0f} us in {event.count:4d}  {event.key[:90]}"


@pytest.mark.bench
@pytest.mark.filterwarnings("default")  # the profiler's own
def test_times() -> None:
    started = time.perf_counter()
    lanes = lanes_of(torch.bfloat16, 256)
    print(f"\nwarm-up of the talker for 256 lanes: {time.perf_counter() - started:.1f} s")
    for lane in range(256):
        lanes.seat(
            lane, prompt_of(lane % 64)[:200], sampling=(RAS, STANDARD)[lane % 2], seed=lane, clause=0, limits=LIMITS
        )
    chunks = [(lane, lanes._tenants[lane].length, 200 - lanes._tenants[lane].length) for lane in range(256)]
    chunks = [(lane, start, len(lanes._tenants[lane].prompt) - start) for lane, start, _ in chunks]
    times = []
    for at in range(0, 256, 64):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        lanes.prefill(chunks[at : at + 64]).fetch()
        times.append(1e3 * (time.perf_counter() - begin))
    rows = sum(count for _, _, count in chunks[:64])
    floor = (
        1e3 * 2 * rows * sum(p.numel() for p in full_size(torch.bfloat16).decoder.layers.parameters()) / MATMUL_FLOPS
    )
    print(f"prefill of 64 prompts, {rows} rows: {min(times):.2f} ms ({', '.join(f'{t:.2f}' for t in times)}); "
          f"products at the full rate {floor:.2f} ms")  # fmt: skip
    for num in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        chosen = list(range(num))
        taken = device_ms(lambda chosen=chosen: lanes.decode(chosen), rounds=16)
        begin = time.perf_counter()
        tickets = [lanes.decode(chosen) for _ in range(8)]
        host = (time.perf_counter() - begin) / 8 * 1e3
        assert all(i is not None for ticket in tickets for i in ticket.fetch())
        floor = floor_ms(num, 250)
        print(f"step of {num:3d} lanes: {taken:.3f} ms on the device, {host:.3f} ms of the host; "
              f"floor {floor:.3f} ms, {100 * floor / taken:.0f} % of it reached")  # fmt: skip
    for num in (1, 64, 256):
        print(f"   where a step of {num} lanes goes:")
        print("\n".join(breakdown(lambda num=num: lanes.decode(list(range(num))))))
    lanes.free(0)
    lanes.seat(0, prompt_of(99), sampling=RAS, seed=1, clause=0, limits=LIMITS)
    print(f"   where a prompt of {len(prompt_of(99))} rows goes:")
    print("\n".join(breakdown(lambda: feed_again(lanes))))


def feed_again(lanes: TalkerLanes) -> None:
    tenant = lanes._tenants[0]
    assert tenant is not None
    tenant.length = 0
    lanes.prefill([(0, 0, len(tenant.prompt))])
