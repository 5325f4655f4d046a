"""What the model does with a weight: use it, multiply by it, look it up. Owns casts and gathers, in both passes.

The backward pass starts from the *stored* weight and gathers it again, so that no gathered weight is kept between the passes
(as FSDP does), and lays each gradient out where the plan wants it, so that partial sums are reduce-scattered. Must not
know the model's equations.

Precision: products take and give the compute dtype. A weight's gradient is summed over tokens and devices in the wider
of the reduce and compute dtypes, which the product must accumulate in to begin with, and is then cast to `gradient_dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.plan.experiment import Precision


def gradient_dtype(precision: Precision) -> jnp.dtype:
    """The dtype that gradients are accumulated and clipped in: the wider of the reduce and parameter dtypes."""
    return jnp.promote_types(precision.reduce, precision.params)


@dataclass(frozen=True)
class Use:
    """How one parameter is used: gathered to its compute layout on the way in, its gradient scattered on the way out."""

    placement: Placement
    name: str

    @property
    def reduce_dtype(self) -> jnp.dtype:
        """The dtype in which a product sums this parameter's gradient."""
        return jnp.promote_types(self.placement.precision.reduce, self.placement.precision.compute)

    def gather(self, stored: jax.Array) -> jax.Array:
        """The weight in the compute dtype and layout."""
        return self.placement.constrain_weight(stored.astype(self.placement.precision.compute), self.name, "compute")

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """A gradient in its planned layout, its partial sums reduced."""
        return self.placement.constrain_weight(gradient, self.name, "gradients")


def use(placement: Placement, weight: nnx.Param) -> jax.Array:
    """A weight in the compute dtype and layout, for elementwise use."""
    return _use(_how(placement, weight), weight[...])


def product(placement: Placement, equation: str, x: jax.Array, weight: nnx.Param) -> jax.Array:
    """`einsum(equation, x, weight)` of an activation and a weight, in the compute dtype."""
    return _product(equation, _how(placement, weight), x, weight[...])


def lookup(placement: Placement, table: nnx.Param, indices: jax.Array) -> jax.Array:
    """Rows of a table (dim 0), in the compute dtype. Its gradient is summed in the reduce dtype."""
    return _lookup(_how(placement, table), table[...], indices)


def _how(placement: Placement, weight: nnx.Param) -> Use:
    return Use(placement, weight.get_metadata("parameter"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use(how: Use, stored: jax.Array) -> jax.Array:
    return how.gather(stored)


def _use_forward(how, stored):
    return how.gather(stored), None


def _use_backward(how, _, dy):
    return (how.scatter(dy.astype(how.placement.precision.params)),)


_use.defvjp(_use_forward, _use_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, how: Use, x: jax.Array, stored: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, how.gather(stored))


def _product_forward(equation, how, x, stored):
    # Not a call of `_product`: checkpoint policies must see the product itself.
    return jnp.einsum(equation, x, how.gather(stored)), (x, stored)


def _product_backward(equation, how, saved, dy):
    x, stored = saved
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    dx = jnp.einsum(f"{output},{right}->{left}", dy, how.gather(stored))
    dw = jnp.einsum(f"{left},{output}->{right}", x, dy, preferred_element_type=how.reduce_dtype)
    return dx, how.scatter(dw).astype(stored.dtype)


_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(how: Use, stored: jax.Array, indices: jax.Array) -> jax.Array:
    return how.gather(stored)[indices]


def _lookup_forward(how, stored, indices):
    return how.gather(stored)[indices], (stored, indices)


def _lookup_backward(how, saved, dy):
    stored, indices = saved
    gradient = jnp.zeros(stored.shape, how.reduce_dtype).at[indices].add(dy.astype(how.reduce_dtype))
    # Summed whole before it is cut: the partitioner would rather gather the activations to where each part of the table lies.
    whole = how.placement.constrain_weight(gradient, how.name, "compute")
    return how.scatter(whole).astype(stored.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)
