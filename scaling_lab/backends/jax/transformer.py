"""The decoder as flax NNX modules: equations only. Where things lie is asked of `Placement`; values are made elsewhere.

Modules hold `nnx.Param`s that carry the names of `models.decoder`, described (shape and dtype) before any exists.
Parameters of a stack are stacked over its layers in dim 0; the same modules compute one layer from one slice of them.
Shapes: b batch, t sequence, e embed, h heads or kv_heads, d head_dim, v vocab.
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
from scaling_lab.backends.jax.chunks import Chunked, chunked_cross_entropy_sum
from scaling_lab.backends.jax.latent import LatentAttention
from scaling_lab.backends.jax.loss import cross_entropy_sum
from scaling_lab.backends.jax.mlp import Mlp
from scaling_lab.backends.jax.moe import Moe
from scaling_lab.backends.jax.norm import Norm, rms_norm
from scaling_lab.backends.jax.products import described, how_used, lookup, plus, product
from scaling_lab.backends.jax.remat import rematerialise
from scaling_lab.backends.jax.rotary import rotary, rotary_tables
from scaling_lab.backends.jax.runtime import mesh_of
from scaling_lab.backends.jax.sharding import Arrays, Placement, place_values
from scaling_lab.models.decoder import stacks
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Found, make_plan

RESIDUAL = ("batch", "residual_sequence", "embed")
INPUT = ("batch", "sequence", "embed")
QUERY = ("batch", "sequence", "heads", "head_dim")
KEY_VALUE = ("batch", "sequence", "kv_heads", "head_dim")
LOGITS = ("batch", "sequence", "vocab")


class Decoder(nnx.Module):
    """tokens (b, t) -> logits (b, t, v), or with labels (b, t) the sum of their cross-entropies, and what routers report.

    The latter by name, of each row (b,), summed over layers; nothing without experts.
    documents, positions (b, t): of packed rows, see `contract.Batch`.
    """

    def __init__(self, experiment: Experiment, on: Placement):
        self.experiment, self.on = experiment, on
        self.embed = Embedding(on)
        for stack in stacks(experiment.model):
            setattr(self, stack, Layer(experiment, on, stack))
        self.final_norm = Norm(experiment, on, "final_norm")
        self.head = Head(on)

    def __call__(self, tokens, labels=None, documents=None, positions=None):
        positions = self.on.positions if positions is None else positions
        x = self.on.constrain(self.embed(tokens, positions), RESIDUAL)  # (b, t, e)
        x, reported = self._through_layers(x, documents, positions)
        return self.finish(x, labels), reported

    def finish(self, x, labels):
        """What follows the layers."""
        x = self.on.constrain(self.final_norm(x), INPUT)
        if labels is None:
            return self.logits(x)
        chunks = self.experiment.workload.loss_chunks
        if chunks == 1:
            return self.loss(x, labels)
        equation, weight = self.head.weighed(self._table)
        head = Chunked(how_used(self.on, weight), equation, self.experiment.model.vocab, chunks)
        return chunked_cross_entropy_sum(head, x.astype(head.use.dtype), weight[...], labels)

    def logits(self, x):
        """x (b, t, e) -> (b, t, v)."""
        return self.on.constrain(self.head(x, self._table), LOGITS)

    @property
    def _table(self):
        return self.embed.tokens if self.experiment.model.tied_head else None

    def loss(self, x, labels):
        """The sum of cross-entropies."""
        return cross_entropy_sum(self.logits(x), labels, self.experiment.model.vocab)

    def _through_layers(self, x, documents, positions):
        experiment = self.experiment
        reported: dict[str, jax.Array] = {}
        tables = rotary_tables(experiment.model, positions) if experiment.model.positions == "rope" else None
        scanned = bool(experiment.backend.scan_layers)
        layer = rematerialise(lambda layer, x: layer(x, tables, documents), experiment.workload.remat, scanned=scanned)
        for stack, numbers in stacks(experiment.model).items():
            x, found = _through(layer, x, getattr(self, stack), len(numbers), scanned=scanned)
            reported |= {name: rows.sum(axis=0) for name, rows in found.items()}  # (layers, b) -> (b,)
        return x, reported


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
    """x (b, t, e) -> x (b, t, e), and what a router reports."""

    def __init__(self, experiment: Experiment, on: Placement, stack: str):
        self.on, model = on, experiment.model
        self.attention_norm = Norm(experiment, on, f"{stack}.attention_norm")
        self.attention = (LatentAttention if model.latent else Attention)(experiment, on, f"{stack}.attention.")
        self.mlp_norm = Norm(experiment, on, f"{stack}.mlp_norm")
        mixture = model.moe is not None and stack == "layers"
        self.mlp = Moe(experiment, on, f"{stack}.moe.") if mixture else Mlp(on, f"{stack}.mlp.")

    def __call__(self, x, tables, documents):
        y = self.on.constrain(self.attention_norm(x), INPUT)
        x = x + self.on.constrain(self.attention(y, tables, documents), RESIDUAL)
        y = self.on.constrain(self.mlp_norm(x), INPUT)
        y, reported = self.mlp(y) if isinstance(self.mlp, Moe) else (self.mlp(y), {})
        return x + self.on.constrain(y, RESIDUAL), reported


class Attention(nnx.Module):
    """x (b, t, e) -> (b, t, e): query head h attends with key and value head h // (heads / kv_heads)."""

    query: Any
    query_bias: Any
    query_norm: Any
    key: Any
    key_bias: Any
    key_norm: Any
    value: Any
    value_bias: Any
    output: Any
    output_bias: Any

    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        self.on, self.form, self.eps = on, experiment.backend.attention, experiment.model.norm_eps
        for name in Attention.__annotations__:
            setattr(self, name, described(on, f"{prefix}{name}"))

    def __call__(self, x, tables, documents):
        on = self.on
        query = plus(on, product(on, "bte,ehd->bthd", x, self.query), self.query_bias)
        key = plus(on, product(on, "bte,ehd->bthd", x, self.key), self.key_bias)
        value = plus(on, product(on, "bte,ehd->bthd", x, self.value), self.value_bias)
        if self.query_norm is not None:
            query, key = rms_norm(on, query, self.query_norm, self.eps), rms_norm(on, key, self.key_norm, self.eps)
        if tables is not None:
            query, key = rotary(query, tables), rotary(key, tables)
        query, key, value = on.constrain(query, QUERY), on.constrain(key, KEY_VALUE), on.constrain(value, KEY_VALUE)
        mixed = context.attend(query, key, value, documents, form=self.form, on=on)
        mixed = on.constrain(mixed, QUERY)  # (b, t, h, d)
        return plus(on, product(on, "bthd,hde->bte", mixed, self.output), self.output_bias)


class Head(nnx.Module):
    """x (b, t, e) -> logits (b, t, v), with its own weight or the embedding's table."""

    def __init__(self, on: Placement):
        self.on = on
        self.weight = described(on, "head.weight")

    def __call__(self, x, table):
        equation, weight = self.weighed(table)
        return product(self.on, equation, x, weight)

    def weighed(self, table):
        """The product's equation and its weight."""
        return ("bte,ve->btv", table) if self.weight is None else ("bte,ev->btv", self.weight)


def _through(layer: Callable[..., Any], x: Any, stack: Layer, count: int, *, scanned: bool) -> tuple[Any, dict[str, jax.Array]]:
    """x after every layer of a stack, and their reports (layers, b)."""
    if scanned:
        return jax.lax.scan(lambda x, one: layer(one, x), x, stack)
    reports = []
    for one in _unstacked(stack, count):
        x, report = layer(one, x)
        reports.append(report)
    return x, jax.tree.map(lambda *rows: jnp.stack(rows), *reports)


def _unstacked(layers: Layer, count: int) -> list[Layer]:
    """One module per layer. By `lax.split`: its gradient is one concatenation, that of indexing a sum of padded copies."""
    leaves, structure = jax.tree.flatten(layers)
    slices = zip(*(jax.lax.split(leaf, (1,) * count, axis=0) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, [leaf[0] for leaf in one]) for one in slices]


def forward(experiment: Experiment, on: Placement) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """A pure function (weights by name, arrays of a batch by name (b, t)) -> what `Decoder` gives."""
    graph, state = nnx.split(Decoder(experiment, on))
    variables = {variable.get_metadata("parameter"): (path, variable) for path, variable in nnx.to_flat_state(state)}
    assert variables.keys() == on.described.keys(), sorted(variables.keys() ^ on.described.keys())

    def apply(weights: Arrays, **batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        filled = [(path, variable.replace(weights[name])) for name, (path, variable) in variables.items()]
        return nnx.merge(graph, nnx.from_flat_state(filled))(**batch)

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
    computed, _ = jax.jit(forward(experiment, on))(place_values(on, weights), tokens=jnp.asarray(tokens, jnp.int32))
    return np.asarray(computed[..., : experiment.model.vocab], np.float32)
