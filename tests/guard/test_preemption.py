"""Ranks agree on what all of them do, through the store of torch.distributed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from surefoot.guard import preemption
from surefoot.guard.preemption import RankConsensus


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """The default store, here shared by two ranks in one process."""
    held = dist.HashStore()
    monkeypatch.setattr(preemption, "_connect", lambda: held)
    return held


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def test_a_proposal_of_one_rank_reaches_the_other(store: dist.HashStore) -> None:
    one, other = RankConsensus(0, 2, "word"), RankConsensus(1, 2, "word")
    one.propose("save", 10)
    assert within(10, lambda: other.pending == "save")
    one.close()
    other.close()


def test_losing_the_rank_store_is_logged(store: dist.HashStore, caplog: pytest.LogCaptureFixture) -> None:
    deaf = RankConsensus(0, 2, "word")
    dist.PrefixStore("surefoot/word", store).set("0", "what nobody has ever said")
    assert within(10, lambda: "lost contact with the rank store" in caplog.text)
    assert deaf.pending is None


ENDS = """
import time
import torch.distributed as dist
from surefoot.guard import preemption

preemption._POLL_SECONDS = 0.0  # so that it is always in the midst of asking
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
agreements = [preemption.RankConsensus(0, 2, f"word{k}") for k in range(4)]
time.sleep(0.1)
"""


def test_a_process_that_exits_while_it_polls_exits_cleanly() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
