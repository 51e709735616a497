"""One detector a file, each `update(row) -> list[Finding]` with explicit state."""
