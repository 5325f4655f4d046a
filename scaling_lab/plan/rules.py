"""The sharding table: logical axis -> mesh axes, in columns for weights, activations, gradients and optimizer state.

Owns reading and checking the table, and the layout of any tensor that carries logical axes. Knows no parameter by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from scaling_lab.errors import ConfigError
from scaling_lab.models.parameters import ACTIVATION_AXES, WEIGHT_AXES
from scaling_lab.plan.experiment import MESH_AXES, Rows, ShardingConfig
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.mesh import Mesh

#: Rows of activations over which the tokens of a batch are divided: nothing else divides the work by examples. (`expert_batch`
#: says how tokens lie that are with their experts: a part of what `batch` has divided.)
TOKEN_ROWS = ("batch", "sequence", "residual_sequence")


@dataclass(frozen=True)
class Rules:
    """The table, complete: every column lists every logical axis it can hold."""

    weights: Rows
    activations: Rows
    gradients: Rows
    optimizer: Rows

    def weight_layout(self, column: str, axes: tuple[str | None, ...]) -> Layout:
        """Layout of a tensor of weight kind in a column (`weights`, `gradients` or `optimizer`)."""
        rows: Rows = getattr(self, column)
        return Layout(tuple(rows[axis] if axis else () for axis in axes))

    def activation_layout(self, axes: tuple[str | None, ...]) -> Layout:
        """Layout of an activation with these logical axes."""
        return Layout(tuple(self.activations[axis] if axis else () for axis in axes))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that divide the tokens: gradients of what they do not store are summed over them."""
        return _unique(axis for row in TOKEN_ROWS for axis in self.activations[row])

    @property
    def divided_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold other tokens inside a block: by rows (`batch`) or by parts of the sequence."""
        return _unique((*self.activations["batch"], *self.activations["sequence"]))

    @property
    def compute_axes(self) -> tuple[str, ...]:
        """Mesh axes that divide the computation on the same tokens: those of every activation row that do not divide tokens."""
        rows = (axes for row, axes in self.activations.items() if row not in ("batch", "expert_batch", "sequence"))
        return tuple(axis for axis in _unique(axis for axes in rows for axis in axes) if axis not in self.divided_axes)

    @property
    def used_axes(self) -> tuple[str, ...]:
        """Mesh axes that the table names anywhere."""
        columns = (self.weights, self.activations, self.gradients, self.optimizer)
        return _unique(axis for column in columns for axes in column.values() for axis in axes)


def _unique(axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axes))


def rules_from(config: ShardingConfig, mesh_order: tuple[str, ...]) -> Rules:
    """The checked table. Raises ConfigError listing every fault: unknown or missing rows, unknown axes, wrong order."""
    faults = [
        *_row_faults("weights", config.weights, WEIGHT_AXES, complete=True),
        *_row_faults("activations", config.activations, ACTIVATION_AXES, complete=True),
        *_row_faults("gradients", config.gradients, WEIGHT_AXES, complete=False),
        *_row_faults("optimizer", config.optimizer, WEIGHT_AXES, complete=False),
    ]
    for column in ("weights", "activations", "gradients", "optimizer"):
        for row, axes in getattr(config, column).items():
            faults.extend(_axis_faults(f"sharding.{column}.{row}", axes, mesh_order))
    if faults:
        raise ConfigError(f"sharding table `{config.name}`:\n" + "\n".join(f"  {fault}" for fault in faults))
    gradients = {**config.weights, **config.gradients}
    return Rules(config.weights, config.activations, gradients, {**gradients, **config.optimizer})


def _row_faults(column: str, rows: Rows, vocabulary: tuple[str, ...], *, complete: bool) -> list[str]:
    faults = [
        f"sharding.{column}.{row}: unknown logical axis{nearest(row, vocabulary)}" for row in rows if row not in vocabulary
    ]
    missing = [row for row in vocabulary if row not in rows] if complete else []
    if missing:
        faults.append(f"sharding.{column}: missing {', '.join(missing)}; write `[]` for replicated, it is a decision")
    return faults


def _axis_faults(key: str, axes: tuple[str, ...], mesh_order: tuple[str, ...]) -> list[str]:
    unknown = [axis for axis in axes if axis not in mesh_order]
    if unknown:
        return [f"{key}: unknown mesh axis {axis!r}{nearest(axis, MESH_AXES)}" for axis in unknown]
    if len(set(axes)) < len(axes):
        return [f"{key}: {_written(axes)} names a mesh axis twice; write {_written(_unique(axes))}"]
    ordered = sorted(axes, key=mesh_order.index)
    if list(axes) != ordered:
        return [f"{key}: {_written(axes)} is not in mesh order; write {_written(ordered)}"]
    return []


def _written(axes: Iterable[str]) -> str:
    """A row as YAML and the command line write it."""
    return f"[{', '.join(axes)}]"


def nearest(word: str, choices: Iterable[str]) -> str:
    """` (did you mean ...?)` with the nearest of the choices, or all of them where none is near."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else f" (one of {', '.join(choices)})"


def spent_twice(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes larger than 1 that a layout uses for two dims of one tensor."""
    real = layout.real(mesh).axes
    return tuple(axis for axis in dict.fromkeys(real) if real.count(axis) > 1)
