"""Ranks agree on saves and signals through the store of torch.distributed."""

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
    """The default store, shared here by two ranks in one process."""
    hash_store = dist.HashStore()
    monkeypatch.setattr(preemption, "connect", lambda: hash_store)
    return hash_store


def becomes_true(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_proposal_of_one_rank_reaches_the_other(store: dist.HashStore) -> None:
    first, second = RankConsensus(0, 2, "word"), RankConsensus(1, 2, "word")
    first.propose("save", 10)
    assert becomes_true(10, lambda: second.pending == "save")
    first.close()
    second.close()


def test_losing_the_rank_store_is_logged(store: dist.HashStore, caplog: pytest.LogCaptureFixture) -> None:
    consensus = RankConsensus(0, 2, "word")
    dist.PrefixStore("surefoot/word", store).set("0", "not a valid proposal")
    assert becomes_true(10, lambda: "lost contact with the rank store" in caplog.text)
    assert consensus.pending is None


ENDS = """
import time
import torch.distributed as dist
from surefoot.guard import preemption

preemption._POLL_SECONDS = 0.0  # so that it is always polling
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
agreements = [preemption.RankConsensus(0, 2, f"word{k}") for k in range(4)]
time.sleep(0.1)
"""


def test_process_that_exits_while_polling_exits_cleanly() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
