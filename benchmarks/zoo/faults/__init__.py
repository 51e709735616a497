"""Everything that can be planted, by what is wrong: each fault a few lines of plain PyTorch."""
