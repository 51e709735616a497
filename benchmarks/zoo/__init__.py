"""Broken runs and suspicious healthy ones, planted on purpose: what every rule is judged by."""

from benchmarks.zoo import controls as _controls
from benchmarks.zoo.faults import data as _data
from benchmarks.zoo.faults import numerics as _numerics
from benchmarks.zoo.faults import optimisation as _optimisation
from benchmarks.zoo.faults import resources as _resources
from benchmarks.zoo.faults import state as _state
from benchmarks.zoo.scenario import CONTROLS, FAULTS

del _controls, _data, _numerics, _optimisation, _resources, _state

__all__ = ["CONTROLS", "FAULTS"]
