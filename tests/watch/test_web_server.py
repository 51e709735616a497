"""The server behind the page: what it answers, and what it refuses."""

from __future__ import annotations

import base64
import http.client
import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.journal import Journal
from surefoot.records import Note
from surefoot.watch import web_server
from surefoot.watch.find_runs import choose_target
from surefoot.watch.web_server import WatchServer

from .conftest import append_rows

MakeRun = Callable[..., Path]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, folder: Path) -> None:
        self.server = WatchServer(choose_target(folder))
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = urlsplit(self.server.url)

    def get(self, path: str, *, method: str = "GET", token: bool = True, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=30)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, (self.url.path if token else "/") + path, headers=headers)
        answer = connection.getresponse()
        found = Answer(answer.status, dict(answer.getheaders()), answer.read())
        connection.close()
        return found

    def run_path(self, kind: str = "run") -> str:
        return f"{kind}/{self.get('runs').json['first']}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Client]]:
    monkeypatch.setattr(web_server, "_REFRESH_SECONDS", 0.0)
    clients: list[Client] = []

    def start(folder: Path) -> Client:
        clients.append(Client(folder))
        return clients[-1]

    yield start
    for client in clients:
        client.stop()


def unpack(text: str, dtype: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


def test_the_page_and_its_parts_are_served_with_a_strict_policy(
    serve: Callable[..., Client], made_run: MakeRun
) -> None:
    client = serve(made_run())
    page = client.get("")
    assert page.status == 200
    parts = re.findall(rb'(?:src|href)="([^"]+)"', page.body)
    assert len(parts) == 7
    assert not [part for part in parts if b"//" in part]
    for part in parts:
        if not part.startswith(b"data:"):
            answer = client.get(part.decode())
            assert answer.status == 200
            policy = answer.headers["Content-Security-Policy"]
            assert "script-src 'self'" in policy
            assert "unsafe" not in policy
    assert b"<script>" not in page.body
    assert not re.search(rb"\son\w+=", page.body)


def test_nothing_is_served_without_the_token_to_other_sites_or_for_writing(
    serve: Callable[..., Client], made_run: MakeRun
) -> None:
    client = serve(made_run())
    host = f"127.0.0.1:{client.server.server_address[1]}"
    assert client.get("runs").status == 200
    assert client.get("runs", token=False).status == 404
    assert client.get("wrong/runs", token=False).status == 404
    assert client.get("runs", Host="evil.example").status == 421
    assert client.get("runs", Origin="http://evil.example").status == 403
    assert client.get("runs", Origin=f"http://{host}").status == 200
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.get("runs", method=method).status == 501
    for path in ("../../etc/passwd", "run/nope", "page.py", "run/", "delete/1", "curves/%2e%2e"):
        assert client.get(path).status == 404
    assert client.get(f"{client.run_path()}?first=x").status == 400
    assert client.server.server_address[0] == "127.0.0.1"
    assert len(client.server.token) >= 32


def test_curves_are_exact_and_followed_at_a_cursor(
    serve: Callable[..., Client], open_run: Callable[..., Journal]
) -> None:
    journal = open_run()
    append_rows(journal, range(2000), loss={700: 70.0, 900: math.nan})
    client = serve(journal.run_dir)
    coarse = client.get(f"{client.run_path('curves')}?first=0&size=20").json
    loss = coarse["series"]["loss"]
    assert unpack(loss["max"]).max() == 70.0
    assert unpack(loss["nonfinite"]).sum() == 1
    assert len(unpack(loss["mean"])) <= 21
    fine = client.get(f"{client.run_path('curves')}?first=695&last=705&size=100").json
    assert unpack(fine["attempts"], "<f8").tolist() == list(range(695, 706))
    assert unpack(fine["series"]["loss"]["mean"])[5] == 70.0
    append_rows(journal, range(2000, 2010))
    tail = client.get(f"{client.run_path('curves')}?first={coarse['last'] + 1}").json
    assert unpack(tail["attempts"], "<f8").tolist() == list(range(2000, 2010))
    flow = client.get(f"{client.run_path('flow')}?size=50").json
    cells = unpack(flow["cells"], "u1").reshape(-1, 3)
    assert flow["names"][0] == "layer.0.weight"
    assert (cells[:, 0] > cells[:, 1]).all()
    assert (cells[:, 1] > cells[:, 2]).all()


def test_an_unchanged_run_is_not_sent_again(serve: Callable[..., Client], open_run: Callable[..., Journal]) -> None:
    journal = open_run()
    append_rows(journal, range(10))
    client = serve(journal.run_dir)
    path = client.run_path()
    first = client.get(path)
    assert client.get(path, If_None_Match=first.headers["ETag"]).status == 304
    append_rows(journal, range(10, 20))
    again = client.get(path, If_None_Match=first.headers["ETag"])
    assert (again.status, again.json["numbers"]["step"]) == (200, 20)


def test_many_readers_and_a_run_that_is_deleted(
    serve: Callable[..., Client], made_run: MakeRun, tmp_path: Path
) -> None:
    path = made_run("a")
    made_run("b")
    client = serve(tmp_path)
    assert len(client.get("runs").json["runs"]) == 2
    key = next(run["id"] for run in client.get("runs").json["runs"] if run["name"] == "a")
    assert client.get(f"run/{key}").json["numbers"]["step"] == 300
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(client.get(f"curves/{key}?size=100").status)) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 12
    shutil.rmtree(path)
    answer = client.get(f"run/{key}").json
    assert (answer["state"], answer["numbers"]["step"]) == ("deleted", 300)
    assert client.get(f"curves/{key}?size=100").status == 200


def test_a_frozen_page_is_one_file_whose_data_cannot_become_script(made_run: MakeRun, tmp_path: Path) -> None:
    hostile = "</script><script>document.title='owned'</script><!--"
    path = made_run("run", Note(step=1, attempt=1, name="failed", detail=hostile), info={"config": {"model": hostile}})
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["watch", str(path), "--static", str(out)])
    assert result.exit_code == 0, result.output
    page = out.read_text()
    assert hostile not in page
    assert "owned" in page
    scripts = re.findall(r"<script[^>]*>", page)
    assert scripts == ['<script type="application/json" id="frozen">', *["<script>"] * 4]
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "unsafe-inline" not in page
    assert CliRunner().invoke(app, ["watch", str(path), "--static", str(out)]).exit_code == 0
    out.write_text("mine")
    refused = CliRunner().invoke(app, ["watch", str(path), "--static", str(out)])
    assert (refused.exit_code, out.read_text()) == (2, "mine")
