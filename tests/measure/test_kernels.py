"""The Triton kernels: on CUDA where there is one, and always in Triton's interpreter (see test_interpreter.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from reference_stats import ABSENT, LAYOUTS, PLANTED, assert_row, odd_tensor
from torch import Tensor

from surefoot.gate import rule as rules
from surefoot.gate.clip import Clip, ClipUnit
from surefoot.measure.block_layout import MAX_MICROBATCHES, UNITS_START, SummarySlot, VerdictSlot
from surefoot.measure.stats_torch import torch_summariser
from surefoot.records import LAYER_STATS, Verdict

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter works with NumPy
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fused(tensors: list[Tensor | None], device: torch.device, numels: list[int] | None = None) -> Callable[..., Tensor]:
    """A function that measures tensors of these sizes with Triton."""
    from surefoot.measure.stats_triton import TritonStats

    stats = TritonStats(numels or [11 if t is None else t.numel() for t in tensors], device)

    def measure(tensors: list[Tensor | None], scale: float | None = None) -> Tensor:
        out = torch.full((len(tensors), len(LAYER_STATS)), 7.7, device=device)
        stats.measure(tensors, out=out, scale=None if scale is None else torch.tensor(scale, device=device))
        return out.cpu()

    return measure


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_statistics_against_float64(scale: float | None, kernels: torch.device) -> None:
    tensors: list[Tensor | None] = [None]
    for seed, layout in enumerate(sorted(LAYOUTS)):
        for dtype in DTYPES:
            planted = PLANTED if seed % 3 == 0 else (0.0, 1e-6)
            tensors.append(odd_tensor(layout, dtype, seed=seed, offset=seed % 2, planted=planted).to(kernels))
    out = fused(tensors, kernels)(tensors, scale)
    assert out[0].tolist() == ABSENT
    for row, tensor in zip(out[1:], tensors[1:], strict=True):
        assert tensor is not None
        assert_row(row, tensor, scale or 1.0)


def test_sizes_around_a_chunk(kernels: torch.device) -> None:
    from surefoot.measure.stats_kernels import CHUNK

    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7)
    host_tensors = [torch.randn(n, generator=generator) + 5.0 * i for i, n in enumerate(sizes)]
    host_tensors[-1][2 * CHUNK :] = math.inf  # a chunk without a single number
    host_tensors[-2][CHUNK : CHUNK + 3] = 0.0
    tensors: list[Tensor | None] = [t.to(kernels) for t in host_tensors]
    for row, tensor in zip(fused(tensors, kernels)(tensors), tensors, strict=True):
        assert tensor is not None
        assert_row(row, tensor)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_tensors_that_start_anywhere(dtype: torch.dtype, kernels: torch.device) -> None:
    base = torch.randn(9001, generator=torch.Generator().manual_seed(0)).to(dtype).to(kernels)
    for start in range(4):
        tensors: list[Tensor | None] = [base[start:], base[: 100 + start]]
        for row, tensor in zip(fused(tensors, kernels)(tensors), tensors, strict=True):
            assert tensor is not None
            assert_row(row, tensor)


def test_gradients_at_new_addresses_and_absent_ones(kernels: torch.device) -> None:
    start: list[Tensor | None] = [torch.ones(50, device=kernels) * i for i in range(5)]
    measure = fused(start, kernels)
    all_tensors: list[list[Tensor | None]] = []
    for turn in range(8):
        now: list[Tensor | None] = [
            None if (turn + i) % 4 == 0 else torch.randn(50, device=kernels) + turn for i in range(5)
        ]
        all_tensors.append(now)  # so that the next tensors have other addresses
        for row, tensor in zip(measure(now), now, strict=True):
            if tensor is None:
                assert row.tolist() == ABSENT
            else:
                assert_row(row, tensor)


def test_another_dtype_at_the_same_address(kernels: torch.device) -> None:
    half = torch.randn(64).to(torch.float16).to(kernels)
    measure = fused([half], kernels)
    assert_row(measure([half])[0], half)
    brain = half.view(torch.bfloat16)
    assert_row(measure([brain])[0], brain)


def test_absent_and_empty_tensors(kernels: torch.device) -> None:
    tensors: list[Tensor | None] = [None, torch.empty(0, device=kernels)]
    out = fused(tensors, kernels, numels=[0, 0])(tensors)
    assert out.tolist() == [ABSENT, [0.0] * 8]


def test_bitwise_repeatable_at_any_address(cuda: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    host_tensors = [torch.randn(n, generator=generator).to(d) for n in (5, 300_000, 70_001) for d in DTYPES[:3]]
    first: Tensor | None = None
    all_tensors: list[list[Tensor]] = []
    measure = fused(list(host_tensors), cuda)
    for _ in range(20):
        now = [t.to(cuda) for t in host_tensors]
        all_tensors.append(now)
        out = measure(list(now))
        first = out if first is None else first
        assert torch.equal(out, first)


def test_measuring_never_waits_for_the_device(cuda: torch.device) -> None:
    from surefoot.measure.stats_triton import TritonStats

    tensors: list[Tensor | None] = [
        None,
        *(torch.randn(1000, device=cuda).to(d) for d in DTYPES),
        torch.randn(8, device=cuda, dtype=torch.complex64),
        torch.randn(4, 5, device=cuda).t(),
        torch.randn(5, 1, device=cuda).expand(5, 7),
    ]
    stats = TritonStats([7 if t is None else t.numel() for t in tensors], cuda)
    out = torch.zeros(len(tensors), len(LAYER_STATS), device=cuda)
    scale = torch.tensor(2.0, device=cuda)
    stats.measure(tensors, out=out, scale=scale)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats.measure(tensors, out=out, scale=scale)
        moved = [None if t is None else t.clone() for t in tensors]
        stats.measure(moved, out=out, scale=scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_both_summarisers_agree(dtype: torch.dtype, kernels: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    units = [slice(0, 3), slice(3, 3), slice(3, 300)]
    owned = (torch.rand(310, generator=generator) > 0.3).to(torch.int32).to(kernels)
    from surefoot.measure.stats_triton import triton_summariser

    both = (torch_summariser(units), triton_summariser(units, kernels))
    summaries = [torch.zeros(UNITS_START + 2 * len(units), dtype=torch.float64, device=kernels) for _ in both]
    microbatches = [torch.zeros(MAX_MICROBATCHES, 3, dtype=torch.float64, device=kernels) for _ in both]
    for microbatch in (0, 1, 2, MAX_MICROBATCHES - 1, MAX_MICROBATCHES, MAX_MICROBATCHES + 5, 0):
        stats = torch.rand(310, len(LAYER_STATS), generator=generator)
        stats[:, 5] = torch.randint(-1, 2, (310,), generator=generator)
        if microbatch == 2:
            stats[1, 0] = math.nan
        loss = torch.randn((), generator=generator).to(dtype).to(kernels)
        weight = None if microbatch == 1 else torch.rand((), generator=generator).to(dtype).to(kernels)
        for summarise, summary, lines in zip(both, summaries, microbatches, strict=True):
            rows = stats.to(kernels)
            summarise(
                rows, owned=owned, loss=loss, weight=weight, summary=summary, microbatches=lines, microbatch=microbatch
            )
        torch.testing.assert_close(summaries[0], summaries[1], rtol=1e-12, atol=0.0, equal_nan=True)
        torch.testing.assert_close(microbatches[0], microbatches[1], rtol=1e-12, atol=0.0, equal_nan=True)
    for summarise, summary, lines in zip(both, summaries, microbatches, strict=True):
        summarise(stats.to(kernels), owned=owned, loss=None, summary=summary, microbatches=lines, microbatch=0)
    torch.testing.assert_close(summaries[0], summaries[1], rtol=1e-12, atol=0.0)


UNIT_SETS = {
    "no clip": (Clip(), Clip(), Clip()),
    "norm": (Clip(norm=1.0), Clip(norm=2.0), Clip(norm=0.5)),
    "adaptive": (Clip(adaptive=True), Clip(adaptive=True), Clip(norm=3.0)),
}


@pytest.mark.parametrize("clips", UNIT_SETS)
@pytest.mark.parametrize("optimizer", [0, 1])
def test_both_deciders_agree(optimizer: int, clips: str, kernels: torch.device) -> None:
    generator = torch.Generator().manual_seed(optimizer)
    spans = (slice(0, 3), slice(3, 5), slice(5, 9))
    owners = (0, 1, 1)
    units = [ClipUnit(k, span, clip) for k, span, clip in zip(owners, spans, UNIT_SETS[clips], strict=True)]
    rule = rules.NormRule(100.0, 20, 0.99)
    memories = [rules.new_gate_memory(optimizer, units, kernels) for _ in range(2)]
    deciders = (rules.torch_decider(memories[0], rule), rules.triton_decider(memories[1], rule))
    if clips == "adaptive":  # as after 990 updates, so that the ring wraps soon
        for m in memories:
            m.norms[:, :990] = torch.rand(len(m.units), 990, generator=torch.Generator().manual_seed(7)).to(kernels)
            m.baseline.copy_(torch.tensor([1.0, 1.0, 990.0]))
            m.refresh_thresholds()
    seen: set[int] = set()
    for i in range(100):
        if i == 70:  # from here on with ceilings, each of which is exceeded sometimes
            for m in memories:
                m.ceilings.copy_(torch.tensor([1.125, 0.75, 0.25]))
        totals = _totals(i, generator).to(kernels)
        joint = None if i % 4 else torch.tensor(float(i // 4 % 4), dtype=torch.float64, device=kernels)
        decisions = [torch.zeros(len(VerdictSlot), dtype=torch.float64, device=kernels) for _ in deciders]
        for decide, decision in zip(deciders, decisions, strict=True):
            decide(totals, out=decision, scaled=i % 3 == 1, joint=joint, commit=i % 7 != 0)
        torch.testing.assert_close(decisions[0], decisions[1], rtol=1e-12, atol=0.0, equal_nan=True)
        for name in ("baseline", "thresholds", "norms", "factors", "refuse", "buffers_tainted", "divisor"):
            a, b = (getattr(m, name) for m in memories)
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
        if totals[SummarySlot.NONFINITE_BUFFERS] > 0 and joint is None:
            assert decisions[0][VerdictSlot.VERDICT] == Verdict.NONFINITE, "an overflow has finite buffers"
        seen.add(int(decisions[0][VerdictSlot.VERDICT]))
        assert decisions[0][VerdictSlot.NORM_LIMIT] <= (math.inf if i < 70 else 1.125)
        assert decisions[0][VerdictSlot.CLIP_THRESHOLD] <= (math.inf if i < 70 else 0.25)
        large = decisions[0][VerdictSlot.NORM] > 1.125 or decisions[0][VerdictSlot.LOSS] > 0.75
        assert i < 70 or not large or decisions[0][VerdictSlot.VERDICT] != Verdict.APPLIED
        if i % 10 == 0:
            for m in memories:
                m.refresh_thresholds()
    assert seen == {Verdict.APPLIED, Verdict.NONFINITE, Verdict.NORM_OUTLIER, Verdict.OVERFLOW}


def _totals(i: int, generator: torch.Generator) -> Tensor:
    """Sums of a summary: healthy, non-finite loss, gradients or buffers, far too large, or all zero."""
    totals = torch.rand(UNITS_START + 6, generator=generator, dtype=torch.float64)
    totals[1] = 1 + i % 3
    totals[UNITS_START + 1 :: 2] = 0.0
    totals[SummarySlot.NONFINITE_BUFFERS] = 2.0 if i % 14 == 4 else 0.0
    if i % 11 == 5:
        totals[UNITS_START + 1 + 2 * (i % 3)] = 3.0
        totals[UNITS_START + 2 * (i % 3)] = math.nan
    if i % 13 == 6:
        totals[0] = (math.nan, math.inf)[i % 2]
    if i % 17 == 9:
        totals[UNITS_START::2] *= 1e12
    if i % 19 == 3:
        totals[UNITS_START:] = 0.0
    if i % 23 == 8:
        totals[UNITS_START::2] = math.inf  # squares too large for float32
    return totals


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("refused", [0.0, 1.0])
def test_buffers_are_committed_or_reverted_on_the_device(refused: float, keep: bool, kernels: torch.device) -> None:
    from surefoot.checkpoint.buffer_kernels import commit_or_revert

    sizes = (1, 7, 1024, 40_001)
    live = [torch.randint(0, 255, (n,), dtype=torch.uint8).to(kernels) for n in sizes]
    shadow = [torch.randint(0, 255, (n,), dtype=torch.uint8).to(kernels) for n in sizes]
    before_live, before_shadow = [t.clone() for t in live], [t.clone() for t in shadow]
    rows = [*(t.data_ptr() for t in live), *(t.data_ptr() for t in shadow), *sizes]
    table = torch.tensor(rows, dtype=torch.int64, device=kernels)
    commit_or_revert[(len(sizes), 16)](table, torch.tensor(refused, device=kernels), len(sizes), KEEP=keep, BLOCK=1024)
    expected_live = before_shadow if refused else before_live
    expected_shadow = before_live if keep and not refused else before_shadow
    for a, b, c, d in zip(live, expected_live, shadow, expected_shadow, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(c, d)


def test_new_nonfinite_buffer_values_are_counted(kernels: torch.device) -> None:
    from surefoot.checkpoint.buffer_kernels import count_nonfinite
    from surefoot.checkpoint.buffers import FloatPair, kernel_table

    pairs: list[FloatPair] = []
    for number, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32, torch.float64) * 2):
        shadow = torch.linspace(-5, 5, 1 + 5000 * (number % 3)).to(dtype).to(kernels)
        live = shadow.clone()
        shadow[-1:] = -math.inf  # already non-finite
        live[-1:] = math.nan
        live[1:4] = torch.tensor([math.nan, math.inf, -math.inf])[: live[1:4].numel()]
        live[4:5] = torch.finfo(dtype).max
        pairs.append(FloatPair(number, live, shadow, of_norm=number < 4))
    counts = torch.zeros(8, dtype=torch.float64, device=kernels)
    total = torch.zeros((), dtype=torch.float64, device=kernels)
    grid = (len(pairs), 16, 1)
    for times in (1, 2):
        count_nonfinite[grid](kernel_table(pairs, kernels), counts, total, len(pairs), BLOCK=1024)
        expected = [
            ((~p.live.isfinite()) & p.shadow.isfinite() & (p.of_norm | (p.live != -math.inf))).sum().item()
            for p in pairs
        ]
        assert expected[1:3] == [3, 3], "a new -inf counts in normalisation layers only"
        assert expected[4:6] == [2, 2]
        assert counts.tolist() == [times * n for n in expected]
        assert total.item() == times * sum(expected)


def test_kernel_checksums_equal_the_portable_ones_and_cover_every_bit(kernels: torch.device) -> None:
    from surefoot.checkpoint.buffer_kernels import checksum_words
    from surefoot.checkpoint.checksums import FIRST, POSITION, SECOND, portable_checksum

    def kernel_checksums(tensors: list[torch.Tensor]) -> list[int]:
        sums = torch.zeros(len(tensors) + 1, dtype=torch.int64, device=kernels)
        places = range(1, len(tensors) + 1)
        rows = [*(t.data_ptr() for t in tensors), *(t.nbytes // 8 for t in tensors), *places]
        table = torch.tensor(rows, dtype=torch.int64, device=kernels)
        constants = {"POSITION": POSITION, "FIRST": FIRST, "SECOND": SECOND, "BLOCK": 1024}
        checksum_words[(len(tensors), 4)](table, sums, len(tensors), **constants)
        first, *checksums = sums.tolist()
        assert first == 0
        return checksums

    generator = torch.Generator().manual_seed(0)
    sizes = (2, 1026, 40_000)
    tensors = [torch.randn(n, generator=generator).to(kernels) for n in sizes]
    tensors += [t.bfloat16()[: len(t) // 4 * 4].clone() for t in tensors[1:]]
    before = kernel_checksums(tensors)
    assert before == [int(portable_checksum(t)) for t in tensors]
    for t in tensors:
        t.view(torch.int16)[-1] ^= 1
    after = kernel_checksums(tensors)
    assert all(a != b for a, b in zip(before, after, strict=True))
