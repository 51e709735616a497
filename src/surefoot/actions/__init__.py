"""The only room that may change a run, at the end of a step."""
