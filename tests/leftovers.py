"""pytest hooks that fail the test run if a process outlives its tests."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from child_processes import MARK, Owner, Watch, gone, supported

WATCH = pytest.StashKey[Watch]()


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    if not supported() or (MARK in os.environ and not worker):
        return  # a pytest that a test has started: its processes are those of the test
    config.stash[WATCH] = watch = Watch(os.environ[MARK].partition("-")[0]) if worker else Owner()
    config.add_cleanup(watch.end)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After the last test of a file, and the fixtures of that file, no process that they started runs."""
    try:
        yield
    finally:
        watch = item.config.stash.get(WATCH, None)
        if watch is not None and (nextitem is None or nextitem.path != item.path) and (left := gone(watch.left)):
            what = "\n  ".join(left)
            pytest.fail(f"{item.path.name} left processes behind, now killed:\n  {what}", pytrace=False)


@pytest.hookimpl(trylast=True)  # after xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    watch = session.config.stash.get(WATCH, None)
    if isinstance(watch, Owner) and (left := gone(watch.left_by_all)):
        told = "the test run left processes behind, now killed:\n  " + "\n  ".join(left)
        report = pytest.TestReport("left-over processes", ("tests", None, ""), {}, "failed", told, "teardown")
        session.config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
