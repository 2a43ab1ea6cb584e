"""Reads reference fixtures: NAME.json, NAME.weights.safetensors, NAME.cases.safetensors.

The folder is RILL_GOLDEN, else the full fixtures beside the repository if they are there, else the cut in
tests/golden. Tests take every case and bound from the manifest, so another set of fixtures runs unchanged.
"""

from __future__ import annotations

import json
import os
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

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
        return load_file(self.folder / f"{self.name}.weights.safetensors")

    @cached_property
    def keys(self) -> list[str]:
        """Every tensor of the cases file, "case/tensor"."""
        with safe_open(self.folder / f"{self.name}.cases.safetensors", framework="pt") as file:
            return sorted(file.keys())

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def tensor(self, key: str) -> Tensor:
        """One tensor by its "case/tensor" name."""
        with safe_open(self.folder / f"{self.name}.cases.safetensors", framework="pt") as file:
            return file.get_tensor(key)

    def case(self, name: str) -> dict[str, Tensor]:
        """All tensors of one case, without the prefix."""
        start = name + "/"
        return {key.removeprefix(start): self.tensor(key) for key in self.keys if key.startswith(start)}

    def groups(self) -> list[str]:
        """Prefixes of the tensors: the cases and the direct calls that stand beside them."""
        return sorted({key.rsplit("/", 1)[0] for key in self.keys})


@cache
def fixture(name: str) -> Fixture:
    return Fixture(name)
