"""What a parameter is: a name, a global shape, logical axes and an initialiser. No framework, no values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

#: The closed vocabulary of logical axes of a weight. `None` in `Parameter.axes` marks a dim that is never split.
WEIGHT_AXES = ("embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "experts", "layers")

#: The closed vocabulary of logical axes of an activation.
ACTIVATION_AXES = (
    "batch",
    "sequence",
    "residual_sequence",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "vocab",
    "experts",
    "expert_batch",
)

#: What a parameter is for. Weight decay and FLOPs go by role, never by the number of dims.
Role = Literal["embedding", "matrix", "head", "norm", "bias"]

#: How a parameter starts: normal with mean 0, all ones, or all zeros.
Init = Literal["normal", "ones", "zeros"]


class Dim(NamedTuple):
    """One dim of a parameter: its logical axis (None: never split) and its size, which need not be `model.<axis>`."""

    axis: str | None
    size: int


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    name: dotted path, the same in both backends; a parameter of a layer stack starts with the stack's name, `layers.` or
    `dense_layers.`
    shape: global shape; the layer stack is dim 0 of every parameter whose first axis is `layers`
    axes: a logical axis per dim, or None for a dim that is never split
    init: `normal` (mean 0, standard deviation `std`), `ones` or `zeros`
    used: the shape without padding, where a dim is padded at its end; padding is zero at first and never takes part
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: Role
    init: Init
    std: float = 0.0
    used: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), self

    @property
    def used_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return self.shape if self.used is None else self.used

    @property
    def size(self) -> int:
        """Number of elements, without padding."""
        return math.prod(self.used_shape)

    @property
    def stacked(self) -> bool:
        """Whether dim 0 is the layer stack: torch holds one tensor per layer, JAX the whole stack."""
        return bool(self.axes) and self.axes[0] == "layers"

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices, the embedding and the head, not to norms and biases."""
        return self.role in ("matrix", "embedding", "head")


def parameter(name: str, role: Role, init: Init, *dims: Dim, std: float = 0.0) -> Parameter:
    """A parameter by its dims."""
    return Parameter(name, tuple(dim.size for dim in dims), tuple(dim.axis for dim in dims), role, init, std)


def matrix(name: str, std: float, *dims: Dim) -> Parameter:
    """A matrix of a product, normal with mean 0."""
    return parameter(name, "matrix", "normal", *dims, std=std)


def norm_scale(name: str, *dims: Dim) -> Parameter:
    """What a norm multiplies with, ones at first."""
    return parameter(name, "norm", "ones", *dims)


def stacked(stack: str, layers: int, layer: Iterable[Parameter]) -> Iterator[Parameter]:
    """The parameters of one layer, named below the stack and stacked over its layers in dim 0."""
    for one in layer:
        yield replace(one, name=f"{stack}.{one.name}", shape=(layers, *one.shape), axes=("layers", *one.axes))


def total_size(parameters: tuple[Parameter, ...]) -> int:
    """Number of elements of all parameters; a tied head is the embedding and counts once."""
    return sum(parameter.size for parameter in parameters)
