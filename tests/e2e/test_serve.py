"""How `rill serve` starts and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Rill, check_end, child_environment, end, profile, start, wait_until
from tests.random_checkpoint import random_checkpoint


@pytest.mark.slow
def test_an_interrupt_ends_both_processes_cleanly(config: Path) -> None:
    """So does SIGTERM: it ends the server that all these tests share."""
    check_end(start(config), signal.SIGINT)


@pytest.mark.slow
def test_a_killed_parent_leaves_no_orphans(tmp_path: Path) -> None:
    rill = start(profile(tmp_path, "cpu", random_checkpoint(tmp_path / "tiny", stop_scale=1.0)))
    children = [Path("/proc") / str(rill.child(module)) for module in ("engine", "gateway")]
    end(rill.process, signal.SIGKILL)
    wait_until(lambda: not any(child.exists() for child in children), 10)


def test_two_servers_at_one_port_say_so(rill: Rill, config: Path) -> None:
    port = rill.address.rstrip("/").rsplit(":", 1)[1]
    second = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--port", port],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    assert f"can't listen at 127.0.0.1 port {port}" in second.stderr
    assert second.stdout == ""


def test_a_checkpoint_that_is_not_there_is_a_clear_end(tmp_path: Path) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text('[model]\ncheckpoint = "/no/such/folder"\n')
    ended = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "serve", "--config", str(profile), "--port", "0"],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "/no/such/folder" in ended.stderr
    assert "rill: the engine ended with code 2 before it was ready" in ended.stderr
