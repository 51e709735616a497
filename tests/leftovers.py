"""pytest hooks that fail the test run if a process outlives its tests."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from child_processes import MARK, MainWatch, Watch, gone, supported

WATCH = pytest.StashKey[Watch]()


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    if not supported() or (MARK in os.environ and not worker):
        return  # a pytest started by a test: its processes belong to that test
    config.stash[WATCH] = watch = Watch(os.environ[MARK].partition("-")[0]) if worker else MainWatch()
    config.add_cleanup(watch.end)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After the last test of a file and its fixtures, none of their processes may still run."""
    try:
        yield
    finally:
        watch = item.config.stash.get(WATCH, None)
        if watch is not None and (nextitem is None or nextitem.path != item.path) and (left := gone(watch.left)):
            processes = "\n  ".join(left)
            pytest.fail(f"{item.path.name} left processes behind, now killed:\n  {processes}", pytrace=False)


@pytest.hookimpl(trylast=True)  # after xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    watch = session.config.stash.get(WATCH, None)
    if isinstance(watch, MainWatch) and (left := gone(watch.left_by_all)):
        message = "the test run left processes behind, now killed:\n  " + "\n  ".join(left)
        report = pytest.TestReport("left-over processes", ("tests", None, ""), {}, "failed", message, "teardown")
        session.config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
