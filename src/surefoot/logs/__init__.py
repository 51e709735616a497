"""Other people's training logs: read whatever there is, and say what went wrong, when, and what to do."""
