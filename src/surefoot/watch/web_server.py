"""The server of `surefoot watch --web`: loopback only, a random token in the address, reads and never writes.

Every reader of the same run shares one `LiveRun` and the answers made from it, so that many pages cost little more
than one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from surefoot.watch import page_data
from surefoot.watch.find_runs import FoundRun, WatchTarget, find_runs
from surefoot.watch.live_run import LiveRun

_REFRESH_SECONDS = 0.5
"""A run is read at most this often, however many pages watch it."""
_LIST_SECONDS = 10.0
_MAX_OPEN_RUNS = 12
_MAX_CACHED = 64
_IDLE_SECONDS = 60.0
"""A connection without a request is closed after this."""
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
ASSETS = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page_numbers.js": ("page_numbers.js", "text/javascript; charset=utf-8"),
    "page_charts.js": ("page_charts.js", "text/javascript; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}


def read_asset(name: str) -> bytes:
    return (resources.files("surefoot.watch") / "assets" / name).read_bytes()


class WatchedRuns:
    """The runs that pages look at; each is read at most every half second. Safe for threads."""

    def __init__(self, target: WatchTarget) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._found: dict[str, FoundRun] = {}
        self._open: dict[str, tuple[LiveRun, float]] = {}
        self._answers: dict[tuple[Any, ...], bytes] = {}
        self._listed_at = time.monotonic()
        self._remember(target.runs)
        self.first = run_id(target.first)

    def _remember(self, runs: tuple[FoundRun, ...]) -> None:
        self._found |= {run_id(run): run for run in runs}

    def list_runs(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._listed_at > _LIST_SECONDS:
                self._remember(tuple(find_runs(self._target.folder)))
                self._listed_at = time.monotonic()
            runs = sorted(self._found.items(), key=lambda item: -item[1].changed)
            names = [{"id": key, "name": run.name_in(self._target.folder)[:300]} for key, run in runs]
            return {"first": self.first, "folder": str(self._target.folder), "runs": names}

    def answer(self, key: str, question: tuple[Any, ...], make: Callable[[LiveRun], Any]) -> tuple[bytes, str] | None:
        """The JSON and its tag; None for an unknown run. Answers to the same question are made once per change."""
        with self._lock:
            run = self._opened(key)
            if run is None:
                return None
            tag = (key, run.version, *question)
            if tag not in self._answers:
                if len(self._answers) >= _MAX_CACHED:
                    self._answers.clear()
                self._answers[tag] = json.dumps(make(run), allow_nan=False).encode("ascii")
            return self._answers[tag], hashlib.sha256(repr((tag, id(run))).encode()).hexdigest()[:24]

    def _opened(self, key: str) -> LiveRun | None:
        if key not in self._found:
            return None
        now = time.monotonic()
        if key not in self._open:
            if len(self._open) >= _MAX_OPEN_RUNS:
                del self._open[min(self._open, key=lambda other: self._open[other][1])]
            self._open[key] = (LiveRun(self._found[key].path), now)
        run, read_at = self._open[key]
        if now - read_at >= _REFRESH_SECONDS:
            run.refresh()
            self._open[key] = (run, time.monotonic())
        return run


def run_id(run: FoundRun) -> str:
    return hashlib.sha256(str(run.path).encode("utf-8", "surrogateescape")).hexdigest()[:16]


class WatchServer(ThreadingHTTPServer):
    """Serves one page for the runs of a folder; `url` holds the token."""

    daemon_threads = True

    def __init__(self, target: WatchTarget, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self.runs = WatchedRuns(target)
        super().__init__(("127.0.0.1", port), PageHandler)
        own_port = self.server_address[1]
        self.hosts = {f"127.0.0.1:{own_port}", f"localhost:{own_port}"}
        self.url = f"http://127.0.0.1:{own_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no error worth a traceback."""


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD below the token, and nothing else."""

    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    server_version, sys_version = "surefoot", ""

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if self.headers.get("Host") not in self.server.hosts:  # a name that an attacker has made point here
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, b"wrong host\n")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}:
            return self._send(HTTPStatus.FORBIDDEN, b"wrong origin\n")
        token, _, rest = path.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode("utf-8"), self.server.token.encode("ascii")):
            return self._send(HTTPStatus.NOT_FOUND, b"not found: use the address that surefoot watch printed\n")
        if rest in ASSETS:
            name, kind = ASSETS[rest]
            return self._send(HTTPStatus.OK, read_asset(name), kind)
        return self._data(rest, {key: values[-1] for key, values in parse_qs(path.query).items()})

    do_HEAD = do_GET

    def _data(self, rest: str, query: Mapping[str, str]) -> None:
        kind, _, key = rest.partition("/")
        if kind == "runs" and not key:
            return self._send(
                HTTPStatus.OK, json.dumps(self.server.runs.list_runs()).encode("ascii"), "application/json"
            )
        try:
            first, last, size = (int(query.get(name, default)) for name, default in _NUMBERS.items())
        except ValueError:
            return self._send(HTTPStatus.BAD_REQUEST, b"first, last and size are whole numbers\n")
        makers: dict[str, Callable[[LiveRun], Any]] = {
            "run": lambda run: page_data.summary(run, lines_after=first),
            "curves": lambda run: page_data.curves(run, first, last, size),
            "flow": lambda run: page_data.flow(run, first, last, size),
        }
        found = self.server.runs.answer(key, (kind, first, last, size), makers[kind]) if kind in makers else None
        if found is None:
            return self._send(HTTPStatus.NOT_FOUND, b"not found\n")
        body, tag = found
        if self.headers.get("If-None-Match") == f'"{tag}"':
            return self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", tag)
        return self._send(HTTPStatus.OK, body, "application/json", tag)

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", tag: str = "") -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache" if tag else "no-store")
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they hold the token."""


_NUMBERS = {"first": "0", "last": str(1 << 62), "size": "1000"}


def serve(target: WatchTarget, *, port: int = 0) -> int:
    """Serve until interrupted."""
    with WatchServer(target, port) as server:
        print(f"surefoot watch: {target.first.path}\n{server.url}", flush=True)
        print(
            "Open this address in a browser on this machine. From another one: "
            f"ssh -L {server.server_address[1]}:127.0.0.1:{server.server_address[1]} HOST. Ctrl+C stops.",
            file=sys.stderr,
        )
        try:
            server.serve_forever(poll_interval=0.25)
        except KeyboardInterrupt:
            return 0
    return 0
