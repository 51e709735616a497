"""Healthy runs that look suspicious: nothing is wrong with them, and surefoot should leave them alone.

Those with onset 0 differ from their twin from the first step on; where such a run also changes on its way, it does so
at `ONSET`, where faults begin.
"""
