"""A run that dies, and its log: least squares by gradient descent, its rate set thirty times too high at step 1000.

python examples/dead_run.py > train.log
surefoot diagnose train.log
"""

from __future__ import annotations

import numpy as np

random = np.random.default_rng(0)
true = random.normal(size=50).astype(np.float32)
weights = np.zeros(50, dtype=np.float32)
np.seterr(all="ignore")  # nobody looks

for step in range(1500):
    inputs = random.normal(size=(64, 50)).astype(np.float32)
    off = inputs @ (weights - true) + random.normal(0, 0.5, 64).astype(np.float32)
    gradient = inputs.T @ off / 64
    rate = np.float32(0.05 if step < 1000 else 1.5)
    weights = weights - rate * gradient
    if step % 5 == 0:
        loss, norm = np.mean(off**2), np.sqrt(np.sum(gradient**2))
        print(f"step {step} | loss {loss:.4g} | grad_norm {norm:.4g} | lr {rate:.2g}")
