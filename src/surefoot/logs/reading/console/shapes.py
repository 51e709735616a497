"""The making of a line: which of its numbers are called what, and a pattern that finds them again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto

from surefoot.logs.reading.console.names import name_after, name_before, own_phase, phase_in
from surefoot.logs.reading.console.tokens import APART, Number, Tokens, figure
from surefoot.logs.reading.meaning import Role, meaning, words_of

HIDDEN = "\x00"
TOTAL = "\x00total"
"""Hidden names of numbers that are of use but no column: a counter's end, the rank that speaks."""
RANK = "\x00rank"
COUNT = "\x00count"
_RANK = re.compile(r"(?i)(?:\brank[ :=_]*|\[(?:gpu|worker|proc|process|node|default)[ :=_-]*|^\s*\[\d+,|\bgpu[ :=_]*)$")
_BATCH = re.compile(r"(?i)\b(?:batch|ba|minibatch)\W*$")
_DROPPED = frozenset(
    {"eta", "pid", "port", "seed", "line", "device", "gpu", "cuda", "v num", "id", "size", "host", "node"}
)
_TELLING = frozenset(
    {Role.LOSS, Role.NORM, Role.RATE, Role.SCALE, Role.SKIPPED, Role.PERPLEXITY, Role.ERROR, Role.ACCURACY, Role.REWARD}
)
_MEASURED = frozenset({Role.LOSS, Role.PERPLEXITY, Role.ERROR, Role.ACCURACY, Role.REWARD, Role.OTHER})
"""What belongs to the data it was measured on; a rate or a time does not."""


class Kind(Enum):
    """What lines of one making are."""

    ROW = auto()
    HELD = auto()
    """Rows, should there be more than one of them."""
    PLACE = auto()
    """Only counters: where the lines behind it stand."""
    SINGLE = auto()
    """One name and one number."""
    BAR = auto()
    """A bar of one epoch whose last state is the epoch's row."""
    CHATTER = auto()


@dataclass(slots=True)
class Slot:
    """One number of use."""

    name: str
    role: Role
    number: Number


@dataclass(slots=True)
class Shape:
    """Lines of one making."""

    key: str
    kind: Kind
    names: tuple[str, ...]
    commas: tuple[bool, ...]
    factors: tuple[float, ...]
    pattern_text: str
    counted: bool
    """Says by itself at which step or epoch it stands."""
    eval: bool
    epoch: str
    """The name of its epoch, if it has one."""
    steps: bool
    """It has a column of steps."""
    loss: bool
    """It has a loss."""
    bar: str = ""
    seen: int = 0
    held: tuple[int, dict[str, float]] | None = None
    """The first row of a kind that may be none, and the number of rows before it."""
    last: tuple[str, ...] = ()
    rank: float | None = None
    passed: float = 0.0
    """Steps of the bars before, for a counter that begins anew with every bar."""
    count: float = 0.0
    pattern: re.Pattern[str] | None = field(default=None)

    @property
    def plain(self) -> bool:
        """Its columns are just its numbers, so that many lines can be read at once."""
        return self.kind is Kind.ROW and self.counted and RANK not in self.names and not any(self.commas) and (
            COUNT not in self.names or not self.eval
        )  # fmt: skip

    def values(self, texts: tuple[str, ...]) -> dict[str, float]:
        """Raises ValueError where a text is no number after all."""
        return {
            name: figure(text, comma=comma) * factor
            for name, text, comma, factor in zip(self.names, texts, self.commas, self.factors, strict=True)
        }

    def compiled(self) -> re.Pattern[str]:
        if self.pattern is None:
            self.pattern = re.compile(self.pattern_text)
        return self.pattern


def shape_of(found: Tokens) -> tuple[Shape, tuple[str, ...]]:
    """How lines like this one are read, and the texts of this one's numbers."""
    slots = _slots(found)
    names = [slot.name for slot in slots]
    kind = _kind(found, slots)
    roles = {slot.role for slot in slots if slot.name[:1] != HIDDEN}
    pieces = list(found.pieces)
    for slot in slots:
        pieces[slot.number.place] = f"({pieces[slot.number.place]})"
    shape = Shape(
        key=found.key,
        kind=kind,
        names=tuple(names),
        commas=tuple(slot.number.comma for slot in slots),
        factors=tuple(slot.number.factor for slot in slots),
        pattern_text="".join(pieces),
        counted=bool(roles & {Role.STEP, Role.EPOCH}) or COUNT in names,
        eval=_evaluates(slots),
        epoch=next((slot.name for slot in slots if slot.role is Role.EPOCH), ""),
        steps=Role.STEP in roles,
        loss=Role.LOSS in roles,
        bar=found.bar,
    )
    return shape, tuple(slot.number.text for slot in slots)


def _evaluates(slots: list[Slot]) -> bool:
    """Whether a row tells of other data only: of what it measured nothing is training's."""
    measured = [slot.name for slot in slots if slot.role in _TELLING & _MEASURED]
    return bool(measured) and all(own_phase(name) == "eval" for name in measured)


def _slots(found: Tokens) -> list[Slot]:
    slots: list[Slot] = []
    taken: set[str] = set()
    phase = ""
    totals: set[int] = set()
    halves: dict[int, str] = {}
    for index, number in enumerate(found.numbers):
        if index in totals:
            continue
        if _speaker(found, index):
            slots.append(Slot(RANK, Role.OTHER, number))
            continue
        said = name_before(number.gap)
        total = _total(found.numbers, index)
        if total is not None:
            totals.add(index + 1)
        name, role = _called(found, index, halves.pop(index, "") or said.name)
        if name.count("/") == 1 and _halved(found.numbers, index):
            name, halves[index + 1] = name.split("/")  # train_loss/val_loss: 0.5/0.6
        phase = phase_in(said.rest) or (phase_in(said.name) if name in (COUNT, "epoch") else "") or phase
        if not name or " ".join(words_of(name)) in _DROPPED or number.unit == "z":
            continue
        if phase == "eval" and role in _MEASURED and not own_phase(name):
            name = f"eval {name}"
        if name in taken:
            continue
        taken.add(name)
        slots.append(Slot(name, role, number))
        if total is not None:
            slots.append(Slot(TOTAL if name == COUNT else f"{TOTAL} {name}", Role.OTHER, total))
    if any(slot.role is Role.STEP for slot in slots):
        slots = [slot for slot in slots if slot.name not in (COUNT, TOTAL)]
    return _sticky(_first(found, slots))


def _halved(numbers: list[Number], index: int) -> bool:
    return index + 1 < len(numbers) and numbers[index + 1].gap.strip() == "/" and _total(numbers, index) is None


def _speaker(found: Tokens, index: int) -> bool:
    """Whether the number is that of the rank that printed the line."""
    gap = found.numbers[index].gap
    return bool(_RANK.search(gap.rstrip("[ "))) or gap == f"[{APART}" or (index == 0 and _labelled(found))


def _called(found: Tokens, index: int, name: str) -> tuple[str, Role]:
    """The name of a number and what it means, where the words before it are not all."""
    numbers = found.numbers
    role = meaning(name).role
    if _total(numbers, index) is not None:
        if role not in (Role.INNER, Role.OTHER):
            return name, role
        if numbers[index].gap.rstrip().endswith("[") and _opens(numbers, index + 1, "]["):
            return "epoch", Role.EPOCH  # [1/200][10/1583]
        return COUNT, Role.INNER
    if name and role is Role.OTHER and phase_in(name) and len(name.split()) == 1 and _opens(numbers, index):
        return "epoch", Role.EPOCH  # Train: 3 [ 50/100 ...
    if not name and index < 2 and (_torchtune(numbers) or _tutorial(numbers)):
        name = ("batch" if numbers[1].gap.startswith(",") else "step") if index else "epoch"
    elif not name and _chinese(numbers, index, found):
        name = "epoch" if "轮" in _after(numbers, index, found)[:3] else "step"
    elif not name and numbers[index].unit[:4] in ("epoc", "step", "iter") and "/" not in numbers[index].unit:
        name = numbers[index].unit
    elif not name:
        name = name_after(numbers[index + 1].gap if index + 1 < len(numbers) else found.tail)
    return name, meaning(name).role


def _total(numbers: list[Number], index: int) -> Number | None:
    """The number behind the slash, for the first of 10/300."""
    if index + 1 < len(numbers) and numbers[index + 1].gap.strip() in ("/", "of", "out of"):
        whole = numbers[index].text.isdigit() and numbers[index + 1].text.isdigit()
        return numbers[index + 1] if whole else None
    return None


def _opens(numbers: list[Number], index: int, sign: str = "[") -> bool:
    return (
        index + 2 < len(numbers) and numbers[index + 1].gap.strip() == sign and _total(numbers, index + 1) is not None
    )


def _labelled(found: Tokens) -> bool:
    """`0: ...` in front of every line, as srun and others label what a task says; it counts no step."""
    numbers = found.numbers
    if numbers[0].gap.strip() or len(numbers) < 3 or numbers[0].unit or not numbers[0].text.isdigit():
        return False
    if not numbers[1].gap.startswith(": "):
        return False
    return any(meaning(name_before(number.gap).name).role in (Role.STEP, Role.EPOCH) for number in numbers[1:])


def _after(numbers: list[Number], index: int, found: Tokens) -> str:
    return (numbers[index + 1].gap if index + 1 < len(numbers) else found.tail).strip()


def _chinese(numbers: list[Number], index: int, found: Tokens) -> bool:
    """第3轮, 第 100 步."""
    return numbers[index].gap.rstrip().endswith("第") and bool(
        re.match("个?[轮步次]|个?epoch", _after(numbers, index, found))
    )


def _torchtune(numbers: list[Number]) -> bool:
    """1|10|Loss: 2.5."""
    return len(numbers) > 2 and not numbers[0].gap.strip() and numbers[1].gap == "|" and numbers[2].gap[:1] == "|"


def _tutorial(numbers: list[Number]) -> bool:
    """[1,  2000] loss: 2.5."""
    opens = numbers[0].gap.strip(f" {APART}") == "[" and len(numbers) > 2
    return opens and numbers[1].gap.strip() == "," and numbers[2].gap[:1] == "]"


def _first(found: Tokens, slots: list[Slot]) -> list[Slot]:
    """A bare number in front of a row that counts nothing is its step: `[10] loss: 0.5`, `10: loss 0.5`."""
    number = found.numbers[0]
    counts = any(slot.role in (Role.STEP, Role.EPOCH, Role.INNER) for slot in slots)
    told = any(slot.role in _TELLING for slot in slots)
    if counts or not told or slots[0].number is number or not number.text.isdigit() or number.unit:
        return slots
    bare = number.gap.replace(APART, "").strip(" [(#")
    behind = found.numbers[1].gap.lstrip()[:1] if len(found.numbers) > 1 else ""
    return [Slot("step", Role.STEP, number), *slots] if not bare and behind in ("]", ")", ":", "|") else slots


def _sticky(slots: list[Slot]) -> list[Slot]:
    """Where the first value of a line is an evaluation's by name and none is training's, all of them are."""
    measured = [slot for slot in slots if slot.role in _MEASURED and slot.name[:1] != HIDDEN]
    if (
        measured
        and own_phase(measured[0].name) == "eval"
        and not any(own_phase(one.name) == "train" for one in measured)
    ):
        for slot in measured:
            if not own_phase(slot.name):
                slot.name = f"eval {slot.name}"
    return slots


def _kind(found: Tokens, slots: list[Slot]) -> Kind:
    named = [slot for slot in slots if slot.name[:1] != HIDDEN]
    roles = {slot.role for slot in named}
    counting = roles & {Role.STEP, Role.EPOCH, Role.INNER} or any(slot.name == COUNT for slot in slots)
    telling = roles & _TELLING
    values = [slot for slot in named if slot.role not in (Role.STEP, Role.EPOCH, Role.INNER)]
    if found.bar == "keras" and telling and any(slot.name == COUNT for slot in slots):
        return Kind.BAR
    if len(values) == 1 and not counting and _alone(found, values[0]):
        return Kind.SINGLE
    if telling & {Role.LOSS, Role.PERPLEXITY} and counting:
        return Kind.ROW
    if telling and (counting or telling & {Role.LOSS}):
        return Kind.HELD
    if counting and not values and (named or found.bar or _BATCH.search(slots[0].number.gap)):
        return Kind.PLACE
    return Kind.CHATTER


def _alone(found: Tokens, slot: Slot) -> bool:
    """One name and one number make the whole line, but for a prefix and a unit."""
    return len(found.tail.strip(" |│┃,;.")) <= 12 and len(found.numbers) <= 2 and bool(slot.name)
