"""Readers of log formats: each turns a log into a `LogTable`; formats are detected by content, not by file name."""
