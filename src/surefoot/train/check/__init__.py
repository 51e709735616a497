"""`surefoot check`: a short real trial of a recipe, and the checklist before a long run answered from it.

| file | what it does |
|---|---|
| `checking.py` | `check`: the checklist from top to bottom |
| `trial.py` | a part of a run, really trained, in a folder that is thrown away |
| `place.py` | that folder, beside the run's own |
| `seen.py` | looks at the samples that are drawn |
| `learning.py`, `gradients.py`, `clipping.py`, `samples.py`, `resources.py` | answers from the trial's journal |
| `surviving.py` | saving and going on, proven; float32 to fall back on; the journal read back |
| `watchdog.py`, `stack.py` | a trial that stands still is ended; the line at fault |
| `item.py`, `page.py` | an answer, and how it is shown |
"""
