"""Checkpoints: every form that an official file comes in, and a named error for every way that one can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import BACKBONE, INV_FREQ, CheckpointError, Settings, load, read_settings, read_state
from engine.flow import Flow
from engine.hift import Hift
from engine.sampler import Sampling
from engine.talker import Talker
from engine.voices import read_voices
from tests.random_checkpoint import SETTINGS, TINY, random_checkpoint

State = dict[str, Tensor]
FEW_GAINS = {"conv_pre.weight_g": torch.ones(3, 1, 1), "conv_pre.weight_v": torch.ones(32, 80, 5)}
LAYERS = "llm.model.model.layers."
CONV = "decoder.estimator.input_embed.conv_pos_embed.conv1.0.weight"
CODES = "input_embedding.weight"


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("official"), suffix=".safetensors")


@pytest.fixture
def folder(official: Path, tmp_path: Path) -> Path:
    """A copy to spoil: links to everything in the official folder."""
    for file in official.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def rewrite(folder: Path, stem: str, change: Callable[[State], Any]) -> None:
    """Replaces STEM.safetensors by STEM.pt holding what `change` returns (None: the state it changed in place)."""
    file = folder / f"{stem}.safetensors"
    state = load_file(file)
    changed = change(state)
    file.unlink()
    torch.save(state if changed is None else changed, folder / f"{stem}.pt")


def hift_normed(state: State, gain: str, direction: str) -> State:
    """Weight-normed as a file from training is: W = g * v / ||v|| with v twice W."""
    plain = ("source_downs", "m_source", "f0_predictor.classifier")
    out: State = {}
    for key, value in state.items():
        if not key.endswith(".weight") or key.startswith(plain):
            out[f"generator.{key}"] = value
            continue
        stem = "generator." + key.removesuffix(".weight")
        out[stem + gain] = value.norm(dim=(1, 2), keepdim=True)
        out[stem + direction] = 2 * value
    return out


def weights(checkpoint: Any) -> State:
    parts = {"llm": checkpoint.talker, "flow": checkpoint.flow, "hift": checkpoint.hift}
    return {f"{name}:{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}


def assert_same_weights(found: Path, wanted: Path) -> None:
    ours, theirs = weights(load(found, "cpu")), weights(load(wanted, "cpu"))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-7, msg=key)


def test_sizes_are_read_off_the_tensors(official: Path) -> None:
    checkpoint = load(official, "cpu")
    assert checkpoint.talker.shape == TINY.talker
    assert checkpoint.flow.shape == TINY.flow
    assert checkpoint.hift.shape == TINY.hift
    assert checkpoint.settings == Settings(mix=(5, 15))
    for part in (checkpoint.talker, checkpoint.flow, checkpoint.hift):
        assert not part.training and not any(p.requires_grad for p in part.parameters())


def test_random_folder_holds_a_tokenizer_and_a_voice_that_fit(official: Path) -> None:
    checkpoint = load(official, "cpu")
    tokenizer = checkpoint.tokenizer()
    assert checkpoint.spk2info is not None
    voice = read_voices(checkpoint.spk2info)["anna"]
    assert tokenizer.end_of_prompt in voice.prompt_text


def test_random_talker_runs_long_or_stops_as_asked(tmp_path: Path) -> None:
    heads = {}
    for scale in (0.0, 1.0):
        talker = load(random_checkpoint(tmp_path / str(scale), stop_scale=scale), "cpu").talker
        hidden = talker.hidden(talker.speech_rows(torch.arange(200)[None]))
        heads[scale] = float(talker.logits(hidden).softmax(-1)[..., talker.shape.num_codes :].sum(-1).mean())
    assert heads[0.0] < 1e-3 < 0.01 < heads[1.0]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_cast_once(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    checkpoint = load(random_checkpoint(tmp_path, suffix=suffix, dtype=dtype), "cpu")
    pitch = "hift:f0_predictor."
    assert {v.dtype for k, v in weights(checkpoint).items() if not k.startswith(pitch)} == {torch.float32}
    assert {v.dtype for k, v in weights(checkpoint).items() if k.startswith(pitch)} == {torch.float64}


def test_half_precision_models_keep_rotary_frequencies_and_vocoder_in_float32(official: Path) -> None:
    checkpoint = load(official, "cpu", torch.bfloat16)
    assert checkpoint.talker.speech_embedding.weight.dtype == torch.bfloat16
    flow = checkpoint.flow.state_dict()
    assert flow[INV_FREQ].dtype == torch.float32 and flow["input_embedding.weight"].dtype == torch.bfloat16
    assert {v.dtype for v in checkpoint.hift.state_dict().values()} == {torch.float32, torch.float64}
    assert not checkpoint.hift.is_exact and load(official, "cpu").hift.is_exact


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": {"module": s}},
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
        lambda s: s | {"epoch": 7, "step": 100},
    ],
    ids=["state_dict", "model.module", "module prefix", "compiled", "counters"],
)
@pytest.mark.parametrize("stem", ["llm", "flow", "hift"])
def test_wrapped_files_load_as_the_bare_one(
    folder: Path, official: Path, stem: str, wrap: Callable[[State], Any]
) -> None:
    rewrite(folder, stem, wrap)
    assert_same_weights(folder, official)


def test_tied_head_and_stale_rotary_buffers_are_ignored(folder: Path, official: Path) -> None:
    def change(state: State) -> None:
        state["llm.model.lm_head.weight"] = state["llm.model.model.embed_tokens.weight"].clone()
        state["llm.model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(folder, "llm", change)
    assert_same_weights(folder, official)


@pytest.mark.parametrize(
    ("gain", "direction"),
    [(".weight_g", ".weight_v"), (".parametrizations.weight.original0", ".parametrizations.weight.original1")],
)
def test_weight_norm_is_folded_in_either_form(folder: Path, official: Path, gain: str, direction: str) -> None:
    def change(state: State) -> State:
        return hift_normed(state, gain, direction) | {"discriminator.convs.0.weight": torch.zeros(2)}

    rewrite(folder, "hift", change)
    assert_same_weights(folder, official)


def test_flow_without_rotary_buffer_takes_the_head_width_from_the_settings(folder: Path, official: Path) -> None:
    rewrite(folder, "flow", lambda state: {k: v for k, v in state.items() if k != INV_FREQ})
    settings = folder / "cosyvoice3.yaml"
    settings.unlink()
    settings.write_text(SETTINGS + "            dim_head: 32\n")
    assert_same_weights(folder, official)


@pytest.mark.parametrize(
    ("stem", "change", "message"),
    [
        (
            "llm",
            lambda s: s.pop("llm_decoder.weight"),
            r"llm.pt lacks the key 'llm_decoder.weight' of shape \[6761, 32\]",
        ),
        ("llm", lambda s: s.pop("speech_embedding.weight"), "llm.pt lacks the key 'speech_embedding.weight'"),
        ("llm", lambda s: s.update(llm_embedding=torch.zeros(2)), r"unknown key 'llm_embedding' of shape \[2\]"),
        ("flow", lambda s: s.pop("pre_lookahead_layer.conv2.bias"), r"flow.pt lacks .*conv2.bias' of shape \[80\]"),
        (
            "flow",
            lambda s: s.update({"encoder.x": torch.zeros(1), "encoder.y": torch.zeros(1)}),
            "encoder.x.*and 1 more",
        ),
        ("hift", lambda s: s.pop("conv_pre.weight"), "hift.pt lacks the key 'conv_pre.weight'"),
        (
            "hift",
            lambda s: s.update({"ups.0.bias": torch.zeros(3)}),
            r"hift.pt: 'ups.0.bias' is \[3\], expected \[16\]",
        ),
        ("hift", lambda s: s.update({"conv_pre.weight": torch.zeros(4)}), "hift.pt has tensors of impossible shapes"),
        ("llm", lambda s: s.update({"llm_decoder.weight": [1]}), "llm.pt: 'llm_decoder.weight' is a list"),
        ("llm", lambda s: s.update({f"{LAYERS}99999999.x": torch.zeros(1)}), "lacks the key .*layers.2"),
        (
            "llm",
            lambda s: s["llm_decoder.weight"][7].fill_(torch.nan),
            "'llm_decoder.weight' holds .* no finite number",
        ),
        ("hift", lambda s: s["ups.0.bias"].fill_(torch.inf), "'ups.0.bias' holds what is no finite number"),
        ("hift", lambda s: s.update({"ups.0.bias": torch.zeros(16, device="meta")}), "'ups.0.bias' is no plain tensor"),
        ("hift", lambda s: s.update(FEW_GAINS), r"conv_pre has gains \[3, 1, 1\] for directions \[32, 80, 5\]"),
        ("flow", lambda s: s.update({INV_FREQ: torch.tensor(1.0)}), "flow.pt has tensors of impossible shapes"),
        ("flow", lambda s: s.update({CONV: s[CONV][:-1]}), "flow.pt has tensors of impossible shapes"),
        ("flow", lambda s: s.update({CODES: s[CODES][:-1]}), "codes that the flow embeds are 6560; 6561 are needed"),
    ],
)
def test_keys_that_do_not_fit_are_named(folder: Path, stem: str, change: Callable[[State], Any], message: str) -> None:
    def in_place(state: State) -> None:
        change(state)

    rewrite(folder, stem, in_place)
    with pytest.raises(CheckpointError, match=message):
        load(folder, "cpu")


@pytest.mark.parametrize("form", [".safetensors", ".pt"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut short", None], ids=str)
@pytest.mark.parametrize("stem", ["llm", "flow", "hift"])
def test_missing_or_corrupt_file_is_named(folder: Path, stem: str, content: bytes | None, form: str) -> None:
    (folder / f"{stem}.safetensors").unlink()
    if content is not None:
        (folder / f"{stem}{form}").write_bytes(content)
    with pytest.raises(CheckpointError, match=stem):
        read_state(folder, stem)


def test_truncated_file_is_named(folder: Path, official: Path) -> None:
    (folder / "flow.safetensors").unlink()
    (folder / "flow.safetensors").write_bytes((official / "flow.safetensors").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="flow.safetensors can't be read"):
        load(folder, "cpu")


class Bomb:
    def __reduce__(self) -> Any:
        return Path.write_text, (Path("exploded"), "boom")


def test_pickled_code_is_refused_and_not_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rewrite(folder, "llm", lambda _: Bomb())
    with pytest.raises(CheckpointError, match="llm.pt can't be read"):
        load(folder, "cpu")
    assert not Path("exploded").exists()


def give_backbone(folder: Path, config: str | None) -> None:
    (folder / BACKBONE).unlink()
    (folder / BACKBONE).mkdir()
    if config is not None:
        (folder / BACKBONE / "config.json").write_text(config)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, None], ids=["cut", "list", "deep", "none"])
def test_missing_or_corrupt_backbone_config_is_named(folder: Path, text: str | None) -> None:
    give_backbone(folder, text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder, "cpu")


@pytest.mark.parametrize(("heads", "message"), [("", "num_attention_heads"), (None, "fit none"), (-1, "fit none")])
def test_backbone_config_with_wrong_heads_is_named(folder: Path, official: Path, heads: Any, message: str) -> None:
    config = json.loads((official / BACKBONE / "config.json").read_text()) | {"num_attention_heads": heads}
    give_backbone(folder, json.dumps({key: value for key, value in config.items() if value != ""}))
    with pytest.raises(CheckpointError, match=message):
        load(folder, "cpu")


def test_a_tokenizer_that_does_not_fit_is_named(folder: Path, official: Path) -> None:
    checkpoint = load(official, "cpu")
    with pytest.raises(CheckpointError, match=r"has \d+ ids; the talker embeds 7"):
        replace(checkpoint, talker=Talker(replace(TINY.talker, text_vocab=7))).tokenizer()
    give_backbone(folder, None)
    with pytest.raises(CheckpointError, match="neither vocab.json"):
        replace(checkpoint, tokenizer_dir=folder / BACKBONE).tokenizer()


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load(tmp_path / "nowhere", "cpu")


def test_cloning_is_refused_by_name_where_an_onnx_model_lacks(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="speech_tokenizer_v3.onnx"):
        load(folder, "cpu").cloning_models()
    (folder / "speech_tokenizer_v3.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match="campplus.onnx"):
        load(folder, "cpu").cloning_models()
    (folder / "campplus.onnx").write_bytes(b"")
    assert [p.name for p in load(folder, "cpu").cloning_models()] == ["speech_tokenizer_v3.onnx", "campplus.onnx"]


# --- settings ----------------------------------------------------------------------------


def settings_from(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "cosyvoice3.yaml"
    file.write_text(text)
    return read_settings(file)


def test_settings_are_read_through_tags_that_nothing_constructs(tmp_path: Path) -> None:
    text = """
__set_seed: !apply:os.system ["touch exploded"]
rate: 0.5
silent_tokens: [1, 2, 3]
llm: !new:os.system
    mix_ratio: [4, 12]
    sampling: !name:os.system
        top_p: 0.7
        top_k: 20
        win_size: 8
        tau_r: 0.25
flow: !new:a.b
    decoder: !new:c.d
        cfm_params: !new:e.f
            content: {inference_cfg_rate: !ref <rate>}
"""
    settings = settings_from(tmp_path, text)
    assert settings.sampling == Sampling(top_p=0.7, top_k=20, window=8, tau=0.25)
    assert settings.mix == (4, 12) and settings.silent_ids == (1, 2, 3) and settings.guidance == 0.5


def test_silent_settings_are_the_official_ones(tmp_path: Path) -> None:
    assert settings_from(tmp_path, "sample_rate: 24000\n") == Settings() == read_settings(tmp_path / "none.yaml")
    assert settings_from(tmp_path, SETTINGS) == Settings(mix=(5, 15))


LISTS_OF_LISTS = "a0: &a0 1\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]\n" for i in range(1, 10))
FACTORS_OF_FACTORS = "a3: 1\nsample_rate: !ref <a0>\n" + "".join(
    f"a{i}: !ref {'*'.join([f'<a{i + 1}>'] * 1000)}\n" for i in range(3)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sample_rate: 16000", "sample_rate_hz is 16000"),
        ("sample_rate: fast", "sample_rate is 'fast', not a number"),
        ("sample_rate: !ref <sample_rate>", "sample_rate"),
        ("sample_rate: .inf", "sample_rate"),
        ("llm: {sampling: {top_p: 7}}", "top_p 7"),
        ("llm: {mix_ratio: [5]}", "mix_ratio"),
        ("llm: {mix_ratio: 5}", "mix_ratio"),
        ("llm: {min_token_text_ratio: 3, max_token_text_ratio: 2}", "3.0 to 2.0"),
        ("frontend: {reads_ascii: 1}", "reads_ascii is 1, neither true nor false"),
        ("flow: {n_timesteps: 0}", "euler_steps 0 is outside 1..100"),
        ("hift: {tone_steps: 2}", "tone_steps is 2, expected 1 or 480"),
        ("x: !!python/object/apply:os.getcwd []", "can't be read"),
        ("a: [", "can't be read"),
        *((f"a: !!{kind} x", "can't be read") for kind in ("timestamp", "bool", "int", "map")),
        ('a: !!int ""', "can't be read"),
        (LISTS_OF_LISTS + "sample_rate: *a9", "sample_rate is a list, not a number"),
        (LISTS_OF_LISTS + "llm: {mix_ratio: *a9}", "mix_ratio is a list, not a number"),
        (FACTORS_OF_FACTORS, "sample_rate is .*, not a number"),
        ("flow: {decoder: {cfm_params: {inference_cfg_rate: 1e300 * 1e300}}}", "guidance inf is outside 0..10"),
        ("flow: {decoder: {estimator: {dim_head: -4}}}", "flow_head_dim -4 is outside"),
        ("llm: {max_token_text_ratio: 1e300 * 1e300}", "2.0 to inf"),
        ("- 1", "holds a list"),
    ],
)
def test_settings_that_no_model_can_have_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        settings_from(tmp_path, text)


def test_saved_models_load_again(official: Path, tmp_path: Path) -> None:
    """What training exports: the modules' own state dicts, halved, beside the other files."""
    checkpoint = load(official, "cpu")
    parts: dict[str, Talker | Flow | Hift] = {
        "llm": checkpoint.talker,
        "flow": checkpoint.flow,
        "hift": checkpoint.hift,
    }
    for file in official.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    for stem, part in parts.items():
        save_file(
            {key: value.contiguous() for key, value in part.state_dict().items()}, tmp_path / f"{stem}.safetensors"
        )
    assert_same_weights(tmp_path, official)


def test_a_tensor_stored_once_under_two_names_is_found_under_both(tmp_path: Path) -> None:
    kept = torch.randn(3, 2)
    save_file({"kept": kept}, str(tmp_path / "llm.safetensors"), metadata={"left_out": "kept", "format": "pt"})
    _, state = read_state(tmp_path, "llm")
    assert state.keys() == {"kept", "left_out"} and torch.equal(state["left_out"], kept)


def test_the_temperature_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    assert settings_from(tmp_path, "llm:\n  sampling:\n    temperature: 0.5\n").sampling.temperature == 0.5


def test_a_talker_of_ascii_alone_is_spelled_to(folder: Path) -> None:
    assert load(folder, "cpu").tokenizer().encode("é") != load(folder, "cpu").tokenizer().encode("e")
    (folder / "cosyvoice3.yaml").write_text("frontend: {reads_ascii: true}\n")
    tokenizer = load(folder, "cpu").tokenizer()
    assert tokenizer.encode("Größe, 嗯") == tokenizer.encode("Grosse, Ng")


def test_how_often_tones_move_is_read(folder: Path) -> None:
    (folder / "cosyvoice3.yaml").unlink()
    (folder / "cosyvoice3.yaml").write_text("hift: {tone_steps: 480}\n")
    assert load(folder, "cpu").hift.shape.tone_steps == 480


def test_how_many_steps_the_flow_takes_is_read(folder: Path) -> None:
    (folder / "cosyvoice3.yaml").unlink()
    (folder / "cosyvoice3.yaml").write_text("flow: {n_timesteps: 6}\n")
    assert load(folder, "cpu").flow.shape.steps == 6


def test_the_codes_for_each_text_id_are_read(tmp_path: Path) -> None:
    text = "llm:\n  min_token_text_ratio: 2.5\n  max_token_text_ratio: 4\n"
    assert settings_from(tmp_path, text).code_ratios == (2.5, 4.0)
