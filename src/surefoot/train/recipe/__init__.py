"""One file for everything a run is made of: read, checked, overridden, swept."""
