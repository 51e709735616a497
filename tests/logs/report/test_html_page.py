"""The HTML page: one file without external resources, and nothing from a log is executed."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_diagnoses import failed, healthy, made_curves

from surefoot.logs.log_diagnosis import LogDiagnosis, RankedCause, RunHealth, UnreadableInput
from surefoot.logs.report.html_page import as_html, write_page
from surefoot.logs.run_curves import RunCurves, Series
from surefoot.records import Cause

_VOID = {"meta", "br", "img"}


class Outline(HTMLParser):
    """Collects tags with their attributes and checks that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(html: str) -> Outline:
    parsed = Outline()
    parsed.feed(html)
    parsed.close()
    assert parsed.open == []
    return parsed


def test_html_page_has_everything_of_the_terminal_page(tmp_path: Path) -> None:
    write_page(failed(), tmp_path / "deep" / "answer.html")
    text = outline((tmp_path / "deep" / "answer.html").read_text(encoding="utf-8")).text
    for words in (
        "FAILED",
        "The loss turned NaN at step 4,000 and stayed so.",
        "80 % into the run",
        "Look at the batch of step 4,000.",
        "The rise took one step.",
        "the log holds two runs",
        "3 lines that are not JSON",
    ):
        assert words in text


def test_page_loads_and_runs_nothing_external() -> None:
    page = outline(as_html(failed()))
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "form", "base", "img"}
    for _, attributes in page.tags:
        assert not {"src", "href", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)


def test_content_security_policy_allows_only_the_style_sheet() -> None:
    html = as_html(failed())
    policy = next(a["content"] for tag, a in outline(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", html, re.S)
    assert policy is not None
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_markup_from_a_log_is_escaped() -> None:
    evil = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    made = replace(made_curves(), loss=replace(made_curves().loss, name=evil), unit=evil)
    named = RankedCause(cause=Cause.DRIFT, confidence=0.5, evidence=(evil,), advice=(evil,))
    source = {"path": evil, "format": evil, "columns": {evil: evil}, "skipped": {evil: 1}}
    html = as_html(failed(sentence=evil, curves=made, causes=(named,), notes=(evil,), source=source))
    assert not {tag for tag, _ in outline(html).tags} & {"script", "img"}


def test_dark_mode_and_small_screens() -> None:
    html = as_html(healthy())
    assert "prefers-color-scheme: dark" in html
    assert "max-width: 600px" in html
    assert 'name="viewport"' in html


def test_each_metric_has_a_panel_with_the_onset() -> None:
    html = as_html(failed())
    for title in ("loss", "gradient norm", "learning rate", "loss scale"):
        assert '<text class="title"' in html
        assert f">{title}</text>" in html
    assert html.count('class="onset"') == 4
    assert 'class="onset"' not in as_html(healthy())


def test_page_for_millions_of_points_is_small() -> None:
    assert len(as_html(healthy(curves=made_curves(1_000_000)))) < 400_000


def test_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(UnreadableInput, match=r"--html .*file"):
        write_page(failed(), tmp_path / "file" / "answer.html")


def test_diagnosis_without_curves_has_a_page_without_a_plot() -> None:
    assert "<svg" not in as_html(LogDiagnosis(verdict=RunHealth.UNKNOWN, sentence="Nothing there."))


@given(st.lists(st.floats(), max_size=30), st.text(max_size=40))
def test_any_numbers_and_names_make_a_valid_page(losses: list[float], name: str) -> None:
    made = RunCurves(loss=Series(name, np.arange(len(losses), dtype=float), np.array(losses)))
    html = as_html(failed(curves=made, sentence=name))
    assert "nan," not in html
    assert ",nan" not in html
    outline(html)
