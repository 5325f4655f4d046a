"""The mixture of experts: the equations of `models.moe`. How tokens reach their experts: `experts`.

Every position of every row takes part, in the room of the experts and in what the router reports too: those whose label is
ignored and those of empty rows are tokens like any other.
Shapes: b batch, t sequence, e embed, k experts_per_token, n experts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from scaling_lab.backends.jax.experts import experts
from scaling_lab.backends.jax.mlp import Mlp
from scaling_lab.backends.jax.products import Weight, product
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.models.model import Moe as Sizes

CHOICES = ("batch", "sequence", None)
WHOLE = ("batch", None, None)


class Moe:
    """x (b, t, e) -> (b, t, e), and what the router reports of each row (b,)."""

    on: Placement
    moe: Sizes
    router: Weight
    gate: Weight | None
    up: Weight
    down: Weight
    shared: Mlp | None

    def __call__(self, x):
        on, moe = self.on, self.moe
        logits = product(on, "bte,en->btn", x, self.router, exact=True)  # float32
        chosen = best(logits, moe.experts_per_token, on)  # (b, t, k)
        weights = moe.routed_scale * weighed(moe, logits, chosen)  # (b, t, k)
        reported = {"balance_loss": balance_loss(moe, logits, chosen), "z_loss": z_loss(logits)}
        most = room(moe, x.shape[1])
        chosen, reported["dropped_tokens"] = with_room(chosen, moe.experts, most, on)
        y = experts(on, moe.experts, most, x, chosen, weights, self.gate, self.up, self.down)
        return (y if self.shared is None else y + self.shared(x)), reported


def best(logits: jax.Array, k: int, on: Placement) -> jax.Array:
    """logits (b, t, n) -> the k highest of each token (b, t, k), highest first, of equal ones the lower index."""
    # On each device's own tokens: the partitioner would bring those of all devices to each.
    layout = on.activation(CHOICES)
    return on.over_mesh(lambda own: jax.lax.top_k(own, k)[1], (layout,), layout)(jax.lax.stop_gradient(logits))


def weighed(moe: Sizes, logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """What each of a token's chosen experts counts (b, t, k)."""

    def of_chosen(values: jax.Array) -> jax.Array:
        # By a mask, not a lookup: its gradient is a mask too, and it stays local wherever tokens lie.
        return jnp.where(_is_expert(chosen, moe.experts), values[:, :, None], 0.0).sum(axis=-1)

    if moe.routing == "topk_softmax":
        return jax.nn.softmax(of_chosen(logits), axis=-1)
    weights = of_chosen(jax.nn.softmax(logits, axis=-1))
    if moe.routing == "softmax_topk_normalised":
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights


def balance_loss(moe: Sizes, logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """Of each row (b,): n x sum over experts of (their share of its assignments x their mean probability)."""
    share = _is_expert(chosen, moe.experts).mean(axis=(1, 2))  # (b, n)
    probability = jax.nn.softmax(logits, axis=-1).mean(axis=1)  # (b, n)
    return moe.experts * (share * probability).sum(axis=-1)


def z_loss(logits: jax.Array) -> jax.Array:
    """Of each row (b,): the mean of logsumexp(logits) squared."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean(axis=1)


def room(moe: Sizes, sequence: int) -> int | None:
    """How many assignments of a sequence an expert takes; None: all."""
    if moe.capacity_factor is None:
        return None
    return math.ceil(moe.capacity_factor * sequence * moe.experts_per_token / moe.experts)


def with_room(chosen: jax.Array, num: int, most: int | None, on: Placement) -> tuple[jax.Array, jax.Array]:
    """chosen (b, t, k) with `num`, no expert, in place of experts without room; how many assignments of each row (b,) that drops.

    An expert takes its first ones in the order of the text, of one token's in the order of its choices; a row counts whole,
    on however many devices it lies, and in whatever order.
    """
    if most is None:
        return chosen, jnp.zeros(chosen.shape[0], jnp.int32)
    stored = np.asarray(on.plan.sequence.positions)  # where in the text each stored token is
    whole = on.constrain(chosen, WHOLE)[:, np.argsort(stored)]
    assigned = _is_expert(whole.reshape(len(whole), -1), num)  # (b, t x k, n)
    rank = (jnp.cumsum(assigned, axis=1) * assigned).sum(axis=-1)  # 1 for the first assignment of an expert
    fits = (rank <= most).reshape(whole.shape)[:, stored]
    return jnp.where(fits, chosen, num), (~fits).sum(axis=(1, 2))


def _is_expert(chosen: jax.Array, num: int) -> jax.Array:
    """Numbers of experts (...) -> (..., n): whether it is that one."""
    return chosen[..., None] == jnp.arange(num)
