"""The files of a checkpoint: tensors as sharded safetensors, everything else as JSON; loading them runs no code."""
