"""GET beside the WebSocket: the page's files, and what operators ask. Files are read once, at the start."""

from __future__ import annotations

import json
import mimetypes
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from websockets.datastructures import Headers
from websockets.http11 import Response

from gateway.errors import Denied

WEB: Final = Path(__file__).resolve().parent.parent / "web"
POLICY: Final = "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' data:; frame-ancestors 'none'"
_TYPES: Final = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".html": "text/html"}


class StaticFiles:
    """Every file below one folder, by its URL path; nothing else can be reached."""

    def __init__(self, folder: Path = WEB) -> None:
        paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        self._files = {f"/{path.relative_to(folder).as_posix()}": _file_response(path) for path in paths}
        if index := self._files.get("/index.html"):
            self._files["/"] = index

    def get(self, path: str) -> Response | None:
        found = self._files.get(path)
        return None if found is None else _copy(found)


def _file_response(path: Path) -> Response:
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    charset = "; charset=utf-8" if kind.startswith("text/") else ""
    return respond(HTTPStatus.OK, path.read_bytes(), kind + charset)


def _copy(response: Response) -> Response:
    """The server adds headers to what it sends, so each request gets its own."""
    return Response(response.status_code, response.reason_phrase, response.headers.copy(), response.body)


def respond(
    status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", cache: str = "no-cache"
) -> Response:
    headers = Headers(
        {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": cache,
            "Connection": "close",
        }
    )
    return Response(status.value, status.phrase, headers, body)


def respond_json(status: HTTPStatus, table: dict[str, Any]) -> Response:
    return respond(status, json.dumps(table).encode() + b"\n", "application/json", "no-store")


def refuse(denied: Denied) -> Response:
    """A refusal before the upgrade, in one line of text."""
    response = respond(denied.status, denied.why.encode() + b"\n")
    if denied.retry_after_s is not None:
        response.headers["Retry-After"] = str(denied.retry_after_s)
    match denied.status:
        case HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            response.headers["Allow"] = "GET"
        case HTTPStatus.UPGRADE_REQUIRED:
            response.headers["Upgrade"] = "websocket"
    return response
