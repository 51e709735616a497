"""Inspects checkpoints tensor by tensor: NaN and Inf, absurd sizes, layers that do nothing, bad optimizer state.

safetensors files are read with numpy alone, torch.save files only with `weights_only=True`.
"""

from surefoot.inspect.inspect_checkpoint import (
    diagnose_checkpoint,
    find_weights,
    folder_has_log,
    is_checkpoint_file,
    is_checkpoint_folder,
)

__all__ = ["diagnose_checkpoint", "find_weights", "folder_has_log", "is_checkpoint_file", "is_checkpoint_folder"]
