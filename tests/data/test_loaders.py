"""Loaders stopped after any batch, with and without workers, killed, in one process and in two."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("torchdata")
sys.path.insert(0, str(Path(__file__).parent))
import reader_processes
from reader_processes import LENGTH, Numbers, noisy_loader

from surefoot.data import Loader, Sampler, WrongPosition, keyed_generator, keyed_numpy, make_loader

EPOCHS = 3


def loader_of(length: int = 23, batch_size: int = 4, **options: Any) -> Loader:
    return make_loader(Numbers(length), batch_size, **{"seed": 1, **options})


def read(loader: Loader, most: int = 10**9, epochs: int = EPOCHS) -> list[list[int]]:
    """Up to `most` batches of the remaining epochs."""
    seen: list[list[int]] = []
    for _ in range(loader.epoch, epochs):
        for batch in loader:
            seen.append(batch.tolist())
            assert loader.last_samples == seen[-1]
            if len(seen) == most:
                return seen
    return seen


def saved(loader: Loader) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


# -- stopped and resumed


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_without_workers_a_resume_is_exact_after_every_batch(shuffle: bool, drop_last: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last}
    expected = read(loader_of(**options))
    assert len(expected) == EPOCHS * (5 if drop_last else 6)
    for cut in range(1, len(expected) + 1):
        stopped = loader_of(**options)
        seen = read(stopped, cut)
        resumed = loader_of(**options)
        resumed.load_state_dict(saved(stopped))
        assert seen + read(resumed) == expected


# In mid-epoch, at the last (partial) batch and in a later epoch, with different numbers of workers before and after.
@pytest.mark.parametrize(
    ("before", "after", "cut", "options"),
    [
        (2, 2, 2, {}),
        (2, 0, 6, {}),
        (0, 2, 6, {"persistent_workers": True}),
        (2, 1, 8, {"persistent_workers": True, "prefetch_factor": 4}),
        (2, 1, 10, {"drop_last": True}),
        (2, 2, 7, {"shuffle": False}),
    ],
)
def test_with_workers_the_position_is_that_of_the_last_yielded_batch(
    before: int, after: int, cut: int, options: dict[str, Any]
) -> None:
    def build(workers: int) -> Loader:
        return loader_of(num_workers=workers, **{k: v for k, v in options.items() if workers or k in plain})

    plain = ("drop_last", "shuffle")
    expected = read(build(0))
    stopped = build(before)
    seen = read(stopped, cut)
    resumed = build(after)
    resumed.load_state_dict(saved(stopped))
    assert seen + read(resumed) == expected


def test_a_new_loop_continues_an_abandoned_one() -> None:
    for workers in (0, 2):
        loader = loader_of(num_workers=workers)
        abandoned = iter(loader)
        seen = [next(abandoned).tolist(), next(abandoned).tolist()]
        seen += read(loader, 3)
        seen += read(loader)
        assert seen == read(loader_of())
        with pytest.raises(RuntimeError, match="ended when another one began"):
            next(abandoned)


def test_a_state_saved_between_epochs_resumes_with_a_full_epoch() -> None:
    loader = loader_of()
    first = read(loader, epochs=1)
    assert (saved(loader)["epoch"], saved(loader)["cursor"]) == (1, 0)
    resumed = loader_of()
    resumed.load_state_dict(saved(loader))
    assert first + read(resumed) == read(loader_of())


def test_a_fresh_loader_has_a_state_without_starting_workers() -> None:
    loader = loader_of(num_workers=2)
    assert saved(loader)["cursor"] == 0
    assert loader._iterator is None


def test_loops_do_not_use_torchs_global_generator() -> None:
    """A resumed run starts one loop more; a seed drawn from torch's generator would change its dropout."""
    before = torch.get_rng_state()
    read(loader_of())
    assert torch.equal(torch.get_rng_state(), before)


# -- load_state_dict and ban in the middle of a loop


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_running_loop_follows_load_state_dict(options: dict[str, Any]) -> None:
    expected = read(loader_of(), epochs=1)
    loader, seen, state = loader_of(**options), [], None
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            state = saved(loader)
        if len(seen) == 4:
            assert state is not None
            loader.load_state_dict(state)
    assert seen == expected[:4] + expected[2:]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_banned_sample_never_comes_again_even_if_prefetched(options: dict[str, Any]) -> None:
    order = [sample for batch in read(loader_of(), epochs=1) for sample in batch]
    banned = {order[1], order[5], order[9], order[22]}
    loader, seen = loader_of(**options), []
    for batch in loader:
        seen += batch.tolist()
        if len(seen) == 4:
            last_samples = loader.last_samples
            loader.ban(banned)
            assert loader.last_samples == last_samples
    assert seen == order[:4] + [sample for sample in order[4:] if sample not in banned]
    resumed = loader_of()
    resumed.load_state_dict(saved(loader))
    assert not banned & {sample for batch in read(resumed) for sample in batch}


def test_the_epoch_can_be_set_as_with_a_distributed_sampler() -> None:
    expected = read(loader_of())
    loader = loader_of(num_workers=1)
    assert read(loader, 2) == expected[:2]
    loader.set_epoch(0)
    assert read(loader, 2, epochs=1) == expected[2:4]
    loader.set_epoch(2)
    assert read(loader) == expected[12:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_failed_to_load_is_read_again(workers: int, tmp_path: Path) -> None:
    class Flaky(Numbers):
        """A dataset whose disk fails once."""

        def __getitem__(self, index: int) -> int:
            if index == 7 and not (tmp_path / "failed").exists():
                (tmp_path / "failed").touch()
                raise OSError("disk went away")
            return index

    loader, seen = make_loader(Flaky(23), 4, seed=1, num_workers=workers), []
    with pytest.raises(OSError, match="disk went away"):
        for batch in loader:
            seen.append(batch.tolist())
    resumed = loader_of()
    resumed.load_state_dict(saved(loader))
    expected = read(loader_of(), epochs=1)
    assert seen + read(resumed, epochs=1) == expected
    assert seen + read(loader, epochs=1) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs an accelerator")
def test_pinned_batches_are_the_same() -> None:
    loader = loader_of(num_workers=2, pin_memory=True)
    first = next(iter(loader))
    assert first.is_pinned()
    assert [first.tolist(), *read(loader)] == read(loader_of())


# -- random numbers per sample


def test_augmentation_depends_on_sample_and_epoch_not_on_workers() -> None:
    alone = [batch for _ in range(2) for batch in noisy_loader(0)]
    loader = noisy_loader(2)
    loop = iter(loader)
    seen = [next(loop) for _ in range(5)]
    assert loader.last_samples == [sample for sample, _ in seen[-1]]
    resumed = noisy_loader(1)
    resumed.load_state_dict(saved(loader))
    seen += list(resumed)
    assert seen == alone[: len(seen)]
    first, second = ({s: x for batch in noisy for s, x in batch} for noisy in (seen, list(resumed)))
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_getitems_is_used_when_the_dataset_has_it() -> None:
    class BatchedNumbers(Numbers):
        def __getitem__(self, index: int) -> int:
            raise AssertionError("__getitem__ was called")

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [2 * i for i in indices]

    def same(sample: int, generator: torch.Generator) -> int:
        return sample

    plain = make_loader(BatchedNumbers(8), 4, seed=0)
    augmented = make_loader(BatchedNumbers(8), 4, seed=0, augment=same)
    assert [b.tolist() for b in plain] == [b.tolist() for b in augmented]


def test_keyed_generators_differ_by_sample_epoch_and_seed() -> None:
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert len({torch.rand((), generator=keyed_generator(*k)).item() for k in keys}) == 4
    assert len({keyed_numpy(*k).random() for k in keys}) == 4
    assert keyed_numpy(1, 2, 3).random() == keyed_numpy(1, 2, 3).random()


# -- states that do not match


def test_a_state_of_other_data_is_refused_and_the_loader_continues() -> None:
    loader = loader_of()
    expected = read(loader_of(), epochs=1)
    seen = read(loader, 2)
    for state, message in (
        (saved(loader_of(24)), "saved with length=24, here it is 23"),
        (saved(loader_of(seed=2)), "the seed of the saved run"),
        ({"_snapshot": {}, "_steps_since_snapshot": 0}, "belongs to another loader"),
    ):
        with pytest.raises(WrongPosition, match=message):
            loader.load_state_dict(state)
    assert seen + read(loader, epochs=1) == expected


def test_make_loader_refuses_an_iterable_dataset_with_advice() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(TypeError, match="For an iterable dataset use torchdata"):
        make_loader(Stream(), 4, seed=0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_sampler_works_in_torchdatas_stateful_data_loader() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def build() -> Any:
        return StatefulDataLoader(
            Numbers(23), batch_sampler=Sampler(23, 4, seed=1), num_workers=2, generator=torch.Generator()
        )

    expected = [batch.tolist() for batch in loader_of()]
    stopped = build()
    loop = iter(stopped)
    seen = [next(loop).tolist() for _ in range(3)]
    resumed = build()
    resumed.load_state_dict(stopped.state_dict())
    assert seen + [batch.tolist() for batch in resumed] == expected


# -- separate processes


FORK = multiprocessing.get_context("fork")  # a child that need not import torch again


def started(target: Any, *args: Any) -> Any:
    process = FORK.Process(target=target, args=args)
    process.start()
    return process


# Steps 1 to 26 are the first epoch, 27 to 52 the second.
@pytest.mark.parametrize("processes", [[(0, 9), (0, 27), (0, None)], [(2, 5), (0, 26), (1, 41), (2, None)]])
def test_a_repeatedly_killed_run_reads_the_same_batches(
    processes: list[tuple[int, int | None]], tmp_path: Path
) -> None:
    loader = noisy_loader(0)
    expected = [batch for _ in range(2) for batch in loader]
    file = tmp_path / "state.json"
    for workers, die_at in processes:
        process = started(reader_processes.read, file, workers, 2, die_at)
        process.join()  # with a timeout it would also wait for the killed process's workers
        assert process.exitcode == (0 if die_at is None else -signal.SIGKILL)
    assert json.loads(file.read_text())["seen"] == expected


def test_one_rank_resumes_from_two_and_two_from_one(tmp_path: Path) -> None:
    order = [sample for batch in make_loader(Numbers(LENGTH), 1, seed=11) for sample in batch.tolist()]
    begun = make_loader(Numbers(LENGTH), 5, seed=11)
    first = read(begun, 7)
    (tmp_path / "begun.json").write_text(json.dumps(begun.state_dict()))
    for process in [started(reader_processes.read_on_two_ranks, tmp_path, rank) for rank in (0, 1)]:
        process.join()
        assert process.exitcode == 0
    rank_0, rank_1 = (json.loads((tmp_path / f"results-{rank}.json").read_text()) for rank in (0, 1))
    assert merge_ranks(first) + merge_ranks(rank_0["rest"], rank_1["rest"]) == order
    assert rank_0["state"] == rank_1["state"]
    alone = make_loader(Numbers(LENGTH), 6, seed=11)
    alone.load_state_dict(rank_0["state"])
    assert merge_ranks(rank_0["first"], rank_1["first"]) + merge_ranks(read(alone, epochs=1)) == order


def merge_ranks(*by_rank: list[list[int]]) -> list[int]:
    return [sample for step in zip(*by_rank, strict=True) for share in step for sample in share]


class Noisy(Dataset[float]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(()))

    kind = "noisy"


def test_random_numbers_in_workers_depend_on_the_batch_only() -> None:
    def read(workers: int, position: dict[str, Any] | None = None) -> list[Any]:
        loader = make_loader(Noisy(), 3, seed=0, num_workers=workers)
        assert loader.dataset.kind == "noisy"  # type: ignore[attr-defined]
        if position is not None:
            loader.load_state_dict(position)
        batches_and_states = []
        for batch in loader:
            batches_and_states.append((batch.tolist(), loader.state_dict()))
        return batches_and_states

    rank_1 = read(2)
    assert [batch for batch, _ in read(1, rank_1[1][1])] == [batch for batch, _ in rank_1[2:]]
    assert len({round(x % 1, 6) for batch, _ in rank_1 for x in batch}) == 12
