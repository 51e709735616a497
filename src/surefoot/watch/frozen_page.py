"""`surefoot watch --static`: the page with its data in one HTML file that needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from surefoot import __version__
from surefoot.journal.output_files import GENERATOR, output_file
from surefoot.watch import page_data
from surefoot.watch.find_runs import FoundRun
from surefoot.watch.live_run import LiveRun
from surefoot.watch.web_server import read_asset, run_id

_POINTS = 4000
_BUCKETS = 400
_ALL = 1 << 62
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "page_numbers.js", "page_charts.js", "page.js")


def freeze(run_dir: Path, out: Path, *, force: bool = False) -> None:
    """Write the page of a run; the file is replaced only if surefoot wrote it, or with `force`."""
    with output_file(out, inputs=[run_dir], force=force) as draft:
        draft.write_bytes(frozen_page(run_dir))


def frozen_page(run_dir: Path) -> bytes:
    """The page with one run in it; nothing in it can be run but the scripts whose hashes it lists."""
    run = LiveRun(run_dir)
    key = run_id(FoundRun(run_dir, 0.0))
    data = {
        "runs": {"first": key, "folder": str(run_dir.parent), "runs": [{"id": key, "name": run.name}]},
        "run": page_data.summary(run),
        "curves": page_data.curves(run, 0, _ALL, _POINTS),
        "flow": page_data.flow(run, 0, _ALL, _BUCKETS),
    }
    # The text of a JSON script ends at "</script" or changes its meaning at "<!--": neither can occur without "<".
    frozen = json.dumps(data, allow_nan=False).replace("<", "\\u003c").encode("ascii")
    styles = b"\n".join(read_asset(name) for name in _STYLES)
    scripts = [read_asset(name) for name in _SCRIPTS]
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(styles)}; script-src {' '.join(_hash(script) for script in scripts)}"
    )
    body = read_asset("page.html").split(b"<body>", 1)[1].split(b"<!-- scripts -->", 1)[0]
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="generator" content="{GENERATOR} {__version__}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>surefoot</title>\n<style>'
    ).encode()
    parts = [head, styles, b"</style></head><body>", body]
    parts += [b'<script type="application/json" id="frozen">', frozen, b"</script>"]
    for script in scripts:
        parts += [b"<script>", script, b"</script>"]
    return b"".join([*parts, b"</body></html>\n"])


def _hash(content: bytes) -> str:
    assert b"</script" not in content.lower()
    return "'sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode("ascii") + "'"
