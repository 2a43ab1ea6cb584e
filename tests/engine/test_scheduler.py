"""Lanes are never shared or lost, every context ends once, and the most urgent listener goes first.

The device here is a few counters: a part's text says how many tokens it will have.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import FLOW, Costs
from engine.messages import (
    SAMPLE_RATE_HZ,
    Audio,
    Cancel,
    Cancelled,
    Clause,
    ClauseDone,
    ClauseTaken,
    Credit,
    Done,
    End,
    Failed,
    Message,
    Open,
    Opened,
    ToEngine,
    ToGateway,
)
from engine.scheduler import (
    LOOKAHEAD_TOKENS,
    SAMPLES_PER_TOKEN,
    FlowRow,
    HiftRow,
    Lane,
    LaneFault,
    Lengths,
    Limits,
    Part,
    Plan,
    Room,
    Scheduler,
    TalkerRow,
)

ROWS = 8
Row = TypeVar("Row")
TERMINAL = (Done, Cancelled, Failed)


class Bench:
    """A scheduler, a clock that is turned by hand, and a device that counts.

    lag: steps until ids and samples have landed; meanwhile two launches of a stage may be under way, as on a GPU.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        prompt_tokens: int = 10,
        lag: int = 0,
        costs: Costs | None = None,
    ) -> None:
        self.scheduler = Scheduler(limits or Limits(lanes=2), costs)
        self.now = 0.0
        self.prompt_tokens = prompt_tokens
        self.lag, self.turn = lag, 0
        self.tick_s = 0.0  # by which the clock goes on in a step
        self.flights: deque[tuple[int, str, list[Callable[[], None]]]] = deque()  # when it lands, stage, what it tells
        self.ended: set[tuple[Lane, Part]] = set()  # talkers whose last id has landed
        self.said: list[tuple[int, ToGateway]] = []
        self.target: dict[tuple[Lane, Part], int] = {}
        self.made: Counter[tuple[Lane, Part]] = Counter()
        self.solved_upto: Counter[tuple[Lane, Part]] = Counter()
        self.steps: Counter[tuple[Lane, Part]] = Counter()
        self.staged: dict[tuple[Lane, Part], int] = {}
        self.mel_upto: dict[tuple[Lane, Part], int] = {}
        self.hops: list[tuple[Part, int, bool]] = []
        self.served: list[int] = []  # lane indices in the order in which they ran
        self.is_out_of_pages: Callable[[FlowRow], bool] = lambda row: False

    def take(self, *messages: ToEngine, link: int = 0) -> None:
        for message in messages:
            self.scheduler.take(link, message, self.now)

    def open(self, context: int, text: str | None = None, *, epoch: int = 0, link: int = 0, end: bool = True) -> None:
        self.take(Open(context=context, epoch=epoch, voice="", seed=1), link=link)
        if text is not None:
            self.take(Clause(context=context, epoch=epoch, index=0, text=text), link=link)
            if end:
                self.take(End(context=context, epoch=epoch), link=link)

    def prepare(self) -> None:
        """Text work: each word of a clause is a part with so many tokens."""
        todo, self.scheduler.preparations = self.scheduler.preparations, []
        for job in todo:
            counts = [int(word) for word in job.text.split()]
            if not self.scheduler.is_current(job.lane):
                continue
            for number, count in enumerate(counts):
                self.target[job.lane, Part(job.clause, number)] = count
            self.scheduler.prepared(job.lane, job.clause, [Lengths(ROWS, self.prompt_tokens) for _ in counts])

    def step(self) -> Plan:
        self.prepare()
        self.turn += 1
        self.now += self.tick_s
        self.land()
        plan = self.scheduler.plan(self.now, self.room)
        self.check(plan)
        self._launch("hift", plan.hift, self._sound)
        self._launch("flow", plan.flow, self._solve)
        self._launch("talker", plan.talker, self._talk)
        if not self.lag:
            self.land()
        self.prepare()
        self.collect()
        return plan

    @property
    def room(self) -> Room:
        stages = Counter(stage for _, stage, _ in self.flights)
        return Room(talker=stages["talker"] < 2, flow=stages["flow"] < 2, is_idle=not self.flights)

    def _launch(self, stage: str, rows: Iterable[Row], run: Callable[[Row], Callable[[], None] | None]) -> None:
        if told := [run(row) for row in rows]:
            self.flights.append((self.turn + self.lag, stage, [tell for tell in told if tell is not None]))

    def land(self) -> None:
        while self.flights and self.flights[0][0] <= self.turn:
            for tell in self.flights.popleft()[2]:
                tell()

    def _talk(self, row: TalkerRow) -> Callable[[], None] | None:
        where, upto = (row.lane, row.part), row.start + row.rows
        self.scheduler.fed(row, upto)
        if upto < ROWS:
            return None
        self.made[where] += 1
        made, target = self.made[where], self.target[where]
        assert made <= target + 2, "one id beyond the stop may be under way"
        return partial(self._tell_ids, row, min(made, target), made > target)  # the stop token is made, but not kept

    def _tell_ids(self, row: TalkerRow, tokens: int, is_end: bool) -> None:
        where = (row.lane, row.part)
        if self.scheduler.is_current(row.lane) and where not in self.ended:
            if is_end:
                self.ended.add(where)
            self.scheduler.talked(row, tokens, is_end=is_end)

    def _solve(self, row: FlowRow) -> None:
        where = (row.lane, row.part)
        if self.is_out_of_pages(row):
            self.scheduler.blocked(row)
            return
        if row.is_new_hop:
            assert self.steps[where] == 0, "a hop began inside another"
            self.hops.append((row.part, row.upto, row.is_final))
            self.staged[where] = row.upto
        self.steps[where] += 1
        has_mel = self.steps[where] == self.scheduler.costs.euler_steps
        if has_mel:
            self.steps[where] = 0
            self.mel_upto[where] = self.staged[where] - LOOKAHEAD_TOKENS
        self.scheduler.solved(row, has_mel=has_mel)

    def _sound(self, row: HiftRow) -> Callable[[], None]:
        lane, part = row.lane, row.part
        upto = self.target[lane, part] if row.is_final else self.mel_upto[lane, part]
        new = upto - self.solved_upto[lane, part]
        self.solved_upto[lane, part] = upto
        self.scheduler.voiced(row, SAMPLES_PER_TOKEN * new)
        return partial(self._tell_samples, row, bytes(4 * SAMPLES_PER_TOKEN * new))

    def _tell_samples(self, row: HiftRow, pcm: bytes) -> None:
        if self.scheduler.is_current(row.lane):
            self.scheduler.sounded(row, pcm, self.now)

    def hops_of(self, part: Part) -> list[int]:
        return [upto for whose, upto, _ in self.hops if whose == part]

    def collect(self) -> None:
        self.scheduler.freed.clear()
        self.said += self.scheduler.outgoing
        self.scheduler.outgoing.clear()

    def check(self, plan: Plan) -> None:
        self.scheduler.check_integrity()
        for rows in (plan.talker, plan.flow, plan.hift):
            lanes = [row.lane for row in rows]
            assert len({lane.index for lane in lanes}) == len(lanes), "a lane runs twice in one launch"
            assert all(self.scheduler.is_current(lane) for lane in lanes), "a lane without a tenant runs"
        self.served += [row.lane.index for row in (*plan.hift, *plan.flow, *plan.talker)]

    def run(self, steps: int = 10_000) -> int:
        """Steps until nothing is left to do."""
        for count in range(steps):
            if self.step().is_empty and not self.flights:
                return count
        raise AssertionError("the scheduler never comes to rest")

    def run_until(self, is_it: Callable[[], bool], steps: int = 10_000) -> Plan:
        """-> the last plan."""
        for _ in range(steps):
            plan = self.step()
            if is_it():
                return plan
        raise AssertionError("it never comes to that")

    def heard(self, context: int = 1, link: int = 0) -> list[Message]:
        return [m for whose, m in self.said if whose == link and getattr(m, "context", None) == context]

    def kinds(self, context: int = 1) -> list[type]:
        return [type(m) for m in self.heard(context)]

    def samples(self, context: int = 1) -> int:
        return sum(len(m.pcm) // 4 for m in self.heard(context) if isinstance(m, Audio))


def cancel(context: int, epoch: int = 0) -> Cancel:
    return Cancel(context=context, epoch=epoch)


# One context


def test_a_context_is_opened_taken_heard_and_done_in_order() -> None:
    bench = Bench()
    bench.open(1, "60")
    bench.run()
    assert bench.kinds() == [Opened, ClauseTaken, Audio, Audio, Audio, ClauseDone, Done]
    assert bench.samples() == 60 * SAMPLES_PER_TOKEN
    done = bench.heard()[-1]
    assert isinstance(done, Done)
    assert done.samples == 60 * SAMPLES_PER_TOKEN
    assert done.stats["tokens"] == 60
    assert bench.scheduler.lanes_used == 0


@pytest.mark.parametrize(("prompt", "first"), [(0, 25), (10, 15), (24, 1), (25, 25), (49, 1)])
def test_the_first_hop_ends_at_the_chunk_boundary_after_the_prompt(prompt: int, first: int) -> None:
    bench = Bench(prompt_tokens=prompt)
    bench.open(1, "80")
    bench.run()
    assert bench.hops_of(Part(0, 0))[:2] == [first + 3, first + 28]
    assert bench.hops[-1] == (Part(0, 0), 80, True)


@pytest.mark.parametrize("tokens", [1, 17, 18, 19, 42, 43, 44])
def test_hops_do_not_depend_on_how_far_the_talker_got_meanwhile(tokens: int) -> None:
    hops = []
    for is_serial, lag in ((True, 0), (False, 0), (False, 1), (False, 5)):
        bench = Bench(Limits(lanes=2, is_serial=is_serial), lag=lag)
        bench.open(1, str(tokens))
        bench.run()
        hops.append(bench.hops)
    assert hops[0] == hops[1] == hops[2] == hops[3]


def test_a_long_prompt_is_fed_in_pieces() -> None:
    bench = Bench(Limits(lanes=1, prefill_rows=3))
    bench.open(1, "5")
    fed = [(row.start, row.rows) for _ in range(4) for row in bench.step().talker]
    assert fed == [(0, 3), (3, 3), (6, 2), (8, 1)]
    bench.run()
    assert bench.kinds().count(ClauseTaken) == 1


def test_text_with_nothing_to_say_is_done_with_no_samples() -> None:
    bench = Bench()
    bench.open(1, "")
    bench.run()
    assert bench.kinds() == [Opened, ClauseTaken, ClauseDone, Done]
    assert bench.samples() == 0


def test_a_talker_that_stops_at_once_gives_no_audio_and_no_flow() -> None:
    bench = Bench()
    bench.open(1, "0")
    bench.run()
    assert bench.kinds() == [Opened, ClauseTaken, ClauseDone, Done]
    assert bench.hops == []


def test_the_parts_of_a_clause_end_in_one_clause_done() -> None:
    bench = Bench()
    bench.open(1, "5 7 9", end=False)
    bench.take(Clause(context=1, epoch=0, index=1, text="3"), End(context=1, epoch=0))
    bench.run()
    assert [m.samples // SAMPLES_PER_TOKEN for m in bench.heard() if isinstance(m, ClauseDone)] == [21, 24]
    assert bench.samples() == 24 * SAMPLES_PER_TOKEN


def test_the_next_talker_starts_while_the_last_clause_is_still_solved() -> None:
    bench = Bench(Limits(lanes=1))
    bench.open(1, "20", end=False)
    bench.take(Clause(context=1, epoch=0, index=1, text="20"))
    plans = [bench.step() for _ in range(40)]
    assert any(plan.talker and plan.flow and plan.talker[0].part.clause > plan.flow[0].part.clause for plan in plans)


def test_a_clause_out_of_order_ends_its_context() -> None:
    bench = Bench()
    bench.open(1)
    bench.take(Clause(context=1, epoch=0, index=1, text="5"))
    bench.run()
    assert bench.kinds() == [Opened, Failed]


def test_full_response_solves_a_part_in_one_go_after_the_talker() -> None:
    bench = Bench()
    bench.take(Open(context=1, epoch=0, voice="", seed=1, streaming=False))
    bench.take(Clause(context=1, epoch=0, index=0, text="90"), End(context=1, epoch=0))
    bench.run()
    assert bench.hops == [(Part(0, 0), 90, True)]
    assert bench.samples() == 90 * SAMPLES_PER_TOKEN


# Ends


def test_cancel_frees_the_lane_at_once_and_nothing_follows_it() -> None:
    bench = Bench()
    bench.open(1, "200")
    for _ in range(60):
        bench.step()
    assert bench.samples() > 0
    bench.take(cancel(1))
    assert bench.scheduler.lanes_used == 0
    assert len(bench.scheduler.freed) == 1
    bench.run()
    assert bench.kinds().count(Cancelled) == 1
    assert bench.kinds()[-1] is Cancelled


def test_cancel_is_answered_before_open_and_after_the_end() -> None:
    bench = Bench()
    bench.take(cancel(1))
    bench.open(1, "5", epoch=1)
    bench.run()
    bench.take(cancel(1, epoch=1))
    bench.collect()
    assert bench.kinds() == [Cancelled, Opened, ClauseTaken, Audio, ClauseDone, Done, Cancelled]


def test_a_late_result_finds_no_tenant() -> None:
    bench = Bench(Limits(lanes=1))
    bench.open(1, "50")
    bench.step()
    lane = bench.scheduler._lane(bench.scheduler._tenants[0])  # type: ignore[arg-type]
    bench.take(cancel(1))
    bench.open(2, "50")
    bench.step()
    assert not bench.scheduler.is_current(lane)
    assert not bench.scheduler.prepared(lane, 0, [Lengths(ROWS, 0)])
    bench.scheduler.failed(lane, LaneFault("late"))
    bench.run()
    assert bench.kinds(2)[-1] is Done


def test_a_late_message_of_an_old_epoch_changes_nothing() -> None:
    bench = Bench()
    bench.open(1, "5", epoch=1)
    bench.take(Clause(context=1, epoch=0, index=0, text="9"), End(context=1, epoch=0))
    bench.run()
    assert bench.samples() == 5 * SAMPLES_PER_TOKEN


def test_a_fault_ends_its_own_context_only() -> None:
    bench = Bench()
    bench.open(1, "50")
    bench.open(2, "50")
    plan = bench.step()
    bench.scheduler.failed(plan.talker[0].lane, LaneFault("NaN in the logits"))
    bench.run()
    assert sorted(bench.kinds(context)[-1].__name__ for context in (1, 2)) == ["Done", "Failed"]


def test_a_closed_link_takes_its_contexts_along_without_a_word() -> None:
    bench = Bench()
    bench.open(1, "50", link=1)
    bench.open(1, "50", link=2)
    bench.step()
    bench.scheduler.close_link(1)
    bench.run()
    assert not [m for link, m in bench.said if link == 1 and isinstance(m, TERMINAL)]
    assert isinstance(bench.heard(link=2)[-1], Done)


# Queue


def test_the_queue_is_bounded_and_the_next_is_refused_with_a_retry() -> None:
    bench = Bench(Limits(lanes=1, waiting=1))
    for context in (1, 2, 3):
        bench.open(context, "5")
    bench.collect()
    failed = bench.heard(3)[0]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retry) == ("overloaded", True)
    assert failed.after_ms
    bench.run()
    assert [bench.kinds(context)[-1] for context in (1, 2)] == [Done, Done]


def test_who_waits_is_seated_at_the_moment_a_lane_comes_free() -> None:
    bench = Bench(Limits(lanes=1))
    bench.open(1, "50")
    bench.open(2, "50")
    bench.open(3)
    bench.take(End(context=3, epoch=0))  # nothing to say: it holds a lane for no time at all
    bench.step()
    bench.take(cancel(1))
    assert bench.scheduler.lanes_used == 1
    bench.scheduler.check_integrity()
    bench.run()
    assert [bench.kinds(context)[0] for context in (2, 3)] == [Opened, Opened]
    assert [bench.kinds(context)[-1] for context in (1, 2, 3)] == [Cancelled, Done, Done]


def test_who_waits_too_long_is_told_so() -> None:
    bench = Bench(Limits(lanes=1, waiting=1, waiting_s=10.0))
    bench.open(1)
    bench.open(2, "5")
    bench.now = 10.5
    bench.step()
    failed = bench.heard(2)[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "queue_timeout"


# Urgency and credit


def test_the_listener_who_runs_dry_first_goes_first() -> None:
    bench = Bench(Limits(lanes=2, is_serial=True))
    bench.open(1, "400")
    while bench.samples(1) < 2 * SAMPLE_RATE_HZ:
        bench.step()
    bench.now = 0.5
    bench.open(2, "400")  # due now; the first is dry in 1.5 s
    bench.served.clear()
    while not bench.samples(2):
        bench.step()
    assert set(bench.served) == {1}


def test_a_lane_far_ahead_is_served_again_in_the_end() -> None:
    bench = Bench(Limits(lanes=2, is_serial=True, ageing_s=3.0))
    bench.open(1, "2000")
    while bench.samples(1) < 60 * SAMPLE_RATE_HZ:
        bench.step()
    before = bench.samples(1)
    bench.open(2, "2000")
    for _ in range(800):
        bench.now += 0.1  # slower than real time: the second is always due
        bench.step()
    assert bench.samples(1) > before


def test_a_context_that_used_its_credit_rests_until_it_gets_more() -> None:
    bench = Bench(Limits(lanes=1, lookahead_samples=SAMPLE_RATE_HZ))
    bench.open(1, "500")
    bench.take(Credit(context=1, epoch=0, samples=SAMPLE_RATE_HZ))
    bench.run()
    hop = 25 * SAMPLES_PER_TOKEN
    assert SAMPLE_RATE_HZ <= bench.samples() < SAMPLE_RATE_HZ + hop
    tokens = max(bench.made.values())
    assert tokens * SAMPLES_PER_TOKEN <= 2 * SAMPLE_RATE_HZ + hop  # credit, look-ahead and less than a hop
    bench.take(Credit(context=1, epoch=0, samples=100))  # never shrinks
    assert bench.step().is_empty
    bench.take(Credit(context=1, epoch=0, samples=10**9))
    bench.run()
    assert bench.kinds()[-1] is Done
    assert bench.samples() == 500 * SAMPLES_PER_TOKEN


# Pages


def test_a_row_without_pages_waits_for_some_and_goes_on() -> None:
    bench = Bench(Limits(lanes=2))
    bench.is_out_of_pages = lambda row: row.lane.index == 1 and bench.scheduler.lanes_used == 2
    bench.open(1, "80")
    bench.open(2, "80")
    bench.run()
    assert bench.kinds(1)[-1] is bench.kinds(2)[-1] is Done


def test_when_nobody_can_go_on_for_lack_of_pages_one_is_refused() -> None:
    bench = Bench(Limits(lanes=2))
    bench.is_out_of_pages = lambda row: bench.scheduler.lanes_used == 2
    bench.open(1, "80")
    bench.open(2, "80")
    bench.run()
    assert sorted(bench.kinds(context)[-1].__name__ for context in (1, 2)) == ["Done", "Failed"]


def one_rests_and_one_lacks_pages() -> Bench:
    bench = Bench(Limits(lanes=2, waiting_s=5.0))
    bench.is_out_of_pages = lambda row: row.lane.index == 1 and bench.scheduler.lanes_used == 2
    bench.open(1, "80")
    bench.take(Credit(context=1, epoch=0, samples=1))
    bench.open(2, "80")
    for _ in range(200):
        bench.step()
    assert Failed not in bench.kinds(1) + bench.kinds(2), "the first only rests on its credit"
    return bench


def test_who_lacks_pages_waits_for_those_who_only_rest() -> None:
    bench = one_rests_and_one_lacks_pages()
    bench.take(Credit(context=1, epoch=0, samples=10**9))
    bench.run()
    assert bench.kinds(1)[-1] is bench.kinds(2)[-1] is Done


def test_who_lacks_pages_does_not_wait_for_those_who_rest_forever() -> None:
    bench = one_rests_and_one_lacks_pages()
    bench.now += 6.0
    bench.step()
    assert bench.kinds(2)[-1] is Failed and Failed not in bench.kinds(1)


# Any order of anything

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "clause", "clause", "end", "cancel", "credit", "close", "fault", "step", "step", "late"]
        ),
        st.integers(0, 5),
        st.integers(0, 60),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=150)
@given(ACTIONS, st.integers(1, 3), st.integers(0, 3), st.booleans(), st.integers(0, 4))
def test_no_order_of_events_loses_a_lane_or_a_terminal(
    actions: list[tuple[str, int, int]], lanes: int, waiting: int, is_serial: bool, lag: int
) -> None:
    bench = Bench(Limits(lanes=lanes, waiting=waiting, is_serial=is_serial), lag=lag)
    epoch, clauses = Counter[int](), Counter[tuple[int, int]]()
    accepted: set[tuple[int, int, int]] = set()
    closed: set[int] = set()
    for what, context, number in actions:
        link, now = context % 2, (context, epoch[context])
        if link in closed and what not in ("step", "late"):
            continue
        match what:
            case "open":
                epoch[context] += 1
                bench.open(context, epoch=epoch[context], link=link)
                accepted.add((link, context, epoch[context]))
            case "clause":
                message = Clause(context=context, epoch=now[1], index=clauses[now], text=str(number))
                bench.take(message, link=link)
                clauses[now] += 1
            case "end":
                bench.take(End(context=context, epoch=now[1]), link=link)
            case "cancel":
                if (link, *now) in accepted:
                    bench.take(cancel(*now), link=link)
            case "credit":
                bench.take(Credit(context=context, epoch=now[1], samples=number * 4_800), link=link)
            case "close":
                closed.add(link)
                bench.scheduler.close_link(link)
            case "fault":
                bench.scheduler.failed(Lane(context % lanes, number), LaneFault("broken"))
            case "late":
                bench.now += number
            case "step":
                for _ in range(number):
                    bench.step()
        bench.scheduler.check_integrity()
    living = {(c.key.link, c.key.context, c.key.epoch) for c in bench.scheduler._contexts.values()}
    for link, context, number in living:
        bench.take(Credit(context=context, epoch=number, samples=10**9), link=link)
        bench.take(End(context=context, epoch=number), link=link)
    bench.run()
    bench.now += 100
    bench.run()
    assert bench.scheduler.lanes_used == bench.scheduler.num_contexts == bench.scheduler.num_waiting == 0
    ends = Counter((link, m.context, m.epoch) for link, m in bench.said if isinstance(m, (Done, Failed)))
    cancels = Counter((link, m.context, m.epoch) for link, m in bench.said if isinstance(m, Cancelled))
    for who in accepted:
        if who[0] not in closed:
            assert ends[who] + min(1, cancels[who]) >= 1, f"{who} has no terminal"
        assert ends[who] <= 1
        if cancels[who] == 0 or ends[who] == 0:
            continue
        own = [type(m) for link, m in bench.said if (link, getattr(m, "context", 0), getattr(m, "epoch", 0)) == who]
        first = next(kind for kind in own if kind in TERMINAL)
        assert all(kind is Cancelled for kind in own[own.index(first) + 1 :]), "something followed the terminal"


def test_a_plan_over_sixteen_lanes_takes_well_under_a_millisecond() -> None:
    from time import perf_counter

    bench = Bench(Limits(lanes=16, is_serial=True))
    for context in range(16):
        bench.open(context, "100")
    bench.step()
    start = perf_counter()
    for _ in range(100):
        bench.scheduler.plan(0.0)
    assert (perf_counter() - start) / 100 < 1e-3


# Launches that fit the time there is


def test_a_launch_grows_with_the_slack_of_its_most_urgent_row() -> None:
    costs = Costs()
    for rows in (2, 4, 8):
        costs.add(FLOW, rows, 1e-3 * rows)
    bench = Bench(Limits(lanes=8, flow_rows=8, flow_rows_least=2), costs=costs)
    for context in range(8):
        bench.open(context, "400")
    sizes = []
    while not any(bench.samples(context) for context in range(8)):
        sizes.append(len(bench.step().flow))
    assert max(sizes) == 2  # they are all due now
    bench.run_until(lambda: all(bench.samples(context) > 2 * SAMPLE_RATE_HZ for context in range(8)))
    assert max(len(bench.step().flow) for _ in range(100)) > 4  # two seconds are time for ten steps of any size


@pytest.mark.parametrize("steps", [1, 4])
def test_a_hop_takes_as_many_launches_as_the_flow_has_steps(steps: int) -> None:
    bench = Bench(Limits(lanes=1), costs=Costs(steps))
    bench.open(1, "60")
    launched = 0
    while bench.samples(1) < 60 * SAMPLES_PER_TOKEN:
        launched += len(bench.step().flow)
    assert launched == steps * len(bench.hops) > 2 * steps


def test_rows_far_ahead_rest_too_but_fill_up_a_small_launch() -> None:
    bench = Bench(Limits(lanes=6, fill_rows=4))
    for context in range(5):
        bench.open(context, "4000")
    bench.run_until(lambda: all(bench.samples(context) > 9 * SAMPLE_RATE_HZ for context in range(5)))
    bench.open(5, "400")
    sizes = []
    while not bench.samples(5):
        plan = bench.step()
        sizes.append(len(plan.flow))
        assert len(plan.flow) <= 4
        assert not any(row.lane.index == 5 for row in plan.flow[1:])  # the newcomer goes first
    assert max(sizes) == 4


def test_a_launch_is_filled_up_further_the_more_lanes_are_taken() -> None:
    """Else those who rest would keep their lanes and pages for as long as newcomers come."""
    for lanes, filled in ((8, 2), (16, 4), (33, 8)):
        bench = Bench(Limits(lanes=lanes, fill_rows=2, fill_share=0.3))
        for context in range(1, lanes):
            bench.open(context, "4000")
        while any(bench.samples(context) < 9 * SAMPLE_RATE_HZ for context in range(1, lanes)):
            bench.step()
        bench.open(0, "400")
        sizes = []
        while not bench.samples(0):
            sizes.append(len(bench.step().flow))
        assert max(sizes) == filled


def test_what_nobody_needs_soon_gathers_and_what_somebody_needs_goes_at_once() -> None:
    bench = Bench(Limits(lanes=4, gather_s=0.01))
    bench.tick_s = 0.02
    bench.open(1, "4000")
    bench.run_until(lambda: bench.samples(1) > 10 * SAMPLE_RATE_HZ)
    bench.tick_s = 0.004
    assert [bool(bench.step().talker) for _ in range(9)].count(True) == 3
    bench.tick_s = 0.0
    assert not bench.step().talker
    bench.open(2, "400")
    assert [len(bench.step().talker) for _ in range(3)] == [2, 2, 2]


def test_mels_of_listeners_far_ahead_share_a_call_of_the_vocoder() -> None:
    """As many as fill a launch, or as there are when one is needed soon or the device has nothing else to do."""
    bench = Bench(Limits(lanes=8, fill_rows=4, gather_s=1e-9), lag=3)
    for context in range(8):
        bench.open(context, "4000")
        bench.step()
    bench.tick_s = 1e-3
    bench.run_until(lambda: all(bench.samples(context) > 5 * SAMPLE_RATE_HZ for context in range(8)))
    sizes = []
    for _ in range(200):
        is_idle = bench.room.is_idle
        plan = bench.step()
        if plan.hift and not is_idle:
            sizes.append(len(plan.hift))
    assert sizes and min(sizes) >= 4


def test_talkers_far_ahead_rest_while_somebody_is_nearly_dry() -> None:
    bench = Bench(Limits(lanes=2, flow_rows_least=1, flow_rows=1, fill_rows=0))
    bench.open(1, "4000")
    bench.run_until(lambda: bench.samples(1) > 10 * SAMPLE_RATE_HZ)
    assert bench.step().talker  # alone it goes on
    bench.open(2, "400")
    while len(bench.step().talker) < 2:
        pass
    first = [len(bench.step().talker) for _ in range(20)]
    assert first == sorted(first, reverse=True)  # until there is enough for the next hop
    while not bench.samples(2):
        assert [row.lane.index for row in bench.step().talker] in ([1], [])
    bench.run_until(lambda: bench.samples(2) > 3 * SAMPLE_RATE_HZ)
    assert {row.lane.index for row in bench.step().talker} == {0, 1}


def test_the_prompts_of_a_burst_share_out_the_rows_of_a_step() -> None:
    bench = Bench(Limits(lanes=8, prefill_rows=3 * ROWS + 2))
    for context in range(8):
        bench.open(context, "30")
    fed = [sum(row.rows for row in bench.step().talker if row.is_prompt) for _ in range(4)]
    assert fed == [3 * ROWS + 2, 3 * ROWS + 2, 8 * ROWS - 2 * (3 * ROWS + 2), 0]


def test_a_burst_goes_in_groups_as_large_as_the_flow_takes_at_once() -> None:
    bench = Bench(Limits(lanes=8, flow_rows_least=3), lag=1)
    for context in range(7):
        bench.open(context, "30")
    begun: list[int] = []
    while len(begun) < 7:
        made = list(bench.made.values())
        prompts = [row.lane.index for row in bench.step().talker if row.is_prompt]
        assert not prompts or min(made, default=18) >= 18, "the group before isn't through"  # 15 tokens and 3 ahead
        assert len(prompts) in (0, 1, 3)
        begun += prompts
    assert begun == sorted(begun)
    bench.run()
    assert all(bench.kinds(context)[-1] is Done for context in range(7))


@pytest.mark.parametrize(("overlaps", "begun"), [(True, 2), (False, 5)])
def test_a_burst_goes_in_groups_only_if_the_flow_runs_beside_the_talker(overlaps: bool, begun: int) -> None:
    bench = Bench(Limits(lanes=8, flow_rows_least=2, overlaps=overlaps))
    for context in range(5):
        bench.open(context, "30")
    assert len(bench.step().talker) == begun


def test_who_comes_after_all_lanes_were_begun_waits_for_no_group_where_launches_take_turns() -> None:
    bench = Bench(Limits(lanes=2, overlaps=False), lag=1)
    for context in (1, 2):
        bench.open(context, "30")
        bench.step()
    bench.take(Cancel(context=1, epoch=0))
    bench.open(3, "30")
    begun = [row.lane.index for _ in range(3) for row in bench.step().talker if row.is_prompt]
    assert begun, "context 2 has not had its first hop, and context 3 is kept waiting for it"


def test_who_is_heard_already_does_not_wait_for_a_group_of_newcomers() -> None:
    bench = Bench(Limits(lanes=8, flow_rows_least=1))
    bench.open(1, "30", end=False)
    bench.run_until(lambda: bench.samples(1) > 0)
    bench.open(2, "30")
    bench.open(3, "30")
    bench.take(Clause(context=1, epoch=0, index=1, text="30"), End(context=1, epoch=0))
    begun = [row.lane.index for _ in range(40) for row in bench.step().talker if row.is_prompt]
    assert begun == [1, 0, 2]


def test_full_responses_gather_and_go_one_by_one_beside_streams() -> None:
    bench = Bench(Limits(lanes=4))
    for context in range(3):
        bench.take(Open(context=context, epoch=0, voice="", seed=1, streaming=False))
        bench.take(Clause(context=context, epoch=0, index=0, text="30"), End(context=context, epoch=0))
    plan = bench.run_until(lambda: bool(bench.hops))
    assert [row.part for row in plan.flow] == [Part(0, 0)] * 3
    bench = Bench(Limits(lanes=4))
    bench.open(9, "400")
    for context in range(3):
        bench.take(Open(context=context, epoch=0, voice="", seed=1, streaming=False))
        bench.take(Clause(context=context, epoch=0, index=0, text="30"), End(context=context, epoch=0))
    most = 0
    while any(Done not in bench.kinds(context) for context in range(3)):
        most = max(most, sum(row.lane.index > 0 for row in bench.step().flow))
    assert most == 1


# Admission


def playing(milliseconds: float, *, share: float = 0.9, lanes: int = 8, waiting: int = 1) -> Bench:
    """A device on which a listener's second takes so long."""
    costs = Costs()
    costs.add(FLOW, 1, milliseconds / 10e3)
    return Bench(Limits(lanes=lanes, waiting=waiting, share=share, flow_rows=1, flow_rows_least=1), costs=costs)


def test_no_more_are_seated_than_can_be_played_and_the_rest_hears_when_to_come_back() -> None:
    bench = playing(milliseconds=300)
    bench.scheduler.admit()
    assert bench.scheduler.places == 3
    for context in range(5):
        bench.open(context, "100")
    bench.collect()
    assert bench.scheduler.lanes_used == 3
    failed = bench.heard(4)[0]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retry) == ("overloaded", True)
    assert "all 3 places" in failed.message
    bench.run()
    assert [bench.kinds(context)[-1] for context in range(4)] == [Done] * 4


def test_a_device_that_slows_down_keeps_whom_it_has_and_takes_no_more() -> None:
    bench = playing(milliseconds=100)
    bench.scheduler.admit()
    for context in range(5):
        bench.open(context, "100")
    for _ in range(50):
        bench.scheduler.costs.add(FLOW, 1, 0.05)
    bench.scheduler.admit()
    assert (bench.scheduler.places, bench.scheduler.lanes_used) == (1, 5)
    bench.open(5, "100")
    assert bench.scheduler.num_waiting == 1
    bench.scheduler.check_integrity()
    bench.run()
    assert [bench.kinds(context)[-1] for context in range(6)] == [Done] * 6


def test_a_faster_device_seats_who_waits_at_once() -> None:
    bench = playing(milliseconds=800)
    bench.scheduler.admit()
    bench.open(1, "100")
    bench.open(2, "100")
    assert bench.scheduler.num_waiting == 1
    for _ in range(50):
        bench.scheduler.costs.add(FLOW, 1, 0.01)
    bench.scheduler.admit()
    assert bench.scheduler.num_waiting == 0


def test_the_time_to_come_back_follows_the_pace_at_which_contexts_end() -> None:
    bench = Bench(Limits(lanes=1, waiting=2))
    for context in range(12):
        bench.now += 4.0
        bench.open(context, "5")
        bench.run()
    for context in range(20, 24):
        bench.open(context, "5")
    bench.collect()
    failed = bench.heard(23)[0]
    assert isinstance(failed, Failed)
    assert failed.after_ms is not None
    assert 11_000 < failed.after_ms < 13_000  # two wait already, and one ends every four seconds
