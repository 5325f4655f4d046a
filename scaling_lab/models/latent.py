"""Latent attention (MLA), as in DeepSeek-V3: what it computes and its parameters. No framework, no mesh.

For each token x, with RMSNorm over the rank of each narrow vector, and no biases:
  queries         = norm(x . query_down) . query_up, or x . query without a query rank: per head nope_dim, then rope_dim
  narrow, turned  = x . kv_down: kv_rank, then rope_dim, the latter one key part that all heads share
  keys and values = norm(narrow) . kv_up: per head nope_dim of the key, then value_dim of the value
Rotary positions turn the last rope_dim of queries and of the shared key part; scores are divided by
sqrt(nope_dim + rope_dim). Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.1.
"""

from __future__ import annotations

from scaling_lab.models.model import Latent, Model
from scaling_lab.models.parameters import Dim, Parameter, matrix, norm_scale


def parameters(model: Model, latent: Latent) -> tuple[Parameter, ...]:
    """Those of one layer. The sizes of heads' parts and the ranks that a product makes carry no axis: nothing splits them."""
    embed, heads = Dim("embed", model.embed), Dim("heads", model.heads)
    keys_values = Dim(None, latent.nope_dim + latent.value_dim)
    return (
        *_query(model, latent),
        matrix("attention.kv_down", model.init_std, embed, Dim(None, latent.kv_rank + latent.rope_dim)),
        norm_scale("attention.kv_down_norm", Dim(None, latent.kv_rank)),
        matrix("attention.kv_up", model.init_std, _rank(latent.kv_rank), heads, keys_values),
        matrix("attention.output", model.residual_std, heads, Dim(None, latent.value_dim), embed),
    )


def _query(model: Model, latent: Latent) -> tuple[Parameter, ...]:
    embed, heads = Dim("embed", model.embed), Dim("heads", model.heads)
    query = Dim(None, latent.nope_dim + latent.rope_dim)
    if latent.query_rank is None:
        return (matrix("attention.query", model.init_std, embed, heads, query),)
    return (
        matrix("attention.query_down", model.init_std, embed, Dim(None, latent.query_rank)),
        norm_scale("attention.query_down_norm", Dim(None, latent.query_rank)),
        matrix("attention.query_up", model.init_std, _rank(latent.query_rank), heads, query),
    )


def _rank(size: int) -> Dim:
    """The rank that a product sums over stands where embed stands elsewhere: stored in parts over fsdp, computed whole.

    Without an axis, these largest of the attention's inputs (54 M elements a layer of DeepSeek-V3) would lie whole on
    every device that fsdp spreads the rest over.
    """
    return Dim("embed", size)
