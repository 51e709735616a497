"""A log judged while it grows."""
