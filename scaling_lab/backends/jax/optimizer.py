"""AdamW and SGD with optax, global-norm clipping, and where their state lies. Knows nothing of the model or the loss.

Updates are computed in the gradients' dtype (`products.gradient_dtype`); state and weights are stored in the parameters'
dtype. The learning rate is an argument of each step, so that both backends take the same number. Numbers as torch's: eps
outside the square root; SGD adds decay to the gradient and has no dampening.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from scaling_lab.backends.jax.sharding import Arrays, Placement, place
from scaling_lab.errors import WorkerError
from scaling_lab.plan.experiment import Optimizer

#: torch's `clip_grad_norm_` divides by the norm plus this.
CLIP_EPS = 1e-6


def transformation(optimizer: Optimizer, on: Placement) -> optax.GradientTransformation:
    """Gradients -> updates for a learning rate of -1. Decay goes by `Parameter.decayed`, the same set as in torch."""
    decay = optax.add_decayed_weights(optimizer.weight_decay, mask=_decay_mask(on))
    if optimizer.name == "adamw":
        return optax.chain(optax.scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps), decay)
    if optimizer.momentum:
        return optax.chain(decay, optax.trace(optimizer.momentum))
    return decay


def _decay_mask(on: Placement) -> dict[str, bool]:
    mask = {name: parameter.decayed for name, parameter in on.described.items()}
    if all(mask.values()) or not any(mask.values()):
        raise WorkerError(f"weight decay would apply to {sum(mask.values())} of {len(mask)} parameters: a fault in their roles")
    return mask


def state_shardings(optimizer: optax.GradientTransformation, on: Placement) -> tuple[Any, Any]:
    """(described state, its shardings): per parameter as the plan's optimizer column says, scalars replicated."""
    dtype = jnp.dtype(on.precision.params)
    weights = {name: jax.ShapeDtypeStruct(parameter.shape, dtype) for name, parameter in on.described.items()}
    described = jax.eval_shape(optimizer.init, weights)
    shardings = on.shardings("optimizer")
    return described, jax.tree_util.tree_map_with_path(
        lambda path, _: shardings[path[-1].key] if isinstance(path[-1], jax.tree_util.DictKey) else on.replicated, described
    )


def initial_state(described: Any, shardings: Any) -> Any:
    """The state before the first step: zeros, which is what `init` gives for every transformation used here."""

    def zeros(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        return place(leaf.shape, sharding, leaf.dtype, lambda part: np.zeros([s.stop - s.start for s in part], leaf.dtype))

    return jax.tree.map(zeros, described, shardings)


def global_norm(gradients: Arrays) -> jax.Array:
    """L2 norm of all gradients together, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(gradient.astype(jnp.float32))) for gradient in gradients.values()))


def clip_factor(norm: jax.Array, clip: float | None) -> jax.Array | float:
    """What gradients of this norm are multiplied by, as torch does: min(1, clip / (norm + 1e-6))."""
    return 1.0 if clip is None else jnp.minimum(1.0, clip / (norm + CLIP_EPS))


def apply(
    optimizer: optax.GradientTransformation, on: Placement, weights: Arrays, state: Any, gradients: Arrays, lr: jax.Array
) -> tuple[Arrays, Any]:
    """One update: (weights, state). Computed where the optimizer state lies; the caller lays the results out."""
    gradients = {name: on.constrain_weight(g, name, "optimizer") for name, g in gradients.items()}
    local = {name: on.constrain_weight(w, name, "optimizer") for name, w in weights.items()}
    updates, updated = optimizer.update(gradients, state, local)
    moved = {name: (w - lr * updates[name]).astype(w.dtype) for name, w in local.items()}
    return (
        {name: on.constrain_weight(w, name, "weights") for name, w in moved.items()},
        jax.tree.map(lambda new, old: new.astype(old.dtype), updated, state),
    )
