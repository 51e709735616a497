"""The answer as one web page that needs nothing else: no script, no network, light and dark, readable on a phone."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from surefoot import __version__
from surefoot.journal.output_files import GENERATOR, output_file
from surefoot.logs.log_diagnosis import LogDiagnosis, RankedCause, UnreadableInput
from surefoot.logs.report.panels import onset_of, run_panels
from surefoot.logs.report.svg_plot import WIDE, draw_svg
from surefoot.logs.report.wording import cause_phrase, clean, format_count, onset_sentence, ordered_advice

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2933; --faint: #5b6773; --rule: #e1e6eb; --panel: #f6f8fa;
  --healthy: #15803d; --warning: #b45309; --failed: #b91c1c; --unknown: #0e7490;
  --one: #2563eb; --two: #d97706; --three: #059669; --four: #9333ea; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e4e9ee; --faint: #9aa6b2; --rule: #2b333c; --panel: #1b2128;
    --healthy: #4ade80; --warning: #fbbf24; --failed: #f87171; --unknown: #22d3ee;
    --one: #60a5fa; --two: #fbbf24; --three: #34d399; --four: #c084fc; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.5 system-ui, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.45rem; line-height: 1.3; margin: .4rem 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
.verdict { display: inline-block; color: var(--paper); border-radius: .25rem; padding: .05rem .6rem; font-weight: 700;
  letter-spacing: .05em; }
.healthy { background: var(--healthy); } .warning { background: var(--warning); }
.failed { background: var(--failed); } .unknown { background: var(--unknown); }
.faint, footer { color: var(--faint); } footer { font-size: .85rem; margin-top: 2.5rem; }
ol, ul { padding-left: 1.4rem; } li { margin: .3rem 0; }
ol.do li::marker { font-weight: 700; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; }
figure { margin: 1.5rem 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--faint); font: 13px system-ui, sans-serif; }
svg .title { fill: var(--ink); font-weight: 600; } svg .told { fill: var(--failed); }
svg .ink0 { fill: var(--one); } svg .ink1 { fill: var(--two); }
svg .ink2 { fill: var(--three); } svg .ink3 { fill: var(--four); }
.grid { stroke: var(--rule); } .axis { stroke: var(--faint); }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.line0 { stroke: var(--one); } .line1 { stroke: var(--two); }
.line2 { stroke: var(--three); } .line3 { stroke: var(--four); }
.dot0 { fill: var(--one); } .dot1 { fill: var(--two); } .dot2 { fill: var(--three); } .dot3 { fill: var(--four); }
.bad { fill: var(--failed); opacity: .16; } .onset { stroke: var(--failed); stroke-width: 1.4; stroke-dasharray: 5 4; }
@media (max-width: 600px) { body { font-size: 16px; } svg text { font-size: 21px; } .line { stroke-width: 2.6; } }
"""


def write_page(answer: LogDiagnosis, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Write the page for one answer to a file."""
    save_page(as_html(answer), path, inputs=inputs, force=force)


def save_page(html: str, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """All of it or nothing, and never over what surefoot did not write, unless forced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with output_file(path, inputs=inputs, force=force) as draft:
            draft.write_text(html, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UnreadableInput(f"--html {path} cannot be written: {error.strerror or error}") from None


def as_html(answer: LogDiagnosis) -> str:
    """The whole page."""
    return html_document(f"{answer.verdict}: {clean(answer.sentence, 120)}", "".join(_body(answer)))


def html_document(title: str, body: str) -> str:
    """A page around a body; only the style sheet in it is allowed to do anything."""
    style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="{GENERATOR} {escape(__version__)}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body><main>\n{body}\n"
        f"<footer>surefoot {escape(__version__)}</footer>\n</main></body></html>\n"
    )


def notebook_html(answer: LogDiagnosis) -> str:
    """The part of it that a notebook shows; the picture brings its own style, for the notebook has none for it."""
    picture = ""
    if answer.curves is not None and (
        drawn := draw_svg(run_panels(answer.curves), **_svg_options(answer), style=STYLE)
    ):
        data = base64.b64encode(drawn.encode()).decode()
        picture = f'<img alt="the course of the run" width="{WIDE}" src="data:image/svg+xml;base64,{data}">'
    told = onset_sentence(answer)
    head = f"<p><b>{answer.verdict.upper()}: {escape_text(answer.sentence)}</b>{f'<br>{escape_text(told)}' if told else ''}</p>"
    return f"<div>{head}{picture}{''.join(_causes_and_advice(answer))}</div>"


def _body(answer: LogDiagnosis) -> Iterator[str]:
    yield _head(answer)
    yield _picture(answer)
    yield from _causes_and_advice(answer)
    yield from _source_table(answer)


def _head(answer: LogDiagnosis) -> str:
    told = onset_sentence(answer)
    verdict = f'<span class="verdict {answer.verdict}">{answer.verdict.upper()}</span>'
    return f"{verdict}<h1>{escape_text(answer.sentence)}</h1>" + (f"<p>{escape_text(told)}</p>" if told else "")


def _picture(answer: LogDiagnosis) -> str:
    if answer.curves is None:
        return ""
    drawn = draw_svg(run_panels(answer.curves), **_svg_options(answer))
    return f"<figure>{drawn}</figure>" if drawn else ""


def _svg_options(answer: LogDiagnosis) -> dict[str, Any]:
    unit = answer.curves.unit if answer.curves is not None else "step"
    return {"title": clean(answer.sentence), "onset": onset_of(answer), "unit": unit}


def _causes_and_advice(answer: LogDiagnosis) -> Iterator[str]:
    if steps := ordered_advice(answer.causes, 20):
        yield f'<h2>What to do, in this order</h2><ol class="do">{list_items(steps)}</ol>'
    if answer.causes:
        yield "<h2>Why</h2>" + "".join(_cause(one) for one in answer.causes)
    if answer.notes:
        yield f"<h2>Notes</h2><ul>{list_items(answer.notes)}</ul>"


def _cause(one: RankedCause) -> str:
    told = cause_phrase(one)
    return f"<h3>{escape_text(told[:1].upper() + told[1:])}</h3><ul>{list_items(one.evidence)}</ul>"


def _source_table(answer: LogDiagnosis) -> Iterator[str]:
    source = answer.source
    rows: list[tuple[str, Any]] = [(name, source.get(name)) for name in ("path", "format")]
    points = source.get("points")
    rows.append(("points", format_count(points) if isinstance(points, int | float) else points))
    rows += [(f"column for {role}", name) for role, name in _pairs(source.get("columns"))]
    rows += [("skipped", f"{format_count(times)} {why}") for why, times in _pairs(source.get("skipped"))]
    rows += [(f"setting {name}", value) for name, value in list(_pairs(source.get("facts")))[:40]]
    yield "<h2>Where this comes from</h2>" + html_table(
        (name, value) for name, value in rows if value not in (None, "")
    )


def _pairs(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def html_table(rows: Iterable[tuple[Any, ...]], head: Iterable[str] = ()) -> str:
    """Rows with their first cell as a heading."""
    top = "".join(f"<th>{escape_text(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{escape_text(first)}</th>{''.join(f'<td>{escape_text(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"


def list_items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{escape_text(line)}</li>" for line in lines)


def escape_text(text: object) -> str:
    return escape(clean(text, 2000))
