"""`surefoot report`: what happened in a run, as one page to keep or as Markdown for a pull request; needs no torch."""
