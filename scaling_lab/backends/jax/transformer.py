"""The decoder: equations only. Where things lie is asked of `Placement`; values are made elsewhere.

A class here is what one module computes with the weights that it lists; those a model may lack are None. How modules hold
them, under the names of `models.decoder`, is said twice over, in `flax_modules` and `equinox_modules`.
Parameters of a stack are stacked over its layers in dim 0; the same modules compute one layer from one slice of them.
Shapes: b batch, t sequence, e embed, h heads or kv_heads, d head_dim, v vocab.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaling_lab.backends.jax import by_turns, context, pipeline
from scaling_lab.backends.jax.chunks import LOGITS, Chunked, chunked_cross_entropy_sum
from scaling_lab.backends.jax.context import KEY_VALUE, QUERY
from scaling_lab.backends.jax.latent import LatentAttention
from scaling_lab.backends.jax.loss import cross_entropy_sum
from scaling_lab.backends.jax.mlp import Mlp
from scaling_lab.backends.jax.moe import Moe
from scaling_lab.backends.jax.norm import Norm, rms_norm
from scaling_lab.backends.jax.pipeline import RESIDUAL
from scaling_lab.backends.jax.products import Weight, how_used, lookup, plus, product
from scaling_lab.backends.jax.remat import rematerialise
from scaling_lab.backends.jax.rotary import rotary, rotary_tables
from scaling_lab.backends.jax.runtime import mesh_of
from scaling_lab.backends.jax.sharding import Arrays, Placement, place_values
from scaling_lab.models.decoder import stacks
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Found, make_plan

INPUT = ("batch", "sequence", "embed")


class Decoder:
    """tokens (b, t) -> logits (b, t, v), or with labels (b, t) the sum of their cross-entropies, and what routers report.

    The latter by name, of each row (b,), summed over layers; nothing without experts.
    documents, positions (b, t): of packed rows, see `contract.Batch`.
    """

    experiment: Experiment
    on: Placement
    embed: Embedding
    dense_layers: Layer | None
    layers: Layer
    final_norm: Norm
    head: Head

    def __call__(self, tokens, labels=None, documents=None, positions=None):
        positions = self.on.positions if positions is None else positions
        x = self.begin(tokens, positions)
        if labels is not None and self.on.plan.pipeline.by_turns:
            return self._by_turns(x, labels, documents, positions), {}
        x, reported = self._through_layers(x, documents, positions)
        return self.finish(x, labels), reported

    def begin(self, tokens, positions):
        """What precedes the layers."""
        shared = positions if positions.ndim == 1 else pipeline.shared_out(self.on.outside, positions)
        x = self.on.outside.constrain(self.embed(pipeline.shared_out(self.on.outside, tokens), shared), RESIDUAL)
        return self.on.constrain(pipeline.gathered(self.on.outside, x), RESIDUAL)  # (b, t, e)

    def finish(self, x, labels):
        """What follows the layers."""
        on = self.on.ending
        x = pipeline.shared_out(on, x)
        if labels is None:
            return pipeline.gathered(on, _logits(on, self._ending, x))
        return _loss(self.experiment, on, self._ending, x, pipeline.shared_out(on, labels))

    @property
    def _ending(self):
        """The weights of what follows the layers."""
        return self.final_norm, self.head, self.embed.tokens if self.experiment.model.tied_head else None

    def _through_layers(self, x, documents, positions):
        experiment = self.experiment
        tables = self._tables(positions)
        if self.on.plan.pipeline.stages > 1:
            return pipeline.through(
                self.on, self._chunk(tables), self.layers, x, None if documents is None else (tables, documents)
            )
        layer = partial(_with_rows, self._layer, (tables, documents))
        reported: dict[str, jax.Array] = {}
        for stack, numbers in stacks(experiment.model).items():
            x, found = _through(layer, x, getattr(self, stack), len(numbers), scanned=bool(experiment.backend.scan_layers))
            reported |= {name: rows.sum(axis=0) for name, rows in found.items()}  # (layers, b) -> (b,)
        return x, reported

    def _by_turns(self, x, labels, documents, positions):
        """The loss of a pipeline whose backward pass is written out."""
        on, tables = self.on, self._tables(positions)
        finish = partial(_loss, self.experiment, on.ending)
        rows = None if documents is None else (tables, documents)
        return by_turns.loss(on, self._chunk(tables), finish, self.layers, self._ending, x, rows, labels)

    def _tables(self, positions):
        return rotary_tables(self.experiment.model, positions) if self.experiment.model.positions == "rope" else None

    @property
    def _layer(self):
        """(one layer's weights, x, rotary tables, documents) -> x and reports, rematerialised as asked."""
        scanned = bool(self.experiment.backend.scan_layers)
        return rematerialise(lambda layer, x, *rows: layer(x, *rows), self.experiment.workload.remat, scanned=scanned)

    def _chunk(self, tables):
        return partial(_chunk, self._layer, tables, scanned=bool(self.experiment.backend.scan_layers))


class Embedding:
    """tokens (b, t) -> (b, t, e)."""

    on: Placement
    tokens: Weight
    positions: Weight | None

    def __call__(self, tokens, positions):
        x = lookup(self.on, self.tokens, tokens)
        if self.positions is None:
            return x
        return x + lookup(self.on, self.positions, positions)


class Layer:
    """x (b, t, e) -> x (b, t, e), and what a router reports."""

    on: Placement
    attention_norm: Norm
    attention: Attention | LatentAttention
    mlp_norm: Norm
    mlp: Mlp | Moe

    def __call__(self, x, tables, documents):
        y = self.on.constrain(self.attention_norm(x), INPUT)
        x = x + self.on.constrain(self.attention(y, tables, documents), RESIDUAL)
        y = self.on.constrain(self.mlp_norm(x), INPUT)
        y, reported = self.mlp(y) if isinstance(self.mlp, Moe) else (self.mlp(y), {})
        return x + self.on.constrain(y, RESIDUAL), reported


class Attention:
    """x (b, t, e) -> (b, t, e): query head h attends with key and value head h // (heads / kv_heads)."""

    on: Placement
    form: str
    eps: float
    query: Weight
    query_bias: Weight | None
    query_norm: Weight | None
    key: Weight
    key_bias: Weight | None
    key_norm: Any
    value: Weight
    value_bias: Weight | None
    output: Weight
    output_bias: Weight | None

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


class Head:
    """x (b, t, e) -> logits (b, t, v), with its own weight or the embedding's table."""

    on: Placement
    weight: Weight | None

    def __call__(self, x, table):
        equation, weight = self.weighed(table)
        return product(self.on, equation, x, weight)

    def weighed(self, table):
        """The product's equation and its weight."""
        return ("bte,ve->btv", table) if self.weight is None else ("bte,ev->btv", self.weight)


def _normed(on: Placement, ending: tuple[Any, ...], x: jax.Array) -> jax.Array:
    """x (b, t, e) after the layers, as the head takes it."""
    final_norm, _, _ = ending
    return on.constrain(final_norm(on.constrain(x, RESIDUAL)), INPUT)


def _logits(on: Placement, ending: tuple[Any, ...], x: jax.Array) -> jax.Array:
    """x (b, t, e) after the layers -> (b, t, v)."""
    _, head, table = ending
    return on.constrain(head(_normed(on, ending, x), table), LOGITS)


def _loss(experiment: Experiment, on: Placement, ending: tuple[Any, ...], x: jax.Array, labels: jax.Array) -> jax.Array:
    """x (b, t, e) after the layers -> the sum of cross-entropies."""
    chunks, vocab = experiment.workload.loss_chunks, experiment.model.vocab
    if chunks == 1:
        return cross_entropy_sum(_logits(on, ending, x), labels, vocab)
    _, head, table = ending
    equation, weight = head.weighed(table)
    chunked = Chunked(how_used(on, weight), equation, vocab, chunks)
    return chunked_cross_entropy_sum(chunked, _normed(on, ending, x).astype(chunked.use.dtype), weight.array, labels)


def _with_rows(layer: Callable[..., Any], rows: tuple[Any, ...], one: Layer, x: Any) -> Any:
    return layer(one, x, *rows)


def _chunk(layer: Callable[..., Any], tables: Any, stack: Layer, real: Any, x: Any, rows: Any, *, scanned: bool) -> Any:
    """x after those layers of a pipeline's chunk that are no padding, and their reports, summed. rows: of packed ones, see `Decoder`."""
    rows = (tables, None) if rows is None else rows

    def masked(one, x):
        one, is_layer = one
        y, report = layer(one, x, *rows)
        return jnp.where(is_layer, y, x), {name: jnp.where(is_layer, of_rows, 0) for name, of_rows in report.items()}

    x, found = _through(masked, x, (stack, real), len(real), scanned=scanned)
    return x, {name: of_rows.sum(axis=0) for name, of_rows in found.items()}


def _through(layer: Callable[..., Any], x: Any, stack: Any, count: int, *, scanned: bool) -> tuple[Any, dict[str, jax.Array]]:
    """x after every layer of a stack, and their reports (layers, b)."""
    if scanned:
        return jax.lax.scan(lambda x, one: layer(one, x), x, stack)
    reports = []
    for one in _unstacked(stack, count):
        x, report = layer(one, x)
        reports.append(report)
    return x, jax.tree.map(lambda *rows: jnp.stack(rows), *reports)


def _unstacked(layers: Any, count: int) -> list[Any]:
    """One module per layer. By `lax.split`: its gradient is one concatenation, that of indexing a sum of padded copies."""
    leaves, structure = jax.tree.flatten(layers)
    slices = zip(*(jax.lax.split(leaf, (1,) * count, axis=0) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, [leaf[0] for leaf in one]) for one in slices]


def forward(experiment: Experiment, on: Placement) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """A pure function (weights by name, arrays of a batch by name (b, t)) -> what `Decoder` gives."""
    # Imported here: it takes a while, and nobody needs both.
    modules = importlib.import_module(f"scaling_lab.backends.jax.{experiment.backend.module}_modules")
    filled = modules.filled(modules.Decoder(experiment, on), on.described)

    def apply(weights: Arrays, **batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return filled(weights)(**batch)

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
