"""Which sizes do not divide over the mesh, and the nearest that do. Owns the advice; must not know what happens to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from scaling_lab.models.model import Model
from scaling_lab.models.parameters import Parameter
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.rules import Rules

#: Activations of the decoder, as logical axes; their dims must divide as a parameter's must.
ACTIVATIONS = {
    "residual stream": ("batch", "residual_sequence", "embed"),
    "block input": ("batch", "sequence", "embed"),
    "queries": ("batch", "sequence", "heads", "head_dim"),
    "keys and values": ("batch", "sequence", "kv_heads", "head_dim"),
    "mlp hidden": ("batch", "sequence", "mlp"),
    "dispatched tokens": ("experts", "expert_batch", "embed"),
    "experts' hidden": ("experts", "expert_batch", "mlp"),
    "logits": ("batch", "sequence", "vocab"),
}

#: Axes of a model, each also the key of its size.
_MODEL_AXES = ("embed", "heads", "kv_heads", "head_dim", "mlp", "vocab")


@dataclass(frozen=True)
class _Undivided:
    """A logical axis whose size, set by a key, does not divide over the mesh axes that split it."""

    axis: str
    size: int
    split: tuple[str, ...]
    key: str


def size_faults(experiment: Experiment, parameters: tuple[Parameter, ...], rules: Rules, mesh: Mesh) -> list[str]:
    """One line for every size that does not divide, in any column: both numbers, all tensors it is in, keys to change.

    But for the layers, which `plan.pipeline` pads.
    """
    tensors: dict[_Undivided, dict[str, None]] = {}
    for name, layout, axes, sizes in _tensors(experiment, parameters, rules):
        for axis, size, split in zip(axes, sizes, layout.real(mesh).dims, strict=True):
            if axis and axis != "layers" and size is not None and size % mesh.split(split):
                undivided = _Undivided(axis, size, split, _key(axis, size, name, experiment))
                tensors.setdefault(undivided, {})[name] = None
    return [_fault(undivided, tuple(names), experiment, mesh) for undivided, names in tensors.items()]


_Tensor = tuple[str, Layout, tuple[str | None, ...], tuple[int | None, ...]]


def _tensors(experiment: Experiment, parameters: tuple[Parameter, ...], rules: Rules) -> Iterator[_Tensor]:
    for parameter in parameters:
        for column in ("weights", "gradients", "optimizer"):
            yield parameter.name, rules.weight_layout(column, parameter.axes), parameter.axes, parameter.shape
    for name, axes in activations(experiment.model).items():
        sizes = tuple(_size(axis, name, experiment) for axis in axes)
        yield f"activation `{name}`", rules.activation_layout(axes), axes, sizes


def activations(model: Model) -> dict[str, tuple[str, ...]]:
    """The activations that a model has."""
    unused = {"dispatched tokens", "experts' hidden"} if model.moe is None else set()
    if model.moe is not None and not model.moe.dense_layers and not model.moe.shared_experts:
        unused = {"mlp hidden"}
    return {name: axes for name, axes in ACTIVATIONS.items() if name not in unused}


def _size(axis: str, activation: str, experiment: Experiment) -> int | None:
    """Size of a logical axis of an activation; None for the batch, which `plan.batch` splits."""
    model = experiment.model
    if axis in ("sequence", "residual_sequence"):
        return experiment.workload.sequence
    if model.moe is not None and axis == "experts":
        return model.moe.experts
    if model.moe is not None and axis == "mlp" and activation == "experts' hidden":
        return model.moe.expert_mlp
    if model.moe is not None and axis == "mlp" and not model.moe.dense_layers:
        return model.moe.expert_mlp * model.moe.shared_experts
    if axis == "vocab":
        return model.padded_vocab
    return getattr(model, axis) if axis in _MODEL_AXES else None


def _key(axis: str, size: int, tensor: str, experiment: Experiment) -> str:
    """The key that sets a size of a tensor."""
    model = experiment.model
    if axis in ("sequence", "residual_sequence"):
        return "workload.sequence"
    if axis == "experts":
        return "model.moe.experts"
    if axis == "mlp" and (".moe." in tensor or "expert" in tensor or size != model.mlp):
        return "model.moe.expert_mlp"
    if axis == "embed" and size != model.embed:
        return "model.latent.query_rank" if "query" in tensor else "model.latent.kv_rank"
    return f"model.{axis}"


def _fault(undivided: _Undivided, names: tuple[str, ...], experiment: Experiment, mesh: Mesh) -> str:
    axis, size, split = undivided.axis, undivided.size, undivided.split
    parts = mesh.split(split)
    spread = " x ".join(f"mesh.{a}={mesh.size(a)}" for a in split)
    sizes = " or ".join(str(size) for size in _sizes_that_fit(undivided, parts, experiment))
    keys = " x ".join(f"mesh.{a}" for a in split)
    if axis == "vocab":
        sizes += f" or model.vocab_multiple={math.lcm(parts, experiment.model.vocab_multiple)}"
    return f"{axis} {size} over {parts} ({spread}): set {undivided.key}={sizes}, or let {keys} divide {size}; in {', '.join(names)}"


def _sizes_that_fit(undivided: _Undivided, parts: int, experiment: Experiment) -> list[int]:
    """The sizes nearest to the present one that divide and that the rest of the model bears."""
    model, size = experiment.model, undivided.size
    if undivided.axis == "heads":
        return _multiples(size, _kv_heads_that_fit(model, parts)[0])
    if undivided.axis == "kv_heads":
        return _kv_heads_that_fit(model, parts)
    near = _multiples(size, parts)
    if undivided.axis == "vocab":  # a smaller vocabulary would not hold the tokens
        return near[-1:]
    longest = model.max_sequence if undivided.axis.endswith("sequence") else None
    return [n for n in near if longest is None or n <= longest] or near


def _multiples(size: int, unit: int) -> list[int]:
    below = size // unit * unit
    return [below, below + unit] if below else [unit]


def _kv_heads_that_fit(model: Model, parts: int) -> list[int]:
    """Multiples of `parts`, of which the heads are multiples where they divide at all; the nearest one first."""
    if model.heads % parts:
        return sorted(_multiples(model.kv_heads, parts), key=lambda n: abs(n - model.kv_heads))[:1]
    fitting = [n for n in range(parts, model.heads + 1, parts) if model.heads % n == 0]
    return sorted(fitting, key=lambda n: abs(n - model.kv_heads))[:2]
