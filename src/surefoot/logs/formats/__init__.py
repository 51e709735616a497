"""Whatever somebody has, read into tables: one module a format, told by content and not by name."""
