"""The page in a real Chromium, at a real `rill serve` with the embedded voice. Skipped where there is no Chromium, or
no Playwright (`pip install -e '.[web]'`) to drive it. Nothing is downloaded."""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest

from tests.e2e.conftest import Rill, end, profile, start

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, WebSocket, WebSocketRoute

Floats = npt.NDArray[np.float32]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
MISSING = (
    "no Chromium here (Debian: apt-get install chromium)"
    if CHROMIUM is None
    else ""
    if HAS_PLAYWRIGHT
    else "no Playwright here (pip install -e '.[web]')"
)
PATIENCE_MS = 20_000  # one step of the page, on a busy machine
WITH_MICROPHONE = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")  # it beeps once a second
READY = "#status[data-state=ready]"

# What goes to the loudspeaker is copied on its way: what is connected to it is also given to the page's own listener,
# the one that it has for microphones.
LISTEN = """
window.heard = [];
const { addModule } = AudioWorklet.prototype;
AudioWorklet.prototype.addModule = async function (url) {
  await addModule.call(this, "/ear-worklet.js");
  return addModule.call(this, url);
};
const { connect } = AudioNode.prototype;
AudioNode.prototype.connect = function (target, ...rest) {
  if (target instanceof AudioDestinationNode && this instanceof AudioWorkletNode) {
    const tap = new AudioWorkletNode(this.context, "rill-ear", { numberOfOutputs: 0 });
    tap.port.onmessage = ({ data }) => window.heard.push(data);
    connect.call(this, tap);
  }
  return connect.call(this, target, ...rest);
};
window.takeHeard = () => {
  const bytes = new Uint8Array(window.heard.flatMap((block) => [...new Uint8Array(block.buffer)]));
  window.heard = [];
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
};
"""
OTHER_RATE = """
window.AudioContext = class extends AudioContext {
  constructor(options) { super({ ...options, sampleRate: %d }); }
};
"""


@dataclass
class Screen:
    """One page, with all that it said to the server, the server to it, and it to the console."""

    page: Page
    sent: list[dict[str, Any]] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def follow(self, socket: WebSocket) -> None:
        socket.on("framesent", lambda data: self.sent.append(msgpack.unpackb(data)))
        socket.on("framereceived", lambda data: self.received.append(msgpack.unpackb(data)))

    def complain(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def forget(self) -> None:
        """What was said, heard and complained about so far."""
        self.sent.clear()
        self.received.clear()
        self.complaints.clear()
        self.heard()

    def write(self, text: str) -> None:
        self.page.fill("#text", text)

    def until(self, condition: str) -> None:
        """Asks from outside: inside, the page's policy forbids to evaluate text."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"waited in vain for {condition}"
            self.page.wait_for_timeout(30)

    def settle(self) -> None:
        """Until nothing is being said."""
        self.until("document.getElementById('stop').disabled")
        self.page.wait_for_selector(READY)

    def wait_for_sound(self) -> None:
        self.until("document.getElementById('length').textContent !== '–'")

    def speak(self, text: str, seed: int | None = None) -> None:
        """To its end."""
        self.write(text)
        self.page.fill("#seed", "" if seed is None else str(seed))
        self.page.press("#text", "Enter")
        self.settle()

    def contexts(self) -> list[str]:
        return [message["c"] for message in self.sent if message["t"] == "open"]

    def audio(self, c: str) -> Floats:
        """What was sent of a context, as the page reads it."""
        data = b"".join(message["d"] for message in self.received if message["t"] == "audio" and message["c"] == c)
        return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32767)

    def heard(self) -> Floats:
        """What the loudspeaker was given since the last call, up to a silence: it tells its listener a moment later."""
        self.until("window.heard.at(-1)?.every((sample) => sample === 0)")
        return np.frombuffer(base64.b64decode(self.page.evaluate("takeHeard()")), "<f4")

    def figure(self, name: str) -> str:
        return self.page.inner_text(f"#{name}")

    def download(self, item: int = 0) -> bytes:
        """The WAV file of an utterance in the history, the latest first."""
        with self.page.expect_download() as waiting:
            self.page.locator("#history li").nth(item).get_by_role("button", name="Save").click()
        return Path(waiting.value.path()).read_bytes()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(f"The page was not tested in a browser: {MISSING}.")


@pytest.fixture(scope="session")
def rill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rill]:
    running = start(profile(tmp_path_factory.mktemp("web"), "cpu"))
    yield running
    assert end(running.process) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ended with its module: while it lives its event loop keeps others from running."""
    if MISSING:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    arguments = [*WITH_MICROPHONE, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


MakeScreen = Callable[..., Screen]


@pytest.fixture
def make_screen(browser: Browser, rill: Rill) -> Iterator[MakeScreen]:
    """Opens pages at the server, ready to speak. `rate_hz`: of the browser's sound, whatever it is asked for;
    `model`: what the server says that it runs."""
    opened: list[BrowserContext] = []

    def make(
        *, rate_hz: int | None = None, model: str | None = None, address: str = rill.address, **options: Any
    ) -> Screen:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        opened.append(context)
        context.set_default_timeout(PATIENCE_MS)
        if rate_hz is not None:
            context.add_init_script(OTHER_RATE % rate_hz)
        context.add_init_script(LISTEN)
        screen = Screen(context.new_page())
        screen.page.on("websocket", screen.follow)
        screen.page.on("console", screen.complain)
        screen.page.on("pageerror", lambda error: screen.complaints.append(str(error)))
        screen.page.on("requestfailed", lambda request: screen.complaints.append(_failed(request)))
        if model is not None:
            screen.page.route_web_socket("**/v1/speech", partial(_rename, model))
        screen.page.goto(address)
        screen.page.wait_for_selector(f"{READY}, #status[data-state=locked]")
        return screen

    yield make
    for context in opened:
        context.close()


def _rename(model: str, socket: WebSocketRoute) -> None:
    """The server, as if it ran another model."""
    server = socket.connect_to_server()

    def to_page(data: str | bytes) -> None:
        message = msgpack.unpackb(data)
        socket.send(msgpack.packb({**message, "model": model}) if message["t"] == "ready" else data)

    server.on_message(to_page)


def _failed(request: Request) -> str:
    return f"{request.url}: {request.failure}"


@pytest.fixture
def screen(make_screen: MakeScreen) -> Iterator[Screen]:
    """A page that must have nothing to complain about in the end."""
    screen = make_screen()
    yield screen
    assert screen.complaints == []
