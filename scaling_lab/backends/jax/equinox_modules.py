"""The decoder's modules in Equinox: how they hold weights, and how a tree of them is filled. `flax_modules` does the same.

A module here is the class of equations that it names, held as a frozen dataclass: every field declared, all that is not an array
marked static; a weight is a small module of its own, whose name is static. Weights are described, by shape and dtype, before
any exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from scaling_lab.backends.jax import latent, mlp, moe, norm, transformer
from scaling_lab.backends.jax.sharding import Arrays, Placement
from scaling_lab.models import model as sizes
from scaling_lab.models.decoder import stacks
from scaling_lab.plan.experiment import Experiment


class Weight(eqx.Module):
    """A parameter by its name: `products.Weight`."""

    array: jax.Array
    name: str = eqx.field(static=True)


def described(on: Placement, name: str) -> Any:
    """A parameter without a value yet, or None where the model has none of that name."""
    if name not in on.described:
        return None
    description: Any = jax.ShapeDtypeStruct(on.described[name].shape, jnp.dtype(on.precision.params))
    return Weight(description, name)


def filled(module: Any, names: Iterable[str]) -> Callable[[Arrays], Any]:
    """A module as a function of its weights by name."""

    def is_weight(node: Any) -> bool:
        return isinstance(node, Weight)

    found = {weight.name for weight in jax.tree.leaves(module, is_leaf=is_weight)}
    assert found == set(names), sorted(found ^ set(names))

    def fill(weights: Arrays) -> Any:
        return jax.tree.map(lambda weight: Weight(weights[weight.name], weight.name), module, is_leaf=is_weight)

    return fill


class Norm(eqx.Module, norm.Norm):
    on: Placement = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    scale: Weight
    bias: Weight | None

    def __init__(self, experiment: Experiment, on: Placement, name: str):
        self.on, self.eps = on, experiment.model.norm_eps
        self.scale, self.bias = described(on, f"{name}.scale"), described(on, f"{name}.bias")


class Mlp(eqx.Module, mlp.Mlp):
    on: Placement = eqx.field(static=True)
    gate: Weight | None
    gate_bias: Weight | None
    up: Weight
    up_bias: Weight | None
    down: Weight
    down_bias: Weight | None

    def __init__(self, on: Placement, prefix: str):
        self.on = on
        for name in ("gate", "gate_bias", "up", "up_bias", "down", "down_bias"):
            setattr(self, name, described(on, f"{prefix}{name}"))


class Moe(eqx.Module, moe.Moe):
    on: Placement = eqx.field(static=True)
    moe: sizes.Moe = eqx.field(static=True)
    router: Weight
    gate: Weight | None
    up: Weight
    down: Weight
    shared: Mlp | None

    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        assert experiment.model.moe is not None
        self.on, self.moe = on, experiment.model.moe
        for name in ("router", "gate", "up", "down"):
            setattr(self, name, described(on, f"{prefix}{name}"))
        self.shared = Mlp(on, f"{prefix}shared_") if self.moe.shared_experts else None


class Attention(eqx.Module, transformer.Attention):
    on: Placement = eqx.field(static=True)
    form: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    query: Weight
    query_bias: Weight | None
    query_norm: Weight | None
    key: Weight
    key_bias: Weight | None
    key_norm: Weight | None
    value: Weight
    value_bias: Weight | None
    output: Weight
    output_bias: Weight | None

    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        self.on, self.form, self.eps = on, experiment.backend.attention, experiment.model.norm_eps
        for name in ("query", "key", "value", "output"):
            setattr(self, name, described(on, f"{prefix}{name}"))
            setattr(self, f"{name}_bias", described(on, f"{prefix}{name}_bias"))
        self.query_norm, self.key_norm = described(on, f"{prefix}query_norm"), described(on, f"{prefix}key_norm")


class LatentAttention(eqx.Module, latent.LatentAttention):
    on: Placement = eqx.field(static=True)
    form: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    latent: sizes.Latent = eqx.field(static=True)
    query: Weight | None
    query_down: Weight | None
    query_down_norm: Weight | None
    query_up: Weight | None
    kv_down: Weight
    kv_down_norm: Weight
    kv_up: Weight
    output: Weight

    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        assert experiment.model.latent is not None
        self.on, self.form = on, experiment.backend.attention
        self.latent, self.eps = experiment.model.latent, experiment.model.norm_eps
        for name in ("query", "query_down", "query_down_norm", "query_up", "kv_down", "kv_down_norm", "kv_up", "output"):
            setattr(self, name, described(on, f"{prefix}{name}"))


class Embedding(eqx.Module, transformer.Embedding):
    on: Placement = eqx.field(static=True)
    tokens: Weight
    positions: Weight | None

    def __init__(self, on: Placement):
        self.on = on
        self.tokens, self.positions = described(on, "embed.tokens"), described(on, "embed.positions")


class Head(eqx.Module, transformer.Head):
    on: Placement = eqx.field(static=True)
    weight: Weight | None

    def __init__(self, on: Placement):
        self.on = on
        self.weight = described(on, "head.weight")


class Layer(eqx.Module, transformer.Layer):
    on: Placement = eqx.field(static=True)
    attention_norm: Norm
    attention: Attention | LatentAttention
    mlp_norm: Norm
    mlp: Mlp | Moe

    def __init__(self, experiment: Experiment, on: Placement, stack: str):
        self.on, model = on, experiment.model
        self.attention_norm = Norm(experiment, on, f"{stack}.attention_norm")
        self.attention = (LatentAttention if model.latent else Attention)(experiment, on, f"{stack}.attention.")
        self.mlp_norm = Norm(experiment, on, f"{stack}.mlp_norm")
        mixture = model.moe is not None and stack == "layers"
        self.mlp = Moe(experiment, on, f"{stack}.moe.") if mixture else Mlp(on, f"{stack}.mlp.")


class Decoder(eqx.Module, transformer.Decoder):
    experiment: Experiment = eqx.field(static=True)
    on: Placement = eqx.field(static=True)
    embed: Embedding
    dense_layers: Layer | None
    layers: Layer
    final_norm: Norm
    head: Head

    def __init__(self, experiment: Experiment, on: Placement):
        self.experiment, self.on = experiment, on
        self.embed = Embedding(on.outside)
        self.dense_layers = None
        for stack in stacks(experiment.model):
            setattr(self, stack, Layer(experiment, on, stack))
        self.final_norm = Norm(experiment, on.ending, "final_norm")
        self.head = Head(on.ending)
