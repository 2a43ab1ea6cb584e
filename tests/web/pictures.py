"""The pictures of the page: `python -m tests.web.pictures` writes web/page.png, page-dark.png and page-phone.png, at a
server of its own or at --url. They show a real utterance: while the machine does something else, it may run dry."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from gateway.cli import DEFAULT_PROFILE, own_server
from tests.web.conftest import CHROMIUM, READY

WEB = Path(__file__).resolve().parents[2] / "web"
TEXT = "The river is low in summer, and the stones along its bed are warm. Listen: it still talks all night."
TYPED = " In spring it ru"  # while it speaks
SEED = "7"
TRIES = 8  # for one of an idle machine
IDLE_FACTOR = 0.5
SPOKEN_S = 3.0  # of the utterance when the picture is taken
SIZES = {
    "page.png": {"viewport": {"width": 1200, "height": 940}},
    "page-dark.png": {"viewport": {"width": 1200, "height": 940}, "color_scheme": "dark"},
    "page-phone.png": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


def take(browser: Browser, address: str, name: str, folder: Path) -> None:
    """The page in the middle of an utterance. The first one only warms everything up."""
    context = browser.new_context(device_scale_factor=1.5, **SIZES[name])  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector(READY)
    page.fill("#seed", SEED)
    for count in range(TRIES):
        page.fill("#text", TEXT)
        page.press("#text", "Enter")
        page.wait_for_selector("#events >> text=First audio")
        page.wait_for_timeout(1000 * SPOKEN_S)
        page.keyboard.type(TYPED, delay=30)
        page.screenshot(path=folder / name)
        page.keyboard.press("Escape")
        page.wait_for_selector(READY)
        if count > 0 and page.inner_text("#underruns") == "0" and float(page.inner_text("#factor")) < IDLE_FACTOR:
            break
    context.close()


def take_all(address: str, names: list[str], folder: Path) -> None:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            for name in names:
                take(browser, address, name, folder)
        finally:
            browser.close()


async def take_at_own_server(names: list[str], folder: Path) -> None:
    async with own_server(DEFAULT_PROFILE) as address:
        await asyncio.to_thread(take_all, address, names, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(SIZES)}; default: all")
    parser.add_argument("--url", help="a running server's address")
    parser.add_argument("--folder", type=Path, default=WEB)
    options = parser.parse_args()
    names = options.names or list(SIZES)
    if options.url:
        take_all(options.url, names, options.folder)
    else:
        asyncio.run(take_at_own_server(names, options.folder))
