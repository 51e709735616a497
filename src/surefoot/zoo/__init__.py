"""Broken runs and suspicious healthy ones, planted on purpose: what every rule is judged by."""

from surefoot.zoo import controls as _controls
from surefoot.zoo.faults import data as _data
from surefoot.zoo.faults import numerics as _numerics
from surefoot.zoo.faults import optimisation as _optimisation
from surefoot.zoo.faults import resources as _resources
from surefoot.zoo.faults import state as _state
from surefoot.zoo.scenario import CONTROLS, FAULTS

del _controls, _data, _numerics, _optimisation, _resources, _state

__all__ = ["CONTROLS", "FAULTS"]
