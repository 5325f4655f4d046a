"""How the global batch splits: accumulation, then rows over the mesh axes of the table's `batch` row."""

from __future__ import annotations

from dataclasses import dataclass

from scaling_lab.errors import PlanError
from scaling_lab.plan.experiment import Workload
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.rules import Rules


@dataclass(frozen=True)
class BatchSplit:
    """An optimizer step has `accumulation` microbatches of `microbatch` rows, each split over `axes` into `parts`.

    Row r of the global batch is row r % microbatch of microbatch r // microbatch.
    """

    axes: tuple[str, ...]
    parts: int
    accumulation: int
    microbatch: int

    @property
    def rows_per_part(self) -> int:
        """Rows of one microbatch on one device."""
        return self.microbatch // self.parts

    def rows(self, mesh: Mesh, device: int) -> range:
        """The rows of a microbatch that a device computes."""
        part = mesh.part(self.axes, mesh.coordinates(device))
        return range(part * self.rows_per_part, (part + 1) * self.rows_per_part)


def split(workload: Workload, rules: Rules, mesh: Mesh) -> BatchSplit:
    """The split. Raises PlanError with the nearest batch sizes that work."""
    for fault in faults(workload, rules, mesh):
        raise PlanError(fault)
    axes = mesh.larger(rules.activations["batch"])
    return BatchSplit(axes, mesh.split(axes), workload.accumulation, workload.global_batch // workload.accumulation)


def faults(workload: Workload, rules: Rules, mesh: Mesh) -> list[str]:
    """Why the batch does not split, with the nearest sizes that do; empty where it does."""
    axes = mesh.larger(rules.activations["batch"])
    parts = mesh.split(axes)
    unit = parts * workload.accumulation
    if workload.global_batch % unit == 0:
        return []
    below, above = workload.global_batch // unit * unit, (workload.global_batch // unit + 1) * unit
    sizes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in axes) or "1 device"
    near = f"{below} or {above}" if below else f"{above}"
    return [
        f"workload.global_batch={workload.global_batch} does not split into workload.accumulation="
        f"{workload.accumulation} microbatches over {parts} parts ({sizes}): it must be a multiple of {unit}. "
        f"Set workload.global_batch={near}."
    ]
