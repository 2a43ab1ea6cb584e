"""The flow's kernels against their twins in plain torch: interpreted on the CPU, compiled on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention import Angles, EachPaged, EachRow, GatheredPaged, RowsChoice, Unit, Units, Whole, unit_columns
from engine.dit import Estimator, FlowShape, Modulations, Packed
from engine.flow import Flow, FlowStore, FlowVoice
from engine.flow_whole import WholeGraphs
from engine.graphs import Graphs

pytest.importorskip("triton")

from engine.flow_kernels import FusedPacked, FusedPaged, FusedRows, paged_launches, rows_launches

SMALL = FlowShape(dim=48, depth=2, heads=2, head_dim=32, ff=128, lookahead_channels=24, vocab=40, conv_groups=4)
FULL = FlowShape(dim=1024, depth=1, heads=16, head_dim=64, ff=2048, lookahead_channels=1024)
GPU = [pytest.mark.gpu]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

Place = tuple[str, FlowShape, torch.dtype]
PLACES = [
    pytest.param(("cpu", SMALL, torch.float32), id="interpreted"),
    pytest.param(("cuda", SMALL, torch.float32), id="cuda-small", marks=GPU),
    pytest.param(("cuda", FULL, torch.float32), id="cuda-float32", marks=GPU),
    pytest.param(("cuda", FULL, torch.bfloat16), id="cuda-bfloat16", marks=GPU),
]


@pytest.fixture(scope="module", autouse=True)
def without_tf32() -> Iterator[None]:
    conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = conv.fp32_precision, matmul.fp32_precision
    conv.fp32_precision = matmul.fp32_precision = "ieee"
    yield
    conv.fp32_precision, matmul.fp32_precision = before


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def nets(place: Place) -> tuple[Packed, Packed]:
    """The twin and the fused one, of the same weights."""
    device, shape, dtype = place
    torch.manual_seed(1)
    net = Estimator(shape).to(device).eval().requires_grad_(False)
    modulations = Modulations.of(net, torch.linspace(0, 1, 10, device=device))
    net = net.to(dtype)
    return Packed(net, modulations), FusedPacked(net, modulations)


def draw(place: Place, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size))).to(place[0], place[2])


def assert_near(a: Tensor, b: Tensor, place: Place) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    error = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-9))
    assert error < BOUNDS[place[2]], f"relative RMS {error}"


@torch.inference_mode()
def test_gate_and_norm(place: Place, nets: tuple[Packed, Packed]) -> None:
    h, y = draw(place, 3, 2, 50, place[1].dim), draw(place, 3, 2, 50, place[1].dim).flip(0)
    rows = [table.to(place[0]) for table in torch.randn(3, 3, 2, 6, place[1].dim)[:, :, 1].unbind(2)[0].unbind(0)]
    twin, fused = (net.gated(h, y, *rows) for net in nets)
    for a, b in zip(fused, twin, strict=True):
        assert_near(a, b, place)
    twin, fused = (net.normed(h, *rows[:2]) for net in nets)
    assert_near(fused, twin, place)


LISTED = [
    Unit(lane=0, step=3, start=100, frames=50, pages=[4, 2, 7], fresh=0, is_last=True),
    Unit(lane=1, step=0, start=0, frames=50, pages=[5], fresh=0, is_last=False),
    Unit(lane=1, step=0, start=50, frames=50, pages=[5, 0], fresh=1, is_last=False),
    Unit(lane=1, step=0, start=100, frames=43, pages=[5, 0, 6], fresh=2, is_last=True),
    Unit(lane=2, step=3, start=50, frames=1, pages=[4, 1], fresh=0, is_last=True),
]
NOBODY = Unit(3, 0, 0, 50, [8], 0, is_last=True)


@torch.inference_mode()
def test_ends_of_a_step(place: Place, nets: tuple[Packed, Packed]) -> None:
    device, shape, dtype = place
    columns = unit_columns(LISTED, NOBODY, 6, 4)
    units = Units.of(torch.from_numpy(columns).to(device), 50)
    x, spans = torch.randn(9, 50, shape.mel, device=device), torch.rand(10, device=device)
    base = draw(place, 9, 50, shape.dim)
    h, velocity = draw(place, 6, 2, 50, shape.dim), draw(place, 6, 2, 50, shape.mel)
    velocity[4, 0, 3, 5] = torch.inf
    contexts = draw(place, 4, 10, 2, 2, 30, shape.dim)
    results = []
    for net in nets:
        at, health, kept = x.clone(), torch.zeros(4, device=device), contexts.clone()
        net.move(at, velocity, units, spans, 1.7, health)
        behind = net.with_history(h, units, kept[:, :, :, 1])
        kept[2] = 0  # a row that ends leaves nothing of meaning
        results.append(
            (net.entered(x[units.pages], base, units.pages), at[:8].nan_to_num(posinf=9.0), behind, kept[:3], health)
        )
    for fused, twin in zip(*reversed(results), strict=True):
        assert torch.equal(fused.isnan(), twin.isnan())
        assert_near(fused.nan_to_num(), twin.nan_to_num(), place)
    assert results[1][4].isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize(("batch", "frames"), [(1, 7), (2, 50), (3, 300)])
@torch.inference_mode()
def test_position_convolution(place: Place, nets: tuple[Packed, Packed], batch: int, frames: int) -> None:
    x = draw(place, batch, 30 + frames, place[1].dim)
    for index in range(2):
        assert_near(nets[1].conv_mish(x, index), nets[0].conv_mish(x, index), place)


@torch.inference_mode()
def test_position_convolution_of_whole_rows(place: Place, nets: tuple[Packed, Packed]) -> None:
    whole = Whole.of([7, 40, 1], torch.device(place[0]))
    h = draw(place, 2, 48, place[1].dim)
    for index in range(2):
        assert_near(nets[1].conv_mish_rows(h, whole, index), nets[0].conv_mish_rows(h, whole, index), place)


@torch.inference_mode()
def test_feed_forward(place: Place, nets: tuple[Packed, Packed]) -> None:
    a = draw(place, 2, 2, 50, place[1].dim)
    twin, fused = (net.hidden(a, net.blocks[0]) for net in nets)
    assert_near(fused, twin, place)


def angles_of(place: Place) -> Angles:
    exponent = torch.arange(0, place[1].head_dim, 2) / place[1].head_dim
    turn = torch.arange(2_000)[:, None] / 10_000**exponent
    return Angles(turn.cos().to(place[0]), turn.sin().to(place[0]))


@torch.inference_mode()
def test_paged_attention(place: Place) -> None:
    device, shape, dtype = place
    angles = angles_of(place)
    columns = unit_columns(LISTED, NOBODY, 6, 4)
    units = Units.of(torch.from_numpy(columns).to(device), 50)
    size = (shape.steps, 2, 1, 2, 9, 50, shape.heads, shape.head_dim)
    before = torch.full(size, float("nan")).to(device, dtype)
    before[:, :, :, :, [2, 4]] = draw(place, 10, 2, 1, 2, 2, 50, shape.heads, shape.head_dim)
    qkv = draw(place, 6, 2, 50, 3, shape.heads, shape.head_dim)
    written = before.clone()
    want = EachPaged(written, units, [*LISTED, NOBODY], angles)(0, qkv.clone())
    for back_end in (GatheredPaged, *paged_launches(dtype).values()):
        data = before.clone()
        assert_near(back_end(data, units, angles)(0, qkv.clone()), want, place)
        assert torch.equal(data.isnan(), written.isnan())
        assert_near(data.nan_to_num(), written.nan_to_num(), place)


@torch.inference_mode()
def test_rows_attention(place: Place) -> None:
    device, shape, dtype = place
    lengths = [70, 1, 33] if device == "cpu" else [494, 70, 1, 640]
    whole, angles = Whole.of(lengths, torch.device(device)), angles_of(place)
    qkv = draw(place, 1, 2, sum(lengths), 3, shape.heads, shape.head_dim)
    want = EachRow(whole, angles)(0, qkv.clone())
    for back_end in rows_launches(dtype).values():
        assert_near(back_end(whole, angles)(0, qkv.clone()), want, place)


@pytest.mark.slow
@torch.inference_mode()
def test_streamed_and_whole_rows_through_all_kernels_equal_the_dense_ones(place: Place) -> None:
    device, shape, dtype = place
    torch.manual_seed(2)
    flow = Flow(replace(shape, depth=1, steps=1)).to(device).eval().requires_grad_(False)
    prompt = torch.randint(40, (20,)), torch.randn(40, 80, device=device), torch.randn(192, device=device)
    voice, tokens = FlowVoice(*prompt), torch.randint(40, (9,)).tolist()
    offline = [x[None] for x in (torch.tensor(tokens), *prompt)]
    want, whole = (flow.offline(*offline, streaming=streaming, finalize=True)[0] for streaming in (True, False))

    inv_freq = flow.estimator.rotary_embed.inv_freq.clone()
    flow = flow.to(dtype)
    flow.estimator.rotary_embed.inv_freq = inv_freq
    store = FlowStore(flow.shape, 6, device, dtype)
    flow._packed, flow._paged, flow._rows = FusedPacked, FusedPaged, RowsChoice({1: FusedRows})
    row, pieces = flow.row(voice), []
    for part in (tokens[:8], tokens[8:]):
        if flow.begin(row, part, is_final=len(row.ids) > 20):
            while row.steps_done < flow.shape.steps:
                flow.step([row], store)
            pieces.append(flow.finish(row, store))
    assert_near(torch.cat(pieces, dim=1), want, place)
    assert_near(flow.offline_all([(voice, tokens)])[0], whole, place)
    flow._whole = WholeGraphs(flow, Graphs(device), tiers=(256,), most_rows=5)
    for mel in flow.offline_all([(voice, tokens)] * 3):  # among rows of nobody, and tiles without frames
        assert_near(mel, whole, place)
