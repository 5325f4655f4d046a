"""Attention of some queries to some keys at a time, and its gradients: what an online softmax adds up. Must not know processes.

Scores of at most ROWS queries exist at once, so that memory is linear in the number of queries and of keys. All results are float32.
Queries `asking` are in the forward pass (query, documents), in the backward one (query, gradient, normaliser, shared, documents).
Shapes: query b k g t d, keys b k t c (key and value side by side), statistics b k g t 1, documents b t 1 or None: the sequence is
always the last dim but one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Queries of a block of scores, so few that these stay in a cache, whatever the keys: 512 take 1.4 x the time of 128 on a Xeon.
ROWS = 128

#: Attention to some keys, and its logsumexp.
Found = tuple[Tensor, Tensor]
#: Of a part of the sequence: its keys and values side by side, and the documents of its tokens, if rows are packed.
Part = tuple[Tensor, Tensor | None]


def attended(asking: tuple[Any, ...], visiting: Part, *, causal: bool = False) -> Found:
    """Attention to these keys alone; causal: of a part of the sequence to itself, whose order is the text's."""
    (query, _), (keys, _) = asking, visiting
    output = query.new_empty(*query.shape[:-1], keys.shape[-1] - query.shape[-1], dtype=torch.float32)
    normaliser = query.new_empty(*query.shape[:-1], 1, dtype=torch.float32)
    for rows, seen in _blocks(asking, causal):
        output[..., rows, :], normaliser[..., rows, :] = _found(cut(asking, rows), cut(visiting, seen), causal)
    return output, normaliser


def merged(one: Found, other: Found) -> Found:
    """Attention to two sets of keys as one softmax, from that to each (Milakov and Gimelshein 2018, arXiv 1805.02867).

    A query has seen its own key before anything is merged: the sum's logarithm is finite.
    """
    (output, normaliser), (more, its) = one, other
    both = torch.logaddexp(normaliser, its)
    return output * (normaliser - both).exp() + more * (its - both).exp(), both


def gradients(asking: tuple[Any, ...], visiting: Part, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Of queries, and of keys and values, as far as these keys go."""
    d_query, d_keys = (torch.zeros_like(x, dtype=torch.float32) for x in (asking[0], visiting[0]))
    for rows, seen in _blocks(asking, causal):
        d_query[..., rows, :], more = _gradients(cut(asking, rows), cut(visiting, seen), causal)
        d_keys[..., seen, :] += more
    return d_query, d_keys


def cut(tensors: Any, part: slice) -> Any:
    """A part of the sequence of each tensor."""
    return tuple(None if x is None else x[..., part, :] for x in tensors)


def parted(keys: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value that lie side by side; a key is as long as a query."""
    key, value = keys.split([query.shape[-1], keys.shape[-1] - query.shape[-1]], dim=-1)
    return key, value


def _blocks(asking: tuple[Any, ...], causal: bool) -> list[tuple[slice, slice]]:
    """Blocks of queries, and the keys that each may see: of a part itself none after its last query.

    Those with most keys first: what one block frees has room for the next, where growing ones would each take new memory.
    """
    length = asking[0].shape[-2]
    rows = [slice(start, min(start + ROWS, length)) for start in reversed(range(0, length, ROWS))]
    return [(block, slice(0, block.stop) if causal else slice(None)) for block in rows]


def _scores(query: Tensor, key: Tensor, of_query: Tensor | None, of_key: Tensor | None, causal: bool) -> Tensor:
    """Scaled scores, -inf for later keys if causal (the last key is the last query's own), and for those of other documents."""
    scores = torch.einsum("bkgtd,bksd->bkgts", query, key).float() * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill_(later.triu(1 + scores.shape[-1] - scores.shape[-2]), -torch.inf)
    if of_query is None or of_key is None:
        return scores
    return scores.masked_fill_((of_query != of_key.transpose(1, 2))[:, None, None], -torch.inf)


def _weights(scores: Tensor, normaliser: Tensor) -> Tensor:
    """exp(scores - normaliser), 0 where a query sees none of the keys: both are -inf there."""
    return (scores - normaliser.masked_fill(normaliser == -torch.inf, 0.0)).exp_()


def _found(asking: tuple[Any, ...], visiting: Part, causal: bool) -> Found:
    (query, of_query), (keys, of_key) = asking, visiting
    key, value = parted(keys, query)
    scores = _scores(query, key, of_query, of_key, causal)
    normaliser = scores.logsumexp(dim=-1, keepdim=True)
    weights = _weights(scores, normaliser).to(query.dtype)
    return torch.einsum("bkgts,bksd->bkgtd", weights, value).float(), normaliser


def _gradients(asking: tuple[Any, ...], visiting: Part, causal: bool) -> tuple[Tensor, Tensor]:
    """Dao 2022 (arXiv 2205.14135), appendix B.2, of one block: of its queries, and of keys and values."""
    (query, gradient, normaliser, shared, of_query), (keys, of_key) = asking, visiting
    key, value = parted(keys, query)
    weights = _weights(_scores(query, key, of_query, of_key, causal), normaliser)
    d_weights = torch.einsum("bkgtd,bksd->bkgts", gradient, value).float()
    d_scores = (weights * (d_weights - shared) * query.shape[-1] ** -0.5).to(query.dtype)
    d_query = torch.einsum("bkgts,bksd->bkgtd", d_scores, key).float()
    d_key = torch.einsum("bkgts,bkgtd->bksd", d_scores, query).float()
    d_value = torch.einsum("bkgts,bkgtd->bksd", weights.to(query.dtype), gradient).float()
    return d_query, torch.cat([d_key, d_value], dim=-1)
