"""The training engine: builds a run from a recipe and trains it under the guard."""
