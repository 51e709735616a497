"""The planted faults, one module per area; each is a few lines of plain PyTorch."""
