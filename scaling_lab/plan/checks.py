"""What a table, a mesh and a memory cannot do, but for sizes: the same answer for every verb and both backends, every offender at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from scaling_lab.errors import PlanError
from scaling_lab.models.parameters import Parameter
from scaling_lab.plan import roles as reading
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.memory import Placed
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.rules import Rules, spent_twice
from scaling_lab.plan.sizes import ACTIVATIONS

#: Rows that a mesh axis may split in weights and activations alike: tensor parallelism.
TENSOR_ROWS = ("heads", "kv_heads", "mlp", "vocab")


def check_axes(parameters: tuple[Parameter, ...], rules: Rules, mesh: Mesh, roles: dict[str, tuple[str, ...]]) -> None:
    """An axis larger than 1 must do something, and no tensor may spend one twice."""
    _check_idle(rules, mesh, roles)
    faults = [fault for p in parameters for fault in _twice(p, rules, mesh)]
    faults += [
        f"activation `{name}`: {', '.join(twice)} splits two dims of {'/'.join(axes)}; take it out of one of those rows"
        for name, axes in ACTIVATIONS.items()
        if (twice := spent_twice(rules.activation_layout(axes), mesh))
    ]
    faults += [fault for p in parameters if (fault := _scattered(p, rules, mesh))]
    faults += [fault for axis in mesh.real_axes for fault in _row_faults(axis, rules)]
    if any("experts" in p.axes for p in parameters):
        faults += [fault for axis in mesh.real_axes for fault in _expert_faults(axis, rules)]
    if faults:
        raise PlanError("the sharding table cannot lay out:\n" + "\n".join(f"  {fault}" for fault in faults))


def check_axis_types(experiment: Experiment, parameters: tuple[Parameter, ...], rules: Rules, mesh: Mesh) -> None:
    """What JAX refuses, or does not follow, where layouts are part of types."""
    if experiment.backend.axis_types != "explicit":
        return
    differing = {
        f"sharding.gradients.{row}=[{', '.join(rules.gradients[row])}] is not sharding.weights.{row}=[{', '.join(rules.weights[row])}]"
        for p in parameters
        if rules.weight_layout("gradients", p.axes).real(mesh) != rules.weight_layout("weights", p.axes).real(mesh)
        for row in p.axes
        if row and rules.gradients[row] != rules.weights[row]
    }
    faults = [f"{fault}: a gradient's type has the layout of its weight's" for fault in sorted(differing)]
    faults += [
        f"mesh.{axis}={mesh.size(axis)} splits sharding.weights.layers: types do not follow rows through the stages of a pipeline"
        for axis in mesh.real_axes
        if axis in rules.weights["layers"]
    ]
    if faults:
        told = "\n".join(f"  {fault}" for fault in faults)
        raise PlanError(f"backend.axis_types=explicit does not go with:\n{told}\nSet backend.axis_types=auto.")


def check_data_parallel(experiment: Experiment, plans: tuple[Placed, ...], rules: Rules, mesh: Mesh) -> None:
    """Torch's own sums of gradients, in place of the lab's, are of copies of a whole model."""
    asked, precision = experiment.backend.data_parallel, experiment.workload.precision
    if asked in (None, "buckets") or mesh.devices == 1:
        return
    parts = {p.parameter.name: layout.axes for p in plans for layout in (p.weights, p.gradients, p.optimizer) if layout.axes}
    if parts or mesh.larger(rules.compute_axes):
        name, axes = next(iter(parts.items()), ("the computation", mesh.larger(rules.compute_axes)))
        raise PlanError(
            f"backend.data_parallel={asked} keeps the whole of every weight, gradient and state on each device, but the table "
            f"splits {name} over {', '.join(axes)}. Set sharding=data, or backend.data_parallel=buckets."
        )
    if asked == "ddp" and precision.reduce != precision.params:
        raise PlanError(
            f"backend.data_parallel=ddp sums gradients in their own dtype. Set workload.precision.reduce={precision.params}, "
            f"backend.data_parallel=fully_shard or backend.data_parallel=buckets."
        )


def _check_idle(rules: Rules, mesh: Mesh, roles: dict[str, tuple[str, ...]]) -> None:
    idle = [axis for axis, axis_roles in roles.items() if reading.is_idle(axis_roles)]
    if not idle:
        return
    names = ", ".join(f"mesh.{axis}={mesh.size(axis)}" for axis in idle)
    batch = ",".join(axis for axis in mesh.names if axis in (*rules.activations["batch"], *idle))
    raise PlanError(
        f"{names}: the sharding table gives this axis no work, its devices would repeat each other's. Set "
        f"{' '.join(f'mesh.{axis}=1' for axis in idle)}, or name it in a row, such as sharding.activations.batch=[{batch}]."
    )


def _twice(parameter: Parameter, rules: Rules, mesh: Mesh) -> list[str]:
    return [
        f"{parameter.name} ({column}): {', '.join(twice)} splits two dims of {'/'.join(map(str, parameter.axes))}; "
        f"take it out of one of those rows"
        for column in ("weights", "gradients", "optimizer")
        if (twice := spent_twice(rules.weight_layout(column, parameter.axes), mesh))
    ]


def _scattered(parameter: Parameter, rules: Rules, mesh: Mesh) -> str | None:
    """FSDP gathers one dim of a parameter: axes that store it over two dims are refused in both backends."""
    stored = rules.weight_layout("weights", parameter.axes)
    dims = {stored.dim_of(axis): axis for axis in reading.fsdp_axes(parameter, rules, mesh)}
    if len(dims) <= 1:
        return None
    rows = ", ".join(f"sharding.weights.{parameter.axes[dim or 0]} ({axis})" for dim, axis in dims.items())
    return f"{parameter.name}: fsdp axes store it over several dims, {rows}; put them all into one row"


def _row_faults(axis: str, rules: Rules) -> Iterator[str]:
    """What a table asks of one axis and no backend computes, or only by repeating work."""
    acts = rules.activations
    if axis in rules.weights["layers"]:
        yield from _stage_faults(axis, rules)
    if axis in acts["sequence"] and axis not in acts["residual_sequence"]:
        yield (
            f"sharding.activations.sequence names {axis}, sharding.activations.residual_sequence does not: tokens stay where they "
            f"are between blocks; write residual_sequence: [{', '.join((*acts['sequence'], *acts['residual_sequence']))}]"
        )
    if axis in rules.divided_axes:
        yield from _column_faults(axis, rules)
        return
    for row in ("embed", *TENSOR_ROWS, "head_dim"):
        stored, computed = axis in rules.weights[row], axis in acts[row]
        if stored != computed:
            has, lacks = ("weights", "activations") if stored else ("activations", "weights")
            yield (
                f"sharding.{has}.{row} names {axis}, sharding.{lacks}.{row} does not: name it in both (tensor parallel) or in "
                f"neither; only an axis that divides the tokens (activations.batch, activations.sequence) may store weights that are "
                f"computed whole"
            )
        elif computed and row not in TENSOR_ROWS:
            yield f"sharding.activations.{row}: {axis} splits the computation there, which the lab does not run yet; write []"
    if axis in acts["kv_heads"] and axis not in acts["heads"]:
        yield f"sharding.activations.kv_heads names {axis}, sharding.activations.heads does not: name it in heads too"
    if axis in acts["residual_sequence"] and not any(axis in acts[row] for row in ("heads", "mlp")):
        yield f"sharding.activations.residual_sequence: {axis} splits nothing inside a block, which would be repeated; write []"
    yield from _column_faults(axis, rules)


def _stage_faults(axis: str, rules: Rules) -> Iterator[str]:
    """An axis that splits the layers into stages does nothing else, in no column."""
    columns = {"activations": rules.activations, "weights": rules.weights}
    other = [
        f"sharding.{name}.{row}" for name, rows in columns.items() for row in rows if row != "layers" and axis in rows[row]
    ]
    if other:
        yield f"sharding.weights.layers names {axis}, which makes pipeline stages of it; take it out of {', '.join(other)}"
    for name in ("gradients", "optimizer"):
        if axis not in getattr(rules, name)["layers"]:
            yield f"sharding.{name}.layers drops {axis}, the pipeline's stages; name it there too"


def _expert_faults(axis: str, rules: Rules) -> Iterator[str]:
    """An axis that splits the experts divides the tokens of the dense layers, and not those sent to its experts."""
    acts = rules.activations
    stored, computed = axis in rules.weights["experts"], axis in acts["experts"]
    if stored != computed:
        has, lacks = ("weights", "activations") if stored else ("activations", "weights")
        yield f"sharding.{has}.experts names {axis}, sharding.{lacks}.experts does not: name it in both or in neither"
    if computed and axis not in acts["batch"]:
        yield (
            f"sharding.activations.experts names {axis}, sharding.activations.batch does not: the dense layers would repeat "
            f"their work on it; name it in batch too"
        )
    if (axis in acts["expert_batch"]) != (axis in acts["batch"] and not computed):
        right = [name for name in acts["batch"] if name not in acts["experts"]]
        yield (
            f"sharding.activations.expert_batch must name the axes of batch that do not split the experts; write "
            f"[{', '.join(right)}]"
        )


def _column_faults(axis: str, rules: Rules) -> Iterator[str]:
    """Gradients are split at least as weights are, optimizer state as gradients are; more only over axes that divide tokens."""
    columns = (("weights", rules.weights), ("gradients", rules.gradients), ("optimizer", rules.optimizer))
    for (outer, above), (inner, below) in itertools.pairwise(columns):
        for row in above:
            if axis in above[row] and axis not in below[row]:
                yield f"sharding.{inner}.{row} drops {axis}, over which sharding.{outer}.{row} is split; name it there too"
            if axis in below[row] and axis not in above[row] and axis not in rules.divided_axes:
                yield f"sharding.{inner}.{row} names {axis}, which does not divide the tokens; take it out"


def check_memory(experiment: Experiment, count: Callable[[Experiment], dict[str, int]], available: int | None) -> None:
    """The plan's bytes must fit the hardware's memory, where that is known. `count` gives the bytes of an experiment."""
    needed = count(experiment)
    if available is None or needed["total"] <= available:
        return
    largest = max((part for part in needed if part != "total"), key=lambda part: needed[part])
    raise PlanError(
        f"needs {_written(needed['total'])} per device, hardware `{experiment.hardware.name}` has {_written(available)}; "
        f"the largest part is {largest} ({_written(needed[largest])}). {_memory_advice(experiment, count, available)}"
    )


def _memory_advice(experiment: Experiment, count: Callable[[Experiment], dict[str, int]], available: int) -> str:
    """The smallest change of the workload that fits, or that none does."""
    workload = experiment.workload
    wanted = [workload.accumulation * 2**n for n in range(11)]
    trials = [(factor, remat) for remat in dict.fromkeys((workload.remat, "full")) for factor in wanted]
    for factor, remat in trials:
        if workload.global_batch % factor:
            continue
        try:
            total = count(
                dataclasses.replace(experiment, workload=dataclasses.replace(workload, accumulation=factor, remat=remat))
            )
        except PlanError:  # so few rows do not split over the devices
            continue
        if total["total"] <= available:
            return f"Set workload.accumulation={factor} workload.remat={remat}, which needs {_written(total['total'])}."
    return (
        "No accumulation or remat makes it fit: use a table that stores more in parts (sharding=fsdp), more mesh.devices on "
        "such an axis, a shorter workload.sequence or a smaller model."
    )


def _written(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
