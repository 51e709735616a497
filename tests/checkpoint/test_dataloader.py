"""What each kind of data loader loses on a resume, and that the warnings about it are true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from surefoot.checkpoint.dataloader import LoaderPosition, position_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


class StatefulStream(Stream):
    """A streaming dataset that saves its own position."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def warning_of(loader: object) -> str:
    position = position_of(loader)
    assert position.stateful is None
    assert position.warning is not None
    return position.warning


# -- loaders without a state


def test_plain_loader_loses_its_position_in_the_epoch() -> None:
    warning = warning_of(DataLoader(Numbers(), batch_size=4, drop_last=True))
    assert "place in the epoch" in warning
    assert "the order" not in warning
    assert warning.endswith("Use surefoot.data.make_loader(dataset, 4, seed=0, shuffle=False, drop_last=True).")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shuffle": True}, "shuffled by torch's global generator"),
        ({"shuffle": True, "generator": seeded()}, "shuffled by a generator, which has advanced"),
        ({"sampler": RandomSampler(Numbers(), generator=seeded())}, "shuffled by a generator"),
        ({"sampler": DistributedSampler(Numbers(), 2, 0)}, "unless the loop calls set_epoch"),
        ({"sampler": [3, 1, 2]}, "if list shuffles, only it knows how"),
        ({"num_workers": 2}, "drawn in its workers"),
    ],
)
def test_warning_names_what_else_a_plain_loader_loses(options: dict[str, Any], expected: str) -> None:
    warning = warning_of(DataLoader(Numbers(), batch_size=4, **options))
    assert expected in warning
    assert "make_loader(dataset, 4, seed=0" in warning


def test_batch_sampler_is_inspected() -> None:
    warning = warning_of(DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 6, drop_last=True)))
    assert "shuffled by torch's global generator" in warning
    assert "make_loader(dataset, 6, seed=0, drop_last=True)" in warning


def test_iterable_dataset_in_a_plain_loader() -> None:
    warning = warning_of(DataLoader(Stream(), batch_size=4))
    assert "place in the stream" in warning
    assert "StatefulDataLoader(dataset, batch_size=4" in warning
    assert "give Stream state_dict and load_state_dict" in warning
    assert "and give" not in warning_of(DataLoader(StatefulStream(), batch_size=4))


def test_generator_and_list_as_loader() -> None:
    assert "a generator runs forward once" in warning_of(i for i in range(3))
    assert "skip_ahead(loader, n)" in warning_of([1, 2, 3])


@pytest.mark.parametrize("not_a_loader", [None, 3, DataLoader, StatefulStream])
def test_object_that_is_no_loader_is_refused(not_a_loader: object) -> None:
    with pytest.raises(TypeError, match="must be iterable or have a state_dict"):
        position_of(not_a_loader)


# -- loaders with a state


def test_stateful_loader_is_trusted() -> None:
    stream = StatefulStream()
    assert position_of(stream) == LoaderPosition(stream)
    assert position_of(stream).warning is None


def test_surefoots_loader_and_sampler_are_exact() -> None:
    pytest.importorskip("torchdata")
    from surefoot.data import Sampler, make_loader

    for loader in (make_loader(Numbers(), 4, seed=0, num_workers=2), Sampler(23, 4, seed=0)):
        assert position_of(loader) == LoaderPosition(loader)


def test_random_numbers_in_workers_are_warned_about() -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    position = position_of(module.StatefulDataLoader(Numbers(), 4, num_workers=2, generator=seeded()))
    assert position.stateful is not None
    assert position.warning is not None
    assert "draws in worker processes" in position.warning
    assert position.warning.endswith("Use surefoot.data.make_loader(dataset, 4, seed=0, shuffle=False, num_workers=2).")


def test_guard_batches_needs_no_seed_warning() -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    position = position_of(module.StatefulDataLoader(Numbers(), 4))
    assert position.warning_for(announced=True) is None
    warning_without_batches = position.warning_for(announced=False)
    assert warning_without_batches is not None
    assert "each loop over the loader draws a seed" in warning_without_batches
    assert "guard.batches(loader)" in warning_without_batches


def loaders_of_torchdata() -> dict[str, Any]:
    from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

    return {
        "plain": {},
        "own generator": {"generator": seeded()},
        "shuffled": {"shuffle": True},
        "one generator for both": {"shuffle": True, "generator": seeded()},
        "torch's sampler": {"sampler": RandomSampler(Numbers(), generator=seeded()), "generator": seeded()},
        "its own sampler": {"sampler": StatefulRandomSampler(Numbers(), generator=seeded()), "generator": seeded()},
    }


LOST = {
    "plain": ["torch's random numbers"],
    "own generator": [],
    "shuffled": ["torch's random numbers"],
    "one generator for both": ["the order"],
    "torch's sampler": ["the order"],
    "its own sampler": [],
}


@pytest.mark.parametrize("kind", LOST)
def test_warnings_about_stateful_dataloader_are_true(kind: str) -> None:
    """After a resume the warning names exactly what differs."""
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def build() -> Any:
        return module.StatefulDataLoader(Numbers(), 4, **loaders_of_torchdata()[kind])

    position = position_of(build())
    assert position.stateful is not None
    assert [warning.split(" (")[0].removesuffix(" of the epochs") for warning in position.inexact] == LOST[kind]
    assert position.warning is None or "generator=torch.Generator()" in position.warning
    torch.manual_seed(0)
    loader, batches, cut_at = build(), [], 8  # the second batch of the second epoch
    state: Any = None
    for _ in range(3):
        for batch in loader:
            batches.append(batch.tolist())
            if len(batches) == cut_at:
                state = loader.state_dict(), torch.get_rng_state()
    final_rng_state = torch.get_rng_state()
    resumed = build()
    resumed.load_state_dict(state[0])
    torch.set_rng_state(state[1])
    resumed_batches = batches[:cut_at] + [batch.tolist() for _ in range(2) for batch in resumed]
    assert (resumed_batches == batches) is ("the order" not in LOST[kind])
    assert torch.equal(torch.get_rng_state(), final_rng_state) is ("torch's random numbers" not in LOST[kind])
