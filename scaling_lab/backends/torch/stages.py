"""What the stages of a pipeline have to tell each other beside activations: whole parameters, layouts, gradients of what two hold.

With one stage nothing here communicates. Must not know schedules or the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scaling_lab.backends.torch.fsdp import copied_axes
from scaling_lab.backends.torch.reduce import way_of
from scaling_lab.backends.torch.sharding import Placement
from scaling_lab.backends.torch.weights import Piece
from scaling_lab.errors import WorkerError
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.plan import ParameterPlan

Axes = tuple[str, ...]


def meet(on: Placement) -> None:
    """Make every group of processes that some stage needs, in one order: all processes must make a group together.

    Later none is missing, so that stages may ask for groups that others have no use for.
    """
    if on.plan.pipeline.stages == 1:
        return
    rules, mesh = on.plan.rules, on.plan.mesh
    needed = {on.plan.sequence.axes, rules.activation_layout(("vocab",)).real(mesh).axes}
    for planned in on.plan.parameters:
        needed |= _groups(planned, on)
    for axes in sorted(axes for axes in needed if len(axes) > 1):
        on.submesh(axes)


def _groups(planned: ParameterPlan, on: Placement) -> set[Axes]:
    """The axes over which a parameter, its gradient or parts of its update travel, in the order in which groups are asked for."""
    piece = Piece(planned, 0 if planned.parameter.stacked else None, torch.nn.Parameter(torch.empty(0)))
    way = way_of(piece, on)
    columns = [piece.layout(column).axes for column in ("compute", "weights", "optimizer")]
    expert = piece.layout("compute").dims[0] if piece.layout("compute").dims else ()
    found = (planned.fsdp_axes, copied_axes(planned, on), way.scattered, way.summed, way.split, *columns, expert)
    ordered = (tuple(axis for axis in on.plan.mesh.real_axes if axis in axes) for axes in found)
    return {*ordered, on.compute_axes}


def joined(own: Mapping[str, np.ndarray], on: Placement) -> dict[str, np.ndarray]:
    """Whole parameters, layers in the model's order, from those of this stage (stacks of its own layers). A sum over the stages."""
    split = on.plan.pipeline
    if split.stages == 1:
        return dict(own)
    layers = [layer for chunk in split.of_stage(on.stage) for layer in chunk]
    found = {}
    for planned in on.plan.parameters:
        parameter, name = planned.parameter, planned.parameter.name
        whole = torch.zeros((split.layers, *parameter.shape[1:]) if parameter.stacked else parameter.shape)
        if parameter.stacked:
            whole[layers] = torch.from_numpy(own[name])
        elif on.stage == planned.stages[0]:
            whole[...] = torch.from_numpy(own[name])
        whole = whole.to(on.device)
        dist.all_reduce(whole, group=on.group(split.axes))
        found[name] = whole.cpu().numpy()
    return found


def joined_layouts(own: Mapping[str, Layout], pieces: Sequence[Piece], on: Placement) -> dict[str, Layout]:
    """The layout of every parameter, from what each stage has found of its own. Raises WorkerError where stages do not fit.

    A stack lies over the pipeline's axes where every layer is on one stage.
    """
    split = on.plan.pipeline
    if split.stages == 1:
        return dict(own)
    told = [(name, layout, [piece.layer for piece in pieces if piece.name == name]) for name, layout in own.items()]
    every: list[list[tuple[str, Layout, list[int | None]]]] = [[] for _ in range(split.stages)]
    dist.all_gather_object(every, told, group=on.group(split.axes))
    found: dict[str, Layout] = {}
    for planned in on.plan.parameters:
        name = planned.parameter.name
        theirs = {stage: one for stage, stage_told in enumerate(every) for one in stage_told if one[0] == name}
        layouts = {layout for _, layout, _ in theirs.values()}
        layers = sorted(layer for _, _, numbers in theirs.values() for layer in numbers if layer is not None)
        wanted = list(range(split.layers)) if planned.parameter.stacked else []
        if len(layouts) != 1 or layers != wanted or tuple(theirs) != planned.stages:
            raise WorkerError(
                f"{name}: stages {list(theirs)} hold its layers {layers}, as {[x.dims for x in layouts]}", "layout"
            )
        (layout,) = layouts
        found[name] = Layout((split.axes, *layout.dims[1:])) if planned.parameter.stacked else layout
    return found


def sum_shared(pieces: Sequence[Piece], gradients: Sequence[Tensor], on: Placement) -> None:
    """Add up, in place, the gradients of what two stages hold: a tied table, looked up by the first and multiplied by the last.

    Each sends its own to the other. A sum of two has the same bits on both sides, so the copies stay equal.
    """
    for piece, gradient in zip(pieces, gradients, strict=True):
        if piece.layer is not None or len(piece.planned.stages) == 1:
            continue
        (other,) = (stage for stage in piece.planned.stages if stage != on.stage)
        group, sent, came = on.group(on.plan.pipeline.axes), gradient.contiguous(), torch.empty_like(gradient).contiguous()
        operations = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=other),
            dist.P2POp(dist.irecv, came, group=group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient += came
