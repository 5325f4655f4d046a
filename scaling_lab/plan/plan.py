"""Every decision, as one frozen object and one JSON file. Owns the order of deciding; each decision has its own module."""

from __future__ import annotations

from dataclasses import dataclass

from scaling_lab.errors import ConfigError, PlanError
from scaling_lab.models import decoder
from scaling_lab.models.model import Model
from scaling_lab.models.parameters import Parameter, total_size
from scaling_lab.plan import auto, batch, checks, contradictions, memory, pipeline, sequence, sizes
from scaling_lab.plan import roles as reading
from scaling_lab.plan.experiment import MESH_AXES, Experiment
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.rules import Rules, rules_from


@dataclass(frozen=True)
class ParameterPlan:
    """A parameter and where it lies: stored, computed, its gradient and its optimizer state. Axes of size 1 are left out."""

    parameter: Parameter
    weights: Layout
    compute: Layout
    gradients: Layout
    optimizer: Layout
    fsdp_axes: tuple[str, ...]
    #: Axes over which partial gradients are summed: those that divide the tokens and do not split the computation.
    sum_axes: tuple[str, ...]
    #: The pipeline stages that hold any of it.
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Found:
    """What the coordinator found on this machine: what kind of devices, how many, and their memory. Nothing is imported."""

    platform: str
    devices: int
    simulated: bool
    memory_bytes_per_device: int | None


@dataclass(frozen=True)
class Plan:
    """The plan. `bytes_per_device` is arithmetic (see `plan.memory`); `flops_per_token` counts full attention.

    memory_bytes_per_device: what a device has, which the bytes fit; None where unknown
    """

    mesh: Mesh
    rules: Rules
    roles: dict[str, tuple[str, ...]]
    parameters: tuple[ParameterPlan, ...]
    batch: batch.BatchSplit
    sequence: sequence.SequenceSplit
    pipeline: pipeline.PipelineSplit
    bytes_per_device: dict[str, int]
    parameter_count: int
    flops_per_token: float
    flops_per_token_causal: float
    processes: int
    devices_per_process: int
    platform: str
    simulated: bool
    memory_bytes_per_device: int | None = None


def make_plan(experiment: Experiment, found: Found) -> Plan:
    """Decide everything. Raises ConfigError for a wrong request, PlanError for an infeasible one, naming keys to change."""
    _check_order(experiment.mesh.order)
    contradictions.check_model(experiment)
    rules = rules_from(experiment.sharding, experiment.mesh.order)
    parameters = decoder.parameters(experiment.model)
    mesh = auto.resolve(experiment.mesh, rules, found.devices, experiment.hardware.devices_per_host)
    roles = reading.roles(parameters, rules, mesh)
    checks.check_axes(parameters, rules, mesh, roles)
    checks.check_axis_types(experiment, parameters, rules, mesh)
    faults = [
        *sizes.size_faults(experiment, parameters, rules, mesh),
        *batch.faults(experiment.workload, rules, mesh),
        *sequence.faults(experiment, rules, mesh),
        *pipeline.faults(experiment, rules, mesh),
    ]
    if faults:
        raise PlanError("sizes that do not divide:\n" + "\n".join(f"  {fault}" for fault in faults))
    stages = pipeline.split(experiment, rules, mesh)
    plans = tuple(_plan_parameter(parameter, rules, mesh, stages, experiment.model) for parameter in parameters)
    checks.check_data_parallel(experiment, plans, rules, mesh)

    def count(changed: Experiment) -> dict[str, int]:
        batch.split(changed.workload, rules, mesh)
        return memory.bytes_per_device(changed, plans, rules, mesh, pipeline.split(changed, rules, mesh))

    checks.check_memory(experiment, count, found.memory_bytes_per_device)
    return _assemble(experiment, found, mesh, rules, plans, stages, count(experiment))


def _assemble(
    experiment: Experiment,
    found: Found,
    mesh: Mesh,
    rules: Rules,
    plans: tuple[ParameterPlan, ...],
    stages: pipeline.PipelineSplit,
    needed: dict[str, int],
) -> Plan:
    model, length = experiment.model, experiment.workload.sequence
    parameters = tuple(plan.parameter for plan in plans)
    per_host = experiment.backend.processes == "per_host"
    return Plan(
        mesh=mesh,
        rules=rules,
        roles=reading.roles(parameters, rules, mesh),
        parameters=plans,
        batch=batch.split(experiment.workload, rules, mesh),
        sequence=sequence.split(experiment, rules, mesh),
        pipeline=stages,
        bytes_per_device=needed,
        parameter_count=total_size(parameters),
        flops_per_token=decoder.flops_per_token(model, length),
        flops_per_token_causal=decoder.flops_per_token(model, length, causal=True),
        processes=mesh.hosts if per_host else mesh.devices,
        devices_per_process=mesh.devices_per_host if per_host else 1,
        platform=found.platform,
        simulated=found.simulated,
        memory_bytes_per_device=found.memory_bytes_per_device,
    )


def _check_order(order: tuple[str, ...]) -> None:
    if sorted(order) != sorted(MESH_AXES):
        raise ConfigError(f"mesh.order=[{', '.join(order)}] must list each of {', '.join(MESH_AXES)} once, outermost first.")


def _plan_parameter(
    parameter: Parameter, rules: Rules, mesh: Mesh, stages: pipeline.PipelineSplit, model: Model
) -> ParameterPlan:
    weights, gradients, optimizer = (
        rules.weight_layout(column, parameter.axes).real(mesh) for column in ("weights", "gradients", "optimizer")
    )
    fsdp = reading.fsdp_axes(parameter, rules, mesh)
    compute = weights.without(fsdp)
    summed = tuple(axis for axis in mesh.real_axes if axis in rules.token_axes and axis not in compute.axes)
    holders = stages.holders(parameter, model)
    return ParameterPlan(stages.stored(parameter), weights, compute, gradients, optimizer, fsdp, summed, holders)
