"""What the model does with a weight: use it, multiply by it, look it up. Owns casts and gathers, in both passes.

The backward pass starts from the *stored* weight and gathers it again, so that no gathered weight is kept between the passes
(as FSDP does), and lays each gradient out where the plan wants it, so that partial sums are reduce-scattered. Must not
know the model's equations, nor which module library holds the weights.

Precision: products take and give the compute dtype, but for a router's, which are in float32 throughout. A weight's gradient is
summed over tokens and devices in the wider of the reduce and compute dtypes, which the product must accumulate in to begin with,
and is then cast to `gradient_dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from scaling_lab.backends.jax import typed
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.plan.experiment import Precision
from scaling_lab.plan.layout import Layout


def gradient_dtype(precision: Precision) -> jnp.dtype:
    """The dtype that gradients are accumulated and clipped in: the wider of the reduce and parameter dtypes."""
    return jnp.promote_types(precision.reduce, precision.params)


class Weight(Protocol):
    """A parameter by its name in `models.decoder`, stacked or of one layer, as a module library holds it."""

    @property
    def name(self) -> str:
        """As in the plan."""

    @property
    def array(self) -> jax.Array:
        """The stored weight."""


@dataclass(frozen=True)
class Use:
    """How one parameter is used: gathered to its compute layout on the way in, its gradient scattered on the way out.

    exact: in float32, whatever the compute dtype, also where a float32 product would be rounded to something faster
    """

    placement: Placement
    name: str
    exact: bool = False

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype in which the parameter is used."""
        return jnp.dtype(jnp.float32 if self.exact else self.placement.precision.compute)

    @property
    def reduce_dtype(self) -> jnp.dtype:
        """The dtype in which a product sums this parameter's gradient."""
        return jnp.promote_types(self.placement.precision.reduce, self.dtype)

    @property
    def einsum(self) -> Any:
        """The product, as exact as asked."""
        return partial(typed.einsum, self.placement, precision=jax.lax.Precision.HIGHEST if self.exact else None)

    def gather(self, stored: jax.Array) -> jax.Array:
        """The weight in the compute dtype and layout."""
        return self.placement.constrain_weight(stored.astype(self.dtype), self.name, "compute")

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """A gradient in its planned layout, its partial sums reduced."""
        return self.placement.constrain_weight(gradient, self.name, "gradients")

    @property
    def summed_layout(self) -> Layout:
        """Of the gradient of one layer after `summed`: as planned in dims that the plan only splits further, else as computed."""
        computed, planned = (self.placement.layer_layout(self.name, column) for column in ("compute", "gradients"))
        dims = zip(computed.dims, planned.dims, strict=True)
        return Layout(tuple(wanted if wanted[: len(have)] == have else have for have, wanted in dims))

    def summed(self, gradient: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Inside a `shard_map`: a partial gradient of one layer, summed over mesh axes in the reduce dtype, scattered on the way."""
        gradient, computed = gradient.astype(self.reduce_dtype), self.placement.layer_layout(self.name, "compute")
        for dim, (have, wanted) in enumerate(zip(computed.dims, self.summed_layout.dims, strict=True)):
            if further := wanted[len(have) :]:
                gradient = jax.lax.psum_scatter(gradient, further, scatter_dimension=dim, tiled=True)
                axes = tuple(axis for axis in axes if axis not in further)
        return jax.lax.psum(gradient, axes)


def use(placement: Placement, weight: Weight) -> jax.Array:
    """A weight in the compute dtype and layout, for elementwise use."""
    return _use(how_used(placement, weight), weight.array)


def product(placement: Placement, equation: str, x: jax.Array, weight: Weight, *, exact: bool = False) -> jax.Array:
    """`einsum(equation, x, weight)` of an activation and a weight, in the compute dtype, or `exact`: in float32."""
    how = how_used(placement, weight, exact=exact)
    return _product(equation, how, x.astype(how.dtype), weight.array)


def plus(placement: Placement, x: jax.Array, bias: Weight | None) -> jax.Array:
    """An activation with a bias added, where there is one."""
    return x if bias is None else x + use(placement, bias)


def lookup(placement: Placement, table: Weight, indices: jax.Array) -> jax.Array:
    """Rows of a table (dim 0), in the compute dtype. Its gradient is summed in the reduce dtype."""
    return _lookup(how_used(placement, table), table.array, indices)


def how_used(placement: Placement, weight: Weight, *, exact: bool = False) -> Use:
    """How a parameter of the model is used."""
    return Use(placement, weight.name, exact)


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
    return how.einsum(equation, x, how.gather(stored))


def _product_forward(equation, how, x, stored):
    # Not a call of `_product`: checkpoint policies must see the product itself.
    return how.einsum(equation, x, how.gather(stored)), (x, stored)


def _product_backward(equation, how, saved, dy):
    x, stored = saved
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    dx = how.einsum(f"{output},{right}->{left}", dy, how.gather(stored))
    wanted = how.placement.weight_layout(how.name, "gradients", stored.ndim)
    dw = how.einsum(f"{left},{output}->{right}", x, dy, wanted, preferred_element_type=how.reduce_dtype)
    return dx, how.scatter(dw).astype(stored.dtype)


_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(how: Use, stored: jax.Array, indices: jax.Array) -> jax.Array:
    return typed.taken(how.placement, how.gather(stored), indices)


def _lookup_forward(how, stored, indices):
    return typed.taken(how.placement, how.gather(stored), indices), (stored, indices)


def _lookup_backward(how, saved, dy):
    stored, indices = saved
    # Summed whole before it is cut: the partitioner would rather gather the activations to where each part of the table lies.
    computed = how.placement.weight_layout(how.name, "compute", stored.ndim)
    whole = typed.added(how.placement, stored.shape, indices, dy.astype(how.reduce_dtype), computed)
    return how.scatter(whole).astype(stored.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)
