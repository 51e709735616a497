"""The shape of a line: the names of its numbers, and a pattern that finds them again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto

from surefoot.logs.formats.console.tokens import NOT_A_NUMBER, LineTokens, NumberToken, to_float
from surefoot.logs.formats.console.value_names import name_after, name_before, phase_in, phase_of_name
from surefoot.logs.formats.metric_names import MetricRole, parse_metric_name, split_words

HIDDEN = "\x00"
TOTAL = "\x00total"
"""Hidden names of numbers that are used but are no columns: a counter's total, the rank of the line."""
RANK = "\x00rank"
COUNT = "\x00count"
_RANK = re.compile(r"(?i)(?:\brank[ :=_]*|\[(?:gpu|worker|proc|process|node|default)[ :=_-]*|^\s*\[\d+,|\bgpu[ :=_]*)$")
_BATCH = re.compile(r"(?i)\b(?:batch|ba|minibatch)\W*$")
_DROPPED = frozenset(
    {"eta", "pid", "port", "seed", "line", "device", "gpu", "cuda", "v num", "id", "size", "host", "node"}
)
_INFORMATIVE = frozenset(
    {
        MetricRole.LOSS,
        MetricRole.GRAD_NORM,
        MetricRole.LR,
        MetricRole.LOSS_SCALE,
        MetricRole.SKIPPED,
        MetricRole.PERPLEXITY,
        MetricRole.ERROR,
        MetricRole.ACCURACY,
        MetricRole.REWARD,
    }
)
_PER_SPLIT = frozenset(
    {MetricRole.LOSS, MetricRole.PERPLEXITY, MetricRole.ERROR, MetricRole.ACCURACY, MetricRole.REWARD, MetricRole.OTHER}
)
"""Metrics that belong to the data split they were measured on, unlike a learning rate or a time."""


class LineKind(Enum):
    """What lines of one shape are."""

    ROW = auto()
    UNCONFIRMED = auto()
    """Rows, if there is more than one of them."""
    POSITION = auto()
    """Only counters: the position of the lines that follow."""
    SINGLE = auto()
    """One name and one number."""
    BAR = auto()
    """A progress bar of one epoch, whose last state is the epoch's row."""
    CHATTER = auto()


@dataclass(slots=True)
class NumberSlot:
    """One number that is kept."""

    name: str
    role: MetricRole
    number: NumberToken


@dataclass(slots=True)
class LineShape:
    """Lines of one shape."""

    key: str
    kind: LineKind
    names: tuple[str, ...]
    commas: tuple[bool, ...]
    factors: tuple[float, ...]
    pattern_text: str
    has_counter: bool
    """Contains its own step or epoch."""
    is_eval: bool
    epoch: str
    """The name of its epoch column, if any."""
    has_steps: bool
    has_loss: bool
    bar: str = ""
    seen: int = 0
    unconfirmed_row: tuple[int, dict[str, float]] | None = None
    """The first row of an unconfirmed shape, and the number of rows before it."""
    last: tuple[str, ...] = ()
    rank: float | None = None
    steps_before: float = 0.0
    """Steps of earlier bars, for a counter that restarts with every bar."""
    count: float = 0.0
    pattern: re.Pattern[str] | None = field(default=None)

    @property
    def plain(self) -> bool:
        """Whether many lines can be parsed at once, as the columns are just the numbers."""
        return self.kind is LineKind.ROW and self.has_counter and RANK not in self.names and not any(self.commas) and (
            COUNT not in self.names or not self.is_eval
        )  # fmt: skip

    def values(self, texts: tuple[str, ...]) -> dict[str, float]:
        """Raises ValueError if a text is not a number after all."""
        return {
            name: to_float(text, comma=comma) * factor
            for name, text, comma, factor in zip(self.names, texts, self.commas, self.factors, strict=True)
        }

    def compiled(self) -> re.Pattern[str]:
        if self.pattern is None:
            self.pattern = re.compile(self.pattern_text)
        return self.pattern


def shape_of(tokens: LineTokens) -> tuple[LineShape, tuple[str, ...]]:
    """How lines like this one are parsed, and the texts of its numbers."""
    slots = _find_slots(tokens)
    names = [slot.name for slot in slots]
    kind = _classify(tokens, slots)
    roles = {slot.role for slot in slots if slot.name[:1] != HIDDEN}
    pieces = list(tokens.pieces)
    for slot in slots:
        pieces[slot.number.piece] = f"({pieces[slot.number.piece]})"
    shape = LineShape(
        key=tokens.key,
        kind=kind,
        names=tuple(names),
        commas=tuple(slot.number.decimal_comma for slot in slots),
        factors=tuple(slot.number.factor for slot in slots),
        pattern_text="".join(pieces),
        has_counter=bool(roles & {MetricRole.STEP, MetricRole.EPOCH}) or COUNT in names,
        is_eval=_is_eval_only(slots),
        epoch=next((slot.name for slot in slots if slot.role is MetricRole.EPOCH), ""),
        has_steps=MetricRole.STEP in roles,
        has_loss=MetricRole.LOSS in roles,
        bar=tokens.bar,
    )
    return shape, tuple(slot.number.text for slot in slots)


def _is_eval_only(slots: list[NumberSlot]) -> bool:
    """Whether a row contains eval metrics only."""
    measured = [slot.name for slot in slots if slot.role in _INFORMATIVE & _PER_SPLIT]
    return bool(measured) and all(phase_of_name(name) == "eval" for name in measured)


def _find_slots(tokens: LineTokens) -> list[NumberSlot]:
    slots: list[NumberSlot] = []
    taken: set[str] = set()
    phase = ""
    totals: set[int] = set()
    halves: dict[int, str] = {}
    for index, number in enumerate(tokens.numbers):
        if index in totals:
            continue
        if _is_rank(tokens, index):
            slots.append(NumberSlot(RANK, MetricRole.OTHER, number))
            continue
        parsed = name_before(number.gap)
        total = _total_of(tokens.numbers, index)
        if total is not None:
            totals.add(index + 1)
        name, role = _name_and_role(tokens, index, halves.pop(index, "") or parsed.name)
        if name.count("/") == 1 and _is_half_of_pair(tokens.numbers, index):
            name, halves[index + 1] = name.split("/")  # train_loss/val_loss: 0.5/0.6
        phase = phase_in(parsed.rest) or (phase_in(parsed.name) if name in (COUNT, "epoch") else "") or phase
        if not name or " ".join(split_words(name)) in _DROPPED or number.unit == "z":
            continue
        if phase == "eval" and role in _PER_SPLIT and not phase_of_name(name):
            name = f"eval {name}"
        if name in taken:
            continue
        taken.add(name)
        slots.append(NumberSlot(name, role, number))
        if total is not None:
            slots.append(NumberSlot(TOTAL if name == COUNT else f"{TOTAL} {name}", MetricRole.OTHER, total))
    if any(slot.role is MetricRole.STEP for slot in slots):
        slots = [slot for slot in slots if slot.name not in (COUNT, TOTAL)]
    return _spread_eval(_add_leading_step(tokens, slots))


def _is_half_of_pair(numbers: list[NumberToken], index: int) -> bool:
    return index + 1 < len(numbers) and numbers[index + 1].gap.strip() == "/" and _total_of(numbers, index) is None


def _is_rank(tokens: LineTokens, index: int) -> bool:
    """Whether the number is the rank that printed the line."""
    gap = tokens.numbers[index].gap
    return bool(_RANK.search(gap.rstrip("[ "))) or gap == f"[{NOT_A_NUMBER}" or (index == 0 and _has_task_label(tokens))


def _name_and_role(tokens: LineTokens, index: int, name: str) -> tuple[str, MetricRole]:
    """The name and role of a number, using more than the words before it."""
    numbers = tokens.numbers
    role = parse_metric_name(name).role
    if _total_of(numbers, index) is not None:
        if role not in (MetricRole.EPOCH_STEP, MetricRole.OTHER):
            return name, role
        if numbers[index].gap.rstrip().endswith("[") and _opens_bracket(numbers, index + 1, "]["):
            return "epoch", MetricRole.EPOCH  # [1/200][10/1583]
        return COUNT, MetricRole.EPOCH_STEP
    if (
        name
        and role is MetricRole.OTHER
        and phase_in(name)
        and len(name.split()) == 1
        and _opens_bracket(numbers, index)
    ):
        return "epoch", MetricRole.EPOCH  # Train: 3 [ 50/100 ...
    if not name and index < 2 and (_is_torchtune(numbers) or _is_pytorch_tutorial(numbers)):
        name = ("batch" if numbers[1].gap.startswith(",") else "step") if index else "epoch"
    elif not name and _is_chinese_counter(numbers, index, tokens):
        name = "epoch" if "轮" in _text_after(numbers, index, tokens)[:3] else "step"
    elif not name and numbers[index].unit[:4] in ("epoc", "step", "iter") and "/" not in numbers[index].unit:
        name = numbers[index].unit
    elif not name:
        name = name_after(numbers[index + 1].gap if index + 1 < len(numbers) else tokens.tail)
    return name, parse_metric_name(name).role


def _total_of(numbers: list[NumberToken], index: int) -> NumberToken | None:
    """The number after the slash, for the first of 10/300."""
    if index + 1 < len(numbers) and numbers[index + 1].gap.strip() in ("/", "of", "out of"):
        whole = numbers[index].text.isdigit() and numbers[index + 1].text.isdigit()
        return numbers[index + 1] if whole else None
    return None


def _opens_bracket(numbers: list[NumberToken], index: int, sign: str = "[") -> bool:
    return (
        index + 2 < len(numbers)
        and numbers[index + 1].gap.strip() == sign
        and _total_of(numbers, index + 1) is not None
    )


def _has_task_label(tokens: LineTokens) -> bool:
    """Whether every line starts with `0: ...`, as srun labels tasks; this is not a step."""
    numbers = tokens.numbers
    if numbers[0].gap.strip() or len(numbers) < 3 or numbers[0].unit or not numbers[0].text.isdigit():
        return False
    if not numbers[1].gap.startswith(": "):
        return False
    return any(
        parse_metric_name(name_before(number.gap).name).role in (MetricRole.STEP, MetricRole.EPOCH)
        for number in numbers[1:]
    )


def _text_after(numbers: list[NumberToken], index: int, tokens: LineTokens) -> str:
    return (numbers[index + 1].gap if index + 1 < len(numbers) else tokens.tail).strip()


def _is_chinese_counter(numbers: list[NumberToken], index: int, tokens: LineTokens) -> bool:
    """第3轮, 第 100 步."""
    return numbers[index].gap.rstrip().endswith("第") and bool(
        re.match("个?[轮步次]|个?epoch", _text_after(numbers, index, tokens))
    )


def _is_torchtune(numbers: list[NumberToken]) -> bool:
    """1|10|Loss: 2.5."""
    return len(numbers) > 2 and not numbers[0].gap.strip() and numbers[1].gap == "|" and numbers[2].gap[:1] == "|"


def _is_pytorch_tutorial(numbers: list[NumberToken]) -> bool:
    """[1,  2000] loss: 2.5."""
    opens = numbers[0].gap.strip(f" {NOT_A_NUMBER}") == "[" and len(numbers) > 2
    return opens and numbers[1].gap.strip() == "," and numbers[2].gap[:1] == "]"


def _add_leading_step(tokens: LineTokens, slots: list[NumberSlot]) -> list[NumberSlot]:
    """A bare number before a row without counters is its step: `[10] loss: 0.5`, `10: loss 0.5`."""
    number = tokens.numbers[0]
    counts = any(slot.role in (MetricRole.STEP, MetricRole.EPOCH, MetricRole.EPOCH_STEP) for slot in slots)
    informative = any(slot.role in _INFORMATIVE for slot in slots)
    if counts or not informative or slots[0].number is number or not number.text.isdigit() or number.unit:
        return slots
    bare = number.gap.replace(NOT_A_NUMBER, "").strip(" [(#")
    behind = tokens.numbers[1].gap.lstrip()[:1] if len(tokens.numbers) > 1 else ""
    return (
        [NumberSlot("step", MetricRole.STEP, number), *slots] if not bare and behind in ("]", ")", ":", "|") else slots
    )


def _spread_eval(slots: list[NumberSlot]) -> list[NumberSlot]:
    """If the first metric of a line is named as eval and none as training, all are eval metrics."""
    measured = [slot for slot in slots if slot.role in _PER_SPLIT and slot.name[:1] != HIDDEN]
    if (
        measured
        and phase_of_name(measured[0].name) == "eval"
        and not any(phase_of_name(slot.name) == "train" for slot in measured)
    ):
        for slot in measured:
            if not phase_of_name(slot.name):
                slot.name = f"eval {slot.name}"
    return slots


def _classify(tokens: LineTokens, slots: list[NumberSlot]) -> LineKind:
    named = [slot for slot in slots if slot.name[:1] != HIDDEN]
    roles = {slot.role for slot in named}
    counting = roles & {MetricRole.STEP, MetricRole.EPOCH, MetricRole.EPOCH_STEP} or any(
        slot.name == COUNT for slot in slots
    )
    telling = roles & _INFORMATIVE
    values = [slot for slot in named if slot.role not in (MetricRole.STEP, MetricRole.EPOCH, MetricRole.EPOCH_STEP)]
    if tokens.bar == "keras" and telling and any(slot.name == COUNT for slot in slots):
        return LineKind.BAR
    if len(values) == 1 and not counting and _is_whole_line(tokens, values[0]):
        return LineKind.SINGLE
    if telling & {MetricRole.LOSS, MetricRole.PERPLEXITY} and counting:
        return LineKind.ROW
    if telling and (counting or telling & {MetricRole.LOSS}):
        return LineKind.UNCONFIRMED
    if counting and not values and (named or tokens.bar or _BATCH.search(slots[0].number.gap)):
        return LineKind.POSITION
    return LineKind.CHATTER


def _is_whole_line(tokens: LineTokens, slot: NumberSlot) -> bool:
    """Whether one name and one number make up the whole line, but for a prefix and a unit."""
    return len(tokens.tail.strip(" |│┃,;.")) <= 12 and len(tokens.numbers) <= 2 and bool(slot.name)
