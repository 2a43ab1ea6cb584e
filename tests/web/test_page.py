"""What a person can do with the page, done in a real browser, and what comes out of it."""

from __future__ import annotations

import io
import os
import re
import signal
import wave
from pathlib import Path

import numpy as np
import pytest
import soxr

from gateway.admission import digest, make_key
from tests.e2e.conftest import READY_S, Rill, end, profile, start, wait_until
from tests.web.conftest import READY, Floats, MakeScreen, Screen

SHORT = "Good morning to you."
LONG = "The lamp went out, and the whole house was still. Then somebody began to sing, far away in the garden. " * 3


def sounding(samples: Floats) -> Floats:
    """Without silence, so that a pause for want of samples doesn't count."""
    return samples[samples != 0]


def whole(samples: Floats) -> Floats:
    """From the first sound to the last."""
    places = np.flatnonzero(samples)
    return samples[places[0] : places[-1] + 1]


# ---- speak


def test_the_loudspeaker_is_given_the_very_samples_that_were_sent(screen: Screen) -> None:
    screen.speak(SHORT, seed=5)
    sent, heard = screen.audio(screen.contexts()[0]), screen.heard()
    assert len(sent) > 12_000
    np.testing.assert_array_equal(sounding(heard), sounding(sent))
    if screen.figure("underruns") == "0":
        np.testing.assert_array_equal(whole(heard), whole(sent))
    assert re.fullmatch(r"\d+\s?ms", screen.figure("first"))
    assert float(screen.figure("factor")) > 0
    assert screen.figure("length") == f"{len(sent) / 24_000:.1f}s"

    screen.page.click("#history >> text=Play")
    screen.settle()
    np.testing.assert_array_equal(whole(screen.heard()), whole(sent))  # no gap, no repeat at any join


@pytest.mark.parametrize(
    "rate_hz", [48_000, *(pytest.param(rate_hz, marks=pytest.mark.slow) for rate_hz in (44_100, 16_000))]
)
def test_a_device_of_another_rate_hears_the_same_sound(make_screen: MakeScreen, rate_hz: int) -> None:
    screen = make_screen(rate_hz=rate_hz)
    screen.speak(SHORT, seed=5)
    screen.heard()
    screen.page.click("#history >> text=Play")
    screen.settle()
    sent, heard = screen.audio(screen.contexts()[0]), screen.heard()
    expected = soxr.resample(sent, 24_000, rate_hz)
    start = int(np.argmax(np.abs(heard) > 0))
    lags = range(max(0, start - 200), start + 200)
    errors = [float(np.mean((heard[lag : lag + len(expected)] - expected) ** 2)) for lag in lags]
    noise_db = 10 * np.log10(min(errors) / np.mean(expected**2))
    assert noise_db < -30
    assert screen.complaints == []


@pytest.mark.slow
def test_the_same_seed_repeats_the_samples_and_the_next_one_does_not(screen: Screen) -> None:
    screen.speak(SHORT)
    screen.page.click("#same")
    screen.settle()
    screen.page.click("#next")
    screen.settle()
    following, same, first = (screen.download(item) for item in range(3))
    assert first == same
    assert first != following
    with wave.open(io.BytesIO(first)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() == len(screen.audio(screen.contexts()[0]))
    seeds = [message["seed"] for message in screen.received if message["t"] == "opened"]
    assert seeds == [seeds[0], seeds[0], seeds[0] + 1]


@pytest.mark.slow
def test_what_is_typed_while_it_speaks_is_said_in_the_same_context_and_can_be_repeated(screen: Screen) -> None:
    screen.write(SHORT)
    screen.page.press("#text", "Enter")
    screen.wait_for_sound()
    screen.page.press("#text", "End")
    screen.page.keyboard.type(" The tea is ready.", delay=20)
    screen.settle()
    (c,) = screen.contexts()
    assert "".join(message["s"] for message in screen.sent if message["t"] == "text") == f"{SHORT} The tea is ready."
    flushes = [message["pos"] for message in screen.received if message["t"] == "flushed"]
    assert len(flushes) >= 2 and flushes[-1] > flushes[0]
    screen.page.click("#same")
    screen.settle()
    np.testing.assert_array_equal(screen.audio(screen.contexts()[1]), screen.audio(c))


def test_text_with_nothing_to_say_says_so(screen: Screen) -> None:
    screen.speak("...")
    assert "nothing to say" in screen.page.inner_text("#notice")


def test_a_model_that_follows_instructions_is_given_them(make_screen: MakeScreen) -> None:
    plain, steered = make_screen(), make_screen(model="Fun-CosyVoice3-0.5B-2512")
    assert plain.page.is_hidden("#instruct")
    steered.page.fill("#instruct", "calmly, as to a child")
    steered.page.fill("#lang", "en")
    steered.page.press("#text", "Enter")
    steered.until("!document.getElementById('stop').disabled")
    steered.page.keyboard.press("Escape")
    steered.until("document.getElementById('heard').textContent.includes('let go')")
    (request,) = (message for message in steered.sent if message["t"] == "open")
    assert (request["instruct"], request["lang"]) == ("calmly, as to a child", "en")


def test_an_example_can_be_undone(screen: Screen) -> None:
    screen.write("My own words.")
    screen.page.click("text=Directions")
    assert "bridge" in screen.page.input_value("#text")
    screen.page.press("#text", "Control+z")
    assert screen.page.input_value("#text") == "My own words."


# ---- barge in


@pytest.mark.parametrize("way", ["Escape", "#stop", "#barge"])
def test_it_falls_silent_when_told_to_and_says_how_soon(screen: Screen, way: str) -> None:
    screen.write(LONG)
    screen.page.press("#text", "Enter")
    screen.wait_for_sound()
    if way == "Escape":
        screen.page.keyboard.press(way)
    else:
        screen.page.click(way)
    screen.until("document.getElementById('heard').textContent.includes('let go')")
    screen.heard()
    screen.page.wait_for_timeout(300)
    assert not np.any(screen.heard())
    (cancelled,) = [message for message in screen.received if message["t"] == "cancelled"]
    (cancel,) = [message for message in screen.sent if message["t"] == "cancel"]
    assert 0 <= cancel["played_ms"] <= cancelled["ms"] + 1
    assert int(screen.figure("stopped").removesuffix("ms")) < 250  # far less on an idle machine
    assert screen.page.input_value("#text") == LONG

    screen.page.click("#rest")
    screen.wait_for_sound()
    screen.page.keyboard.press("Escape")
    screen.settle()
    texts = [message["s"] for message in screen.sent if message["t"] == "text"]
    assert texts[-1] == LONG[cancelled["text_upto"] :]


def test_a_voice_in_the_microphone_stops_it(screen: Screen) -> None:
    screen.page.check("#ear")
    screen.page.wait_for_selector("#level:not([hidden])")
    screen.write(LONG)
    screen.page.press("#text", "Enter")  # the microphone of this browser beeps once a second
    screen.until("document.getElementById('heard').textContent.includes('Silent')")
    assert any(message["t"] == "cancel" for message in screen.sent)
    screen.page.uncheck("#ear")


# ---- own voices, many at once


@pytest.mark.slow
def test_a_recording_becomes_a_voice_that_speaks(screen: Screen) -> None:
    screen.speak("The morning train was late, and the platform was full of people with bags.", seed=3)
    recording = {"name": "Ida.wav", "mimeType": "audio/wav", "buffer": screen.download()}
    screen.page.set_input_files("#file", recording)
    screen.page.wait_for_selector("#preview:not([hidden])")
    screen.page.fill("#words", "The morning train was late, and the platform was full of people with bags.")
    screen.page.click("#keep")
    screen.page.wait_for_selector("#mine li")
    assert "Ida can speak now" in screen.page.inner_text("#said")
    screen.page.click("#mine >> text=Hear it")
    screen.settle()
    opened = [message for message in screen.received if message["t"] == "opened"][-1]
    kept = [message for message in screen.received if message["t"] == "voice"][-1]
    assert opened["voice"] == kept["voice"]
    assert len(screen.audio(opened["c"]))
    screen.page.click("#mine >> text=Forget")
    screen.until("document.getElementById('said').textContent.includes('forgotten')")
    assert screen.page.locator("#mine li").count() == 0


def test_a_recording_that_will_not_do_is_refused_in_plain_words(screen: Screen) -> None:
    def offer(data: bytes) -> str:
        screen.page.fill("#words", "Anything at all.")
        screen.page.set_input_files("#file", {"name": "a.wav", "mimeType": "audio/wav", "buffer": data})
        screen.until("document.getElementById('said').textContent !== ''")
        return screen.page.inner_text("#said")

    assert "can't be read as audio" in offer(b"no audio at all")
    assert "at least 3" in offer(noise(1.0))
    assert screen.page.is_disabled("#keep")
    assert "Nothing can be heard" in offer(noise(4.0, loudness=0))


def noise(seconds: float, loudness: float = 1_000) -> bytes:
    """A WAV file."""
    samples = np.random.default_rng(1).normal(0, loudness, int(24_000 * seconds)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 24_000, 0, "NONE", ""))
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def test_a_recording_can_be_made_with_the_microphone(screen: Screen) -> None:
    screen.page.click("#record")
    screen.until("parseFloat(document.getElementById('take').textContent) > 3.2")
    screen.page.click("#record")
    screen.page.wait_for_selector("#preview:not([hidden])")
    assert screen.page.input_value("#words")  # something to read aloud


def test_many_streams_show_how_far_ahead_each_is(screen: Screen) -> None:
    screen.page.fill("#streams", "2")
    screen.page.click("#run")
    screen.until("[...document.querySelectorAll('#bars div')].filter((bar) => bar.style.transform).length === 2")
    assert len(screen.contexts()) == 2
    assert "made each second" in screen.page.inner_text("#summary")
    screen.page.click("#run")
    screen.page.wait_for_selector("#run >> text=Start")
    screen.until("document.getElementById('server').textContent.includes('of 10')")


# ---- when the server goes


def test_a_killed_gateway_is_noticed_and_found_again_and_no_text_is_lost(make_screen: MakeScreen, rill: Rill) -> None:
    screen = make_screen()
    screen.write(LONG)
    screen.page.press("#text", "Enter")
    screen.wait_for_sound()
    os.kill(rill.child("gateway"), signal.SIGKILL)
    screen.page.wait_for_selector("#lost:not([hidden])")
    assert "trying again" in screen.page.inner_text("#lost")
    screen.page.type("#text", "And more.")
    screen.page.wait_for_selector("#notice:not([hidden]) >> text=Your text is still here")
    screen.until("!document.getElementById('speak').disabled")
    assert screen.page.is_hidden("#lost")
    assert sorted(screen.page.input_value("#text")) == sorted(f"{LONG}And more.")
    screen.forget()
    screen.speak(SHORT)
    assert len(screen.audio(screen.contexts()[-1]))
    assert screen.complaints == []


def test_text_survives_a_reload(screen: Screen) -> None:
    screen.write("Half a thought")
    screen.page.reload()
    screen.page.wait_for_selector(READY)
    assert screen.page.input_value("#text") == "Half a thought"


@pytest.mark.slow
def test_a_server_that_falls_silent_is_left_though_its_socket_is_open(make_screen: MakeScreen, rill: Rill) -> None:
    screen = make_screen()
    gateway = rill.child("gateway")
    os.kill(gateway, signal.SIGSTOP)
    try:
        screen.page.wait_for_selector("#lost:not([hidden])")
    finally:
        os.kill(gateway, signal.SIGCONT)
    screen.page.click("#lost >> text=Try now")
    screen.speak(SHORT)
    assert np.any(screen.heard())


@pytest.mark.slow
def test_a_killed_engine_is_told_and_the_same_seed_goes_on(make_screen: MakeScreen, rill: Rill) -> None:
    screen = make_screen()
    screen.write(LONG)
    screen.page.press("#text", "Enter")
    screen.wait_for_sound()
    os.kill(rill.child("engine"), signal.SIGKILL)
    screen.page.wait_for_selector("#notice:not([hidden])")
    assert "speech engine is being restarted" in screen.page.inner_text("#notice")
    wait_until(lambda: rill.readiness()["ready"], READY_S)
    screen.until("!document.getElementById('speak').disabled")
    screen.page.click("#notice >> text=Speak it again")
    screen.wait_for_sound()
    first, again = (message for message in screen.received if message["t"] == "opened")
    assert first["seed"] == again["seed"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_server_that_ends_and_is_started_again_is_found_and_no_text_is_lost(
    make_screen: MakeScreen, tmp_path: Path, number: signal.Signals
) -> None:
    config = profile(tmp_path, "cpu")
    rill = start(config)
    screen = make_screen(address=rill.address)
    screen.write(LONG)
    screen.page.press("#text", "Enter")
    screen.wait_for_sound()
    rill.process.send_signal(number)
    rill.process.wait()
    screen.page.wait_for_selector("#lost:not([hidden])")
    screen.page.type("#text", "And more.")
    again = start(config, "--port", rill.address.rstrip("/").rpartition(":")[2])
    try:
        screen.until("!document.getElementById('speak').disabled")
        assert sorted(screen.page.input_value("#text")) == sorted(f"{LONG}And more.")
        screen.forget()
        screen.speak(SHORT)
        assert len(screen.audio(screen.contexts()[-1]))
    finally:
        end(again.process)


@pytest.mark.slow
def test_a_server_that_asks_for_a_key_is_given_one(make_screen: MakeScreen, tmp_path: Path) -> None:
    key = make_key()
    config = profile(tmp_path, "cpu")
    config.write_text(f'{config.read_text()}[gateway.keys.ada]\nsha256 = "{digest(key)}"\n')
    rill = start(config)
    try:
        screen = make_screen(address=rill.address)
        assert "asks its callers for a key" in screen.page.inner_text("#lost")
        screen.page.fill("#lost input", "wrong")
        screen.page.click("#lost >> text=Connect")
        screen.page.wait_for_selector("#lost >> text=not known here")
        screen.page.fill("#lost input", key)
        screen.page.click("#lost >> text=Connect")
        screen.page.wait_for_selector(READY)
        screen.speak(SHORT)
        assert np.any(screen.heard())
    finally:
        end(rill.process)


# ---- for everyone


def test_a_phone_shows_all_of_it_and_its_buttons_are_large_enough(make_screen: MakeScreen) -> None:
    screen = make_screen(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    width = screen.page.evaluate("document.documentElement.scrollWidth")
    assert width == 360
    for name in ("#speak", "#stop", "#barge", "#record", "#keep", "#run", "#voice", "#seed"):
        box = screen.page.locator(name).bounding_box()
        assert box is not None and box["height"] >= 44, name
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360, name
    screen.write(SHORT)
    screen.page.tap("#speak")
    screen.settle()
    assert np.any(screen.heard())
    assert screen.page.evaluate("document.documentElement.scrollWidth") == 360
    assert screen.complaints == []


def test_every_control_can_be_reached_by_the_tab_key(screen: Screen) -> None:
    screen.page.focus("#text")
    reached = ["text"]
    for _ in range(30):
        screen.page.keyboard.press("Tab")
        reached.append(screen.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    expected = ["text", "voice", "seed", "speak", "ear", "record", "file", "words", "name", "streams", "run"]
    assert [name for name in reached if name in expected][: len(expected)] == expected


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing_wrong(make_screen: MakeScreen, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe here: pip install -e '.[web]'")
    screen = make_screen(color_scheme=scheme)
    screen.speak(SHORT)
    screen.write(LONG)
    screen.page.press("#text", "Enter")
    screen.wait_for_sound()
    screen.page.click("#barge")
    screen.page.wait_for_selector("#again:not([hidden])")
    screen.page.wait_for_selector("#server dd")
    found = axe.Axe().run(screen.page)
    assert found.violations_count == 0, found.generate_report()
