"""A guarded run is bit-identical to an unguarded one; `surefoot bench equal` is the long form of this test."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bit_equal

STEPS = 60
FAMILIES = bit_equal.training_setups()


@pytest.fixture(scope="module")
def bare() -> dict[str, bit_equal.RunRecord]:
    """The bare runs, each trained once for both policies."""
    return {}


@pytest.mark.parametrize("policy", bit_equal.POLICIES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_weights_state_buffers_and_random_states(
    family: bit_equal.TrainingSetup, policy: str, bare: dict[str, bit_equal.RunRecord]
) -> None:
    if family.name not in bare:
        bare[family.name] = bit_equal.train(family, STEPS, None)
    assert bit_equal.differences(bare[family.name], bit_equal.train(family, STEPS, policy)) == []


def test_five_training_setups_have_finite_losses() -> None:
    assert len(FAMILIES) == 5
    for family in FAMILIES:
        trace = bit_equal.train(family, 5, None)
        assert len(trace.losses) == 5 * family.num_microbatches
        assert trace.state["model"]
        assert torch.stack(trace.losses).isfinite().all()


def test_single_bit_flip_is_detected() -> None:
    first, second = (bit_equal.train(FAMILIES[0], 3, None) for _ in range(2))
    assert bit_equal.differences(first, second) == []
    weight = second.state["model"]["0.weight"]
    weight.view(torch.int32)[0, 0] ^= 1
    assert bit_equal.differences(first, second) == ["model.0.weight"]
    second.state["random"]["torch"][0] ^= 1
    assert set(bit_equal.differences(first, second)) == {"model.0.weight", "random.torch"}


def test_command_names_the_difference_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(bit_equal, "training_setups", lambda: FAMILIES[:1])
    assert bit_equal.main(4, device="cpu", say=lines.append) == 0
    assert lines[-1] == "every bit is equal"
    original_train = bit_equal.train

    def train_with_difference(
        family: bit_equal.TrainingSetup, steps: int, policy: str | None, **options: str
    ) -> bit_equal.RunRecord:
        trace = original_train(family, steps, policy, **options)
        if policy == "protect":
            trace.losses[2] = trace.losses[2] + 1.0
        return trace

    monkeypatch.setattr(bit_equal, "train", train_with_difference)
    assert bit_equal.main(4, device="cpu", say=lines.append) == 1
    assert any("DIFFERS: losses, first at backward 2" in line for line in lines)
