"""Cuts the full reference fixtures down to what fits in this repository, in the same form.

    python -m tests.golden.cut FULL_FOLDER [OUT_FOLDER]

Whole cases are kept or dropped; long lists of steps are shortened together with what the manifest says of them; of
embedding tables only the rows that the kept cases read stay, in the sparse form that golden_fixtures reads.
No value is changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
LICENCE = "Cut from fixtures of the CosyVoice3 reference classes (Apache-2.0) with small random weights."

KEPT: dict[str, tuple[str, ...]] = {
    "flow": ("est_T50", "p0_t60", "p25_t2", "p37_t60_f75", "p20_t46"),
    "hift": ("T9", "T3", "stream126", "noise"),
    "talker": ("A", "B", "bistream_A", "bistream_B", "embed_rows"),
    "sampler": (
        "flat_top_k",
        "one_candidate_no_history",
        "repeat_at_window_edge_inside",
        "repeat_just_outside_window",
        "ties",
        "below_min_len_mask",
        "stop_token_candidate",
        "other_parameters",
    ),
    "frontend": ("short_silence", "filters"),
    "stream": ("short",),
    "release_noise": ("sine_noise_head", "sine_noise_tail", "flow_noise_head", "flow_noise_tail"),
}
DROPPED = {"p20_t46/streaming_velocity_step0", "p20_t46/nonstreaming_velocity_step0"}
ALONE = {"est_T120/chunk_mask", "est_T120/rope_angles"}  # kept of a group that is dropped
STEPS = 2  # of long lists of steps


def first_rows(count: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[:count].clone()


SHORTENED: dict[str, Callable[[Tensor], Tensor]] = {
    "p20_t46/streaming_x_before_step": first_rows(STEPS),
    "p20_t46/nonstreaming_x_before_step": first_rows(1),
    "noise/sine_noise": first_rows(120),
    "sine_noise_head": first_rows(120),
    "A/forced_tokens": first_rows(STEPS),
    "A/logits": first_rows(STEPS),
    "A/yielded": first_rows(STEPS),
    "bistream_A/logits": first_rows(STEPS),
    "bistream_B/logits": first_rows(STEPS),
}


def sparse(name: str, x: Tensor, rows: Iterable[int] | None = None) -> Tensors:
    """The rows named, or every value that is not zero: NAME|shape, NAME|index, NAME|value."""
    units = x.flatten(0, -2) if rows is not None else x.reshape(-1, 1)
    index = torch.tensor(sorted(set(rows))) if rows is not None else units[:, 0].nonzero()[:, 0]
    parts = {"shape": torch.tensor(x.shape), "index": index.int(), "value": units[index]}
    return {f"{name}|{part}": value.contiguous() for part, value in parts.items()}


def keep(name: str, tensors: Tensors) -> Tensors:
    kept = {}
    for key, value in tensors.items():
        if key in ALONE or (key.split("/")[0] in KEPT[name] and key not in DROPPED):
            kept[key] = SHORTENED.get(key, Tensor.contiguous)(value)
    return kept


def cut_manifest(name: str, manifest: dict[str, Any], kept: Tensors) -> dict[str, Any]:
    manifest = dict(manifest, cut=f"{LICENCE} See README.md beside this file.")
    if "cases" in manifest:
        manifest["cases"] = {key: value for key, value in manifest["cases"].items() if key in KEPT[name]}
    manifest["case_tensors"] = {
        key: dict(about, shape=list(kept[key].shape)) for key, about in manifest["case_tensors"].items() if key in kept
    }
    manifest.pop("weight_tensors", None)  # the file of weights says the same
    if name == "talker":
        shorten_talker(manifest["cases"])
    return manifest


def shorten_talker(cases: dict[str, Any]) -> None:
    cases["A"].update(steps=STEPS, steps_with_mask=min(STEPS, cases["A"]["steps_with_mask"]), stopped_by="the cut")
    for case in cases.values():
        if "logits_at_calls" in case:
            case["logits_at_calls"] = case["logits_at_calls"][:STEPS]


def speech_ids(tensors: Tensors, names: tuple[str, ...], manifest: dict[str, Any] | None = None) -> set[int]:
    ids = {int(i) for key, value in tensors.items() if key.rsplit("/", 1)[-1] in names for i in value.flatten()}
    for case in (manifest or {"cases": {}})["cases"].values():
        ids |= {int(i) for name in ("prompt_speech_token", "sampler_returns", "yielded") for i in case.get(name, ())}
    return ids


def cut_weights(name: str, weights: Tensors, ids: set[int]) -> Tensors:
    table = {"flow": "input_embedding.weight", "talker": "speech_embedding.weight"}.get(name)
    if table is None:
        return weights
    x = weights.pop(table)
    return weights | sparse(table, x, ids | set(range(6561, len(x))))


def main(full: Path, out: Path) -> None:
    cases = {name: keep(name, load_file(full / f"{name}.cases.safetensors")) for name in KEPT}
    for name, kept in cases.items():
        manifest = cut_manifest(name, json.loads((full / f"{name}.json").read_text()), kept)
        (out / f"{name}.json").write_text(json.dumps(manifest, separators=(",", ":"), ensure_ascii=False) + "\n")
        weights = full / f"{name}.weights.safetensors"
        if weights.is_file():
            ids = speech_ids(kept, ("token", "prompt_token", "forced_tokens", "prompt_speech_token"), manifest)
            if name == "flow":
                ids = speech_ids(kept, ("token", "prompt_token")) | speech_ids(
                    cases["stream"], ("token", "prompt_token")
                )
            save_file(cut_weights(name, load_file(weights), ids), out / weights.name, {"licence": LICENCE})
        if name == "frontend":
            for key in [key for key in kept if key.startswith("filters/")]:
                kept |= sparse(key, kept.pop(key))
        save_file(kept, out / f"{name}.cases.safetensors", {"licence": LICENCE})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parent)
