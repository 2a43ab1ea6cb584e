"""A profile is read whole or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import Config, ConfigError, EngineConfig, load

PROFILES = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_that_we_ship_loads(path: Path) -> None:
    load(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[engine]\nlane = 3", r"unknown keys \['lane'\] in \[engine\]"),
        ("[motor]\nlanes = 3", r"unknown tables \['motor'\]"),
        ("engine = 3", r"\[engine\] is a table"),
        ("[engine]\nlanes = '3'", r"\[engine\] lanes is int, not '3'"),
        ("[engine]\nlanes = true", r"\[engine\] lanes is int, not True"),
        ("[engine]\nlanes = 0", r"\[engine\] lanes is 0, allowed are 1 to"),
        ("[engine]\nmode = 'fast'", r"\[engine\] mode is 'fast'"),
        ("[engine]\ndtype = 'int8'", r"\[engine\] dtype is 'int8'"),
        ("[engine]\ndevice = 'tpu'", r"\[engine\] device is 'tpu'"),
        ("[gateway]\nport = 70000", r"\[gateway\] port is 70000"),
        ("[gateway]\norigins = [1]", r"\[gateway\] origins is a list of strings"),
        ("lanes =", r"profile.toml: "),
    ],
)
def test_a_wrong_profile_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml")


def test_auto_is_resolved_once_for_each_device() -> None:
    on_cpu, on_cuda = (EngineConfig(lanes=4).resolved(has_cuda=cuda) for cuda in (False, True))
    assert (on_cpu.device, on_cpu.dtype, on_cpu.rows_per_launch) == ("cpu", "float32", 1)
    assert (on_cuda.device, on_cuda.dtype, on_cuda.rows_per_launch) == ("cuda", "bfloat16", 4)
    assert on_cpu.resolved(has_cuda=True) == on_cpu


def test_the_embedded_voice_lies_inside_the_package_and_another_where_it_is_said() -> None:
    assert Config().model.folder.parts[-3:] == ("engine", "voices", "embedded")
    assert Config.from_tables({"model": {"checkpoint": "/srv/voice"}}).model.folder == Path("/srv/voice")
