"""A whole run in files: tensors as sharded safetensors, everything else as JSON; nothing in them can run."""
