"""A GAN as users write it: two alternating optimizers, each with its own loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot
from benchmarks.replay import replay
from surefoot.records import Action, Decision, Event, Finding, Note, StepOverrides

Losses = dict[tuple[int, str], float]


class Gan:
    """A generator of points on a ring, and a critic."""

    def __init__(self, run: Path, *, generator_first: bool = False, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.05), nn.Linear(32, 1))
        self.model = nn.ModuleDict({"generator": generator, "critic": critic})
        self.generator, self.critic = generator, critic
        self.generator_opt = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
        self.critic_opt = torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.999))
        both = [self.generator_opt, self.critic_opt] if generator_first else [self.critic_opt, self.generator_opt]
        if options.pop("counts_critic", False):
            options["steps_of"] = self.critic_opt
        self.guard = surefoot.attach(self.model, both, run_dir=run, **options)
        self.events: list[Event] = []
        self.guard.on_event(self.events.append)
        self.losses: Losses = {}
        self._entropy = nn.BCEWithLogitsLoss()

    def train_critic(self, i: int, turn: int = 0, fault: Callable[[Tensor], Tensor] | None = None) -> None:
        source = torch.Generator().manual_seed(10_000 * i + turn)
        angle = 2 * math.pi * torch.rand(64, 1, generator=source)
        real = 2 * torch.cat([angle.cos(), angle.sin()], 1)
        real = real if fault is None else fault(real)
        self.critic_opt.zero_grad()
        made = self.generator(torch.randn(64, 8, generator=source)).detach()
        loss = self._entropy(self.critic(real), torch.ones(64, 1))
        loss = self.guard.watch(loss + self._entropy(self.critic(made), torch.zeros(64, 1)), real)
        loss.backward()
        self.critic_opt.step()
        self.losses[i, f"critic {turn}"] = loss.item()

    def train_generator(self, i: int) -> None:
        noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(10_000 * i + 999))
        self.generator_opt.zero_grad()
        loss = self.guard.watch(self._entropy(self.critic(self.generator(noise)), torch.ones(64, 1)), noise)
        loss.backward()
        self.generator_opt.step()
        self.losses[i, "generator"] = loss.item()

    def events_of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def refusals(run: Path, optimizer: int) -> np.ndarray:
    rows = surefoot.read(run).scalars
    return rows["verdict"][rows["optimizer"] == optimizer] > 0


@pytest.mark.parametrize("turns", [1, 5])
def test_healthy_gan_has_no_decisions(turns: int, tmp_path: Path) -> None:
    gan = Gan(tmp_path / "run", seed=turns)
    for i in range(120 // turns):
        for turn in range(turns):
            gan.train_critic(i, turn)
        gan.train_generator(i)
    gan.guard.close()
    assert gan.events_of(Decision) == []
    assert [f for f in gan.events_of(Finding) if f.severe] == []
    assert gan.guard.step == 120 // turns
    rows = surefoot.read(tmp_path / "run").scalars
    assert rows["step"].tolist()[-2:] == [120 // turns - 1] * 2, "all updates of an iteration share its step"


def damage_the_critic(gan: Gan) -> None:
    with torch.no_grad():
        for p in gan.critic.parameters():
            p.mul_(30.0)


@pytest.mark.parametrize("generator_first", [False, True])
@pytest.mark.parametrize("fault", ["nan", "scaled", "damaged"])
def test_both_networks_continue_after_one_fault(fault: str, generator_first: bool, tmp_path: Path) -> None:
    gan = Gan(tmp_path / "run", generator_first=generator_first)
    damage_batch = {"nan": lambda x: x * math.nan, "scaled": lambda x: 1e4 * x}.get(fault)
    for i in range(240):
        if i == 150 and fault == "damaged":
            damage_the_critic(gan)
        gan.train_critic(i, fault=damage_batch if i == 150 else None)
        gan.train_generator(i)
    gan.guard.close()
    critic, generator = (refusals(tmp_path / "run", k) for k in ((1, 0) if generator_first else (0, 1)))
    assert critic[150] or fault == "damaged", "the faulty update is refused"
    assert critic.sum() <= 20
    assert generator.sum() <= 20
    assert not critic[-60:].any()
    assert not generator[-60:].any()
    rewinds = [d for d in gan.events_of(Decision) if d.action is Action.REWIND]
    assert len(rewinds) >= (fault == "damaged")
    assert replay(tmp_path / "run").differences == [], "a replay of the recorded rows decides the same"
    assert all(torch.isfinite(p).all() and p.abs().max() < 10 for p in gan.model.parameters())


def test_decisions_and_history_name_their_optimizer(tmp_path: Path) -> None:
    gan = Gan(tmp_path / "run")
    for i in range(40):
        gan.train_critic(i, fault=(lambda x: x * math.nan) if i == 30 else None)
        gan.train_generator(i)
    gan.guard.close()
    refused = next(d for d in gan.events_of(Decision) if d.action is Action.REFUSE)
    assert refused.optimizers == (0,)
    assert refused.reason.startswith("optimizer 0 (critic): ")
    losses = [v for (_, name), v in gan.losses.items() if "critic" in name]
    assert gan.guard.history[0] == pytest.approx(losses, nan_ok=True), "history is that of the first optimizer"
    rows = surefoot.read(tmp_path / "run").scalars
    for k, name in ((0, "critic 0"), (1, "generator")):
        own = np.array([gan.losses[i, name] for i in range(30)])
        assert rows["loss_d1"][rows["optimizer"] == k][1:30] == pytest.approx(np.diff(own), rel=1e-3, abs=1e-6)


def norm_of(part: nn.Module) -> float:
    return nn.utils.parameters_to_vector(part.parameters()).detach().norm().item()


def test_weight_norms_are_those_of_the_optimizer_that_stepped(tmp_path: Path) -> None:
    gan = Gan(tmp_path / "run", policy=surefoot.Policy(weights_every=3))
    own: dict[int, list[float]] = {0: [], 1: []}
    for i in range(40):
        gan.train_critic(i)
        own[0].append(norm_of(gan.critic))
        gan.train_generator(i)
        own[1].append(norm_of(gan.generator))
    gan.guard.close()
    rows = surefoot.read(tmp_path / "run").scalars
    for k, norms in own.items():
        weight_norms = rows["weight_norm"][rows["optimizer"] == k]
        seen = np.flatnonzero(np.isfinite(weight_norms))
        assert len(seen) >= 8
        assert weight_norms[seen] == pytest.approx([norms[at - 1] for at in seen], rel=1e-4), (
            "measured after the previous update"
        )


def test_ceilings_apply_to_their_own_optimizer(tmp_path: Path) -> None:
    gan = Gan(tmp_path / "run")
    guard: Any = gan.guard
    for i in range(5):
        one_each(gan, i)
    guard._recovery.overrides.set(StepOverrides(loss_ceiling=1e-9), (1,))
    for i in range(5, 8):
        one_each(gan, i)
    guard._recovery.overrides.set(StepOverrides(norm_ceiling=(1e-9,)), (0,))
    for i in range(8, 10):
        one_each(gan, i)
    guard._recovery.overrides.set(StepOverrides())
    one_each(gan, 10)
    guard.close()
    assert refusals(tmp_path / "run", 0).tolist() == [False] * 8 + [True] * 2 + [False]
    assert refusals(tmp_path / "run", 1).tolist() == [False] * 5 + [True] * 5 + [False]


# -- steps, saves and rewinds


def one_each(gan: Gan, i: int) -> None:
    gan.train_critic(i)
    gan.train_generator(i)


def five_to_one(gan: Gan, i: int) -> None:
    for turn in range(5):
        gan.train_critic(i, turn)
    gan.train_generator(i)


def generator_before_five(gan: Gan, i: int) -> None:
    gan.train_generator(i)
    for turn in range(5):
        gan.train_critic(i, turn)


def every_fifth(gan: Gan, i: int) -> None:
    gan.train_critic(i)
    if i % 5 == 0:
        gan.train_generator(i)


class Interrupted(Exception):
    pass


def interrupt_iteration(loop: Callable[[Gan, int], None], gan: Gan, i: int) -> None:
    """Raise in the middle of an iteration, after its first update."""

    def die(*_: Any) -> None:
        raise Interrupted

    gan.train_generator = gan.train_critic = die  # type: ignore[method-assign]
    first_update = Gan.train_generator if loop is generator_before_five else Gan.train_critic
    first_update(gan, i)
    loop(gan, i)


@pytest.mark.parametrize(
    ("loop", "options"),
    [(one_each, {}), (five_to_one, {}), (generator_before_five, {}), (every_fifth, {"counts_critic": True})],
)
def test_interrupted_iteration_resumes_exactly(
    loop: Callable[[Gan, int], None], options: dict[str, Any], tmp_path: Path
) -> None:
    policy = surefoot.Policy(save_every=2, cautious_after_crash=False)
    straight = Gan(tmp_path / "straight", policy=policy, **options)
    for i in range(36):
        loop(straight, i)
    straight.guard.close()
    assert straight.guard.step == 36
    losses, starts = dict[tuple[int, str], float](), list[int]()
    for stop in (18, 27, 36):
        gan = Gan(tmp_path / "broken", resume=True, policy=policy, **options)
        starts.append(gan.guard.step)
        try:
            with gan.guard:
                for i in range(gan.guard.step, stop):
                    loop(gan, i)
                if stop < 36:
                    interrupt_iteration(loop, gan, stop)
        except Interrupted:
            pass
        losses |= gan.losses
    assert losses == straight.losses
    assert starts[0] == 0
    assert 0 < starts[1] <= 18
    assert starts[1] < starts[2] <= 27


def test_final_save_counts_iterations(tmp_path: Path) -> None:
    for n in (1, 3, 8):
        gan = Gan(tmp_path / "run", resume=True)
        for i in range(gan.guard.step, n):
            one_each(gan, i)
        gan.guard.close()
        assert gan.guard.step == n


def test_rewind_happens_only_at_the_end_of_an_iteration(tmp_path: Path) -> None:
    """Generated points are used again after the critic's step, so a rewind in between would break their graph."""
    gan = Gan(tmp_path / "run")
    for i in range(60):
        if i == 40:
            damage_the_critic(gan)
        noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(i))
        made = gan.generator(noise)
        gan.critic_opt.zero_grad()
        real = torch.randn(64, 2, generator=torch.Generator().manual_seed(500 + i))
        loss = gan.critic(made.detach()).sigmoid().mean() - gan.critic(real).sigmoid().mean()
        gan.guard.watch(loss, real).backward()
        gan.critic_opt.step()
        gan.generator_opt.zero_grad()
        gan.guard.watch(-gan.critic(made).sigmoid().mean(), noise).backward()
        gan.generator_opt.step()
    gan.guard.close()
    assert [e.name for e in gan.events_of(Note) if e.name in ("rewound", "degraded")] == ["rewound"]


def test_steps_of_must_be_an_attached_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    attached, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"steps_of=SGD is none of the 1 attached optimizers"):
        surefoot.attach(model, attached, run_dir=tmp_path / "a", steps_of=other)
    with pytest.raises(ValueError, match=r"steps_of=int is none of the 1 attached optimizers"):
        surefoot.attach(model, attached, run_dir=tmp_path / "b", steps_of=5)  # type: ignore[arg-type]


def test_generator_with_a_new_param_group_stays_guarded(tmp_path: Path) -> None:
    gan = Gan(tmp_path / "run")
    for i in range(30):
        if i == 20:
            gan.generator.append(nn.Linear(2, 2))
            gan.generator_opt.add_param_group({"params": gan.generator[-1].parameters()})
        one_each(gan, i)
    gan.guard.close()
    assert [e.name for e in gan.events_of(Note) if e.name in ("rewired", "degraded")] == ["rewired"]
    assert gan.guard.step == 30
    rows = surefoot.read(tmp_path / "run").scalars
    assert rows["optimizer"].tolist() == [0, 1] * 30
