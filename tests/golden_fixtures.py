"""Reads reference fixtures: NAME.json, NAME.weights.safetensors, NAME.cases.safetensors.

The folder is RILL_GOLDEN, else the full fixtures beside the repository if they are there, else the cut in
tests/golden. Tests take every case and bound from the manifest, so another set of fixtures runs unchanged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from engine.flow import Flow, FlowShape

TESTS = Path(__file__).resolve().parent


def golden_dir() -> Path:
    """The folder of fixtures. Raises FileNotFoundError if RILL_GOLDEN names none."""
    if named := os.environ.get("RILL_GOLDEN"):
        folder = Path(named)
        if not (folder / "flow.json").is_file():
            raise FileNotFoundError(f"RILL_GOLDEN={named} holds no flow.json")
        return folder
    beside = TESTS.parent.parent / "shared" / "golden"
    return beside if (beside / "flow.json").is_file() else TESTS / "golden"


class Fixture:
    """One family of fixtures, read lazily: talker, sampler, flow, hift, frontend, stream, release_noise."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name = name
        self.folder = folder or golden_dir()

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / f"{self.name}.json").read_text())

    @property
    def cases(self) -> dict[str, Any]:
        """The manifest's table of cases: name -> sizes and calls."""
        return self.manifest.get("cases", {})

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        stored = load_file(self.folder / f"{self.name}.weights.safetensors")
        return {name: dense(name, stored.__getitem__, stored) for name in sorted({key.split("|")[0] for key in stored})}

    @cached_property
    def keys(self) -> list[str]:
        """Every tensor of the cases file, "case/tensor"."""
        with safe_open(self.folder / f"{self.name}.cases.safetensors", framework="pt") as file:
            return sorted({key.split("|")[0] for key in file.keys()})  # noqa: SIM118  (a file, not a mapping)

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def tensor(self, key: str) -> Tensor:
        """One tensor by its "case/tensor" name."""
        with safe_open(self.folder / f"{self.name}.cases.safetensors", framework="pt") as file:
            return dense(key, file.get_tensor, file.keys())

    def case(self, name: str) -> dict[str, Tensor]:
        """All tensors of one case, without the prefix."""
        start = name + "/"
        return {key.removeprefix(start): self.tensor(key) for key in self.keys if key.startswith(start)}

    def groups(self) -> list[str]:
        """Prefixes of the tensors: the cases and the direct calls that stand beside them."""
        return sorted({key.rsplit("/", 1)[0] for key in self.keys})


def dense(name: str, get: Callable[[str], Tensor], stored: Iterable[str]) -> Tensor:
    """A stored tensor; of a sparse one (NAME|shape, NAME|index, NAME|value) the rest is zero."""
    if name in stored:
        return get(name)
    value = get(f"{name}|value")
    full = torch.zeros(get(f"{name}|shape").tolist(), dtype=value.dtype)
    full.view(-1, value.shape[1])[get(f"{name}|index").long()] = value
    return full


def hift_noise(samples: int) -> Tensor:
    """The vocoder fixture's noise, [samples, 9]: its recipe drawn on, its stored head checked."""
    hift = fixture("hift")
    recipe = re.search(r"manual_seed\((\d+)\)", hift.manifest["noise"]["recipe_of_this_fixture"])
    assert recipe is not None, "the manifest tells the seed of its noise"
    draw = torch.Generator().manual_seed(int(recipe[1]))
    torch.rand(1, 9, generator=draw)
    head = hift.tensor("noise/sine_noise")
    noise = torch.rand(max(samples, len(head)), 9, generator=draw)
    assert torch.equal(noise[: len(head)], head), "the recipe does not give the stored noise"
    return noise[:samples]


def fixture_flow() -> Flow:
    """The flow fixture's network, sized by its weights and its manifest."""
    flow = fixture("flow")
    about = flow.manifest["hyper_parameters"]
    shape = replace(
        FlowShape.from_state(flow.weights),
        chunk_frames=about["dit"]["static_chunk_size"],
        lookahead=about["pre_lookahead_len"],
        steps=about["cfm"]["n_timesteps"],
        cfg=about["cfm"]["inference_cfg_rate"],
    )
    net = Flow(shape).eval()
    net.load_state_dict(flow.weights)
    return net


@cache
def fixture(name: str) -> Fixture:
    return Fixture(name)
