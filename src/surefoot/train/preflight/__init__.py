"""`surefoot check`: trains a recipe for a short trial and answers the checklist for a long run from it."""
