"""Causal self-attention, in two forms with one meaning: `plain` (softmax written out) and `fused` (torch's own kernel).

Softmax is in float32 whatever the compute dtype. Must not know meshes or layouts.
Shapes: query [batch, sequence, heads, head_dim]; key, value [batch, sequence, kv_heads, head_dim]; heads = kv_heads x group, query
head h reading key head h // group; the result is shaped as the query.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, *, form: str) -> Tensor:
    """Causal attention in a form: `plain`, or `fused` (what torch chooses for the device)."""
    return plain(query, key, value) if form == "plain" else fused(query, key, value)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query key' / sqrt(head_dim)) value, over keys no later than the query."""
    sequence, head_dim = query.shape[1], query.shape[3]
    grouped = query.unflatten(2, (key.shape[2], -1))  # (batch, sequence, kv_heads, group, head_dim)
    scores = torch.einsum("btkgd,bskd->bkgts", grouped, key).float() * head_dim**-0.5
    later = torch.ones(sequence, sequence, dtype=torch.bool, device=query.device).triu(1)
    weights = (
        scores.masked_fill(later, -torch.inf).softmax(dim=-1).to(query.dtype)
    )  # (batch, kv_heads, group, sequence, sequence)
    return torch.einsum("bkgts,bskd->btkgd", weights, value).flatten(2, 3)


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same through `scaled_dot_product_attention`, which never keeps the scores."""
    grouped = query.shape[2] != key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (batch, heads, sequence, head_dim)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return mixed.transpose(1, 2)
