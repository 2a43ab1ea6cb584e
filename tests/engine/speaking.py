"""An engine on a small random checkpoint, driven step by step from the test's own thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import torch

from engine import checkpoint as checkpoints
from engine.batch import Launched, Runner
from engine.config import EngineConfig
from engine.costs import Costs
from engine.frontend import Tokenizer
from engine.loop import Engine, LinkOpened, Reader, Said
from engine.messages import (
    Audio,
    Cancel,
    Cancelled,
    Clause,
    Credit,
    Done,
    End,
    Failed,
    Gauges,
    Open,
    SamplingChoice,
    ToEngine,
    ToGateway,
)
from engine.scheduler import Plan, Scheduler
from engine.server import limits, with_caches
from engine.voice_store import VoiceStore
from engine.voices import read_voices

LINK = 0
TERMINAL = (Done, Cancelled, Failed)


class AtOnce(Executor):
    """Work is done where it is submitted."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def never_waiting(launch: Callable[[Plan], Launched]) -> Callable[[Plan], Launched]:
    """The launch, which fails where it waits for the GPU."""

    def launched(plan: Plan) -> Launched:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return launched


class Speaking:
    """The engine and all that it said, by context."""

    def __init__(self, folder: Path, *, device: str = "cpu", **settings: Any) -> None:
        defaults = {"device": device, "dtype": "float32", "lanes": 12, "threads": 1, "talker_pages": 0, "flow_pages": 0}
        chosen = EngineConfig(**{**defaults, **settings}).resolved(has_cuda=device != "cpu")
        checkpoint = checkpoints.load(folder, device, getattr(torch, chosen.dtype))
        voices = read_voices(folder / "spk2info.pt")
        reader = Reader(
            Tokenizer(checkpoint.tokenizer_dir),
            VoiceStore(voices),
            worker=AtOnce(),
            sampling=checkpoint.settings.sampling,
            code_ratios=checkpoint.settings.code_ratios,
            default_voice=next(iter(voices)),
            clause_tokens=chosen.clause_tokens,
            can_stream=chosen.mode == "streaming",
            mix=checkpoint.settings.mix,
        )
        runner = Runner(
            with_caches(checkpoint, chosen),
            lanes=chosen.lanes,
            rows_per_launch=chosen.rows_per_launch,
            prompt_remainder=chosen.prompt_remainder,
            keeps_flow=chosen.flow_cache,
            is_final_causal=chosen.last_hop == "causal",
            overlaps=chosen.overlap,
        )
        self.said: defaultdict[int, list[ToGateway]] = defaultdict(list)
        self.gauges: list[Gauges] = []
        self.engine = Engine(
            runner,
            Scheduler(limits(chosen), Costs(checkpoint.flow.shape.steps)),
            reader,
            deliver=self._deliver,
            gauges_s=0.0,
        )
        self.runner = runner
        self.engine.inbox.put(LinkOpened(LINK))
        self.engine.step()

    def _deliver(self, outgoing: list[tuple[int, ToGateway]]) -> None:
        for link, message in outgoing:
            if link != LINK:
                continue
            if isinstance(message, Gauges):
                self.gauges.append(message)
            elif hasattr(message, "context"):
                self.said[message.context].append(message)

    def tell(self, *messages: ToEngine) -> None:
        self.engine.inbox.put(*(Said(LINK, message) for message in messages))

    def open(
        self,
        context: int,
        *texts: str,
        voice: str = "",
        seed: int = 1,
        end: bool = True,
        sampling: SamplingChoice | None = None,
        streaming: bool = True,
        instruct: str | None = None,
        lang: str | None = None,
    ) -> None:
        self.tell(
            Open(
                context=context,
                epoch=0,
                voice=voice,
                seed=seed,
                sampling=sampling,
                streaming=streaming,
                instruct=instruct,
                lang=lang,
            )
        )
        self.tell(*(Clause(context=context, epoch=0, index=i, text=text) for i, text in enumerate(texts)))
        if end:
            self.tell(End(context=context, epoch=0))

    def more(self, context: int, text: str, *, index: int, end: bool = True) -> None:
        """Another clause of an open context."""
        self.tell(Clause(context=context, epoch=0, index=index, text=text))
        if end:
            self.tell(End(context=context, epoch=0))

    def cancel(self, context: int) -> None:
        self.tell(Cancel(context=context, epoch=0))

    def credit(self, context: int, samples: int) -> None:
        self.tell(Credit(context=context, epoch=0, samples=samples))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()

    def until_audio(self, context: int, samples: int = 1, most: int = 5_000) -> None:
        for _ in range(most):
            if len(self.pcm(context)) // 4 >= samples:
                return
            self.engine.step()
        raise AssertionError(f"context {context} made {len(self.pcm(context)) // 4} samples in {most} steps")

    def finish(self, contexts: Iterable[int], most: int = 50_000) -> None:
        wanted = list(contexts)
        for _ in range(most):
            if all(self.end(context) is not None for context in wanted):
                return
            self.engine.step()
        raise AssertionError(f"not ended: {[context for context in wanted if self.end(context) is None]}")

    def speak(self, context: int, *texts: str, **settings: Any) -> bytes:
        self.open(context, *texts, **settings)
        self.finish([context])
        return self.pcm(context)

    def pcm(self, context: int) -> bytes:
        return b"".join(message.pcm for message in self.said[context] if isinstance(message, Audio))

    def end(self, context: int) -> ToGateway | None:
        return next((message for message in self.said[context] if isinstance(message, TERMINAL)), None)

    def assert_empty(self) -> None:
        """Nothing of any context is left on the device."""
        runner, scheduler = self.runner, self.engine.scheduler
        scheduler.check_integrity()
        runner.models.talker_store.pool.check_integrity()
        runner.models.flow_store.pool.check_integrity()
        assert (scheduler.lanes_used, scheduler.num_contexts) == (0, 0)
        assert (runner.talker_pages, runner.flow_pages, runner.hift_states) == (0, 0, 0)
        assert not list(runner.segments())
