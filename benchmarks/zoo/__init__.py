"""Training runs with planted faults, and healthy runs that look suspicious: every rule is scored on them."""

from benchmarks.zoo.controls import data as _control_data
from benchmarks.zoo.controls import training as _control_training
from benchmarks.zoo.faults import data as _data
from benchmarks.zoo.faults import numerics as _numerics
from benchmarks.zoo.faults import optimisation as _optimisation
from benchmarks.zoo.faults import resources as _resources
from benchmarks.zoo.faults import state as _state
from benchmarks.zoo.scenario import CONTROLS, FAULTS

del _control_data, _control_training, _data, _numerics, _optimisation, _resources, _state

__all__ = ["CONTROLS", "FAULTS"]
