"""Causal self-attention, in two forms with one meaning: `plain` (softmax written out) and `fused` (torch's own kernel).

Softmax is in float32 whatever the compute dtype. Must not know meshes or layouts.
Shapes: query [batch, sequence, heads, head_dim]; key [batch, sequence, kv_heads, head_dim]; value alike, or with a head_dim of
its own; heads = kv_heads x group, query head h reading key head h // group; documents [batch, sequence]: numbers of the
documents packed in a row, or None. The result is shaped as the query, with the value's head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None, *, form: str) -> Tensor:
    """Causal attention in a form: `plain`, or `fused` (what torch chooses for the device)."""
    return (plain if form == "plain" else fused)(query, key, value, documents)


def seen(sequence: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Which keys a query sees, bool [batch or 1, sequence, sequence]: no later ones, and of its own document."""
    earlier = torch.ones(sequence, sequence, dtype=torch.bool, device=device).tril()[None]
    return earlier if documents is None else earlier & (documents[:, :, None] == documents[:, None, :])


def plain(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
    """softmax(query key' / sqrt(head_dim)) value, over keys of the same document no later than the query."""
    sequence, head_dim = query.shape[1], query.shape[3]
    grouped = query.unflatten(2, (key.shape[2], -1))  # (batch, sequence, kv_heads, group, head_dim)
    scores = torch.einsum("btkgd,bskd->bkgts", grouped, key).float() * head_dim**-0.5
    unseen = ~seen(sequence, documents, query.device)[:, None, None]
    weights = (
        scores.masked_fill(unseen, -torch.inf).softmax(dim=-1).to(query.dtype)
    )  # (batch, kv_heads, group, sequence, sequence)
    return torch.einsum("bkgts,bskd->btkgd", weights, value).flatten(2, 3)


def fused(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
    """The same through `scaled_dot_product_attention`, which never keeps the scores."""
    grouped, size = query.shape[2] != key.shape[2], value.shape[3]
    if size < query.shape[3]:  # torch's fastest kernels want them as wide as the queries
        value = F.pad(value, (0, query.shape[3] - size))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (batch, heads, sequence, head_dim)
    if documents is None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    else:
        mask = seen(query.shape[2], documents, query.device)[:, None]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)[..., :size]
