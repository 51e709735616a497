"""Warnings about the position of loaders of all kinds, and that they are true."""

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


class Remembering(Stream):
    """As streaming datasets elsewhere: it keeps its place itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def warning_of(loader: object) -> str:
    told = position_of(loader)
    assert told.stateful is None
    assert told.warning is not None
    return told.warning


# -- loaders without a state


def test_a_plain_loader_loses_its_place_in_the_epoch() -> None:
    words = warning_of(DataLoader(Numbers(), batch_size=4, drop_last=True))
    assert "place in the epoch" in words
    assert "the order" not in words
    assert words.endswith("Use surefoot.data.make_loader(dataset, 4, seed=0, shuffle=False, drop_last=True).")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": True}, "shuffled by torch's global generator"),
        ({"shuffle": True, "generator": seeded()}, "shuffled by a generator, which has advanced"),
        ({"sampler": RandomSampler(Numbers(), generator=seeded())}, "shuffled by a generator"),
        ({"sampler": DistributedSampler(Numbers(), 2, 0)}, "unless the loop calls set_epoch"),
        ({"sampler": [3, 1, 2]}, "if list shuffles, only it knows how"),
        ({"num_workers": 2}, "drawn in its workers"),
    ],
)
def test_a_plain_loader_is_told_what_else_it_loses(options: dict[str, Any], said: str) -> None:
    words = warning_of(DataLoader(Numbers(), batch_size=4, **options))
    assert said in words
    assert "make_loader(dataset, 4, seed=0" in words


def test_a_batch_sampler_is_looked_into() -> None:
    words = warning_of(DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 6, drop_last=True)))
    assert "shuffled by torch's global generator" in words
    assert "make_loader(dataset, 6, seed=0, drop_last=True)" in words


def test_a_stream_in_a_plain_loader() -> None:
    words = warning_of(DataLoader(Stream(), batch_size=4))
    assert "place in the stream" in words
    assert "StatefulDataLoader(dataset, batch_size=4" in words
    assert "give Stream state_dict and load_state_dict" in words
    assert "and give" not in warning_of(DataLoader(Remembering(), batch_size=4))


def test_a_generator_and_a_list() -> None:
    assert "a generator runs forward once" in warning_of(i for i in range(3))
    assert "skip_ahead(loader, n)" in warning_of([1, 2, 3])


@pytest.mark.parametrize("thing", [None, 3, DataLoader, Remembering])
def test_what_is_no_loader_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match="must be iterable or have a state_dict"):
        position_of(thing)


# -- loaders with a state


def test_anything_that_keeps_its_own_place_is_taken_at_its_word() -> None:
    stream = Remembering()
    assert position_of(stream) == LoaderPosition(stream)
    assert position_of(stream).warning is None


def test_our_loader_and_our_sampler_are_exact() -> None:
    pytest.importorskip("torchdata")
    from surefoot.data import Sampler, make_loader

    for loader in (make_loader(Numbers(), 4, seed=0, num_workers=2), Sampler(23, 4, seed=0)):
        assert position_of(loader) == LoaderPosition(loader)


def test_what_is_drawn_in_workers_is_told() -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    said = position_of(module.StatefulDataLoader(Numbers(), 4, num_workers=2, generator=seeded()))
    assert said.stateful is not None
    assert said.warning is not None
    assert "draws in worker processes" in said.warning
    assert said.warning.endswith("Use surefoot.data.make_loader(dataset, 4, seed=0, shuffle=False, num_workers=2).")


def test_a_loop_over_guard_batches_is_not_told_of_seeds() -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    said = position_of(module.StatefulDataLoader(Numbers(), 4))
    assert said.warning_for(announced=True) is None
    without = said.warning_for(announced=False)
    assert without is not None
    assert "each loop over the loader draws a seed" in without
    assert "guard.batches(loader)" in without


def loaders_of_torchdata() -> dict[str, Any]:
    from torchdata.stateful_dataloader.sampler import RandomSampler as Remembered

    return {
        "plain": {},
        "own generator": {"generator": seeded()},
        "shuffled": {"shuffle": True},
        "one generator for both": {"shuffle": True, "generator": seeded()},
        "torch's sampler": {"sampler": RandomSampler(Numbers(), generator=seeded()), "generator": seeded()},
        "its own sampler": {"sampler": Remembered(Numbers(), generator=seeded()), "generator": seeded()},
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
def test_what_is_said_of_torchdatas_loader_is_what_happens(kind: str) -> None:
    """Trained on and resumed: the warning names what differs, and nothing that does not."""
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def made() -> Any:
        return module.StatefulDataLoader(Numbers(), 4, **loaders_of_torchdata()[kind])

    said = position_of(made())
    assert said.stateful is not None
    assert [words.split(" (")[0].removesuffix(" of the epochs") for words in said.inexact] == LOST[kind]
    assert said.warning is None or "generator=torch.Generator()" in said.warning
    torch.manual_seed(0)
    loader, seen, cut = made(), [], 8  # the second batch of the second epoch
    state: Any = None
    for _ in range(3):
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == cut:
                state = loader.state_dict(), torch.get_rng_state()
    at_the_end = torch.get_rng_state()
    resumed = made()
    resumed.load_state_dict(state[0])
    torch.set_rng_state(state[1])
    again = seen[:cut] + [batch.tolist() for _ in range(2) for batch in resumed]
    assert (again == seen) is ("the order" not in LOST[kind])
    assert torch.equal(torch.get_rng_state(), at_the_end) is ("torch's random numbers" not in LOST[kind])
