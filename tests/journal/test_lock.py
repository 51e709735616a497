from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from surefoot.journal.lock import RunDirectoryInUse, WriterLock

PROGRAM = Path(__file__).with_name("writing_process.py")
QUICK = 0.05


class Contender:
    """Another process that tries to acquire the locks it is sent."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(PROGRAM), "contend"]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def take(self, run_dir: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{run_dir}\n")
        self.process.stdin.flush()

    def read_reply(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        """End the process; return how many of its locks it still held."""
        return int(self.process.communicate()[0])


@pytest.fixture
def contender() -> Iterator[Contender]:
    contender = Contender()
    assert contender.read_reply() == "ready"
    with contender.process:
        yield contender
        contender.process.kill()


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Simulate a writer on another host, visible only by its heartbeat."""
    stop = threading.Event()

    def beat() -> None:
        beats = 0
        while not stop.wait(QUICK / 4):
            beats += 1
            edit(path, beats=beats)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_a_second_writer_gets_owner_time_and_advice(tmp_path: Path, contender: Contender) -> None:
    contender.take(tmp_path)
    assert contender.read_reply() == "won"
    with pytest.raises(RunDirectoryInUse) as error:
        WriterLock(tmp_path, interval=QUICK).acquire()
    since = json.loads((tmp_path / "writer.lock").read_text())["since"]
    pid = str(contender.process.pid)
    for message_part in (str(tmp_path), pid, since, "another run_dir", "stop that process", "writer.lock"):
        assert message_part in str(error.value)
    assert contender.end() == 1
    assert WriterLock(tmp_path, interval=QUICK).acquire().is_held()


def test_the_same_process_is_advised_to_close_first(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path).acquire()
    with pytest.raises(RunDirectoryInUse, match="this very process"):
        WriterLock(tmp_path).acquire()
    lock.release()
    WriterLock(tmp_path).acquire()


def test_the_lock_of_a_killed_owner_is_taken_over_even_unreaped(tmp_path: Path, contender: Contender) -> None:
    contender.take(tmp_path)
    assert contender.read_reply() == "won"
    contender.process.kill()
    os.waitid(os.P_PID, contender.process.pid, os.WEXITED | os.WNOWAIT)  # dead, but a zombie until this test ends
    lock = WriterLock(tmp_path, interval=1000).acquire()
    assert lock.is_held()
    assert [path.name for path in tmp_path.iterdir()] == ["writer.lock"]


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    WriterLock(tmp_path).acquire()
    edit(tmp_path / "writer.lock", start=1, token="another")
    assert WriterLock(tmp_path, interval=1000).acquire().is_held()


@pytest.mark.parametrize(
    "where", [{"host": "elsewhere"}, {"boot": "another"}, {"namespace": "pid:[1]"}, {"start": None}]
)
def test_an_owner_on_another_host_is_alive_while_it_refreshes(tmp_path: Path, where: dict[str, Any]) -> None:
    WriterLock(tmp_path, interval=QUICK).acquire()
    edit(tmp_path / "writer.lock", token="another", pid=1, **where)
    with (
        heartbeat(tmp_path / "writer.lock"),
        pytest.raises(RunDirectoryInUse, match=where.get("host", "in use")),
    ):
        WriterLock(tmp_path, interval=QUICK, watch=40).acquire()
    assert WriterLock(tmp_path, interval=QUICK).acquire().is_held()


@pytest.mark.parametrize("content", [b"", b"{", b"\x00" * 512, b"[]", b'{"pid": "x", "start": {}, "interval": "y"}'])
def test_a_damaged_lock_is_taken_over_after_watching_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "writer.lock").write_bytes(content)
    assert WriterLock(tmp_path, interval=QUICK).acquire().is_held()


def test_the_takeover_lock_of_a_dead_contender_is_taken_over(tmp_path: Path) -> None:
    WriterLock(tmp_path, interval=QUICK).acquire()
    lock = tmp_path / "writer.lock"
    edit(lock, host="elsewhere", token="dead")
    child = subprocess.run(
        [sys.executable, "-c", _DIE_AS_HEIR, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert child.returncode == 7
    assert [path.name for path in tmp_path.glob("*.heir-*")]
    assert WriterLock(tmp_path, interval=QUICK).acquire().is_held()
    assert [path.name for path in tmp_path.iterdir()] == ["writer.lock"]


_DIE_AS_HEIR = """
import os, pathlib, sys
from surefoot.journal.lock import WriterLock
os.replace = lambda *_: os._exit(7)
WriterLock(pathlib.Path(sys.argv[1]), interval=0.05).acquire()
"""


def make_abandoned_lock(run_dir: Path, number: int) -> None:
    """A run directory without a lock, or with that of a dead local owner, of a silent remote one, or an empty file."""
    run_dir.mkdir()
    if number % 4:
        WriterLock(run_dir).acquire()
        edit(
            run_dir / "writer.lock",
            token="dead",
            interval=0.05,
            **({"start": 1} if number % 4 == 1 else {"host": "far"}),
        )
    if number % 4 == 3:
        (run_dir / "writer.lock").write_bytes(b"")


def test_of_many_contenders_exactly_one_wins_every_time(tmp_path: Path) -> None:
    contenders = [Contender() for _ in range(4)]
    assert [contender.read_reply() for contender in contenders] == ["ready"] * 4
    wins = 0
    for number in range(8):
        run_dir = tmp_path / str(number)
        make_abandoned_lock(run_dir, number)
        for contender in contenders:
            contender.take(run_dir)
        replies = [contender.read_reply() for contender in contenders]
        assert replies.count("won") == 1
        assert sum(reply.startswith("lost: ") for reply in replies) == 3
        wins += 1
    assert sum(contender.end() for contender in contenders) == wins


def test_a_holder_notices_that_it_lost_the_lock(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path).acquire()
    assert lock.refresh()
    assert json.loads(lock.path.read_text())["beats"] == 1
    edit(lock.path, token="another")
    assert not lock.refresh()
    assert not lock.is_held()
    lock.release()
    assert lock.path.exists()
    lock.path.unlink()
    assert not lock.refresh()
    assert not lock.is_held()
    lock.release()
