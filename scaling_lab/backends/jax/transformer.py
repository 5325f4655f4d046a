"""The decoder as flax NNX modules: equations only. Where things lie is asked of `Placement`; values are made elsewhere.

Modules hold `nnx.Param`s whose dotted paths are the names in `models.decoder`, described (shape and dtype) before any exists.
Parameters of `layers` are stacked over layers in dim 0; the same modules compute one layer from one slice of them.
Shapes: b batch, t sequence, e embed, h heads or kv_heads, d head_dim, f mlp, v vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scaling_lab.backends.jax import context
from scaling_lab.backends.jax.attention import attend
from scaling_lab.backends.jax.products import lookup, product, use
from scaling_lab.backends.jax.remat import rematerialise
from scaling_lab.backends.jax.rotary import rotary, rotary_tables
from scaling_lab.backends.jax.runtime import mesh_of
from scaling_lab.backends.jax.sharding import Arrays, Placement, place_values
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Found, make_plan

RESIDUAL = ("batch", "residual_sequence", "embed")
INPUT = ("batch", "sequence", "embed")
QUERY = ("batch", "sequence", "heads", "head_dim")
KEY_VALUE = ("batch", "sequence", "kv_heads", "head_dim")
HIDDEN = ("batch", "sequence", "mlp")
LOGITS = ("batch", "sequence", "vocab")


class Decoder(nnx.Module):
    """tokens (b, t) -> logits (b, t, v). documents, positions (b, t): of packed rows, see `contract.Batch`."""

    def __init__(self, experiment: Experiment, on: Placement):
        self.experiment, self.on = experiment, on
        self.embed = Embedding(on)
        self.layers = Layer(experiment, on)
        self.final_norm = Norm(experiment, on, "final_norm")
        self.head = Head(on)

    def __call__(self, tokens, documents=None, positions=None):
        positions = self.on.positions if positions is None else positions
        x = self.on.constrain(self.embed(tokens, positions), RESIDUAL)  # (b, t, e)
        x = self._through_layers(x, documents, positions)
        x = self.on.constrain(self.final_norm(x), INPUT)
        table = self.embed.tokens if self.experiment.model.tied_head else None
        return self.on.constrain(self.head(x, table), LOGITS)  # (b, t, v)

    def _through_layers(self, x, documents, positions):
        experiment, scanned = self.experiment, bool(self.experiment.backend.scan_layers)
        tables = rotary_tables(experiment.model, positions) if experiment.model.positions == "rope" else None
        layer = rematerialise(lambda layer, x: layer(x, tables, documents), experiment.workload.remat, scanned=scanned)
        if scanned:
            return jax.lax.scan(lambda x, one: (layer(one, x), None), x, self.layers)[0]
        for one in _unstacked(self.layers, experiment.model.layers):
            x = layer(one, x)
        return x


class Embedding(nnx.Module):
    """tokens (b, t) -> (b, t, e)."""

    def __init__(self, on: Placement):
        self.on = on
        self.tokens, self.positions = described(on, "embed.tokens"), described(on, "embed.positions")

    def __call__(self, tokens, positions):
        x = lookup(self.on, self.tokens, tokens)
        if self.positions is None:
            return x
        return x + lookup(self.on, self.positions, positions)


class Layer(nnx.Module):
    """x (b, t, e) -> x (b, t, e)."""

    def __init__(self, experiment: Experiment, on: Placement):
        self.on = on
        self.attention_norm = Norm(experiment, on, "layers.attention_norm")
        self.attention = Attention(experiment, on)
        self.mlp_norm = Norm(experiment, on, "layers.mlp_norm")
        self.mlp = Mlp(on)

    def __call__(self, x, tables, documents):
        y = self.on.constrain(self.attention_norm(x), INPUT)
        x = x + self.on.constrain(self.attention(y, tables, documents), RESIDUAL)
        y = self.on.constrain(self.mlp_norm(x), INPUT)
        return x + self.on.constrain(self.mlp(y), RESIDUAL)


class Norm(nnx.Module):
    """x (b, t, e) -> (b, t, e), statistics in float32: RMSNorm, or LayerNorm where the model says so."""

    def __init__(self, experiment: Experiment, on: Placement, name: str):
        self.on, self.eps = on, experiment.model.norm_eps
        self.scale, self.bias = described(on, f"{name}.scale"), described(on, f"{name}.bias")

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - wide.mean(axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + self.eps)
        return _plus(self.on, wide.astype(x.dtype) * use(self.on, self.scale), self.bias)


class Attention(nnx.Module):
    """x (b, t, e) -> (b, t, e): query head h attends with key and value head h // (heads / kv_heads)."""

    query: Any
    query_bias: Any
    key: Any
    key_bias: Any
    value: Any
    value_bias: Any
    output: Any
    output_bias: Any

    def __init__(self, experiment: Experiment, on: Placement):
        self.on, self.form = on, experiment.backend.attention
        for name in ("query", "key", "value", "output"):
            setattr(self, name, described(on, f"layers.attention.{name}"))
            setattr(self, f"{name}_bias", described(on, f"layers.attention.{name}_bias"))

    def __call__(self, x, tables, documents):
        on = self.on
        query = _plus(on, product(on, "bte,ehd->bthd", x, self.query), self.query_bias)
        key = _plus(on, product(on, "bte,ehd->bthd", x, self.key), self.key_bias)
        value = _plus(on, product(on, "bte,ehd->bthd", x, self.value), self.value_bias)
        if tables is not None:
            query, key = rotary(query, tables), rotary(key, tables)
        query, key, value = on.constrain(query, QUERY), on.constrain(key, KEY_VALUE), on.constrain(value, KEY_VALUE)
        if on.plan.sequence.parts == 1:
            mixed = attend(query, key, value, documents, form=self.form, platform=on.plan.platform)
        else:
            mixed = context.attend(query, key, value, documents, form=self.form, on=on)
        mixed = on.constrain(mixed, QUERY)  # (b, t, h, d)
        return _plus(on, product(on, "bthd,hde->bte", mixed, self.output), self.output_bias)


class Mlp(nnx.Module):
    """x (b, t, e) -> (b, t, e): SwiGLU where there is a gate, else GELU in GPT-2's tanh form."""

    gate: Any
    gate_bias: Any
    up: Any
    up_bias: Any
    down: Any
    down_bias: Any

    def __init__(self, on: Placement):
        self.on = on
        for name in ("gate", "gate_bias", "up", "up_bias", "down", "down_bias"):
            setattr(self, name, described(on, f"layers.mlp.{name}"))

    def __call__(self, x):
        on = self.on
        hidden = on.constrain(_plus(on, product(on, "bte,ef->btf", x, self.up), self.up_bias), HIDDEN)  # (b, t, f)
        if self.gate is None:
            hidden = jax.nn.gelu(hidden, approximate=True)
        else:
            gate = on.constrain(_plus(on, product(on, "bte,ef->btf", x, self.gate), self.gate_bias), HIDDEN)
            hidden = hidden * jax.nn.silu(gate)
        return _plus(on, product(on, "btf,fe->bte", hidden, self.down), self.down_bias)


class Head(nnx.Module):
    """x (b, t, e) -> logits (b, t, v), with its own weight or the embedding's table."""

    def __init__(self, on: Placement):
        self.on = on
        self.weight = described(on, "head.weight")

    def __call__(self, x, table):
        if self.weight is None:
            return product(self.on, "bte,ve->btv", x, table)
        return product(self.on, "bte,ev->btv", x, self.weight)


def described(on: Placement, name: str) -> Any:
    """A parameter without a value yet, or None where the model has none of that name."""
    if name not in on.described:
        return None
    shape = on.described[name].shape
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(on.precision.params)), parameter=name)


def _plus(on: Placement, x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    return x if bias is None else x + use(on, bias)


def _unstacked(layers: Layer, count: int) -> list[Layer]:
    """One module per layer. By `lax.split`: its gradient is one concatenation, that of indexing a sum of padded copies."""
    leaves, structure = jax.tree.flatten(layers)
    slices = zip(*(jax.lax.split(leaf, (1,) * count, axis=0) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, [leaf[0] for leaf in one]) for one in slices]


def forward(experiment: Experiment, on: Placement) -> Callable[..., jax.Array]:
    """A pure function (weights by name, tokens (b, t), documents and positions (b, t) if packed) -> logits (b, t, v)."""
    graph, state = nnx.split(Decoder(experiment, on))
    variables = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}
    assert variables.keys() == on.described.keys(), sorted(variables.keys() ^ on.described.keys())

    def apply(weights: Arrays, tokens: jax.Array, **packed: jax.Array) -> jax.Array:
        filled = [(path, variable.replace(weights[name])) for name, (path, variable) in variables.items()]
        return nnx.merge(graph, nnx.from_flat_state(filled))(tokens, **packed)

    return apply


def logits(experiment: Experiment, weights: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits (b, t, v), float32, of tokens (b, t) on one device. weights: global arrays by parameter name."""
    ones: dict[str, Any] = dict.fromkeys(experiment.mesh.order, 1)
    alone = replace(experiment.mesh, **ones, devices=1, hosts=1, devices_per_host=None)
    workload = replace(experiment.workload, global_batch=tokens.shape[0], sequence=tokens.shape[1], accumulation=1)
    experiment = replace(experiment, mesh=alone, workload=workload)
    devices = jax.devices()[:1]
    plan = make_plan(experiment, Found(devices[0].platform, 1, True, None))
    on = Placement(mesh_of(plan, devices), plan, experiment.workload.precision)
    computed = jax.jit(forward(experiment, on))(place_values(on, weights), jnp.asarray(tokens, jnp.int32))
    return np.asarray(computed, np.float32)
