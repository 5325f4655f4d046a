"""Layouts <-> DTensor placements: where activations and weights lie during the computation, and how they get there.

Only the mesh axes that split a computation on the same tokens appear here (the compute mesh): tokens (rows, and parts of a split
sequence) are local to each process, and how weights are stored beyond their compute layout belongs to `fsdp` and `weights`. Without
such axes every tensor is a plain one. Reads mesh axes and rows from the plan only; must not know the model's equations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scaling_lab.backends.torch.runtime import World
from scaling_lab.errors import PlanError
from scaling_lab.plan.experiment import Experiment, Precision
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.plan import ParameterPlan, Plan

Placements = tuple[Shard | Replicate, ...]

#: The axes of the residual stream: what a block takes and gives.
RESIDUAL = ("batch", "residual_sequence", "embed")


@dataclass(frozen=True, eq=False)
class Placement:
    """The plan's layouts on this process's device. `process` is the device's row-major index in the mesh."""

    plan: Plan
    precision: Precision
    world: World
    process: int

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.world.device

    @property
    def mesh(self) -> DeviceMesh:
        """All devices, by the axes larger than 1; only where there is more than one."""
        assert self.world.mesh is not None
        return self.world.mesh

    @cached_property
    def place(self) -> dict[str, int]:
        """Coordinates of this process's device."""
        return self.plan.mesh.coordinates(self.process)

    @cached_property
    def stage(self) -> int:
        """The pipeline stage of this process's device; 0 where there is one."""
        return self.plan.mesh.part(self.plan.pipeline.axes, self.place)

    @property
    def chunks(self) -> range:
        """Which of the pipeline's chunks of layers are here."""
        split = self.plan.pipeline
        return range(self.stage, len(split.chunks), split.stages)

    @cached_property
    def compute_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the computation on the same tokens, outermost first."""
        rules, mesh = self.plan.rules, self.plan.mesh
        return tuple(axis for axis in mesh.real_axes if axis in rules.compute_axes)

    @cached_property
    def compute_mesh(self) -> DeviceMesh | None:
        """The devices that compute parts of the same rows; None where each computes its rows alone."""
        return self.mesh[self.compute_axes] if self.compute_axes else None

    @cached_property
    def described(self) -> dict[str, ParameterPlan]:
        """Every parameter's plan by its name."""
        return {planned.parameter.name: planned for planned in self.plan.parameters}

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of products and of the residual stream."""
        return dtype_of(self.precision.compute)

    @cached_property
    def columns(self) -> slice:
        """The stored tokens of a row that this process computes."""
        return self.plan.sequence.columns(self.plan.mesh, self.process)

    @cached_property
    def positions(self) -> Tensor:
        """The position in the text of each of them, int64 [local sequence]."""
        return torch.tensor(self.plan.sequence.positions[self.columns], device=self.device)

    def constrain(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """An activation, laid out as the table says for its logical axes; its gradient comes back laid out likewise.

        A partial sum is summed here, forward and backward, so that each block costs one collective and pass. What is no DTensor
        is this device's own and stays so.
        """
        if not isinstance(x, DTensor):
            return x
        placements = self.placements(self.plan.rules.activation_layout(axes))
        if x.placements == placements and not any(p.is_replicate() for p in placements):
            return x
        return x.redistribute(placements=placements)

    def assembled(self, local: Tensor, axes: tuple[str, ...]) -> Tensor:
        """An activation from this device's own part of it; the gradient of that is whole where the activation is."""
        if self.compute_mesh is None:
            return local
        layout = self.plan.rules.activation_layout(axes)
        return DTensor.from_local(local, self.compute_mesh, self.placements(layout), run_check=False)

    def split_axes(self, name: str) -> tuple[str, ...]:
        """The compute axes that split a parameter."""
        return tuple(axis for axis in self.compute_axes if axis in self.described[name].compute.axes)

    def spread(self, *whole: Tensor, over: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Each device's copies of tensors that are whole along these axes, where they meet parts of weights.

        Nothing happens forward; backward the gradients, partial sums, are added up, all of them in one collective.
        """
        return _Spread.apply(self.group(over), *whole) if over else whole

    def partial(self, local: Tensor, over: tuple[str, ...]) -> Tensor:
        """What each device has computed of its own, a summand along these axes and whole along others, as `constrain` takes it."""
        if self.compute_mesh is None:
            return local
        placements = [Partial() if axis in over else Replicate() for axis in self.compute_axes]
        return DTensor.from_local(local, self.compute_mesh, placements, run_check=False)

    def placements(self, layout: Layout) -> Placements:
        """A layout as DTensor says it, over the compute mesh."""
        dims = (layout.dim_of(axis) for axis in self.compute_axes)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The processes that differ from this one only along these axes, in row-major order."""
        return self.submesh(axes).get_group()

    def submesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The same processes as a mesh of one dim."""
        return self.mesh[axes[0]] if len(axes) == 1 else self.mesh[axes]._flatten()

    def first_along_others(self, axes: tuple[str, ...]) -> bool:
        """Whether this process comes first along every axis but these: it then counts what lies the same on the others."""
        return all(self.place[axis] == 0 for axis in self.plan.mesh.real_axes if axis not in axes)


def check_supported(experiment: Experiment, plan: Plan) -> None:
    """Refuse what the plan allows and torch does not carry out. Raises PlanError naming the keys."""
    split = [axis for axis in plan.rules.compute_axes if plan.mesh.size(axis) > 1]
    if experiment.backend.compile and experiment.workload.remat != "none" and split:
        raise PlanError(
            f"backend.compile=true with workload.remat={experiment.workload.remat}: torch cannot compile a checkpointed layer "
            f"that is split over {', '.join(split)}. Set workload.remat=none or backend.compile=false."
        )


def on_shards(function: Callable[..., Tensor], first: Tensor, *others: Tensor | None) -> Tensor:
    """`function` of each device's own parts, for what needs no communication; the result is laid out as `first`.

    The gradient of another argument that is whole where `first` is split is a partial sum.
    """
    if not isinstance(first, DTensor):
        return function(first, *others)
    local = function(first.to_local(), *(_local(x, first) for x in others))
    return DTensor.from_local(local, first.device_mesh, first.placements, run_check=False)


def _local(x: Tensor | None, first: DTensor) -> Tensor | None:
    if not isinstance(x, DTensor):
        return x
    pairs = zip(x.placements, first.placements, strict=True)
    return x.to_local(grad_placements=[Partial() if own.is_replicate() and not f.is_replicate() else own for own, f in pairs])


def local_of(x: Tensor) -> Tensor:
    """This device's part of a tensor, sharing its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


class _Spread(torch.autograd.Function):
    """The same tensors; their gradients summed over a group, in the dtype of the first."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *whole: Tensor) -> tuple[Tensor, ...]:
        """Copies of them by name only."""
        ctx.group = group
        return tuple(x.view_as(x) for x in whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """One sum of all."""
        packed = torch.cat([g.flatten().to(gradients[0].dtype) for g in gradients])
        dist.all_reduce(packed, group=ctx.group)
        parts = packed.split([g.numel() for g in gradients])
        return None, *(part.view_as(g).to(g.dtype) for part, g in zip(parts, gradients, strict=True))


def part_start(x: DTensor, dim: int) -> int:
    """The global index at which this process's part of a dim starts; the dim is split evenly."""
    index = 0
    for axis, placement in enumerate(x.placements):
        if placement.is_shard(dim):
            index = index * x.device_mesh.size(axis) + x.device_mesh.get_local_rank(axis)
    return index * x._local_tensor.shape[dim]


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of a configured name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
