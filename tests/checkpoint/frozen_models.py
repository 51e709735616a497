"""Models with many frozen parameters: adapters on a frozen layer, and a teacher that follows its student."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 256


class AdapterModel(nn.Module):
    """A frozen layer with a trained adapter, as in LoRA; batch norm adds buffers."""

    def __init__(self, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(self.drop(self.norm(x))))


class TeacherStudent(nn.Module):
    """A student, and a teacher of the same shape that needs no gradient."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.student = nn.Linear(width, width)
        self.teacher = nn.Linear(width, width).requires_grad_(False)
        self.fixed = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.teacher(x).detach() * 0.1 + self.fixed(x)


def follow(model: TeacherStudent, how: str) -> None:
    """Move the teacher towards the student, with or without bumping the version counter."""
    for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        if how == "data":
            t.data.mul_(0.9).add_(s.data, alpha=0.1)
        elif how == "rebind":
            t.data = t.data * 0.9 + s.data * 0.1
        else:
            with torch.no_grad():
                t.mul_(0.9).add_(s, alpha=0.1)


def adapter_run(**options: Any) -> tuple[AdapterModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = AdapterModel(**options)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def teacher_student_run() -> tuple[TeacherStudent, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TeacherStudent()
    return model, torch.optim.AdamW(model.student.parameters(), lr=0.01)


def inputs(i: int, width: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(i))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, i: int, watch: Any = None, factor: float = 1.0) -> None:
    width = next(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    x = inputs(i, width)
    loss = (model(x) - x).square().mean() * factor
    loss = loss if watch is None else watch(loss, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    tensors += [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*tensors, torch.get_rng_state()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.equal(y) for x, y in zip(a, b, strict=True))
