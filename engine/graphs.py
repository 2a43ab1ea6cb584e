"""Capture and replay: a body over fixed buffers becomes one CUDA graph, or stays the plain function it is.

A body takes nothing, returns nothing, allocates nothing that outlives it, and never waits for the device; it reads and
writes buffers whose addresses never change. Capture the largest tier first: the smaller ones then fit into its memory.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

Body = Callable[[], None]


class CaptureAfterStart(Exception):
    """A shape that the warm-up left out was asked for in service: no request may pay for a capture."""


class Graphs:
    """The graphs of one stream. They share their scratch memory, so no two of one object may run at the same time:
    work on another stream needs an object of its own.

    stream      where the graphs will be replayed; kernels keep its priority. None: a stream made here
    is_enabled  False, or any device but CUDA: bodies are handed back as they are
    on_capture  called with each body's name before its capture, for a progress bar
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        stream: torch.cuda.Stream | None = None,
        is_enabled: bool = True,
        on_capture: Callable[[str], None] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.is_capturing = is_enabled and self.device.type == "cuda"
        self.names: list[str] = []
        self._on_capture = on_capture
        self._is_closed = False
        if self.device.type == "cuda":
            self.stream = stream or torch.cuda.Stream(self.device)
        if self.is_capturing:
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, name: str, body: Body) -> Body:
        """What runs the body from now on: a graph's replay on the current stream, or the body itself.

        On CUDA the body runs once here, so that what compiles lazily is compiled; let its inputs be harmless ones.
        Raises CaptureAfterStart once the graphs are closed.
        """
        if self._is_closed:
            raise CaptureAfterStart(f"{name} was not captured at the start; these were: {', '.join(self.names)}")
        if self._on_capture is not None:
            self._on_capture(name)
        self.names.append(name)
        body = torch.inference_mode()(body)
        if self.device.type != "cuda":
            return body
        started = time.perf_counter()
        self._run_once(body)
        run = self._captured(body) if self.is_capturing else body
        logger.debug("%s ready in %.2f s", name, time.perf_counter() - started)
        return run

    def close(self) -> None:
        """The start is over."""
        self._is_closed = True

    def _run_once(self, body: Body) -> None:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            body()
        current.wait_stream(self.stream)

    def _captured(self, body: Body) -> Body:
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls may break the capture: others go on loading voices meanwhile.
        with (
            garbage_kept(),
            torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            body()
        return graph.replay


@contextmanager
def garbage_kept() -> Iterator[None]:
    """A collection may free an old graph or its memory, which breaks a capture under way."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
