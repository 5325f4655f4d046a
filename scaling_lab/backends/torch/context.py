"""Causal attention whose sequence is split over processes: context parallelism, in three strategies with one meaning.

`gather` brings all keys and values to every process, `ring` passes them round, and both visit one process's part at a time with an
online softmax, so that scores of a part at most exist at once; `all_to_all` exchanges parts of the sequence for parts of the heads. Owns
this communication in both passes; must not know the model's equations. Where each token is stored: `plan.sequence`.
Shapes as in `attention`, of a process's own part; inside, query b k g t d, keys b k t c (key and value side by side), statistics
b k g t 1 (float32), documents b t 1: the sequence is always the last dim but one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaling_lab.backends.torch import attention
from scaling_lab.backends.torch.collectives import all_gather, all_to_all, reduce_scatter
from scaling_lab.backends.torch.sharding import Placement

Found = tuple[Tensor, Tensor]
#: Of a part: its keys and values side by side, and the documents of its tokens, if rows are packed.
Part = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class How:
    """group: the processes with the other parts of the same rows, in the order of the parts; zigzag, gather: see `plan.sequence`."""

    group: dist.ProcessGroup
    zigzag: bool
    gather: bool

    @property
    def parts(self) -> int:
        """How many parts the sequence has."""
        return self.group.size()

    @property
    def place(self) -> int:
        """Which part this process holds."""
        return self.group.rank()


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None, *, form: str, on: Placement) -> Tensor:
    """Causal attention over the whole sequence, in parts or not, of this process's own part of the queries."""
    split = on.plan.sequence
    if split.parts == 1:
        return attention.attend(query, key, value, documents, form=form)
    how = How(on.group(split.axes), split.zigzag, split.strategy == "gather")
    if split.strategy == "all_to_all":
        return _over_heads(query, key, value, documents, form=form, group=how.group)
    q = query.unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)
    numbers = None if documents is None else documents[..., None]
    mixed = _Around.apply(q, key.transpose(1, 2), value.transpose(1, 2), numbers, how)
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


def whole_rows(numbers: Tensor, on: Placement) -> Tensor:
    """Of each of this process's tokens (b, t, ...) -> of all tokens of its rows, in the text's order. For what has no gradient."""
    split = on.plan.sequence
    if split.parts == 1:
        return numbers
    stored = torch.cat(all_gather(numbers, on.group(split.axes)).unbind(), dim=1)
    return stored[:, torch.tensor(split.positions, device=numbers.device).argsort()]


def _over_heads(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, *, form: str, group: dist.ProcessGroup
) -> Tensor:
    """Every process gets the whole sequence of some heads (Jacobs et al. 2023, arXiv 2309.14509: Ulysses), and gives it back."""
    query, key, value = (_Exchange.apply(x, 2, 1, group) for x in (query, key, value))
    if documents is not None:
        documents = torch.cat(all_gather(documents, group).unbind(), dim=1)
    return _Exchange.apply(attention.attend(query, key, value, documents, form=form), 1, 2, group)


class _Exchange(torch.autograd.Function):
    """Cuts one dim over the group and joins another: each process sends part p of `cut` to process p."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> Tensor:
        """x: (batch, sequence, heads, head_dim); its dim `cut` shrinks by the group's size, `joined` grows by it."""
        ctx.ways = cut, joined, group
        return _exchanged(x, cut, joined, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The way back."""
        cut, joined, group = ctx.ways
        return _exchanged(gradient, joined, cut, group), None, None, None


def _exchanged(x: Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    came = all_to_all(torch.stack(x.chunk(group.size(), dim=cut)), group)
    return torch.cat(came.unbind(), dim=joined)


class _Around(torch.autograd.Function):
    """query (b, k, g, t, d), key (b, k, t, d), value (b, k, t, v), documents (b, t, 1) or None -> (b, k, g, t, v)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, how: How) -> Tensor:
        """Keys and values of one part after the other."""
        asking, sent = (query, documents), (torch.cat([key, value], dim=-1), documents)
        found = _block(asking, sent, causal=True)
        for source, visiting in _visitors(how, sent):
            found = _extended(how, asking, found, source, visiting)
        output = found[0].to(query.dtype)
        ctx.how = how
        ctx.save_for_backward(query, sent[0], documents, output, found[1])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The same visits; a part's gradient goes home with it."""
        how: How = ctx.how
        query, keys, documents, output, normaliser = ctx.saved_tensors
        shared = (gradient.float() * output.float()).sum(dim=-1, keepdim=True)
        asking, sent = (query, gradient, normaliser, shared, documents), (keys, documents)
        d_query, own = _block_gradients(asking, sent, causal=True)
        home = _Home(how, own)
        for source, visiting in _visitors(how, sent):
            more, theirs = _extended_gradients(how, asking, source, visiting)
            d_query += more
            home.add(source, theirs)
        d_key, d_value = _parted(home.collected().to(keys.dtype), query)
        return d_query.to(query.dtype), d_key, d_value, None, None


def _visitors(how: How, own: Part) -> Iterator[tuple[int, Part]]:
    """(source, part) of every other part, nearest before first; a ring passes each on before it is attended to."""
    keys, documents = own
    numbers = None if documents is None else all_gather(documents, how.group)  # they are small: not worth a ring
    every = all_gather(keys, how.group) if how.gather else None
    arriving = None if how.gather else _Passing(how, keys)
    for hop in range(1, how.parts):
        source = (how.place - hop) % how.parts
        if arriving is not None:
            visiting = arriving.wait()
            arriving = _Passing(how, visiting) if hop < how.parts - 1 else None
        else:
            assert every is not None
            visiting = every[source]
        yield source, (visiting, None if numbers is None else numbers[source])


class _Passing:
    """A tensor on its way to the process with the next part, while the one before sends its own."""

    def __init__(self, how: How, sent: Tensor):
        self._sent, self._came = sent.contiguous(), torch.empty_like(sent, memory_format=torch.contiguous_format)
        after, before = ((how.place + step) % how.parts for step in (1, -1))
        operations = [
            dist.P2POp(dist.isend, self._sent, group=how.group, group_peer=after),
            dist.P2POp(dist.irecv, self._came, group=how.group, group_peer=before),
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        """What came from the process before."""
        for work in self._works:
            work.wait()
        return self._came


class _Home:
    """Brings gradients of keys and values to the process that holds these, from every process that they visited."""

    def __init__(self, how: How, own: Tensor):
        self._how, self._own = how, own
        self._sums = own.new_zeros(how.parts, *own.shape) if how.gather else None
        self._travelling: _Passing | None = None

    def add(self, source: int, gradient: Tensor) -> None:
        """Of the part that `source` holds, from the visit now: in a ring what others found before comes just behind the part."""
        if self._sums is not None:
            self._sums[source] = gradient
            return
        if self._travelling is not None:
            gradient = gradient + self._travelling.wait()
        self._travelling = _Passing(self._how, gradient)

    def collected(self) -> Tensor:
        """The gradient of this process's own keys and values."""
        if self._sums is not None:
            return self._own + reduce_scatter(self._sums, self._how.group)
        return self._own if self._travelling is None else self._own + self._travelling.wait()


def _extended(how: How, asking: tuple[Any, ...], found: Found, source: int, visiting: Part) -> Found:
    """What was found so far, and what the queries find in a visiting part that `source` holds."""
    queries, keys = _met(how, source, asking[0].shape[-2])
    if keys is None:
        return found
    block = _block(_cut(asking, queries), _cut(visiting, keys))
    merged = _merged(_cut(found, queries), block)
    unmet = slice(0, queries.start or 0)
    output, normaliser = (torch.cat([x[..., unmet, :], part], dim=-2) for x, part in zip(found, merged, strict=True))
    return output, normaliser


def _met(how: How, source: int, length: int) -> tuple[slice, slice | None]:
    """Which of this process's queries meet which keys of the part that `source` holds, all of them earlier; keys None: none do.

    Chunks of a zigzag split: mine are (i, 2n-1-i), the visitor's (j, 2n-1-j). If j < i all my queries see its early keys, else
    my late ones all its keys: half of the scores, whoever visits.
    """
    every = slice(None)
    if source < how.place:
        return every, slice(0, length // 2) if how.zigzag else every
    return (slice(length // 2, None), every) if how.zigzag else (every, None)


def _cut(tensors: Any, part: slice) -> Any:
    return tuple(None if x is None else x[..., part, :] for x in tensors)


def _scores(query: Tensor, key: Tensor, of_query: Tensor | None, of_key: Tensor | None, *, causal: bool) -> Tensor:
    """Scaled scores, float32; -inf for later keys if causal (within one part, whose order is the text's), and for other documents."""
    scores = torch.einsum("bkgtd,bksd->bkgts", query, key).float() * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if of_query is None or of_key is None:
        return scores
    return scores.masked_fill((of_query != of_key.transpose(1, 2))[:, None, None], -torch.inf)


def _weights(scores: Tensor, normaliser: Tensor) -> Tensor:
    """exp(scores - normaliser), 0 where a query sees none of the keys: both are -inf there."""
    return (scores - normaliser.masked_fill(normaliser == -torch.inf, 0.0)).exp_()


def _block(asking: tuple[Any, ...], visiting: Part, *, causal: bool = False) -> Found:
    """Attention to these keys alone, float32, and its logsumexp."""
    (query, of_query), (keys, of_key) = asking, visiting
    key, value = _parted(keys, query)
    scores = _scores(query, key, of_query, of_key, causal=causal)
    normaliser = scores.logsumexp(dim=-1, keepdim=True)
    weights = _weights(scores, normaliser).to(query.dtype)
    return torch.einsum("bkgts,bksd->bkgtd", weights, value).float(), normaliser


def _merged(one: Found, other: Found) -> Found:
    """Attention to two sets of keys as one softmax, from that to each (Milakov and Gimelshein 2018, arXiv 1805.02867).

    A query has seen its own key before anything is merged: the sum's logarithm is finite.
    """
    (output, normaliser), (more, its) = one, other
    both = torch.logaddexp(normaliser, its)
    return output * (normaliser - both).exp() + more * (its - both).exp(), both


def _extended_gradients(how: How, asking: tuple[Any, ...], source: int, visiting: Part) -> tuple[Tensor, Tensor]:
    """Gradients of the queries and of a visiting part's keys and values: the block of `_extended`, zero elsewhere."""
    d_query, d_keys = (torch.zeros_like(x, dtype=torch.float32) for x in (asking[0], visiting[0]))
    queries, keys = _met(how, source, asking[0].shape[-2])
    if keys is not None:
        found = _block_gradients(_cut(asking, queries), _cut(visiting, keys))
        d_query[..., queries, :], d_keys[..., keys, :] = found
    return d_query, d_keys


def _block_gradients(asking: tuple[Any, ...], visiting: Part, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Dao 2022 (arXiv 2205.14135), appendix B.2, of one block, float32: of queries, and of keys and values."""
    (query, gradient, normaliser, shared, of_query), (keys, of_key) = asking, visiting
    key, value = _parted(keys, query)
    weights = _weights(_scores(query, key, of_query, of_key, causal=causal), normaliser)
    d_weights = torch.einsum("bkgtd,bksd->bkgts", gradient, value).float()
    d_scores = (weights * (d_weights - shared) * query.shape[-1] ** -0.5).to(query.dtype)
    d_query = torch.einsum("bkgts,bksd->bkgtd", d_scores, key).float()
    d_key = torch.einsum("bkgts,bkgtd->bksd", d_scores, query).float()
    d_value = torch.einsum("bkgts,bkgtd->bksd", weights.to(query.dtype), gradient).float()
    return d_query, torch.cat([d_key, d_value], dim=-1)


def _parted(keys: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value that lie side by side; a key is as long as a query."""
    key, value = keys.split([query.shape[-1], keys.shape[-1] - query.shape[-1]], dim=-1)
    return key, value
