"""Numbers to findings to decisions; floats in, no torch anywhere."""
