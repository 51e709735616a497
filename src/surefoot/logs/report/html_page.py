"""The diagnosis as a self-contained HTML page: no script, no network, light and dark, readable on a phone."""

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
svg .title { fill: var(--ink); font-weight: 600; } svg .annotation { fill: var(--failed); }
svg .ink0 { fill: var(--one); } svg .ink1 { fill: var(--two); }
svg .ink2 { fill: var(--three); } svg .ink3 { fill: var(--four); }
.grid { stroke: var(--rule); } .axis { stroke: var(--faint); }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.line0 { stroke: var(--one); } .line1 { stroke: var(--two); }
.line2 { stroke: var(--three); } .line3 { stroke: var(--four); }
.dot0 { fill: var(--one); } .dot1 { fill: var(--two); } .dot2 { fill: var(--three); } .dot3 { fill: var(--four); }
.mark { stroke: var(--failed); opacity: .6; stroke-dasharray: 2 4; }
.running { background: var(--unknown); } .killed { background: var(--warning); }
.incident { border-left: 3px solid var(--rule); padding: 0 0 0 .9rem; margin: 1.2rem 0; break-inside: avoid; }
.incident h3 { margin-top: 0; } .incident h4 { margin: .7rem 0 .1rem; font-size: .95rem; }
.acted, .refused { border-color: var(--warning); } .stopped { border-color: var(--failed); }
.tables { overflow-x: auto; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.chosen td, tr.chosen th { font-weight: 700; color: var(--healthy); }
td.yes { color: var(--healthy); font-weight: 600; } td.no { color: var(--failed); font-weight: 600; }
td.dim { color: var(--faint); } details { margin: .6rem 0; } summary { cursor: pointer; }
.bad { fill: var(--failed); opacity: .16; } .onset { stroke: var(--failed); stroke-width: 1.4; stroke-dasharray: 5 4; }
@media print { body { font-size: 11pt; } main { max-width: none; padding: 0; } figure, table { break-inside: avoid; } }
@media (max-width: 600px) { body { font-size: 16px; } svg text { font-size: 21px; } .line { stroke-width: 2.6; } }
"""


def write_page(diagnosis: LogDiagnosis, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Write the page of one diagnosis to a file."""
    save_page(as_html(diagnosis), path, inputs=inputs, force=force)


def save_page(
    html: str, path: Path, *, inputs: Sequence[str] = (), force: bool = False, option: str = "--html"
) -> None:
    """Write atomically, and never over a file that surefoot did not write, unless forced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with output_file(path, inputs=inputs, force=force) as draft:
            draft.write_text(html, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UnreadableInput(f"{option} {path} cannot be written: {error.strerror or error}") from None


def as_html(diagnosis: LogDiagnosis) -> str:
    """The complete page."""
    return html_document(f"{diagnosis.verdict}: {clean(diagnosis.sentence, 120)}", "".join(_body(diagnosis)))


def html_document(title: str, body: str) -> str:
    """A page around a body; its content policy allows only its own style sheet."""
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


def notebook_html(diagnosis: LogDiagnosis) -> str:
    """The diagnosis for a notebook; the plot brings its own style, as a notebook has none for it."""
    picture = ""
    if diagnosis.curves is not None and (
        drawn := draw_svg(run_panels(diagnosis.curves), **_svg_options(diagnosis), style=STYLE)
    ):
        data = base64.b64encode(drawn.encode()).decode()
        picture = f'<img alt="curves of the run" width="{WIDE}" src="data:image/svg+xml;base64,{data}">'
    onset_text = onset_sentence(diagnosis)
    onset = f"<br>{escape_text(onset_text)}" if onset_text else ""
    head = f"<p><b>{diagnosis.verdict.upper()}: {escape_text(diagnosis.sentence)}</b>{onset}</p>"
    return f"<div>{head}{picture}{''.join(_causes_and_advice(diagnosis))}</div>"


def _body(diagnosis: LogDiagnosis) -> Iterator[str]:
    yield _head(diagnosis)
    yield _picture(diagnosis)
    yield from _causes_and_advice(diagnosis)
    yield from _source_table(diagnosis)


def _head(diagnosis: LogDiagnosis) -> str:
    onset_text = onset_sentence(diagnosis)
    verdict = f'<span class="verdict {diagnosis.verdict}">{diagnosis.verdict.upper()}</span>'
    return f"{verdict}<h1>{escape_text(diagnosis.sentence)}</h1>" + (
        f"<p>{escape_text(onset_text)}</p>" if onset_text else ""
    )


def _picture(diagnosis: LogDiagnosis) -> str:
    if diagnosis.curves is None:
        return ""
    drawn = draw_svg(run_panels(diagnosis.curves), **_svg_options(diagnosis))
    return f"<figure>{drawn}</figure>" if drawn else ""


def _svg_options(diagnosis: LogDiagnosis) -> dict[str, Any]:
    unit = diagnosis.curves.unit if diagnosis.curves is not None else "step"
    return {"title": clean(diagnosis.sentence), "onset": onset_of(diagnosis), "unit": unit}


def _causes_and_advice(diagnosis: LogDiagnosis) -> Iterator[str]:
    if steps := ordered_advice(diagnosis.causes, 20):
        yield f'<h2>What to do, in this order</h2><ol class="do">{list_items(steps)}</ol>'
    if diagnosis.causes:
        yield "<h2>Why</h2>" + "".join(_cause(cause) for cause in diagnosis.causes)
    if diagnosis.notes:
        yield f"<h2>Notes</h2><ul>{list_items(diagnosis.notes)}</ul>"


def _cause(cause: RankedCause) -> str:
    phrase = cause_phrase(cause)
    return f"<h3>{escape_text(phrase[:1].upper() + phrase[1:])}</h3><ul>{list_items(cause.evidence)}</ul>"


def _source_table(diagnosis: LogDiagnosis) -> Iterator[str]:
    source = diagnosis.source
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
    """Rows whose first cell is a heading."""
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
