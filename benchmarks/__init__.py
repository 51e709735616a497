"""The commands behind every figure this project states."""
