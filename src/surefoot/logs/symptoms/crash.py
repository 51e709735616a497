"""Finds the exception or kill that a log ends in: what it was, what it means, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from surefoot.judge.cause_catalog import CAUSES
from surefoot.logs.symptoms.crash_rules import CrashKind, CrashRule
from surefoot.logs.symptoms.crash_rules_environment import RULES
from surefoot.records import Cause

MAX_LINE_CHARS = 1000
"""Longer lines are cut before matching."""
MAX_MESSAGE_CHARS = 300
"""Longer messages are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """How a run ended, by the last text of its log."""

    kind: CrashKind
    cause: Cause
    sentence: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    line: str
    """The line that matched."""
    confidence: float = 0.9
    is_fault: bool = True
    """False if the run was stopped from outside and nothing is wrong with it."""


_PREFIX = re.compile(
    r"^(?:\[(?:rank|default|gpu|worker)[ :]?(?P<a>\d+)\]:?\s?|(?:rank|worker)[ :]?(?P<b>\d+)[:|]\s?"
    r"|\[\d+,(?P<c>\d+)\]<std\w+>:\s?"
    r"|(?P<d>\d+): (?=\S|  )|\(\w+ pid=\d+[^)]*\)\s?)"
)
_EXCEPTION = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Fault|Timeout"
    r"|NotFound|Aborted|Invalid)))"
    r"(?::\s*(?P<message>.*))?$"
)
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_LIBRARY_PATH = re.compile(
    r"site-packages|dist-packages|[/\\]lib[/\\]python\d|<frozen|<string>|<__array|importlib"
    r"|[/\\]envs?[/\\][^/\\]+[/\\]lib"
)
_CRASH_HINTS = re.compile(
    r"Traceback \(most recent|Error|error|Killed|killed|SIG[A-Z]{3,}|[Ss]ignal \d|Exception|Interrupt|Xid"
    r"|CANCELLED|TIME LIMIT|failed"
    r"|[Oo]ut of memory|OOM|[Tt]imed? ?out|137|\^C|[Pp]reempt|fault|nan|NaN|Terminated|bad_alloc|No space"
    r"|[Ll]oss scale|oom|143|fallen off"
)
_WARNING = re.compile(
    r"Warning\b|\bWARN(?:ING)?\b|DEBUG|deprecated|\[INFO\]|\bINFO\b(?!.*[Ee]rror)|^\s*#|^\s*except\b|^\s*raise\b"
)
_TORCHRUN_FIELD = re.compile(r"^\s*(?P<key>rank|exitcode|error_file|traceback|time|host)\s*:\s*(?P<value>.+)$")
_ERRNO = re.compile(r"^\[Errno \d+\] ")
_CHILD_FAILED = re.compile(r"ChildFailedError")
_SIZE = r"([\d.]+) ?([KMGT]i?B|bytes|B)"
_SIZES = {"B": 0, "bytes": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_ORDINARY_LINE = re.compile(r"^[A-Za-z][\w ,.:()%/=-]{8,}$")
MIN_LINES_SURVIVED = 40
"""The run survived an exception if more ordinary lines than this follow it."""


@dataclass(slots=True)
class _Line:
    text: str
    rank: str


def find_crash(text: str) -> Crash | None:
    """The crash in the text after the last row; None if the log just ends."""
    lines = list(_split_lines(text))
    match_found = _find_rule_match(lines)
    general = _unknown_exception(lines)
    if match_found is None:
        return general
    rule, index, match = match_found
    unexplained = general is not None and general.kind is CrashKind.EXCEPTION
    if rule.tier > 0 and unexplained and rule.kind is not CrashKind.INTERRUPTED:
        return general  # an exception in the user's code, and its consequences
    return _from_rule(rule, match, index, lines)


def _split_lines(text: str) -> Iterator[_Line]:
    """The lines without launcher prefixes, and the rank in those prefixes."""
    for line in text.split("\n"):
        rank = ""
        while match := _PREFIX.match(line):
            rank = next((group for group in match.groups() if group), rank)
            line = line[match.end() :]
        yield _Line(line.rstrip(), rank)


def _find_rule_match(lines: list[_Line]) -> tuple[CrashRule, int, re.Match[str]] | None:
    """The first match of the lowest tier: root causes first, then consequences, then stops from outside."""
    best: tuple[int, int, CrashRule, re.Match[str]] | None = None
    for index, line in enumerate(lines):
        text = line.text
        if (
            not _CRASH_HINTS.search(text)
            or (_WARNING.search(text) and not _EXCEPTION.match(text))
            or _FRAME.match(text)
        ):
            continue
        text = text[:MAX_LINE_CHARS]
        for rule in RULES:
            match = rule.pattern.search(text)
            if match is None:
                continue
            if (best is None or rule.tier < best[0]) and not _survived(lines, index):
                best = (rule.tier, index, rule, match)
            break
    return (best[2], best[1], best[3]) if best is not None else None


def _survived(lines: list[_Line], index: int) -> bool:
    """Whether the run continued: many ordinary lines follow, and no more of an exception."""
    ordinary = 0
    for line in lines[index + 1 :]:
        if _CRASH_HINTS.search(line.text):
            ordinary = 0
        elif _ORDINARY_LINE.match(line.text):
            ordinary += 1
    return ordinary > MIN_LINES_SURVIVED


def _from_rule(rule: CrashRule, match: re.Match[str], index: int, lines: list[_Line]) -> Crash:
    text = lines[index].text.strip()[:MAX_MESSAGE_CHARS]
    given = {name: value or "" for name, value in match.groupdict().items()}
    sentence = rule.sentence.format(**given)
    evidence = [f"The log says: {text}"]
    advice = [line.format(**given) if "{" in line else line for line in rule.all_advice()]
    whole = "\n".join(line.text for line in lines[index : index + 12])
    if rule.kind is CrashKind.OUT_OF_MEMORY:
        sentence, details, first = _explain_oom(whole)
        evidence += details
        advice = first + advice
    elif rule.kind is CrashKind.NCCL_TIMEOUT:
        sentence, details = _explain_timeout(whole, sentence)
        evidence += details
    elif rule.kind is CrashKind.XID and given.get("xid"):
        sentence = f"The device reported a fault of its own (Xid {given['xid']})."
    elif rule.kind is CrashKind.IMPORT and given.get("module"):
        sentence = f"The module {given['module']} is not installed."
    elif rule.kind in _KINDS_WITH_MESSAGE and (message := _exception_message(text)):
        sentence = f"{sentence[:-1]}: {message}."
    evidence += _location(lines, index, rule.kind)
    return Crash(
        kind=rule.kind,
        cause=rule.cause,
        sentence=sentence,
        evidence=tuple(evidence),
        advice=tuple(dict.fromkeys(advice)),
        line=text,
        confidence=0.9 if rule.tier == 0 else 0.6,
        is_fault=rule.tier < 2,
    )


_KINDS_WITH_MESSAGE = frozenset(
    {
        CrashKind.MISSING_FILE,
        CrashKind.SHAPE,
        CrashKind.STATE_DICT,
        CrashKind.DTYPE_MISMATCH,
        CrashKind.PERMISSION,
        CrashKind.LABELS,
        CrashKind.DATA_FORMAT,
    }
)


def _exception_message(text: str) -> str:
    match = _EXCEPTION.match(text)
    return _ERRNO.sub("", match["message"] or "").strip().rstrip(".:")[:160] if match else ""


def _location(lines: list[_Line], index: int, kind: CrashKind) -> list[str]:
    """Where in the user's code it happened, on which rank, and the root cause that torchrun reports."""
    sentences: list[str] = []
    frame = _user_frame(lines, index)
    if frame:
        sentences.append(f"It happened at {frame}.")
    if lines[index].rank:
        sentences.append(f"Rank {lines[index].rank} reported it first.")
    root = _torchrun_root_cause(lines)
    if root and kind is not CrashKind.INTERRUPTED:
        sentences.append(root)
    return sentences


def _user_frame(lines: list[_Line], index: int) -> str:
    """The last frame before the exception, of the same rank, that is not in a library."""
    user = last = ""
    rank = lines[index].rank
    for line in reversed(lines[max(0, index - 400) : index]):
        if line.rank != rank and line.rank:
            continue
        if line.text.startswith("Traceback (most recent"):
            break
        frame = _FRAME.match(line.text)
        if frame:
            place = f"{frame['file']}:{frame['line']}" + (f" in {frame['function']}" if frame["function"] else "")
            last = last or place
            if not _LIBRARY_PATH.search(frame["file"]):
                user = place
                break
    return user or last


def _torchrun_root_cause(lines: list[_Line]) -> str:
    """The root cause reported by torchrun: the rank that failed first, and how."""
    for index, line in enumerate(lines):
        if "Root Cause" not in line.text:
            continue
        fields: dict[str, str] = {}
        for below in lines[index + 1 : index + 12]:
            match = _TORCHRUN_FIELD.match(below.text)
            if match:
                fields.setdefault(match["key"], match["value"].strip())
        if "rank" in fields:
            code = f", exit code {fields['exitcode'].split()[0]}" if "exitcode" in fields else ""
            host = f" on {fields['host']}" if "host" in fields else ""
            return f"The launcher names rank {fields['rank'].split()[0]}{host} as the first to fail{code}."
    return ""


def _unknown_exception(lines: list[_Line]) -> Crash | None:
    """The first exception that no rule matches and the run did not survive."""
    for index, line in enumerate(lines):
        match = _EXCEPTION.match(line.text)
        if (
            match is None
            or _CHILD_FAILED.search(match["name"])
            or not _has_traceback(lines, index)
            or _survived(lines, index)
        ):
            continue
        if match["name"].endswith("SystemExit") or _was_superseded(lines, index) or _matches_a_rule(line.text):
            continue
        name, message = match["name"].rsplit(".", 1)[-1], (match["message"] or "").strip()[:MAX_MESSAGE_CHARS]
        return _describe_exception(name, message, index, lines)
    root = _torchrun_root_cause(lines)
    if root:
        index = next(index for index, line in enumerate(lines) if "Root Cause" in line.text)
        return _child_failure(root, index, lines)
    return None


def _matches_a_rule(text: str) -> bool:
    return any(rule.pattern.search(text[:MAX_LINE_CHARS]) for rule in RULES)


def _child_failure(root: str, index: int, lines: list[_Line]) -> Crash:
    return Crash(
        kind=CrashKind.CHILD_FAILED,
        cause=Cause.RANK_FAULT,
        sentence=root,
        evidence=(root,),
        advice=(
            "Look at that rank's own output for its traceback, or at the error_file that is named.",
            "Wrap the main function in torch.distributed.elastic's @record, which brings the traceback here.",
        ),
        line=lines[index].text.strip()[:MAX_MESSAGE_CHARS],
        confidence=0.5,
    )


def _describe_exception(name: str, text: str, index: int, lines: list[_Line]) -> Crash:
    message = text.rstrip(".")
    where = _location(lines, index, CrashKind.EXCEPTION)
    return Crash(
        kind=CrashKind.EXCEPTION,
        cause=Cause.UNKNOWN,
        sentence=f"The run ended in {name}: {message}." if message else f"The run ended in {name}.",
        evidence=(f"The log says: {lines[index].text.strip()[:MAX_MESSAGE_CHARS]}", *where),
        advice=(
            "Look at the line that is named, and at what it was given.",
            "Run that batch again by itself; with num_workers=0 and CUDA_LAUNCH_BLOCKING=1 the line is the right one.",
            *CAUSES[Cause.UNKNOWN].remedies[-1:],
        ),
        line=lines[index].text.strip()[:MAX_MESSAGE_CHARS],
        confidence=0.5,
    )


def _has_traceback(lines: list[_Line], index: int) -> bool:
    """Whether a traceback precedes the exception, or it is at the end of the log."""
    above = lines[max(0, index - 60) : index]
    return (
        any(line.text.startswith("Traceback") or _FRAME.match(line.text) for line in above) or index >= len(lines) - 5
    )


def _was_superseded(lines: list[_Line], index: int) -> bool:
    """Whether another exception was raised while handling this one, and ended the run."""
    below = lines[index + 1 : index + 4]
    return any("During handling of the above exception" in line.text for line in below)


def _find_size(text: str, pattern: str) -> float | None:
    match = re.search(pattern.replace("SIZE", _SIZE), text)
    if match is None:
        return None
    try:
        return float(match[1]) * 1024 ** _SIZES.get(match[2], _SIZES.get(match[2][0], 0))
    except ValueError:
        return None


def _format_size(size: float) -> str:
    return f"{size / 1024**3:.2f} GiB" if size >= 1024**3 else f"{size / 1024**2:.0f} MiB"


def _explain_oom(text: str) -> tuple[str, list[str], list[str]]:
    """Sentence, evidence and first advice from the numbers in an out-of-memory message, old or new wording."""
    requested = _find_size(text, r"[Tt]ried to allocate SIZE") or _find_size(text, r"allocat\w+ SIZE")
    total = _find_size(text, r"total capacity of SIZE") or _find_size(text, r"SIZE total capacity")
    free = _find_size(text, r"of which SIZE is free") or _find_size(text, r"SIZE free")
    allocated = _find_size(text, r"SIZE is allocated by PyTorch") or _find_size(text, r"SIZE already allocated")
    spare = _find_size(text, r"SIZE is reserved by PyTorch but unallocated")
    reserved = _find_size(text, r"SIZE reserved in total by PyTorch")
    if spare is None and reserved is not None and allocated is not None:
        spare = reserved - allocated
    sentence = "The device ran out of memory"
    if requested is not None:
        sentence += f": {_format_size(requested)} was requested"
        if free is not None:
            sentence += f", {_format_size(free)}{f' of {_format_size(total)}' if total is not None else ''} was free"
    evidence: list[str] = []
    if allocated is not None:
        evidence.append(
            f"PyTorch held {_format_size(allocated)}"
            + (f", and {_format_size(spare)} unused." if spare is not None else ".")
        )
    return sentence + ".", evidence, _oom_advice(requested, total, free, allocated, spare)


def _oom_advice(
    requested: float | None, total: float | None, free: float | None, allocated: float | None, spare: float | None
) -> list[str]:
    advice: list[str] = []
    if requested is not None and total is not None and requested > 0.5 * total:
        advice.append(
            f"One tensor of {_format_size(requested)} is too large: check its shape (a long sequence, logits over the"
            " whole vocabulary, attention without a fused kernel)."
        )
    if spare is not None and requested is not None and spare >= max(requested, 512 * 1024**2):
        advice.append(
            f"{_format_size(spare)} is reserved but unused, in pieces too small: set"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    if (
        total is not None
        and allocated is not None
        and free is not None
        and allocated + (spare or 0) + free < 0.7 * total
    ):
        other = total - allocated - (spare or 0) - free
        advice.append(
            f"About {_format_size(other)} is held by something else: look for other processes in `nvidia-smi`."
        )
    return advice


def _explain_timeout(text: str, sentence: str) -> tuple[str, list[str]]:
    sentences: list[str] = []
    operation = re.search(r"OpType=(\w+)", text)
    rank = re.search(r"\[?[Rr]ank (\d+)\]?", text)
    limit = re.search(r"Timeout\(ms\)=(\d+)", text) or re.search(r"ran for (\d+) milliseconds", text)
    number = re.search(r"SeqNum=(\d+)", text)
    if limit:
        sentence = f"{sentence[:-1]} for {int(limit[1]) / 1000:g} seconds."
    if operation:
        sentences.append(
            f"The collective was {operation[1]}" + (f", number {number[1]}" if number else "")
            + (f"; rank {rank[1]} was the first to give up waiting." if rank else ".")
        )  # fmt: skip
    return sentence, sentences
