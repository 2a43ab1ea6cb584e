"""Voices of callers: whose they are, what they take, and that they outlive a restart and a crash."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
import torch

from engine.voice_store import StoreFull, VoiceStore
from engine.voices import Voice, VoiceFileError


def voice(key: str = "mia", num_tokens: int = 100) -> Voice:
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return Voice(
        id=key,
        name=key,
        lang="en",
        transcript="Hello.",
        prompt_text=(3, 1, 4),
        tokens=torch.arange(num_tokens),
        mel=torch.rand(2 * num_tokens, 80, generator=generator),
        embedding=torch.rand(192, generator=generator),
    )


BYTES = 100 * 8 + 200 * 80 * 4 + 192 * 4  # of one such voice


@pytest.fixture
def store(tmp_path: Path) -> VoiceStore:
    return VoiceStore({"ada": voice("ada")}, tmp_path / "voices")


def test_a_voice_is_kept_over_a_restart_to_the_bit(store: VoiceStore, tmp_path: Path) -> None:
    store.add(voice(), "key", "Mia")
    again = VoiceStore({}, tmp_path / "voices")
    kept, given = again.get("mia"), voice()
    assert (kept.id, kept.lang, kept.transcript, kept.prompt_text) == ("mia", "en", "Hello.", (3, 1, 4))
    for name in ("tokens", "mel", "embedding"):
        assert torch.equal(getattr(kept, name), getattr(given, name))
    assert again.infos() == [store.info("mia")]
    assert store.info("mia").ms == 4_000


def test_one_voice_of_two_owners_goes_with_the_last(store: VoiceStore, tmp_path: Path) -> None:
    store.add(voice(), "one", "Mia")
    assert store.claim("mia", "two", "M.")
    assert store.info("mia").owners == {"one": "Mia", "two": "M."}
    assert store.drop("mia", "one") and "mia" in store
    assert not store.drop("mia", "one"), "a second drop changes nothing"
    assert store.drop("mia", "two") and "mia" not in store
    assert list((tmp_path / "voices").iterdir()) == []
    assert not store.drop("mia", "two")


def test_the_checkpoints_own_voices_come_first_and_cannot_be_dropped(store: VoiceStore) -> None:
    store.add(voice("aaa"), "key", "A")
    assert [info.id for info in store.infos()] == ["ada", "aaa"]
    assert not store.drop("ada", "key") and not store.drop("ada", "")
    assert store.get("ada").id == "ada"


def test_whoever_holds_a_voice_keeps_it_when_it_is_dropped(store: VoiceStore) -> None:
    store.add(voice(), "key", "Mia")
    held = store.get("mia")
    store.drop("mia", "key")
    assert torch.equal(held.mel, voice().mel)
    with pytest.raises(KeyError):
        store.get("mia")


def test_memory_is_bounded_and_the_longest_unused_voice_leaves_it(tmp_path: Path) -> None:
    store = VoiceStore({}, tmp_path, memory_bytes=2 * BYTES)
    for key in ("a", "b"):
        store.add(voice(key), "key", key)
    store.get("a")
    store.add(voice("c"), "key", "c")
    assert store.num_loaded_bytes == 2 * BYTES
    files = {path.name: path.stat().st_atime_ns for path in tmp_path.glob("*.pt")}
    assert set(files) == {"a.pt", "b.pt", "c.pt"}
    (tmp_path / "a.pt").unlink()
    assert torch.equal(store.get("a").mel, voice("a").mel), "still in memory"
    assert torch.equal(store.get("b").mel, voice("b").mel), "read again"
    assert store.num_loaded_bytes == 2 * BYTES


def test_a_voice_larger_than_the_memory_allowed_still_speaks(tmp_path: Path) -> None:
    store = VoiceStore({}, tmp_path, memory_bytes=BYTES - 1)
    store.add(voice(), "key", "Mia")
    assert store.num_loaded_bytes == 0
    assert torch.equal(store.get("mia").mel, voice().mel)


def test_the_disk_and_each_owner_are_bounded(tmp_path: Path) -> None:
    store = VoiceStore({}, tmp_path, disk_bytes=2 * BYTES, per_owner=1)
    store.add(voice("a"), "one", "a")
    with pytest.raises(StoreFull, match="1 voices are registered, at most 1"):
        store.claim("b", "one", "b")
    assert store.claim("a", "one", "renamed"), "its own is no second one"
    store.add(voice("b"), "two", "b")
    with pytest.raises(StoreFull, match=f"{2 * BYTES} bytes of voices are kept, at most {2 * BYTES}"):
        store.add(voice("c"), "three", "c")
    assert "c" not in store and not (tmp_path / "c.pt").exists()


def test_without_a_folder_voices_last_as_long_as_the_store() -> None:
    store = VoiceStore({}, None)
    store.add(voice(), "key", "Mia")
    folder = store._path("mia", ".pt").parent
    assert torch.equal(store.get("mia").mel, voice().mel) and folder.exists()
    del store
    assert not folder.exists()


def test_what_a_crash_left_half_done_is_cleared_away(store: VoiceStore, tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    for key in ("whole", "lost"):
        store.add(voice(key), "key", key)
    (folder / "lost.pt").unlink()
    (folder / "orphan.pt").write_bytes(b"its entry was removed first")
    (folder / "whole.draft").write_bytes(b"half of an entry")
    again = VoiceStore({}, folder)
    assert [info.id for info in again.infos()] == ["whole"]
    assert {path.name for path in folder.iterdir()} == {"whole.pt", "whole.json", "lost.json"}


def test_an_entry_that_cannot_be_read_names_its_file(store: VoiceStore, tmp_path: Path) -> None:
    store.add(voice(), "key", "Mia")
    (tmp_path / "voices" / "mia.json").write_text(json.dumps({"lang": "en", "size": 3}))
    with pytest.raises(VoiceFileError, match=r"mia\.json is no entry"):
        VoiceStore({}, tmp_path / "voices")


def test_only_its_owner_may_enter_the_folder(store: VoiceStore, tmp_path: Path) -> None:
    store.add(voice(), "key", "Mia")
    assert (tmp_path / "voices").stat().st_mode & 0o777 == 0o700


def test_threads_that_put_get_and_drop_the_same_voice_leave_a_whole_store(store: VoiceStore, tmp_path: Path) -> None:
    faults: list[BaseException] = []

    def work(owner: str) -> None:
        try:
            for _ in range(30):
                if not store.claim("mia", owner, owner):
                    store.add(dataclasses.replace(voice(), name=owner), owner, owner)
                assert torch.equal(store.get("mia").mel, voice().mel)
                assert store.drop("mia", owner)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(f"owner-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert "mia" not in store and list((tmp_path / "voices").iterdir()) == []


def test_an_unreadable_voice_is_as_good_as_gone_and_the_others_speak(store: VoiceStore, tmp_path: Path) -> None:
    for key in ("mia", "noa"):
        store.add(voice(key), "key", key)
    (tmp_path / "voices" / "mia.pt").write_bytes(b"half of")
    again = VoiceStore({}, tmp_path / "voices")
    assert again.in_memory("mia") is None
    with pytest.raises(KeyError):
        again.get("mia")
    assert torch.equal(again.get("noa").mel, voice("noa").mel)
    assert again.in_memory("noa") is not None


def test_a_look_at_memory_does_not_wait_for_the_disk(store: VoiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(voice("mia"), "key", "mia")
    begun, go_on = threading.Event(), threading.Event()

    def slow(path: Path, text: str, **_: str) -> int:
        begun.set()
        assert go_on.wait(10)
        return path.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", slow)
    writing = threading.Thread(target=store.claim, args=("mia", "other", "M."))
    writing.start()
    assert begun.wait(10)
    assert store.in_memory("mia") is not None and store.info("mia").owners == {"key": "mia"}
    go_on.set()
    writing.join()
    assert store.info("mia").owners == {"key": "mia", "other": "M."}


def test_what_cannot_be_written_changes_nothing(store: VoiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(voice("mia"), "one", "Mia")
    store.claim("mia", "two", "M.")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        store.drop("mia", "two")
    with pytest.raises(OSError, match="No space"):
        store.add(voice("noa"), "one", "Noa")
    assert store.info("mia").owners == {"one": "Mia", "two": "M."} and "noa" not in store
