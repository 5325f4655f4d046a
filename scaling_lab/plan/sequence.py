"""How the sequence splits over devices inside a block: context parallelism. Which token is stored where, and its position.

A sequence is stored in an order of its own where its split is balanced: under a causal mask late tokens attend to more keys, so
device i of n holds chunks i and 2n - 1 - i of 2n (zigzag), one cheap and one dear. Must not know how attention is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from scaling_lab.errors import PlanError
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.rules import Rules


@dataclass(frozen=True)
class SequenceSplit:
    """The sequence's split over the mesh axes of the table's `sequence` row.

    axes: those larger than 1; length: tokens of a row; zigzag: whether device i holds chunks i and 2 parts - 1 - i
    strategy: how attention meets the keys and values of other parts, `gather`, `ring` or `all_to_all`
    """

    axes: tuple[str, ...]
    parts: int
    length: int
    zigzag: bool
    strategy: str

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position in the text of each stored token of a row."""
        if not self.zigzag:
            return tuple(range(self.length))
        size = self.length // (2 * self.parts)
        chunks = (chunk for part in range(self.parts) for chunk in (part, 2 * self.parts - 1 - part))
        return tuple(position for chunk in chunks for position in range(chunk * size, (chunk + 1) * size))

    def columns(self, mesh: Mesh, device: int) -> slice:
        """The stored tokens of a row that a device computes."""
        part, size = mesh.part(self.axes, mesh.coordinates(device)), self.length // self.parts
        return slice(part * size, (part + 1) * size)


def split(experiment: Experiment, rules: Rules, mesh: Mesh) -> SequenceSplit:
    """The split. Raises PlanError where a size does not divide, as `faults` says."""
    for fault in faults(experiment, rules, mesh):
        raise PlanError(fault)
    axes = mesh.larger(rules.activations["sequence"])
    context = experiment.workload.context
    zigzag = bool(axes) and context.zigzag and context.strategy != "all_to_all"
    return SequenceSplit(axes, mesh.split(axes), experiment.workload.sequence, zigzag, context.strategy)


def faults(experiment: Experiment, rules: Rules, mesh: Mesh) -> Iterator[str]:
    """Why the sequence does not split beyond its plain division, which `plan.sizes` checks; nothing where it does."""
    axes = mesh.larger(rules.activations["sequence"])
    parts, workload, model = mesh.split(axes), experiment.workload, experiment.model
    if workload.sequence % parts:
        return
    if workload.sequence // parts % workload.loss_chunks:
        local = workload.sequence // parts
        yield (
            f"workload.loss_chunks={workload.loss_chunks} does not divide the {local} tokens of a row on a device. "
            f"Set workload.loss_chunks={math.gcd(local, workload.loss_chunks)}."
        )
    if parts == 1:
        return
    sizes = " x ".join(f"mesh.{axis}={mesh.size(axis)}" for axis in axes)
    if workload.context.strategy == "all_to_all":
        for row in ("heads", "kv_heads"):
            need = parts * mesh.split(rules.activation_layout((row,)).real(mesh).axes)
            have = getattr(model, row)
            if have % need:
                yield (
                    f"workload.context.strategy=all_to_all splits {row} over {sizes} too: model.{row}={have} does not divide by "
                    f"{need}. Set model.{row}={-(-have // need) * need} or workload.context.strategy=ring."
                )
    elif workload.context.zigzag and workload.sequence % (2 * parts):
        unit = 2 * parts
        near = " or ".join(str(n) for n in (workload.sequence // unit * unit, -(-workload.sequence // unit) * unit) if n)
        yield (
            f"workload.sequence={workload.sequence} over {sizes}: a zigzag split needs a multiple of {unit}, twice the parts. "
            f"Set workload.sequence={near}, or workload.context.zigzag=false."
        )
