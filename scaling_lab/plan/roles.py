"""Parallelism as a reading of the table: what each mesh axis does for each parameter. Never a flag."""

from __future__ import annotations

from scaling_lab.models.parameters import Parameter
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.rules import Rules

PIPELINE, TENSOR, EXPERT, FSDP, DATA, SEQUENCE, CONTEXT, REPEATED = (
    "pipeline",
    "tensor parallel",
    "expert parallel",
    "fsdp",
    "data parallel",
    "sequence parallel",
    "context parallel",
    "repeated",
)

#: The order in which they are shown, whatever parameter a model begins with.
ORDER = (PIPELINE, TENSOR, EXPERT, FSDP, DATA, SEQUENCE, CONTEXT, REPEATED)


def role_of(axis: str, parameter: Parameter, rules: Rules) -> str:
    """What a mesh axis (larger than 1) does for a parameter: the first reading that matches.

    `repeated`: the axis neither stores the parameter nor divides the work on it, as tensor devices all apply the same norm.
    """
    rows = [row for row in parameter.axes if row and axis in rules.weights[row]]
    if "layers" in rows:
        return PIPELINE
    shared = [row for row in rows if axis in rules.activations[row]]
    if shared:
        return EXPERT if "experts" in shared else TENSOR
    if axis in rules.token_axes:
        return FSDP if rows else _token_role(axis, rules)
    return REPEATED


def _token_role(axis: str, rules: Rules) -> str:
    """Data parallel where the axis divides rows, context parallel where it divides the sequence inside a block.

    Sequence parallel (Megatron's) where it divides the sequence only between blocks. The gradient is summed in each case.
    """
    if axis in rules.activations["batch"]:
        return DATA
    return CONTEXT if axis in rules.activations["sequence"] else SEQUENCE


def roles(parameters: tuple[Parameter, ...], rules: Rules, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """For each mesh axis larger than 1, the roles it plays for some parameter, in the order of ORDER."""
    found = {axis: {role_of(axis, p, rules) for p in parameters} for axis in mesh.real_axes}
    return {axis: tuple(role for role in ORDER if role in played) for axis, played in found.items()}


def is_idle(axis_roles: tuple[str, ...]) -> bool:
    """Whether an axis plays no role at all: its devices would repeat each other's work."""
    return set(axis_roles) <= {REPEATED}


def fsdp_axes(parameter: Parameter, rules: Rules, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that store the parameter in parts and are gathered before use."""
    return tuple(axis for axis in mesh.real_axes if role_of(axis, parameter, rules) == FSDP)
