"""What happened in a run, told once: console, log, `surefoot diagnose` and `surefoot report` all read it here.

Does not import torch.
"""
