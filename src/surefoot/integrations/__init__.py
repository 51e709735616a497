"""surefoot inside other people's trainers; each module translates between one of them and a guard.

`hf` for the Trainer of transformers and TRL's trainers, `lightning` for Lightning and Fabric, `accelerate` for loops on
Accelerate. Nothing is imported until one of them is.
"""
