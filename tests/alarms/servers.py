"""Servers on loopback that alarms are sent to: one that answers, one that errors, one that never answers."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class AlarmServer:
    """Keeps what it is sent; answers with the next of `statuses`, the last of them from then on."""

    def __init__(self, *statuses: int) -> None:
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._statuses = list(statuses or (200,))
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.headers.append(dict(self.headers))
                server.received.append(json.loads(body, parse_constant=_no_constant))
                status = server._statuses.pop(0) if len(server._statuses) > 1 else server._statuses[0]
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/services/T0KEN-of-the-team"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def levels(self) -> list[str]:
        return [alarm["level"] for alarm in self.received]

    def __enter__(self) -> AlarmServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


class SilentServer:
    """Accepts connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0.05)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/services/T0KEN-of-the-team"
        self.connections: list[socket.socket] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept)

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                self.connections.append(self._socket.accept()[0])

    def __enter__(self) -> SilentServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for connection in self.connections:
            connection.close()
        self._socket.close()


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it holds within this time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def all_servers() -> Iterator[tuple[AlarmServer, AlarmServer, SilentServer]]:
    with AlarmServer() as fine, AlarmServer(500) as broken, SilentServer() as silent:
        yield fine, broken, silent
