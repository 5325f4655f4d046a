"""Causal attention whose sequence is split over processes: context parallelism, in three strategies with one meaning.

`gather` brings all keys and values to every process, `ring` passes them round, and both visit one process's part at a time with an
online softmax, see `blocks`; `all_to_all` exchanges parts of the sequence for parts of the heads. Owns this communication in both
passes; must not know the model's equations. Where each token is stored: `plan.sequence`.
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

from scaling_lab.backends.torch import attention, blocks
from scaling_lab.backends.torch.blocks import Found, Part
from scaling_lab.backends.torch.collectives import all_gather, all_to_all, reduce_scatter
from scaling_lab.backends.torch.sharding import Placement


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
        found = blocks.attended(asking, sent, causal=True)
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
        d_query, own = blocks.gradients(asking, sent, causal=True)
        home = _Home(how, own)
        for source, visiting in _visitors(how, sent):
            more, theirs = _extended_gradients(how, asking, source, visiting)
            d_query += more
            home.add(source, theirs)
        d_key, d_value = blocks.parted(home.collected().to(keys.dtype), query)
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
    block = blocks.attended(blocks.cut(asking, queries), blocks.cut(visiting, keys))
    merged = blocks.merged(blocks.cut(found, queries), block)
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


def _extended_gradients(how: How, asking: tuple[Any, ...], source: int, visiting: Part) -> tuple[Tensor, Tensor]:
    """Gradients of the queries and of a visiting part's keys and values: the block of `_extended`, zero elsewhere."""
    d_query, d_keys = (torch.zeros_like(x, dtype=torch.float32) for x in (asking[0], visiting[0]))
    queries, keys = _met(how, source, asking[0].shape[-2])
    if keys is not None:
        found = blocks.gradients(blocks.cut(asking, queries), blocks.cut(visiting, keys))
        d_query[..., queries, :], d_keys[..., keys, :] = found
    return d_query, d_keys
