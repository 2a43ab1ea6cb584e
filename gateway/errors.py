"""What can go wrong between a caller and the gateway, and who acts on it.

GatewayError
|-- ConfigError          the operator's file or flags: say so and exit
|-- Denied               no entry: an HTTP status before the upgrade
|-- Violation            bytes that are not rill.v1: close the socket with `close_code`
|-- Refusal              a message that is well formed but can't be done: `error` on the wire, the socket lives
|-- EngineUnavailable    the pipe to the engine is down: callers try again
"""

from __future__ import annotations

from enum import IntEnum
from http import HTTPStatus


class Close(IntEnum):
    """WebSocket close codes that rill.v1 uses."""

    NORMAL = 1000
    GOING_AWAY = 1001
    TEXT_FRAME = 1003
    BAD_UTF8 = 1007
    TOO_LARGE = 1009
    INTERNAL = 1011
    RESTART = 1012
    TRY_LATER = 1013
    VIOLATION = 4400
    KEY_REVOKED = 4401
    IDLE = 4408
    RATE = 4429


FINAL_CODES = frozenset(
    {
        "bad_message",
        "bad_sequence",
        "unknown_context",
        "duplicate_context",
        "unknown_voice",
        "bad_voice",
        "unsupported",
        "bad_text",
        "text_too_long",
        "engine_error",
    }
)
RETRY_CODES = frozenset(
    {
        "context_limit",
        "quota",
        "overloaded",
        "queue_timeout",
        "engine_restart",
        "slow_client",
        "idle",
        "draining",
        "internal",
    }
)


class GatewayError(Exception):
    """Root of the gateway's own errors."""


class ConfigError(GatewayError):
    """The operator asked for something that can't be: the text names the value and the bound."""


class Denied(GatewayError):
    """A request is refused before the upgrade: `status`, and when to come back."""

    def __init__(self, status: HTTPStatus, why: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
        self.retry_after_s = retry_after_s


class Violation(GatewayError):
    """The peer broke the protocol; the connection ends with `close_code`."""

    def __init__(self, reason: str, close_code: Close = Close.VIOLATION) -> None:
        super().__init__(reason)
        self.close_code = close_code


class Refusal(GatewayError):
    """One message or one context is refused: `code` is one of the wire's error codes, `after_ms` a hint for retries."""

    def __init__(self, code: str, text: str, *, after_ms: int | None = None) -> None:
        assert code in FINAL_CODES | RETRY_CODES, f"{code} is not an error code of rill.v1"
        super().__init__(text)
        self.code = code
        self.text = text
        self.after_ms = after_ms

    @property
    def retry(self) -> bool:
        """True if the same request may succeed later."""
        return self.code in RETRY_CODES


class EngineUnavailable(GatewayError):
    """Nothing can be synthesised now: the engine is starting, restarting or gone."""
