"""The dense mlp, of a layer or of its shared experts, and what lies between its products. Must not know layers or routing.

Shapes: b batch, t sequence, e embed, f mlp.
"""

from __future__ import annotations

import jax

from scaling_lab.backends.jax.products import Weight, plus, product
from scaling_lab.backends.jax.sharding import Placement

HIDDEN = ("batch", "sequence", "mlp")


class Mlp:
    """x (b, t, e) -> (b, t, e)."""

    on: Placement
    gate: Weight | None
    gate_bias: Weight | None
    up: Weight
    up_bias: Weight | None
    down: Weight
    down_bias: Weight | None

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
