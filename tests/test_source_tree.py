"""What CONTRIBUTING promises about the source tree: unique names, files of a readable size, pointers that hold."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "surefoot").rglob("*.py"))
MAX_LINES = 400
FOLDERS = ("src", "tests", "benchmarks", "docs", "examples")
DOCS = ("CONTRIBUTING.md", "docs/architecture.md")


def test_no_two_classes_share_a_name() -> None:
    names: Counter[str] = Counter()
    for path in SOURCES:
        names.update(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_files_share_a_name() -> None:
    names = Counter(path.name for path in SOURCES if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_is_too_long_to_read() -> None:
    assert [path.name for path in SOURCES if len(path.read_text().splitlines()) > MAX_LINES] == []


def test_files_that_the_docs_point_to_exist() -> None:
    known = {path.relative_to(ROOT).as_posix() for name in FOLDERS for path in (ROOT / name).glob("**/*")}
    missing = []
    for doc in DOCS:
        for pointer in re.findall(r"`((?:[\w.-]+/)*[\w-]+(?:\.py|/))`", (ROOT / doc).read_text()):
            place = pointer.rstrip("/")
            if place not in FOLDERS and not any(path == place or path.endswith(f"/{place}") for path in known):
                missing.append(f"{doc}: {pointer}")
    assert missing == []
