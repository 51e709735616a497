"""`surefoot bench scale`: planted faults and healthy changes in a decoder of 85 M parameters on real text.

    surefoot bench scale                              on a GPU; at most ten minutes on one H200
    surefoot bench scale --quick                      eight scenarios, without the other rules
    surefoot bench scale --only lr_                   only scenarios whose name contains this
    surefoot bench scale --out scale.json             also writes every result as it comes; run again to continue
    surefoot bench scale --show scale.json            only prints the tables of that file
    surefoot bench scale --device cpu --size small    the same on a decoder for a CPU; half an hour with --quick
    surefoot bench scale --device cpu --size tiny     the same on a tiny one, to try it out

Every scenario is trained by several loops from the same weights over the same batches: the bare loop, surefoot with its
defaults and a `step_fn`, and rules that other projects ship. The bare loop is a usual recipe: bfloat16 autocast, fused
AdamW, warmup and cosine, gradients clipped at 1.0. It and the other rules cannot differ from their fault-free run
before the fault begins, so that part is trained once per loop and each scenario continues from there. surefoot trains
every run from its first update.

| file | contents |
|---|---|
| `sizes.py` | the decoders, and how long and on what they train |
| `texts.py` | the texts on the device |
| `scale_run.py` | one run with hooks for faults |
| `loops.py` | bare, surefoot, other rules |
| `scale_scenario.py` | what a scenario states |
| `scale_faults.py`, `scale_controls.py` | the scenarios |
| `scale_trainer.py` | trains scenarios under loops, and reads surefoot's journal |
| `scale_bench.py` | all runs within the time limit, results on disk |
| `scale_report.py` | the tables |
"""
