"""`rill serve` as a user starts it: both processes, over the embedded voice. Under the mark `gpu` the same tests run on
CUDA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
READY_S = 180.0  # loading and warming up, on a busy machine
END_S = 20.0
LANES, WAITING = 10, 2


@dataclass
class Rill:
    """A running pair of processes."""

    process: subprocess.Popen[str]
    address: str
    lines: Queue[str | None]

    def get(self, path: str) -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.address + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def readiness(self) -> dict[str, Any]:
        table: dict[str, Any] = json.loads(self.get("readyz")[1])
        return table

    def gauge(self, name: str) -> float | None:
        for line in self.get("metrics")[1].splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
        return None

    def child(self, module: str) -> int:
        """The id of the engine's or the gateway's process."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and _is_child(entry, self.process.pid, module):
                return int(entry.name)
        raise LookupError(f"{module} is not running")


def _is_child(entry: Path, parent: int, module: str) -> bool:
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
        ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # it has just ended
        return False
    return ppid == parent and module.encode() in words


def profile(folder: Path, device: str, checkpoint: str | Path = "embedded") -> Path:
    """A profile for tests: few lanes, so that overload is near; nothing captured, so that a GPU starts in seconds."""
    path = folder / "profile.toml"
    path.write_text(
        f"[gateway]\ndrain_ms = 500\n[engine]\ndevice = {json.dumps(device)}\nlanes = {LANES}\nwaiting = {WAITING}\n"
        f"graphs = false\nthreads = 1\ngauges_ms = 100\n[model]\ncheckpoint = {json.dumps(str(checkpoint))}\n"
    )
    return path


def start(config: Path, *arguments: str) -> Rill:
    """Starts `rill serve` on a free port and waits for its line."""
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=config.parent, stdout=subprocess.PIPE, text=True, env=child_environment())
    lines: Queue[str | None] = Queue()
    threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
    try:
        line = lines.get(timeout=READY_S)
    except Empty:
        line = None
    if line is None:
        end(process)
        pytest.fail("rill serve did not get ready")
    return Rill(process, line.split()[-1], lines)


def child_environment() -> dict[str, str]:
    """Ours, with this tree importable before whatever the caller's own path names."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _read_lines(process: subprocess.Popen[str], lines: Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    """Signals it and waits; its exit code."""
    if process.poll() is None:
        process.send_signal(number)
    try:
        return process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        pytest.fail("rill serve did not end")


def check_end(rill: Rill, number: int) -> None:
    """The signal ends both children too, in order; nothing was printed after the address."""
    children = [Path("/proc") / str(rill.child(module)) for module in ("engine", "gateway")]
    assert end(rill.process, number) == 0
    wait_until(lambda: not any(child.exists() for child in children), 5)
    assert rill.lines.get(timeout=5) is None


def wait_until(condition: Any, patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="session")
def config(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profile(tmp_path_factory.mktemp(f"e2e-{device}"), device)


@pytest.fixture(scope="session")
def rill(config: Path) -> Iterator[Rill]:
    running = start(config)
    yield running
    check_end(running, signal.SIGTERM)
