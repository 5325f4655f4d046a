"""The routed experts on a mesh: which device computes what, and what is exchanged, in both passes. One meaning, two forms.

`dropless` where an expert takes whatever comes, `limited` where its room is bounded; both run inside a `shard_map` over the whole
mesh, with each device's own tokens and its part of the experts. Weights are gathered from the stored ones in each pass, and
their gradients scattered to where the plan wants them, as `products` does. Must not know how tokens chose their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from scaling_lab.backends.jax import dropless, limited
from scaling_lab.backends.jax.dispatch import Experts
from scaling_lab.backends.jax.expert import Matrices
from scaling_lab.backends.jax.products import Use, Weight, how_used
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.plan.layout import Layout

TOKENS = ("batch", "sequence", "embed")
ASSIGNMENTS = ("batch", "sequence", None)


def experts(
    on: Placement,
    num: int,
    room: int | None,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate: Weight | None,
    up: Weight,
    down: Weight,
) -> jax.Array:
    """x (b, t, e) -> (b, t, e): sum over a token's experts of weight x mlp(x).

    chosen (b, t, k): the experts of a token, `num` for none; an expert must not get more than `room` of a sequence's tokens
    weights (b, t, k): float32; gate, up (n, e, f), down (n, f, e): of all experts
    """
    into = (up,) if gate is None else (up, gate)
    how = How(on, num, room, tuple(how_used(on, weight) for weight in into), how_used(on, down))
    return _experts(how, x, chosen, weights, (tuple(weight.array for weight in into), down.array))


@dataclass(frozen=True)
class How:
    """How the experts are used. num, room: see `experts`; into, down: see `expert.Matrices`."""

    on: Placement
    num: int
    room: int | None
    into: tuple[Use, ...]
    down: Use

    @property
    def form(self) -> Any:
        """The module that computes them."""
        return dropless if self.room is None else limited

    @property
    def matrices(self) -> tuple[tuple[Use, ...], Use]:
        """How each of them is used."""
        return self.into, self.down

    def axes(self, row: str) -> tuple[str, ...]:
        """Mesh axes of a row of activations."""
        return self.on.activation((row,)).dims[0]

    @property
    def others(self) -> tuple[str, ...]:
        """Mesh axes whose devices have other tokens for the same experts."""
        return tuple(axis for row in ("batch", "sequence") for axis in self.axes(row) if axis not in self.axes("experts"))

    @property
    def experts(self) -> Experts:
        """As one device sees them. Of a sequence in parts, an expert gets no more than a part's tokens from a device."""
        axes, sequence = self.axes("experts"), self.on.plan.sequence
        room = None if self.room is None else min(self.room, sequence.length // sequence.parts)
        return Experts(self.num, axes, self.on.plan.mesh.split(axes), room)

    def layouts(self) -> tuple[Layout, Layout, Layout, Any, Layout]:
        """Of x, chosen, weights, the matrices, and what is saved: rows for a device's experts of the tokens it computes."""
        tokens, assignments = self.on.activation(TOKENS), self.on.activation(ASSIGNMENTS)
        matrices = jax.tree.map(lambda use: self.on.layer_layout(use.name, "compute"), self.matrices)
        return tokens, assignments, assignments, matrices, Layout((self.axes("experts"), self.others))

    def gathered(self, stored: Matrices) -> Matrices:
        """The matrices in the compute dtype and layout."""
        return jax.tree.map(lambda use, matrix: use.gather(matrix), self.matrices, stored)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(how: How, x: jax.Array, chosen: jax.Array, weights: jax.Array, stored: Matrices) -> jax.Array:
    return _forward(how, x, chosen, weights, stored)[0]


def _forward(how, x, chosen, weights, stored):
    *inputs, saved = how.layouts()
    compute = how.on.over_mesh(partial(_local_forward, how), tuple(inputs), (inputs[0], saved))
    y, saved = compute(x, chosen, weights, how.gathered(stored))
    return y, (x, chosen, weights, stored, saved)


def _backward(how, residuals, dy):
    x, chosen, weights, stored, saved = residuals
    inputs = how.layouts()
    summed = jax.tree.map(lambda use: use.summed_layout, how.matrices)
    compute = how.on.over_mesh(partial(_local_backward, how), (*inputs, inputs[0]), (inputs[0], inputs[2], summed))
    dx, d_weights, gradients = compute(x, chosen, weights, how.gathered(stored), saved, dy)
    d_stored = jax.tree.map(lambda use, d, matrix: use.scatter(d).astype(matrix.dtype), how.matrices, gradients, stored)
    return dx, None, d_weights, d_stored


_experts.defvjp(_forward, _backward)


def _local_forward(how, x, chosen, weights, matrices):
    """On one device, which may have but a part of its experts' width: sums over it are made once a token's rows are one."""
    y, saved = how.form.forward(how.experts, _flat(x), chosen, _flat(weights), matrices)
    return jax.lax.psum(y, how.axes("mlp")).reshape(x.shape), saved


def _local_backward(how, x, chosen, weights, matrices, saved, dy):
    given = _flat(x), chosen, _flat(weights), matrices, saved, _flat(dy)
    dx, d_weights, gradients = how.form.backward(how.experts, *given)
    dx, d_weights = jax.lax.psum((dx, d_weights), how.axes("mlp"))
    summed = jax.tree.map(lambda use, d: use.summed(d, how.others), how.matrices, gradients)
    return dx.reshape(x.shape), d_weights.reshape(weights.shape), summed


def _flat(x: jax.Array) -> jax.Array:
    """(b, t, ...) -> (b x t, ...)."""
    return x.reshape(-1, x.shape[-1])
