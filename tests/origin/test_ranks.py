"""Under DistributedDataParallel the rank whose batch made a gradient non-finite names it, and no other does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import surefoot
from surefoot.logs.diagnose_log import diagnose


def test_the_rank_that_made_it_names_it(tmp_path: Path) -> None:
    script = Path(__file__).parent / "ranks_origin.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(tmp_path)], check=False, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    findings = [e for e in surefoot.read(tmp_path).events if e["kind"] == "finding" and e["detector"] == "origin"]
    assert [e["rank"] for e in findings] == [1]
    origin = findings[0]["evidence"]["origin"]
    assert (origin["kind"], origin["operation"], origin["samples"]) == ("sqrt_at_zero", "sqrt", [3])
    assert any("rank 1" in note and "sample 3 of the batch" in note for note in diagnose(tmp_path).notes)
