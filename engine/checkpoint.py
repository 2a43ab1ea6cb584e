"""A model folder in the official layout -> the three models and their settings.

    llm.pt flow.pt hift.pt            plain state dicts; a .safetensors twin is preferred where there is one
    cosyvoice3.yaml                   settings that no tensor shows; official values where it is silent
    CosyVoice-BlankEN/                config.json of the Qwen2 backbone, tokenizer files
    speech_tokenizer_v3.onnx campplus.onnx   needed to take up new voices only
    spk2info.pt                       saved voices, optional

Nothing in a folder is executed: weights are read with `weights_only`, the YAML's object tags become plain mappings.
Source: CosyVoice3 reference, section 1. Tests: tests/engine/test_checkpoint.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from safetensors import safe_open
from torch import Tensor, nn

from engine.flow import Flow, FlowShape
from engine.frontend import Tokenizer, TokenizerError
from engine.hift import FRAME_SAMPLES, Hift, HiftShape, fold_weight_norm
from engine.sampler import Sampling
from engine.talker import Talker, TalkerShape
from engine.voices import MEL_BANDS, SPEAKER_WIDTH, is_plain

BACKBONE = "CosyVoice-BlankEN"
TOKENIZER = "speech_tokenizer_v3.onnx"
ENCODER = "campplus.onnx"
SETTINGS_FILE = "cosyvoice3.yaml"
WRAPPERS = ("state_dict", "model", "module")
MOST_CODES = 1000  # for a text id: 40 s
SILENT_IDS = (1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323)
INV_FREQ = "decoder.estimator.rotary_embed.inv_freq"
State = dict[str, Tensor]
T, S = TypeVar("T"), TypeVar("S")
M = TypeVar("M", bound=nn.Module)


class CheckpointError(Exception):
    """The folder can't be served; the text names the file, and the key with the shapes expected and found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the tensors don't show, with the official values."""

    sampling: Sampling = Sampling()
    silent_ids: tuple[int, ...] = SILENT_IDS
    mix: tuple[int, int] | None = None  # text ids to speech ids when text comes word by word; None: not trained for it
    code_ratios: tuple[float, float] = (2.0, 20.0)  # fewest and most codes for each text id
    sample_rate_hz: int = 24_000
    tokens_per_second: int = 25
    frames_per_token: int = 2
    chunk_frames: int = 50
    lookahead_tokens: int = 3
    guidance: float = 0.7
    flow_head_dim: int = 64  # used only where flow.pt lacks inv_freq
    euler_steps: int = 10  # of the flow's solver
    tone_steps: int = 1  # of the vocoder's excitation in a mel frame
    reads_ascii: bool = False  # the talker knows no other letters: others are spelled in these


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Models on their device, in eval mode, without gradients. Paths are None where the folder lacks the file."""

    folder: Path
    talker: Talker
    flow: Flow
    hift: Hift
    settings: Settings
    tokenizer_dir: Path
    spk2info: Path | None
    speech_tokenizer_onnx: Path | None
    campplus_onnx: Path | None

    def cloning_models(self) -> tuple[Path, Path]:
        """The two ONNX models that a new voice needs. Raises CheckpointError naming what is missing."""
        if self.speech_tokenizer_onnx is None:
            raise CheckpointError(f"{self.folder} lacks {TOKENIZER}, so it can't take up a new voice")
        if self.campplus_onnx is None:
            raise CheckpointError(f"{self.folder} lacks {ENCODER}, so it can't take up a new voice")
        return self.speech_tokenizer_onnx, self.campplus_onnx

    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError for one that can't be read, or that has more ids than the talker."""
        try:
            tokenizer = Tokenizer(self.tokenizer_dir, reads_ascii=self.settings.reads_ascii)
        except TokenizerError as error:
            raise CheckpointError(str(error)) from error
        if tokenizer.size > (most := self.talker.shape.text_vocab):
            raise CheckpointError(f"{self.tokenizer_dir} has {tokenizer.size} ids; the talker embeds {most}")
        return tokenizer


def load(folder: Path, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Everything in `folder`. Talker and flow in `dtype`; HiFT in float32 at least. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder {folder}")
    device = torch.device(device)
    settings = read_settings(folder / SETTINGS_FILE)
    talker = load_talker(folder, device, dtype)
    flow = load_flow(folder, settings, device, dtype)
    hift = load_hift(folder, settings, device, dtype)
    for what, size, needed in (
        ("codes that the flow embeds", flow.shape.vocab, talker.shape.num_codes),
        ("mel bands of the flow", flow.shape.mel, MEL_BANDS),
        ("mel bands of the vocoder", hift.shape.mel, MEL_BANDS),
        ("numbers of a speaker", flow.shape.speaker, SPEAKER_WIDTH),
    ):
        if size != needed:
            raise CheckpointError(f"{folder}: the {what} are {size}; {needed} are needed")
    return Checkpoint(
        folder=folder,
        talker=talker,
        flow=flow,
        hift=hift,
        settings=settings,
        tokenizer_dir=folder / BACKBONE,
        spk2info=found(folder / "spk2info.pt"),
        speech_tokenizer_onnx=found(folder / TOKENIZER),
        campplus_onnx=found(folder / ENCODER),
    )


def found(path: Path) -> Path | None:
    return path if path.is_file() else None


def load_talker(folder: Path, device: torch.device, dtype: torch.dtype) -> Talker:
    file, state = read_state(folder, "llm")
    config = read_json(folder / BACKBONE / "config.json")
    unused = ("llm.model.lm_head.", "rotary_emb.inv_freq")
    state = {k: v.to(device, dtype) for k, v in state.items() if not any(part in k for part in unused)}
    shape = measured(file, lambda: TalkerShape.from_state(state, config))
    return filled(measured(file, lambda: on_meta(Talker, shape)), state, file)


def load_flow(folder: Path, settings: Settings, device: torch.device, dtype: torch.dtype) -> Flow:
    file, state = read_state(folder, "flow")
    if INV_FREQ not in state:
        width = settings.flow_head_dim
        state[INV_FREQ] = 1.0 / 10_000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    shape = measured(file, lambda: FlowShape.from_state(state))
    shape = replace(
        shape,
        chunk_frames=settings.chunk_frames,
        lookahead=settings.lookahead_tokens,
        steps=settings.euler_steps,
        cfg=settings.guidance,
    )
    # Rotary frequencies stay float32 at least: rounded to bfloat16 they would turn far positions at random.
    wide = torch.promote_types(dtype, torch.float32)
    state = {k: v.to(device, wide if k == INV_FREQ else dtype) for k, v in state.items()}
    return filled(measured(file, lambda: on_meta(Flow, shape)), state, file)


def load_hift(folder: Path, settings: Settings, device: torch.device, dtype: torch.dtype) -> Hift:
    """In float32 at least; under a narrower dtype its products may be rounded on CUDA, where it warms up.

    Weight norm is folded on `device`, whose norms differ from other devices' in the last bits.
    """
    file, state = read_state(folder, "hift")
    wide = torch.promote_types(dtype, torch.float32)
    state = {k: v.to(device, wide) for k, v in state.items()}
    state = measured(file, lambda: fold_weight_norm(state))
    shape = replace(measured(file, lambda: HiftShape.from_state(state)), tone_steps=settings.tone_steps)
    hift = measured(file, lambda: Hift(shape)).to(device, wide)
    hift.is_exact = wide == dtype
    return filled(hift, state, file)


def measured(file: Path, measure: Callable[[], T]) -> T:
    """What `measure` makes of the tensors' sizes; a missing or misshapen one is the file's fault."""
    try:
        return measure()
    except KeyError as error:
        raise CheckpointError(f"{file.name} lacks the key {error.args[0]!r}") from error
    except (ValueError, IndexError, ArithmeticError, RuntimeError, TypeError, AttributeError) as error:
        text = f"{file.name} has tensors of impossible shapes, or settings that fit none: {error}"
        raise CheckpointError(text) from error


def on_meta(make: Callable[[S], M], shape: S) -> M:
    with torch.device("meta"):
        return make(shape)


def filled(module: M, state: State, file: Path) -> M:
    """The module with exactly these tensors, ready for inference. Raises CheckpointError for the first misfit."""
    expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    for key, shape in expected.items():
        if key not in state:
            raise CheckpointError(f"{file.name} lacks the key {key!r} of shape {list(shape)}")
        if tuple(state[key].shape) != shape:
            raise CheckpointError(f"{file.name}: {key!r} is {list(state[key].shape)}, expected {list(shape)}")
        if not bool(state[key].isfinite().all()):
            raise CheckpointError(f"{file.name}: {key!r} holds what is no finite number in {state[key].dtype}")
    if extra := state.keys() - expected.keys():
        key = min(extra)
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(f"{file.name} has the unknown key {key!r} of shape {list(state[key].shape)}{more}")
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)


# --- files -----------------------------------------------------------------------------------------------------------


def read_state(folder: Path, stem: str) -> tuple[Path, State]:
    """The file's path and its tensors, unwrapped, under clean keys. Raises CheckpointError."""
    file = found(folder / f"{stem}.safetensors") or found(folder / f"{stem}.pt")
    if file is None:
        raise CheckpointError(f"{folder} holds neither {stem}.safetensors nor {stem}.pt")
    try:
        stored = load_safetensors(file) if file.suffix == ".safetensors" else load_pickle(file)
    except Exception as error:  # damaged bytes make the unpickler raise anything
        raise CheckpointError(f"{file.name} can't be read: {str(error)[:200] or type(error).__name__}") from error
    return file, cleaned(unwrapped(stored, file), file)


def load_safetensors(file: Path) -> State:
    """The tensors of a file. A tensor that stands under two names is stored once, as `save_model` of safetensors does:
    the metadata maps the name left out to the name it shares."""
    with safe_open(file, framework="pt") as content:
        state = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118, it is no mapping
        shared = content.metadata() or {}
    return state | {left_out: state[kept] for left_out, kept in shared.items() if kept in state}


def load_pickle(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def unwrapped(stored: Any, file: Path) -> Mapping[str, Any]:
    """The innermost mapping of a dump that nests its state dict under state_dict, model or module."""
    while isinstance(stored, Mapping) and (
        inner := [stored[w] for w in WRAPPERS if isinstance(stored.get(w), Mapping)]
    ):
        stored = inner[0]
    if not isinstance(stored, Mapping) or not stored:
        raise CheckpointError(f"{file.name} holds {type(stored).__name__}, not a mapping from key to tensor")
    return stored


def cleaned(stored: Mapping[str, Any], file: Path) -> State:
    """Tensors only (a trainer's epoch and step counters go), without a prefix that a wrapper gave to every key."""
    state = {str(key): value for key, value in stored.items() if not isinstance(value, int | float | str)}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{file.name}: {key!r} is a {type(value).__name__}, not a tensor")
        if not is_plain(value):
            raise CheckpointError(f"{file.name}: {key!r} is no plain tensor of real numbers")
    for prefix in [*(f"{w}." for w in WRAPPERS), "_orig_mod."] * 2:
        if state and all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not an object")
    return content


# --- settings --------------------------------------------------------------------------------------------------------


class PlainLoader(yaml.SafeLoader):
    """SafeLoader for which any tag of its own (!new:, !name:, !apply:, !ref) leaves the plain value underneath."""

    def plain(self, _: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return self.construct_sequence(node, deep=True)
        return node.value


PlainLoader.add_multi_constructor("!", PlainLoader.plain)


def read_settings(file: Path) -> Settings:
    """Settings from `cosyvoice3.yaml`; official values where it, or the file, is silent. Raises CheckpointError."""
    if not file.is_file():
        return Settings()
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), PlainLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{file.name} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.name} holds a {type(content).__name__}, not a mapping")
    try:
        return settings_of(Leaves(content))
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{file.name}: {error}") from error


class Leaves:
    """Values of a nested mapping by path, with `<name>` and `<a> * <b>` looked up among its top-level keys."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def number(self, default: float, *paths: str) -> float:
        """The first of the paths ("llm.sampling.top_p") that is there. ValueError names one that is no number."""
        for path in paths:
            value = self._at(path)
            if value is not None:
                return self._number(value, path)
        return default

    def flag(self, default: bool, path: str) -> bool:
        value = self._at(path)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{path} is {shown(value)}, neither true nor false")
        return default if value is None else value

    def numbers(self, default: tuple[int, ...], path: str) -> tuple[int, ...]:
        value = self._at(path)
        if value is None:
            return default
        if not isinstance(value, list):
            raise ValueError(f"{path} is {shown(value)}, not a list")
        return tuple(int(self._number(item, path)) for item in value)

    def _at(self, path: str) -> Any:
        value: Any = self._content
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def _number(self, value: Any, path: str, depth: int = 0) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
        if isinstance(value, str) and depth < 4 and value.count("*") < 4:  # each of which may be four more
            return math.prod(self._number(part, path, depth + 1) for part in self._factors(value, path))
        raise ValueError(f"{path} is {shown(value)}, not a number")

    def _factors(self, text: str, path: str) -> Iterator[Any]:
        for part in text.split("*"):
            part = part.strip()
            if part.startswith("<") and part.endswith(">"):
                yield self._at(part[1:-1])
                continue
            try:
                yield float(part)
            except ValueError:
                raise ValueError(f"{path} is {shown(text)}, not a number") from None


def shown(value: Any) -> str:
    """A scalar's beginning; a list's content could be endless, since YAML lets it hold others many times over."""
    return repr(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def settings_of(leaves: Leaves) -> Settings:
    """Raises ValueError naming a setting that no model can have."""
    official = Settings()
    ras = official.sampling
    mix = leaves.numbers((), "llm.mix_ratio")
    if mix and (len(mix) != 2 or min(mix) < 1):
        raise ValueError(f"llm.mix_ratio is {list(mix)}, expected two counts of at least 1")
    shortest = float(leaves.number(official.code_ratios[0], "llm.min_token_text_ratio"))
    longest = float(leaves.number(official.code_ratios[1], "llm.max_token_text_ratio"))
    if not 0 <= shortest <= longest or not 0 < longest <= MOST_CODES:
        bounds = f"0 <= fewest <= most, 0 < most <= {MOST_CODES}"
        raise ValueError(f"codes for each text id are {shortest} to {longest}, expected {bounds}")
    estimator = "flow.decoder.estimator."
    settings = Settings(
        sampling=Sampling(
            temperature=float(leaves.number(ras.temperature, "llm.sampling.temperature")),
            top_p=float(leaves.number(ras.top_p, "llm.sampling.top_p")),
            top_k=int(leaves.number(ras.top_k, "llm.sampling.top_k")),
            window=int(leaves.number(ras.window, "llm.sampling.win_size")),
            tau=float(leaves.number(ras.tau, "llm.sampling.tau_r")),
        ),
        silent_ids=leaves.numbers(official.silent_ids, "silent_tokens"),
        mix=(mix[0], mix[1]) if mix else None,
        code_ratios=(shortest, longest),
        sample_rate_hz=int(leaves.number(official.sample_rate_hz, "sample_rate")),
        tokens_per_second=int(leaves.number(official.tokens_per_second, "token_frame_rate")),
        frames_per_token=int(leaves.number(official.frames_per_token, "token_mel_ratio")),
        chunk_frames=int(leaves.number(official.chunk_frames, estimator + "static_chunk_size")),
        lookahead_tokens=int(leaves.number(official.lookahead_tokens, "flow.pre_lookahead_len")),
        guidance=float(
            leaves.number(
                official.guidance,
                "flow.decoder.cfm_params.content.inference_cfg_rate",
                "flow.decoder.cfm_params.inference_cfg_rate",
            )
        ),
        flow_head_dim=int(leaves.number(official.flow_head_dim, estimator + "dim_head")),
        euler_steps=int(leaves.number(official.euler_steps, "flow.n_timesteps")),
        tone_steps=int(leaves.number(official.tone_steps, "hift.tone_steps")),
        reads_ascii=leaves.flag(official.reads_ascii, "frontend.reads_ascii"),
    )
    if settings.tone_steps not in (1, FRAME_SAMPLES):
        raise ValueError(f"hift.tone_steps is {settings.tone_steps}, expected 1 or {FRAME_SAMPLES}")
    bounds = {"guidance": (0, 10), "flow_head_dim": (2, 1024), "euler_steps": (1, 100)}
    for name, (low, high) in bounds.items():
        if not low <= getattr(settings, name) <= high:
            raise ValueError(f"{name} {getattr(settings, name)} is outside {low}..{high}")
    fixed = ("sample_rate_hz", "tokens_per_second", "frames_per_token", "chunk_frames", "lookahead_tokens")
    for name in fixed:  # the models' arithmetic is built on these
        if getattr(settings, name) != getattr(official, name):
            raise ValueError(f"{name} is {getattr(settings, name)}; only {getattr(official, name)} is supported")
    return settings
