from __future__ import annotations

import hypothesis
import torch

# On a busy machine threads that wait for each other make small tensors many times slower.
torch.set_num_threads(1)

# No test asserts a time, and that includes the time hypothesis gives an example.
hypothesis.settings.register_profile("surefoot", deadline=None)
hypothesis.settings.load_profile("surefoot")
