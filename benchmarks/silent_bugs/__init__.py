"""Training loops with a silent bug, and healthy twins: does surefoot name the bug before or within the first updates?

loops           what a case is; the registry
tasks           the data, and healthy loops of every family that cases change in one place
small_models    models that the zoo does not have
tuning_bugs     the half that checks may be tuned on
report_bugs     the half that is reported, written before it was run
twins           healthy loops of both halves, several of which look suspicious
silent_bench    runs them and prints the table
"""
