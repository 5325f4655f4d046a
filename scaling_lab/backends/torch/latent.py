"""Latent attention (MLA): equations only; `models.latent` says them in words.

Queries, keys and values come from narrow vectors that every device has whole, each device making those of its own heads.
Everything up to these vectors, and the way back to them, is the same on all devices that share the heads; so what
lies before is computed on local tensors, and one collective per pass sums the gradients of all of them.
Shapes: b batch, t sequence, e embed, h heads, r rank of a narrow vector, q size of a query: nope_dim + rope_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scaling_lab.backends.torch import context
from scaling_lab.backends.torch.norm import rms_norm
from scaling_lab.backends.torch.products import described, product, use
from scaling_lab.backends.torch.rotary import rotary
from scaling_lab.backends.torch.sharding import RESIDUAL, Placement, local_of
from scaling_lab.plan.experiment import Experiment


class LatentAttention(nn.Module):
    """x (b, t, e) -> (b, t, e): every head with keys and values of its own, all made from one narrow vector a token."""

    query: Any
    query_down: Any
    query_down_norm: Any
    query_up: Any
    kv_down: Any
    kv_down_norm: Any
    kv_up: Any
    output: Any

    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        super().__init__()
        assert experiment.model.latent is not None
        self.on, self.form, self.eps = on, experiment.backend.attention, experiment.model.norm_eps
        self.latent, self.split = experiment.model.latent, on.split_axes(f"{prefix}output")
        for name in LatentAttention.__annotations__:
            setattr(self, name, described(on, f"{prefix}{name}"))

    def forward(self, x, tables, documents):
        on, latent, x = self.on, self.latent, local_of(x)
        narrow, turned = product(on, "bte,er->btr", x, self.kv_down).split([latent.kv_rank, latent.rope_dim], dim=-1)
        narrow = self.norm(narrow, self.kv_down_norm)  # (b, t, r)
        if self.query_down is not None:
            x = self.norm(product(on, "bte,er->btr", x, self.query_down), self.query_down_norm)  # (b, t, r of the queries)
        x, narrow, turned = on.spread(x, narrow, turned, over=self.split)
        query = product(on, "btr,rhq->bthq", x, self.query if self.query_down is None else self.query_up)
        keys_values = product(on, "btr,rhd->bthd", narrow, self.kv_up)
        mixed = self.mix(query, keys_values, turned[:, :, None], tables, documents)  # (b, t, h, value_dim)
        return on.constrain(on.partial(product(on, "bthd,hde->bte", mixed, self.output), self.split), RESIDUAL)

    def norm(self, x: Tensor, scale: nn.Parameter) -> Tensor:
        """RMSNorm over the rank of a narrow vector."""
        return rms_norm(x, local_of(use(self.on, scale)), self.eps)

    def mix(self, query, keys_values, turned, tables, documents):
        """Attention of the heads on one device. turned (b, t, 1, rope_dim): the part of the key that all heads share."""
        latent = self.latent
        plain, shared = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        query = torch.cat([plain, rotary(shared, tables)], dim=-1)  # (b, t, h, q)
        plain, value = keys_values.split([latent.nope_dim, latent.value_dim], dim=-1)
        key = torch.cat([plain, rotary(turned, tables).expand(-1, -1, plain.shape[2], -1)], dim=-1)  # (b, t, h, q)
        return context.attend(query, key, value, documents, form=self.form, on=self.on)
