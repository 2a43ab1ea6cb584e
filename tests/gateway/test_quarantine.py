from __future__ import annotations

from gateway.quarantine import MEMORY_S, SUSPECTS, Quarantine


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_two_deaths_refuse_and_one_does_not() -> None:
    quarantine = Quarantine(Time())
    culprit = quarantine.fingerprint("ada", None, None, "boom")
    quarantine.strike([culprit], 1)
    assert not quarantine.is_refused(culprit)
    quarantine.strike([culprit], 2)
    assert quarantine.is_refused(culprit)


def test_one_death_is_one_strike_however_many_said_it() -> None:
    quarantine = Quarantine(Time())
    common = quarantine.fingerprint("ada", "Hello.")
    quarantine.strike([common, common], 1)
    quarantine.strike([common], 1)
    assert not quarantine.is_refused(common)


def test_what_is_spoken_to_its_end_is_cleared_and_time_forgets() -> None:
    time = Time()
    quarantine = Quarantine(time)
    innocent, old = quarantine.fingerprint("a"), quarantine.fingerprint("b")
    quarantine.strike([innocent, old], 1)
    quarantine.clear(innocent)
    time.now += MEMORY_S + 1
    quarantine.strike([innocent, old], 2)
    assert not quarantine.is_refused(innocent) and not quarantine.is_refused(old)


def test_a_fingerprint_tells_texts_apart_and_gives_none_away() -> None:
    quarantine = Quarantine(Time())
    assert quarantine.fingerprint("ab", "c") != quarantine.fingerprint("a", "bc")
    assert quarantine.fingerprint("a", None) == quarantine.fingerprint("a", None)
    assert quarantine.fingerprint("secret") != Quarantine(Time()).fingerprint("secret")


def test_suspects_are_bounded() -> None:
    quarantine = Quarantine(Time())
    many = [quarantine.fingerprint(str(number)) for number in range(SUSPECTS + 10)]
    for epoch in (1, 2):
        quarantine.strike(many, epoch)
    assert quarantine.is_refused(many[-1])
    assert sum(quarantine.is_refused(one) for one in many) <= SUSPECTS
