from __future__ import annotations

from pathlib import Path

import pytest

from gateway.quarantine import MEMORY_S, Quarantine


class Door:
    """A folder's quarantine as one process sees it, with a clock that the test turns."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_000.0
        self.quarantine = Quarantine(folder / "suspects", lambda: self.now)
        self.culprit = self.quarantine.fingerprint("ada", None, None, "boom")

    def die(self, life: str, *fingerprints: str) -> None:
        self.quarantine.engine = life
        self.quarantine.strike(fingerprints or [self.culprit])

    @property
    def refuses(self) -> bool:
        return self.quarantine.is_refused(self.culprit)


def test_two_deaths_refuse_and_one_does_not(tmp_path: Path) -> None:
    door = Door(tmp_path)
    door.die("first")
    assert not door.refuses
    door.die("second")
    assert door.refuses


def test_one_death_is_one_strike_however_many_contexts_and_processes_said_it(tmp_path: Path) -> None:
    one, other = Door(tmp_path), Door(tmp_path)
    one.die("first", one.culprit, one.culprit)
    one.die("first")
    other.die("first")
    assert not one.refuses and not other.refuses


def test_what_one_process_has_seen_the_others_know(tmp_path: Path) -> None:
    one, other = Door(tmp_path), Door(tmp_path)
    one.die("first")
    other.die("second")
    assert one.refuses and other.refuses
    other.quarantine.clear(other.culprit)
    assert not one.refuses and not other.refuses


def test_what_is_spoken_to_its_end_is_cleared_and_time_forgets(tmp_path: Path) -> None:
    door = Door(tmp_path)
    innocent, old = door.quarantine.fingerprint("a"), door.quarantine.fingerprint("b")
    door.die("first", innocent, old)
    door.quarantine.clear(innocent)
    door.quarantine.clear(innocent)
    door.now += MEMORY_S + 1
    door.die("second", innocent, old)
    assert not door.quarantine.is_refused(innocent) and not door.quarantine.is_refused(old)
    door.die("third", innocent)
    assert door.quarantine.is_refused(innocent)
    door.now += MEMORY_S + 1
    assert not door.quarantine.is_refused(innocent)


def test_a_fingerprint_tells_texts_apart_and_gives_none_away(tmp_path: Path) -> None:
    door = Door(tmp_path)
    assert door.quarantine.fingerprint("ab", "c") != door.quarantine.fingerprint("a", "bc")
    assert door.quarantine.fingerprint("a", None) == door.quarantine.fingerprint("a", None)
    assert door.culprit != Door(tmp_path / "another").culprit
    door.die("first")
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "suspects", tmp_path / "suspects" / "secret"))


def test_where_nothing_can_be_written_nothing_is_remembered_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "suspects").write_text("a file where the folder should be")
    door = Door(tmp_path)
    for life in ("first", "second"):
        door.die(life)
    door.quarantine.clear(door.culprit)
    assert not door.refuses
    assert door.culprit == door.quarantine.fingerprint("ada", None, None, "boom")
    Quarantine(tmp_path / "new", lambda: 0.0).strike([])


def test_suspects_are_bounded_and_old_ones_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.quarantine.SUSPECTS", 4)
    door = Door(tmp_path)
    many = [door.quarantine.fingerprint(str(number)) for number in range(8)]
    for life in ("first", "second"):
        door.die(life, *many)
    assert sum(map(door.quarantine.is_refused, many)) == 3  # and the secret
    door.now += MEMORY_S + 1
    for life in ("third", "fourth"):
        door.die(life)
    assert door.refuses
