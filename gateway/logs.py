"""Log lines with fields, as text or as JSON. Fields are ids, codes and sizes: no text, no audio, no key."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import time
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener
from typing import Final

TEXT: Final = "text"
WAITING: Final = 10_000


def event(logger: logging.Logger, words: str, *, level: int = logging.INFO, **fields: str | float | None) -> None:
    """One line: what happened, and to whom."""
    logger.log(level, words, extra={"fields": fields})


class Behind(QueueHandler):
    """Hands lines to a thread that writes them: whoever reads our standard error may stall, the loop must not.

    At most WAITING lines wait; what comes then is dropped and counted.
    """

    def __init__(self) -> None:
        super().__init__(queue.Queue(WAITING))
        self.num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # the thread formats it

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1


@contextlib.contextmanager
def writing(style: str) -> Iterator[None]:
    """All of this process's log to the standard error. websockets logs frames, so only its worst is let through."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextLines() if style == TEXT else JsonLines())
    behind = Behind()
    listener = QueueListener(behind.queue, handler)
    logging.basicConfig(level=logging.INFO, handlers=[behind], force=True)
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        if behind.num_dropped:
            handler.handle(
                logging.makeLogRecord({"levelno": logging.WARNING, "msg": f"{behind.num_dropped} lines lost"})
            )


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s gateway %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return " ".join([super().format(record), *(f"{name}={value}" for name, value in fields_of(record).items())])


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process or 0,
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def fields_of(record: logging.LogRecord) -> dict[str, str | float]:
    given: dict[str, str | float | None] = record.__dict__.get("fields", {})
    return {name: value for name, value in given.items() if value is not None}
