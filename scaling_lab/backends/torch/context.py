"""Causal attention whose sequence is split over processes: context parallelism, in three strategies with one meaning.

`gather` brings all keys and values to every process, `ring` passes them round, and both visit one process's part at a time with an
online softmax, so that scores of a part at most exist at once; `all_to_all` exchanges parts of the sequence for parts of the heads. Owns
this communication in both passes; must not know the model's equations. Where each token is stored: `plan.sequence`.
Shapes as in `attention`, of a process's own part; inside, query b k g t d, key and value b k t d, statistics b k g t (float32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaling_lab.backends.torch import attention
from scaling_lab.backends.torch.collectives import all_gather, all_to_all, reduce_scatter
from scaling_lab.backends.torch.sharding import Placement

Found = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


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


def attend(query: Tensor, key: Tensor, value: Tensor, *, form: str, on: Placement) -> Tensor:
    """Causal attention over the whole sequence, of this process's own part of the queries."""
    split = on.plan.sequence
    how = How(on.group(split.axes), split.zigzag, split.strategy == "gather")
    if split.strategy == "all_to_all":
        return _over_heads(query, key, value, form=form, group=how.group)
    q = query.unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)
    mixed = _Around.apply(q, key.transpose(1, 2), value.transpose(1, 2), how)
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _over_heads(query: Tensor, key: Tensor, value: Tensor, *, form: str, group: dist.ProcessGroup) -> Tensor:
    """Every process gets the whole sequence of some heads (Jacobs et al. 2023, arXiv 2309.14509: Ulysses), and gives it back."""
    query, key, value = (_Exchange.apply(x, 2, 1, group) for x in (query, key, value))
    return _Exchange.apply(attention.attend(query, key, value, form=form), 1, 2, group)


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
    """query (b, k, g, t, d), key and value (b, k, t, d) -> as query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Keys and values of one part after the other."""
        found = _block(query, key, value, causal=True)
        for source, visiting in _visitors(how, (key, value)):
            found = _extended(how, query, found, source, visiting)
        output = found[0].to(query.dtype)
        ctx.how = how
        ctx.save_for_backward(query, key, value, output, found[1])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The same visits; a part's gradient goes home with it."""
        how: How = ctx.how
        query, key, value, output, normaliser = ctx.saved_tensors
        shared = (gradient.float() * output.float()).sum(dim=-1)
        asking = (query, gradient, normaliser, shared)
        d_query, *own = _block_gradients(asking, (key, value), causal=True)
        home = _Home(how, own)
        for source, visiting in _visitors(how, (key, value)):
            more, *theirs = _extended_gradients(how, asking, source, visiting)
            d_query += more
            home.add(source, theirs)
        d_key, d_value = home.collected()
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None


def _visitors(how: How, own: Pair) -> Any:
    """(source, keys and values) of every other part, nearest before first; a ring passes each on before it is attended to."""
    if how.gather:
        every = all_gather(torch.stack(own), how.group)
        for hop in range(1, how.parts):
            source = (how.place - hop) % how.parts
            yield source, tuple(every[source])
        return
    arriving = _Passing(how, torch.stack(own))
    for hop in range(1, how.parts):
        visiting = arriving.wait()
        if hop < how.parts - 1:
            arriving = _Passing(how, visiting)
        yield (how.place - hop) % how.parts, tuple(visiting)


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

    def __init__(self, how: How, own: list[Tensor]):
        self._how, self._own = how, torch.stack(own)
        self._sums = self._own.new_zeros(how.parts, *self._own.shape) if how.gather else None
        self._travelling: _Passing | None = None

    def add(self, source: int, gradients: list[Tensor]) -> None:
        """Of the part that `source` holds, from the visit now: in a ring what earlier hosts found comes just behind the part."""
        gradient = torch.stack(gradients)
        if self._sums is not None:
            self._sums[source] = gradient
            return
        if self._travelling is not None:
            gradient += self._travelling.wait()
        self._travelling = _Passing(self._how, gradient)

    def collected(self) -> Tensor:
        """This process's own keys' and values' gradients, stacked."""
        if self._sums is not None:
            return self._own + reduce_scatter(self._sums, self._how.group)
        return self._own if self._travelling is None else self._own + self._travelling.wait()


def _extended(how: How, query: Tensor, found: Found, source: int, visiting: Pair) -> Found:
    """What was found so far, and what the queries find in a visiting part that `source` holds."""
    key, value = visiting
    if not how.zigzag:
        return _merged(found, _block(query, key, value)) if source < how.place else found
    # Chunks: mine are (i, 2n-1-i), the visitor's (j, 2n-1-j). If j < i all my queries see its early keys, else my late ones all its keys.
    if source < how.place:
        half = key.shape[2] // 2
        return _merged(found, _block(query, key[:, :, :half], value[:, :, :half]))
    half = query.shape[3] // 2
    late = _merged((found[0][:, :, :, half:], found[1][:, :, :, half:]), _block(query[:, :, :, half:], key, value))
    return torch.cat([found[0][:, :, :, :half], late[0]], dim=3), torch.cat([found[1][:, :, :, :half], late[1]], dim=3)


def _scores(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    scores = torch.einsum("bkgtd,bksd->bkgts", query, key).float() * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _block(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> Found:
    """Attention to these keys alone, float32, and its logsumexp. causal: within one part, whose order is the text's."""
    scores = _scores(query, key, causal=causal)
    normaliser = scores.logsumexp(dim=-1)
    weights = (scores - normaliser[..., None]).exp_().to(query.dtype)
    return torch.einsum("bkgts,bksd->bkgtd", weights, value).float(), normaliser


def _merged(one: Found, other: Found) -> Found:
    """Attention to two sets of keys as one softmax, from that to each (Milakov and Gimelshein 2018, arXiv 1805.02867)."""
    (output, normaliser), (more, its) = one, other
    both = torch.logaddexp(normaliser, its)
    share, rest = (normaliser - both).exp()[..., None], (its - both).exp()[..., None]
    return output * share + more * rest, both


def _extended_gradients(how: How, asking: tuple[Tensor, ...], source: int, visiting: Pair) -> tuple[Tensor, ...]:
    """Gradients of the queries and of a visiting part's keys and values: the blocks of `_extended`."""
    key, value = visiting
    d_query, d_key, d_value = (torch.zeros_like(x, dtype=torch.float32) for x in (asking[0], key, value))
    half, t_half = key.shape[2] // 2, asking[0].shape[3] // 2
    queries, keys = slice(None), slice(None)
    if how.zigzag and source < how.place:
        keys = slice(0, half)
    elif how.zigzag:
        queries = slice(t_half, None)
    elif source > how.place:
        return d_query, d_key, d_value
    part = tuple(x[:, :, :, queries] for x in asking)
    d_query[:, :, :, queries], d_key[:, :, keys], d_value[:, :, keys] = _block_gradients(
        part, (key[:, :, keys], value[:, :, keys])
    )
    return d_query, d_key, d_value


def _block_gradients(asking: tuple[Tensor, ...], visiting: Pair, *, causal: bool = False) -> tuple[Tensor, ...]:
    """Dao 2022 (arXiv 2205.14135), appendix B.2, of one block, float32: of queries, keys and values."""
    (query, gradient, normaliser, shared), (key, value) = asking, visiting
    weights = (_scores(query, key, causal=causal) - normaliser[..., None]).exp_()
    d_weights = torch.einsum("bkgtd,bksd->bkgts", gradient, value).float()
    d_scores = (weights * (d_weights - shared[..., None]) * query.shape[-1] ** -0.5).to(query.dtype)
    d_query = torch.einsum("bkgts,bksd->bkgtd", d_scores, key).float()
    d_key = torch.einsum("bkgts,bkgtd->bksd", d_scores, query).float()
    return d_query, d_key, torch.einsum("bkgts,bkgtd->bksd", weights.to(query.dtype), gradient).float()
