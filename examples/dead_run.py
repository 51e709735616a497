"""Writes the log of a run that diverges: linear regression whose lr is raised 30-fold at step 1000.

python examples/dead_run.py > train.log
surefoot diagnose train.log
"""

from __future__ import annotations

import numpy as np

random = np.random.default_rng(0)
true = random.normal(size=50).astype(np.float32)
weights = np.zeros(50, dtype=np.float32)
np.seterr(all="ignore")  # overflow is the point

for step in range(1500):
    inputs = random.normal(size=(64, 50)).astype(np.float32)
    error = inputs @ (weights - true) + random.normal(0, 0.5, 64).astype(np.float32)
    gradient = inputs.T @ error / 64
    lr = np.float32(0.05 if step < 1000 else 1.5)
    weights = weights - lr * gradient
    if step % 5 == 0:
        loss, norm = np.mean(error**2), np.sqrt(np.sum(gradient**2))
        print(f"step {step} | loss {loss:.4g} | grad_norm {norm:.4g} | lr {lr:.2g}")
