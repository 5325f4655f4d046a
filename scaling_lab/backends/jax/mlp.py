"""The dense mlp, of a layer or of its shared experts, and what lies between its products. Must not know layers or routing.

Shapes: b batch, t sequence, e embed, f mlp.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from scaling_lab.backends.jax.products import described, plus, product
from scaling_lab.backends.jax.sharding import Placement

HIDDEN = ("batch", "sequence", "mlp")


class Mlp(nnx.Module):
    """x (b, t, e) -> (b, t, e). Parameters are named with a prefix."""

    gate: Any
    gate_bias: Any
    up: Any
    up_bias: Any
    down: Any
    down_bias: Any

    def __init__(self, on: Placement, prefix: str):
        self.on = on
        for name in ("gate", "gate_bias", "up", "up_bias", "down", "down_bias"):
            setattr(self, name, described(on, f"{prefix}{name}"))

    def __call__(self, x):
        on = self.on
        hidden = on.constrain(plus(on, product(on, "bte,ef->btf", x, self.up), self.up_bias), HIDDEN)  # (b, t, f)
        if self.gate is None:
            hidden = activated(hidden)
        else:
            gate = plus(on, product(on, "bte,ef->btf", x, self.gate), self.gate_bias)
            hidden = activated(hidden, on.constrain(gate, HIDDEN))
        return plus(on, product(on, "btf,fe->bte", hidden, self.down), self.down_bias)


def activated(hidden: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """SwiGLU where there is a gate, else GELU in GPT-2's tanh form."""
    return jax.nn.gelu(hidden, approximate=True) if gate is None else hidden * jax.nn.silu(gate)
