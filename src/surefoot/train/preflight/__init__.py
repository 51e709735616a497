"""`surefoot check`: runs a short trial of a recipe and fills in the checklist for a long run from it."""
