"""What all integrations share: the options that the trainer itself fills in, and attributes replaced for a while."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from surefoot.guard import validate
from surefoot.guard.attached import AttachedGuard
from surefoot.guard.guard import Guard
from surefoot.guard.validate import Misuse

_ABSENT = object()
RESUME = (
    "{name}: resume=True is not possible inside {trainer}, because two resumes would end at two different steps. Leave "
    "it out and resume as {trainer} does ({how}); the guard's state is in its checkpoints."
)


def check_trainer_options(
    name: str, trainer: str, how: str, options: Mapping[str, Any], *, filled_in: Collection[str]
) -> None:
    """Raise where an option cannot be given inside this trainer."""
    if options.get("resume"):
        raise Misuse(RESUME.format(name=name, trainer=trainer, how=how))
    for option in filled_in:
        if option in options:
            raise Misuse(f"{name}: leave {option}= out: it comes from {trainer}.")
    validate.check_options(option for option in options if option not in (*validate.OPTIONS, "resume"))


def saves_wait(guard: Guard, options: Mapping[str, Any]) -> bool:
    """Whether the trainer's saves wait: not where surefoot only observes, or has lost its protection."""
    if validate.check_policy(options.get("policy", "protect")).observe:
        return False
    return isinstance(guard, AttachedGuard) and not guard.disabled and not guard.healthy


class Replaced:
    """Attributes of objects that were replaced, to be put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the newest first; may be called again."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)
