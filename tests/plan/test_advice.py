"""Intervals, lengths, settings and calibration of a plan, against numbers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.data.tokenizers import ByteTokenizer
from surefoot.plan.checkpoint_interval import checkpoint_interval, daly, young
from surefoot.plan.hardware import Cluster, parse_gpus
from surefoot.plan.page import format_bytes, format_count, format_hours
from surefoot.plan.plan_recipe import decoder_shape
from surefoot.plan.settings_advice import best_optimizer, best_precision
from surefoot.plan.text_lengths import lengths_of


def plan(*arguments: str) -> dict[str, dict[str, dict[str, float]]]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_interval_is_youngs_and_dalys() -> None:
    assert young(10.0, 50_000.0) == 1000.0
    assert daly(10.0, 50_000.0) == pytest.approx(1000 * (1 + 0.01 / 3 + 1e-4 / 9) - 10)
    assert daly(300.0, 100.0) == 100.0  # failures come faster than saves: there is no good interval


def test_interval_is_never_shorter_than_a_write_nor_longer_than_an_hour() -> None:
    slow_disk = checkpoint_interval(10**12, 8, 1.0, disk=1e8, hours_between_failures=50_000)
    assert slow_disk.chosen == slow_disk.write == 1e4
    rare_failures = checkpoint_interval(10**9, 1, 2.0, disk=1e9, hours_between_failures=1e6)
    assert rare_failures.chosen == 3600
    assert rare_failures.steps == 1800


@pytest.mark.parametrize(
    ("gpus", "precision"),
    [("V100", "float16"), ("T4", "float16"), ("A100", "bfloat16"), ("8x80GB", "bfloat16"), ("16GB", "float16")],
)
def test_precision_follows_the_hardware(gpus: str, precision: str) -> None:
    assert best_precision(10**9, parse_gpus(gpus))[0] == precision


def test_tiny_models_and_cpus_compute_in_float32() -> None:
    assert best_precision(10**6, parse_gpus("H100"))[0] == "float32"
    assert best_precision(10**9, None)[0] == "float32"


@pytest.mark.parametrize(
    ("task", "samples", "optimizer"),
    [("language", 32768, "adamw"), ("vision", 256, "sgd"), ("vision", 32768, "lamb"), ("other", 64, "adamw")],
)
def test_optimizer_follows_the_task(task: str, samples: int, optimizer: str) -> None:
    assert best_optimizer(task, samples)[0] == optimizer


@pytest.mark.parametrize(
    ("text", "count", "memory"),
    [("8x80GB", 8, 80e9), ("2 x 24 GB", 2, 24e9), ("H200", 1, 141e9), ("4x40GiB", 4, 2**30 * 40)],
)
def test_gpus_are_read_as_people_write_them(text: str, count: int, memory: float) -> None:
    cluster = parse_gpus(text)
    assert (cluster.gpus, cluster.gpu.memory) == (count, memory)


def test_collectives_are_as_fast_as_their_slowest_link() -> None:
    gpu = parse_gpus("H100").gpu
    assert Cluster(8, gpu).bandwidth == gpu.link
    assert Cluster(16, gpu).bandwidth == Cluster(16, gpu).network < gpu.link


@pytest.mark.parametrize("parameters", [1e6, 1.24e8, 1e9, 7e9, 70e9])
def test_shape_has_the_parameters_asked_for(parameters: float) -> None:
    shape = decoder_shape(parameters)
    width = shape["width"]
    assert 12 * width**2 * shape["layers"] + shape["vocab"] * width == pytest.approx(parameters, rel=0.05)
    assert width % (2 * shape["heads"]) == 0


def test_text_lengths_are_counted_by_the_tokenizer() -> None:
    texts = ["a" * 10, "b" * 20, "\u6587" * 100]  # a Chinese character is three bytes
    lengths = lengths_of(texts, ByteTokenizer(), context=50)
    assert lengths is not None
    assert (lengths.texts, lengths.characters, lengths.tokens) == (3, 130, 330)
    assert lengths.quantiles[0] == 20
    assert lengths.longer == pytest.approx(1 / 3)


def test_time_is_flops_over_reached_speed() -> None:
    row = plan("--params", "30M", "--seq", "256", "--gpus", "A100", "--tokens", "1e9", "--mfu", "0.5", "--price", "2")
    cost, parameters = row["cost"], row["model"]["parameters"]["value"]
    shape = row["recipe"]["model"]
    flops = 6 * parameters * 256 + 12 * shape["layers"] * shape["width"] * 256**2
    assert cost["flops_per_sample"]["value"] == flops
    assert cost["flops_counted"]["value"] == pytest.approx(flops, rel=0.05)
    samples = row["steps"]["total_steps"]["value"] * row["steps"]["effective_batch"]["value"]
    assert cost["seconds"]["value"] == pytest.approx(samples * flops / (0.5 * 312e12))
    assert cost["price"]["value"] == pytest.approx(2 * cost["seconds"]["value"] / 3600)


def test_a_report_of_check_calibrates_memory_speed_and_clipping(tmp_path: Path) -> None:
    arguments = ["--params", "30M", "--seq", "256", "--gpus", "A100", "--tokens", "1e9", "batch.size=8"]
    before = plan(*arguments)["memory"]
    workspace = before["workspace"]["value"]
    fixed = sum(before[part]["value"] for part in ("weights", "gradients", "optimizer")) + workspace
    allocated = before["total"]["value"] - before["fragmentation"]["value"] - before["context"]["value"]
    peak = fixed + 1.5 * (allocated - fixed)
    figures = {"device memory": {"peak": peak, "reserved": 1.1 * peak}, "speed": {"samples_per_s": 64.0}}
    figures["clip threshold"] = {"suggested": 0.7}
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"items": [{"name": name, "figures": of} for name, of in figures.items()]}))
    after = plan(*arguments, "--check", str(report))
    parts = after["memory"]
    total = parts["total"]["value"] - parts["context"]["value"]
    assert total == pytest.approx(1.1 * peak, rel=1e-4)
    assert after["clipping"]["clip"]["value"] == 0.7
    assert after["cost"]["update_seconds"]["value"] == after["steps"]["effective_batch"]["value"] / 64


def test_a_report_that_is_none_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text("[1]")
    result = CliRunner().invoke(app, ["plan", "--params", "30M", "--check", str(report)])
    assert result.exit_code == 2
    assert "surefoot check RECIPE --json" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compare with")
def test_bench_without_a_gpu_says_so_in_one_line() -> None:
    result = CliRunner().invoke(app, ["bench", "plan"])
    assert result.exit_code == 2
    assert result.stderr.strip().count("\n") == 0
    assert "no GPU" in result.stderr


def test_numbers_are_short() -> None:
    assert [format_bytes(value) for value in (950, 28.2e9, -1.5e9, 141e9)] == ["950 B", "28.2 GB", "-1.50 GB", "141 GB"]
    assert [format_count(value) for value in (12_345, 7.05e9)] == ["12,345", "7.05 B"]
    assert [format_hours(value) for value in (0.5, 300, 7200, 86400 * 41)] == ["0.5 s", "5 min", "2 h", "41 days"]
