"""Norms, their statistics in float32: of the residual stream, of each head's queries and keys, of narrow vectors."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from scaling_lab.backends.torch.products import described, use
from scaling_lab.backends.torch.sharding import Placement, on_shards
from scaling_lab.plan.experiment import Experiment


class Norm(nn.Module):
    """x (b, t, e) -> (b, t, e): RMSNorm, or LayerNorm where the model says so."""

    scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, experiment: Experiment, on: Placement, name: str):
        super().__init__()
        self.on, self.eps = on, experiment.model.norm_eps
        for part in ("scale", "bias"):
            setattr(self, part, described(on, f"{name}.{part}"))

    def forward(self, x):
        scale = use(self.on, self.scale)
        if self.bias is None:
            return on_shards(lambda x, scale: rms_norm(x, scale, self.eps), x, scale)
        return on_shards(lambda x, scale, bias: layer_norm(x, scale, bias, self.eps), x, scale, use(self.on, self.bias))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, where that is whole."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * scale


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dim, where that is whole."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * scale + bias
