"""FSDP2: which units store their weights in parts and gather them before use. Must not know what a unit computes.

A unit is a layer, or what lies outside the layers. Where modules that a layer names (its experts) are stored over other axes than its
rest, or their copies lie elsewhere, each is a unit of its own, wrapped before the layer. One `fully_shard` per unit, on a mesh of
one dim (the axes that store it) or of two (those that keep copies of it, those that store it): wrapping twice is refused by torch,
or silently wrong. A parameter without an FSDP row is left to `reduce`, which sums its gradient; or where nothing at all is in parts,
FSDP may hold the whole of every weight, on a dim of size 1: then it sums all gradients, and computes with a second copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from scaling_lab.backends.torch.runtime import mesh_of_copies
from scaling_lab.backends.torch.sharding import Placement, dtype_of
from scaling_lab.backends.torch.weights import Piece, pieces_of
from scaling_lab.errors import PlanError
from scaling_lab.plan.plan import ParameterPlan

#: The axes that store a parameter, and those that keep copies of it.
Ways = tuple[tuple[str, ...], tuple[str, ...]]


class Layer(Protocol):
    """What a layer says of itself."""

    def apart(self) -> tuple[nn.Module, ...]:
        """Its modules whose weights may lie on other axes than the rest."""
        ...


def wrap(root: nn.Module, layers: Sequence[Layer], on: Placement, *, reshard: bool, whole: bool = False) -> bool:
    """Store the weights of the layers and of what is outside them as the plan says. False where there are none to store.

    reshard: free each gathered layer but the last after its forward pass, and gather it again for the backward one
    whole: take every weight, although the plan stores none in parts
    """
    stored = {piece.parameter: piece for piece in pieces_of(root, on) if piece.planned.fsdp_axes or whole}
    ignored = {piece.parameter for piece in pieces_of(root, on)} - stored.keys()
    if not stored:
        return False
    last = set(_units(layers[-1], stored, on))
    taken: set[nn.Parameter] = set()
    for unit in (*(unit for layer in layers for unit in _units(layer, stored, on)), root):
        own = [p for p in unit.parameters() if p in stored and p not in taken]
        if own or unit is root:
            # The last layer's weights are wanted again as soon as the backward pass begins.
            # A root that only ties the layers together communicates nothing: any mesh will do.
            mesh = _mesh({p: stored[p] for p in own or list(stored)[:1]}, on)
            _wrap_unit(unit, mesh, stored, ignored, on, keep=not reshard or unit in last or unit is root)
        taken.update(own)
    return True


def _units(layer: Layer, stored: Mapping[nn.Parameter, Piece], on: Placement) -> Iterator[nn.Module]:
    """The layer, and before it those of its modules that need another mesh."""
    assert isinstance(layer, nn.Module)
    for module in layer.apart():
        own = set(module.parameters())
        if _ways(own, stored, on).keys() != _ways(set(layer.parameters()) - own, stored, on).keys():
            yield module
    yield layer


def _ways(parameters: Iterable[nn.Parameter], stored: Mapping[nn.Parameter, Piece], on: Placement) -> dict[Ways, str]:
    """How those of the parameters that are stored in parts are stored, with a parameter's name as an example of each."""
    ways: dict[Ways, str] = {}
    for piece in (stored[p] for p in parameters if p in stored):
        ways.setdefault((piece.planned.fsdp_axes, copied_axes(piece.planned, on)), piece.name)
    return ways


def _wrap_unit(
    unit: nn.Module,
    mesh: DeviceMesh,
    stored: Mapping[nn.Parameter, Piece],
    ignored: set[nn.Parameter],
    on: Placement,
    *,
    keep: bool,
) -> None:
    precision = on.precision
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=not keep,
        shard_placement_fn=lambda parameter: _shard(stored[parameter]),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype_of(precision.compute), reduce_dtype=dtype_of(precision.reduce), cast_forward_inputs=False
        ),
        ignored_params=ignored,
    )
    assert isinstance(unit, FSDPModule)
    # The loss is a sum over tokens, so gradients are summed; gloo has no pre-multiplied sum.
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _shard(piece: Piece) -> Shard:
    if not piece.planned.fsdp_axes:
        return Shard(0)
    dim = piece.layout("weights").dim_of(piece.planned.fsdp_axes[0])
    assert dim is not None
    return Shard(dim)


def copied_axes(planned: ParameterPlan, on: Placement) -> tuple[str, ...]:
    """Axes over which FSDP sums a gradient beside those that store the weight: each place on them has a copy."""
    return tuple(a for a in planned.sum_axes if a not in planned.fsdp_axes and a not in on.compute_axes)


def _mesh(stored: dict[nn.Parameter, Piece], on: Placement) -> DeviceMesh:
    """The mesh of a unit. Raises PlanError where its parameters would need several."""
    ways = _ways(stored, stored, on)
    if len(ways) > 1:
        listed = "; ".join(f"{name} over {list(axes)} with copies over {list(copies)}" for (axes, copies), name in ways.items())
        raise PlanError(
            f"the torch backend stores a layer, or what is outside the layers, over the same axes: {listed}. Give the rows of "
            f"sharding.weights that these parameters share with no activation the same axes."
        )
    (axes, copies), _ = ways.popitem()
    if not axes:
        return mesh_of_copies(on.world)
    shard = on.submesh(axes)
    return DeviceMesh._concatenate([on.submesh(copies), shard]) if copies else shard
