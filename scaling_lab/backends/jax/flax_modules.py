"""The decoder's modules in flax NNX: how they hold weights, and how a tree of them is filled. `equinox_modules` does the same.

A module here is the class of equations that it names, held by NNX: attributes set in `__init__`, with no declaration; a weight
is a variable, and its name metadata of it. Weights are described, by shape and dtype, before any exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from scaling_lab.backends.jax import latent, mlp, moe, norm, transformer
from scaling_lab.backends.jax.sharding import Arrays, Placement
from scaling_lab.models.decoder import stacks
from scaling_lab.plan.experiment import Experiment


class Weight(nnx.Param):
    """A parameter by its name: `products.Weight`."""

    @property
    def name(self) -> str:
        """As in the plan."""
        return self.get_metadata("parameter")

    @property
    def array(self) -> jax.Array:
        """The stored weight."""
        return self[...]


def described(on: Placement, name: str) -> Any:
    """A parameter without a value yet, or None where the model has none of that name."""
    if name not in on.described:
        return None
    return Weight(jax.ShapeDtypeStruct(on.described[name].shape, jnp.dtype(on.precision.params)), parameter=name)


def filled(module: Any, names: Iterable[str]) -> Callable[[Arrays], Any]:
    """A module as a function of its weights by name."""
    graph, state = nnx.split(module)
    variables = {variable.name: (path, variable) for path, variable in nnx.to_flat_state(state)}
    assert variables.keys() == set(names), sorted(variables.keys() ^ set(names))

    def fill(weights: Arrays) -> Any:
        flat = [(path, variable.replace(weights[name])) for name, (path, variable) in variables.items()]
        return nnx.merge(graph, nnx.from_flat_state(flat))

    return fill


class Norm(nnx.Module, norm.Norm):
    def __init__(self, experiment: Experiment, on: Placement, name: str):
        self.on, self.eps = on, experiment.model.norm_eps
        self.scale, self.bias = described(on, f"{name}.scale"), described(on, f"{name}.bias")


class Mlp(nnx.Module, mlp.Mlp):
    def __init__(self, on: Placement, prefix: str):
        self.on = on
        for name in ("gate", "gate_bias", "up", "up_bias", "down", "down_bias"):
            setattr(self, name, described(on, f"{prefix}{name}"))


class Moe(nnx.Module, moe.Moe):
    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        assert experiment.model.moe is not None
        self.on, self.moe = on, experiment.model.moe
        for name in ("router", "gate", "up", "down"):
            setattr(self, name, described(on, f"{prefix}{name}"))
        self.shared = Mlp(on, f"{prefix}shared_") if self.moe.shared_experts else None


class Attention(nnx.Module, transformer.Attention):
    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        self.on, self.form, self.eps = on, experiment.backend.attention, experiment.model.norm_eps
        for name in ("query", "key", "value", "output"):
            setattr(self, name, described(on, f"{prefix}{name}"))
            setattr(self, f"{name}_bias", described(on, f"{prefix}{name}_bias"))
        self.query_norm, self.key_norm = described(on, f"{prefix}query_norm"), described(on, f"{prefix}key_norm")


class LatentAttention(nnx.Module, latent.LatentAttention):
    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        assert experiment.model.latent is not None
        self.on, self.form = on, experiment.backend.attention
        self.latent, self.eps = experiment.model.latent, experiment.model.norm_eps
        for name in ("query", "query_down", "query_down_norm", "query_up", "kv_down", "kv_down_norm", "kv_up", "output"):
            setattr(self, name, described(on, f"{prefix}{name}"))


class Embedding(nnx.Module, transformer.Embedding):
    def __init__(self, on: Placement):
        self.on = on
        self.tokens, self.positions = described(on, "embed.tokens"), described(on, "embed.positions")


class Head(nnx.Module, transformer.Head):
    def __init__(self, on: Placement):
        self.on = on
        self.weight = described(on, "head.weight")


class Layer(nnx.Module, transformer.Layer):
    def __init__(self, experiment: Experiment, on: Placement, stack: str):
        self.on, model = on, experiment.model
        self.attention_norm = Norm(experiment, on, f"{stack}.attention_norm")
        self.attention = (LatentAttention if model.latent else Attention)(experiment, on, f"{stack}.attention.")
        self.mlp_norm = Norm(experiment, on, f"{stack}.mlp_norm")
        mixture = model.moe is not None and stack == "layers"
        self.mlp = Moe(experiment, on, f"{stack}.moe.") if mixture else Mlp(on, f"{stack}.mlp.")


class Decoder(nnx.Module, transformer.Decoder):
    def __init__(self, experiment: Experiment, on: Placement):
        self.experiment, self.on = experiment, on
        self.embed = Embedding(on.outside)
        for stack in stacks(experiment.model):
            setattr(self, stack, Layer(experiment, on, stack))
        self.final_norm = Norm(experiment, on.ending, "final_norm")
        self.head = Head(on.ending)
