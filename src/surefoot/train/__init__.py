"""The engine: from a recipe to a finished run, on `attach`."""
