"""Causal attention whose sequence is split over devices: context parallelism, in three strategies with one meaning.

`gather` brings all keys and values to every device, `ring` passes them round, and both visit one device's part at a time with an
online softmax, see `blocks`; `all_to_all` exchanges parts of the sequence for parts of the heads. Owns this communication in both
passes; must not know the model's equations. Where each token is stored: `plan.sequence`.
Shapes as in `attention`; inside, of a device's own part: query b k g t d, key and value b k t d, statistics b k g t 1 (float32),
documents b t 1: the sequence is always the last dim but one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from scaling_lab.backends.jax import attention, blocks
from scaling_lab.backends.jax.remat import ATTENTION_NORMALISER, ATTENTION_OUTPUT
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.plan.layout import Layout

QUERY = ("batch", "sequence", "heads", "head_dim")
KEY_VALUE = ("batch", "sequence", "kv_heads", "head_dim")


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None = None, *, form: str, on: Placement
) -> jax.Array:
    """Causal attention over the whole sequence, in parts or not, of global arrays laid out as the table says."""
    split, rules = on.plan.sequence, on.plan.rules
    if split.parts == 1:
        return attention.attend(query, key, value, documents, form=form, platform=on.plan.platform)
    if split.strategy == "all_to_all":
        return _over_heads(query, key, value, documents, form=form, on=on)
    layout, source = (rules.activation_layout(axes).real(on.plan.mesh) for axes in (QUERY, KEY_VALUE))
    if layout.dims[2] != source.dims[2]:  # heads in parts, key and value heads whole: give each query head its own
        group = query.shape[2] // key.shape[2]
        key, value, source = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2), layout
    how = How(split.axes, split.parts, split.zigzag, split.strategy == "gather")
    specs = tuple(on.named(x).spec for x in (layout, source, source, Layout(layout.dims[:2])))
    local = jax.shard_map(partial(_local, how), mesh=on.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return local(query, key, value, documents)


def _over_heads(query, key, value, documents, *, form: str, on: Placement) -> jax.Array:
    """Every device gets the whole sequence of some heads (Jacobs et al. 2023, arXiv 2309.14509: Ulysses), and gives it back."""
    split = on.plan.sequence

    def exchanged(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        batch, sequence, heads, dim = on.plan.rules.activation_layout(axes).real(on.plan.mesh).dims
        left = tuple(axis for axis in sequence if axis not in split.axes)
        return on.laid_out(on.constrain(x, axes), Layout((batch, left, (*heads, *split.axes), dim)))

    query, key, value = exchanged(query, QUERY), exchanged(key, KEY_VALUE), exchanged(value, KEY_VALUE)
    if documents is not None:  # numbers of all tokens, for each token's scores
        batch, sequence = on.activation(("batch", "sequence")).dims
        documents = on.laid_out(documents, Layout((batch, tuple(axis for axis in sequence if axis not in split.axes))))
    return exchanged(attention.attend(query, key, value, documents, form=form, platform=on.plan.platform), QUERY)


@dataclass(frozen=True)
class How:
    """axes: mesh axes that split the sequence, into `parts`; zigzag, gather: see `plan.sequence`."""

    axes: tuple[str, ...]
    parts: int
    zigzag: bool
    gather: bool

    @property
    def place(self) -> jax.Array:
        """Which part this device holds."""
        return jax.lax.axis_index(self.axes)

    def onward(self, tree: Any) -> Any:
        """Every device's arrays, passed to the device with the next part."""
        to_next = [(part, (part + 1) % self.parts) for part in range(self.parts)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, to_next), tree)

    def gathered(self, tree: Any) -> Any:
        """The arrays of every part, (parts, ...)."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.axes), tree)


def _local(how: How, query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None) -> jax.Array:
    """Of a device's own (batch, sequence, heads, head_dim) and (batch, sequence)."""
    batch, sequence, kv_heads, head_dim = key.shape
    q = query.reshape(batch, sequence, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    numbers = None if documents is None else documents[..., None]
    mixed = _around(how, q, key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3), numbers)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(*query.shape[:3], -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(how: How, query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None) -> jax.Array:
    return _forward(how, query, key, value, documents)[0]


def _forward(how, query, key, value, documents):
    asking, sent = (query, documents), (key, value, documents)
    own = blocks.attended_causally(asking, sent)
    if how.gather:
        every = how.gathered(sent)

        def visit(hop, found):
            source = (how.place - hop) % how.parts
            return _extended(how, asking, found, source, jax.tree.map(lambda x: x[source], every))

        output, normaliser = jax.lax.fori_loop(1, how.parts, visit, own)
    else:
        output, normaliser = _ring(how, asking, own, sent)
    output = checkpoint_name(output.astype(query.dtype), ATTENTION_OUTPUT)
    normaliser = checkpoint_name(normaliser, ATTENTION_NORMALISER)
    return output, (query, key, value, documents, output, normaliser)


def _ring(how, asking, own, visiting):
    """Parts come from the device before; each is sent on before it is attended to, so that both can go on at once."""

    def visit(hop, carried):
        found, visiting = carried
        coming = how.onward(visiting)
        return _extended(how, asking, found, (how.place - hop) % how.parts, visiting), coming

    found, visiting = jax.lax.fori_loop(1, how.parts - 1, visit, (own, how.onward(visiting)))
    return _extended(how, asking, found, (how.place + 1) % how.parts, visiting)


def _extended(how: How, asking, found, source, visiting):
    """What was found so far, and what the queries find in a visiting part that `source` holds."""
    earlier = source < how.place
    if not how.zigzag:
        return jax.lax.cond(earlier, lambda: blocks.merged(found, blocks.attended(asking, visiting)), lambda: found)
    # Chunks: mine are (i, 2n-1-i), the visitor's (j, 2n-1-j). My late queries see its early keys. Beside that, my early queries see
    # its early keys if j < i, else my late queries its late keys: two blocks without a causal mask, whoever visits.
    early, late = _halves(found)
    (asks_early, asks_late), (keys_early, keys_late) = _halves(asking), _halves(visiting)
    late = blocks.merged(late, blocks.attended(asks_late, keys_early))
    block = blocks.attended(_either(earlier, asks_early, asks_late), _either(earlier, keys_early, keys_late))
    changed = blocks.merged(_either(earlier, early, late), block)
    early, late = _either(earlier, changed, early), _either(earlier, late, changed)
    return jax.tree.map(_joined, early, late)


def _halves(tree):
    """The first and the second half of the sequence of each array."""
    half = tree[0].shape[-2] // 2
    return blocks.cut(tree, slice(0, half)), blocks.cut(tree, slice(half, None))


def _joined(early, late):
    return jnp.concatenate([early, late], axis=-2)


def _either(condition, yes, no):
    return jax.tree.map(partial(jnp.where, condition), yes, no)


def _backward(how, saved, gradient):
    query, key, value, documents, output, normaliser = saved
    asking, sent = (query, gradient, normaliser, blocks.shared(gradient, output), documents), (key, value, documents)
    d_query, *own = blocks.causal_gradients(asking, sent)
    if how.gather:
        d_query, came = _gathered_gradients(how, asking, d_query, sent)
    else:
        d_query, came = _ring_gradients(how, asking, d_query, sent)
    d_key, d_value = jax.tree.map(jnp.add, tuple(own), came)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), None


def _gathered_gradients(how, asking, d_query, sent):
    """What every device finds for a part is summed where the part lies."""
    every = how.gathered(sent)

    def visit(hop, carried):
        d_query, sums = carried
        source = (how.place - hop) % how.parts
        more, *theirs = _extended_gradients(how, asking, source, jax.tree.map(lambda x: x[source], every))
        return d_query + more, jax.tree.map(lambda total, x: total.at[source].add(x), sums, tuple(theirs))

    nothing = tuple(jnp.zeros(x.shape, jnp.float32) for x in every[:2])
    d_query, sums = jax.lax.fori_loop(1, how.parts, visit, (d_query, nothing))
    return d_query, jax.tree.map(lambda x: jax.lax.psum_scatter(x, how.axes), sums)


def _ring_gradients(how, asking, d_query, visiting):
    """A part's gradient travels with it, and home from the last device that it visits."""

    def visit(hop, carried):
        d_query, visiting, sums = carried
        coming = how.onward(visiting)
        more, *theirs = _extended_gradients(how, asking, (how.place - hop) % how.parts, visiting)
        return d_query + more, coming, how.onward(jax.tree.map(jnp.add, sums, tuple(theirs)))

    visiting = how.onward(visiting)
    nothing = tuple(jnp.zeros(x.shape, jnp.float32) for x in visiting[:2])
    d_query, visiting, sums = jax.lax.fori_loop(1, how.parts - 1, visit, (d_query, visiting, nothing))
    more, *theirs = _extended_gradients(how, asking, (how.place + 1) % how.parts, visiting)
    return d_query + more, how.onward(jax.tree.map(jnp.add, sums, tuple(theirs)))


def _extended_gradients(how: How, asking, source, visiting):
    """Gradients of the queries and of a visiting part's keys and values: the blocks of `_extended`."""
    earlier = source < how.place
    if not how.zigzag:
        nothing = tuple(jnp.zeros(x.shape, jnp.float32) for x in (asking[0], *visiting[:2]))
        return jax.lax.cond(earlier, lambda: blocks.gradients(asking, visiting), lambda: nothing)
    (asks_early, asks_late), (keys_early, keys_late) = _halves(asking), _halves(visiting)
    q_late, *of_early = blocks.gradients(asks_late, keys_early)
    q_more, *more = blocks.gradients(_either(earlier, asks_early, asks_late), _either(earlier, keys_early, keys_late))
    none = jnp.zeros_like(q_more)
    d_query = _joined(jnp.where(earlier, q_more, none), jnp.where(earlier, q_late, q_late + q_more))
    halves = (
        _joined(jnp.where(earlier, first + x, first), jnp.where(earlier, jnp.zeros_like(x), x))
        for first, x in zip(of_early, more, strict=True)
    )
    return d_query, *halves


_around.defvjp(_forward, _backward)
