"""The dense mlp, of a layer or of its shared experts, and what lies between its products. Must not know layers or routing.

Shapes: b batch, t sequence, e embed, f mlp.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from scaling_lab.backends.torch.products import described, plus, product
from scaling_lab.backends.torch.sharding import RESIDUAL, Placement

HIDDEN = ("batch", "sequence", "mlp")


class Mlp(nn.Module):
    """x (b, t, e) -> (b, t, e); of a device's own x (no DTensor) its own summand. Parameters are named with a prefix."""

    gate: Any
    gate_bias: Any
    up: Any
    up_bias: Any
    down: Any
    down_bias: Any

    def __init__(self, on: Placement, prefix: str):
        super().__init__()
        self.on = on
        for name in Mlp.__annotations__:
            setattr(self, name, described(on, f"{prefix}{name}"))

    def forward(self, x):
        on = self.on
        hidden = on.constrain(plus(on, product(on, "bte,ef->btf", x, self.up), self.up_bias), HIDDEN)  # (b, t, f)
        if self.gate is None:
            hidden = activated(hidden)
        else:
            gate = plus(on, product(on, "bte,ef->btf", x, self.gate), self.gate_bias)
            hidden = activated(hidden, on.constrain(gate, HIDDEN))
        y = on.constrain(product(on, "btf,fe->bte", hidden, self.down), RESIDUAL)
        return plus(on, y, self.down_bias)


def activated(hidden: Tensor, gate: Tensor | None = None) -> Tensor:
    """SwiGLU where there is a gate, else GELU in GPT-2's tanh form."""
    return F.gelu(hidden, approximate="tanh") if gate is None else hidden * F.silu(gate)
