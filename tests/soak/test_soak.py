from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.supervisor import child_environment


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["scripted", "embedded"])
def test_a_short_soak_holds_every_promise(engine: str) -> None:
    soak = Path(__file__).with_name("soak.py")
    words = ["--engine", engine, "--seconds", "20", "--connections", "60", "--sockets", "15"]
    ended = subprocess.run(
        [sys.executable, str(soak), *words], env=child_environment(), capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2_000:]
