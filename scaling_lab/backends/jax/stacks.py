"""Stacks of layers as they are stored: in the order of the plan's slots, which a pipeline's stages make another than the model's.

Must not know devices.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scaling_lab.backends.initial import initial_values
from scaling_lab.models.parameters import Parameter
from scaling_lab.plan.plan import Plan


def drawn(plan: Plan, parameter: Parameter, seed: int) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """The initial values of a part of a stored parameter; zeros where a stack has no layer."""
    if not _reordered(plan, parameter):
        return lambda part: initial_values(parameter, seed, part)

    def layer(slot: int | None, part: tuple[slice, ...]) -> np.ndarray:
        if slot is None:
            return np.zeros((1, *(s.stop - s.start for s in part)), np.float32)
        return initial_values(parameter, seed, (slice(slot, slot + 1), *part))

    return lambda part: np.concatenate([layer(slot, part[1:]) for slot in plan.pipeline.slots[part[0]]])


def in_order(plan: Plan, parameter: Parameter, stored: np.ndarray) -> np.ndarray:
    """A stored parameter, or something shaped alike, with its layers in the model's order and no padding among them."""
    if not _reordered(plan, parameter):
        return stored
    slots = plan.pipeline.slots
    return stored[[slots.index(layer) for layer in range(plan.pipeline.layers)]]


def _reordered(plan: Plan, parameter: Parameter) -> bool:
    return plan.pipeline.stages > 1 and parameter.stacked
