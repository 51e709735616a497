"""Changes a run at the end of a step: rewinds it, overrides its steps, or stops it."""
