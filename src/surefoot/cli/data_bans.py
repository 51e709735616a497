"""`surefoot data`: lists the samples that a run does not train on any more; lifts bans and adds some."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import typer

from surefoot.journal.ban_list import BANS_JSON, BY_COMMAND, Ban, BanList, InvalidBans, read_bans, write_bans
from surefoot.journal.incident_folders import IncidentBundle, read_incidents
from surefoot.journal.lock import RunDirectoryInUse, WriterLock
from surefoot.journal.run_json import RUN_JSON, SIGNALS_DIR
from surefoot.journal.strict_json import dumps, loads_object
from surefoot.logs.report.wording import clean

FINE, USAGE = 0, 2
ALL = "all"
INCIDENT_REACH = 100
"""Of refusals that follow one another within this many attempts, only the first has an incident bundle."""


class InvalidRequest(ValueError):
    """What was asked for cannot be done; the message says why."""


def show(run: Path, *, lift: Sequence[str], ban: Sequence[str], as_json: bool) -> int:
    """List the bans of a run, after lifting and adding what was asked for."""
    try:
        _check_run(run)
        bans = _with_num_samples(read_bans(run), run)
        changed = _changed(bans, lift, ban)
        if changed != bans:
            lock = WriterLock(run).acquire()
            try:
                write_bans(run, changed)
            finally:
                lock.release()
        _report(run, changed, lift=lift, ban=ban, as_json=as_json)
    except RunDirectoryInUse as error:
        typer.echo(f"surefoot data: bans change only while the run is not training. {error}", err=True)
        return USAGE
    except (InvalidBans, InvalidRequest) as error:
        typer.echo(f"surefoot data: {error}", err=True)
        return USAGE
    except OSError as error:
        typer.echo(f"surefoot data: {run / BANS_JSON} cannot be written: {error.strerror or error}", err=True)
        return USAGE
    return FINE


def _check_run(run: Path) -> None:
    if not run.is_dir():
        raise InvalidRequest(f"{run} is not a folder. Pass the run_dir of a run")
    if not (run / RUN_JSON).exists() and not (run / SIGNALS_DIR).exists():
        raise InvalidRequest(f"{run} is not a run directory: it has no {RUN_JSON}. Pass the run_dir of a run")


def _with_num_samples(bans: BanList, run: Path) -> BanList:
    """With the size of the data set as `run.json` tells it, where nothing was banned before."""
    if bans.num_samples:
        return bans
    try:
        config = (loads_object((run / RUN_JSON).read_bytes()) or {}).get("config")
    except OSError:
        return bans
    count = config.get("num_samples") if isinstance(config, dict) else None
    return replace(bans, num_samples=count) if type(count) is int and count > 0 else bans


def _changed(bans: BanList, lift: Sequence[str], ban: Sequence[str]) -> BanList:
    wanted = _numbers("--ban", ban)
    if ALL in lift and len(lift) > 1:
        raise InvalidRequest(f"--lift {ALL} takes no sample numbers beside it")
    gone = bans.samples if ALL in lift else set(_numbers("--lift", lift))
    both = sorted(gone.intersection(wanted))
    if both:
        raise InvalidRequest(f"sample {both[0]} is named by --lift and by --ban: name it once")
    unknown = sorted(gone - bans.samples - set(bans.lifted))
    if unknown:
        raise InvalidRequest(f"sample {unknown[0]} is not banned. List the bans with: surefoot data RUN")
    outside = [sample for sample in wanted if bans.num_samples and sample >= bans.num_samples]
    if outside:
        raise InvalidRequest(
            f"there is no sample {outside[0]}: the data set has {bans.num_samples:,} samples, numbered from 0"
        )
    if gone:
        bans = bans.without(gone)
    new = [Ban(sample=sample, reason="by hand", by=BY_COMMAND, time=time.time()) for sample in wanted]
    return bans.with_bans(new) if new else bans


def _numbers(option: str, words: Sequence[str]) -> list[int]:
    """Sample numbers, also several in one word as "3,17"."""
    parts = [part for word in words if word != ALL or option != "--lift" for part in word.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdigit() and len(part) < 19)]
    if wrong:
        hint = f", or {ALL}" if option == "--lift" else ""
        raise InvalidRequest(f"{option} takes sample numbers such as 17{hint}; got {clean(wrong[0], 60)!r}")
    return [int(part) for part in parts]


def _report(run: Path, bans: BanList, *, lift: Sequence[str], ban: Sequence[str], as_json: bool) -> None:
    bundles = list(read_incidents(run, []))
    incidents = {banned.sample: _incident_of(banned, bundles) for banned in bans.bans}
    if as_json:
        listed = [asdict(banned) | {"incident": incidents[banned.sample]} for banned in bans.bans]
        content = {"run": str(run), "num_samples": bans.num_samples, "lifted": list(bans.lifted), "bans": listed}
        sys.stdout.write(dumps(content) + "\n")
        return
    if lift or ban:
        typer.echo("Changed: this holds from the next resume of the run on.")
    of = f" of {bans.num_samples:,}" if bans.num_samples else ""
    if not bans.bans:
        typer.echo(f"No sample{of} is banned.")
    else:
        typer.echo(f"{len(bans.bans):,}{of} samples {'is' if len(bans.bans) == 1 else 'are'} banned:")
        for banned in bans.bans:
            for line in _lines(banned, incidents[banned.sample]):
                typer.echo(line)
        typer.echo(f"To train on one again: surefoot data {clean(run)} --lift {bans.bans[0].sample}")
    if bans.lifted:
        typer.echo(f"Lifted, and trained on again: {', '.join(map(str, bans.lifted[:20]))}")


def _lines(banned: Ban, incident: str) -> Iterator[str]:
    """One ban on two lines: what, and why."""
    yield f"  sample {banned.sample}" + (f"  {clean(banned.source, 300)}" if banned.source else "")
    facts = [f"step {banned.step}"] if banned.step >= 0 else []
    if 0 < banned.time < 1e11:
        facts.append(datetime.fromtimestamp(banned.time).strftime("%Y-%m-%d %H:%M"))
    facts += [f"by {clean(banned.by, 20)}", f"incident {incident}" if incident else ""]
    yield f"    {clean(banned.reason, 300) or 'no reason is recorded'} ({', '.join(filter(None, facts))})"


def _incident_of(banned: Ban, bundles: Sequence[IncidentBundle]) -> str:
    """The incident bundle of the refusal that the ban followed."""
    attempts = [(int(bundle.info["attempt"]), bundle.path.name) for bundle in bundles]
    before = [pair for pair in attempts if 0 <= banned.attempt - pair[0] < INCIDENT_REACH]
    return clean(max(before)[1], 100) if before and banned.attempt >= 0 else ""
