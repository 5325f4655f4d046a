"""The layers as pipeline stages, inside one program: microbatches pass through a buffer of one place for each stage.

In every tick each stage computes one of its chunks of layers on what lies in its place of the buffer, all stages at once
(`vmap` over the stages, whose dim lies over the pipeline's mesh axis), and the buffer moves on by one place (a collective
permute). What leaves the last stage enters the first one again until it has been through all chunks: so microbatches come in
groups of as many as there are stages. After Xu et al. 2021 (arXiv 2105.04663, section 3.3) and, for the way round, the circular
schedule of MaxText. Stages without work compute on what lies there, and nobody uses it. The backward pass is what
differentiation makes of this: all ticks once more, from the last to the first.

Outside the layers every stage takes a share of the rows, where they divide. Must not know what a layer computes.
Shapes: b rows, t sequence, e embed; M microbatches, S stages, V chunks of a stage, K layers a chunk has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.pipeline import PipelineSplit

RESIDUAL = ("batch", "residual_sequence", "embed")

#: (weights of a chunk's layers (K, ...), which of them are layers and not padding (K,), x, what goes with its rows) -> x, reports
Chunk = Callable[[Any, Any, jax.Array, Any], tuple[jax.Array, dict[str, jax.Array]]]


class Turn(NamedTuple):
    """What each stage does in a tick, arrays (S,), or of all ticks (ticks, S). working: whether anybody wants it."""

    microbatch: Any
    chunk: Any
    working: Any


def ticks(split: PipelineSplit) -> tuple[Turn, np.ndarray]:
    """What each stage does in each tick, and the tick in which each microbatch leaves the last stage for good, (M,).

    Stage s does in tick t what stage 0 did in tick t - s: of each group of S microbatches every one, once for each chunk.
    """
    stages, chunks, microbatches = split.stages, split.virtual_stages, split.microbatches
    every = np.arange(microbatches * chunks + stages - 1)[:, None] - np.arange(stages)
    order = np.clip(every, 0, microbatches * chunks - 1)
    group, within = np.divmod(order, stages * chunks)
    turns = Turn(group * stages + within % stages, within // stages, order == every)
    first = np.arange(microbatches)
    leaves = first // stages * stages * chunks + (chunks - 1) * stages + first % stages + stages - 1
    return turns, leaves


def through(on: Placement, chunk: Chunk, stack: Any, x: jax.Array, rows: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """x (b, t, e) after every layer, and the layers' reports (ticks, S, b of a microbatch), zero where there was no work.

    stack: a tree of weights (S x V x K, ...), stored as the plan's slots say; rows: a tree of what goes with rows, (b, ...)
    """
    split = on.plan.pipeline
    places = (split.stages, split.virtual_stages, split.room)
    stack = jax.tree.map(lambda weight: weight.reshape(*places, *weight.shape[1:]), stack)
    real = np.array([layer is not None for layer in split.slots]).reshape(places)
    entering, rows = at_first_stage(on, x), jax.tree.map(partial(microbatches, on), rows)

    def stage(stack: Any, real: Any, turn: Turn, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        own, mine = jax.tree.map(lambda weight: weight[turn.chunk], (stack, real))
        x, reports = chunk(own, mine, x, jax.tree.map(lambda one: one[turn.microbatch], rows))
        return x, {name: jnp.where(turn.working, report, 0) for name, report in reports.items()}

    def tick(places: jax.Array, now: tuple[Turn, Any, Any]) -> tuple[jax.Array, Any]:
        turn, microbatch, enters = now
        places = jnp.where(enters & (stage_number(places) == 0), entering[microbatch], moved_on(places))
        left, reports = jax.vmap(stage, spmd_axis_name=split.axes)(stack, real, turn, in_places(on, places))
        left = in_places(on, left)
        return left, (left, reports)

    turns, leaves = ticks(split)
    nothing = jnp.zeros_like(entering[0])
    _, (left, reports) = jax.lax.scan(tick, nothing, (turns, turns.microbatch[:, 0], turns.chunk[:, 0] == 0))
    return rows_at(left[leaves], split.stages - 1), reports


def shared_out(on: Placement, rows: jax.Array) -> jax.Array:
    """Rows (b, ...) in the order in which a placement outside the stages has them: of a device's rows each stage takes a part."""
    return _exchanged(on, rows, (on.plan.batch.parts, on.plan.pipeline.stages))


def gathered(on: Placement, rows: jax.Array) -> jax.Array:
    """Rows (b, ...) of such a placement in their own order again."""
    return _exchanged(on, rows, (on.plan.pipeline.stages, on.plan.batch.parts))


def _exchanged(on: Placement, rows: jax.Array, parts: tuple[int, int]) -> jax.Array:
    if not on.rows_over:
        return rows
    return rows.reshape(*parts, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


@jax.custom_vjp
def moved_on(places: jax.Array) -> jax.Array:
    """What each stage has, at the next one's place. The backward pass moves as much back, where differentiation would do it twice."""
    return jnp.roll(places, 1, axis=0)


moved_on.defvjp(lambda places: (moved_on(places), None), lambda _, gradient: (jnp.roll(gradient, -1, axis=0),))


def at_first_stage(on: Placement, x: jax.Array) -> jax.Array:
    """The microbatches at the first of as many places as there are stages (M, S, b, t, e).

    So each stage has its own, and their gradient comes together once, not in every tick.
    """
    parts = microbatches(on, x, RESIDUAL)[:, None]
    every = jnp.where(stage_number(jnp.empty((on.plan.pipeline.stages, *parts.shape[2:]))) == 0, parts, 0)
    return on.laid_out(every, Layout(((), on.plan.pipeline.axes, *on.activation(RESIDUAL).dims)))


def microbatches(on: Placement, rows: jax.Array, axes: tuple[str, ...] = ("batch",)) -> jax.Array:
    """Rows (b, ...) -> (M, rows of a microbatch, ...): every M-th one, so that each device's rows stay where they are."""
    num = on.plan.pipeline.microbatches
    parts = jnp.moveaxis(rows.reshape(-1, num, *rows.shape[1:]), 1, 0)
    dims = on.activation(axes).dims
    return on.laid_out(parts, Layout(((), *dims, *((),) * (parts.ndim - 1 - len(dims)))))


def rows_at(parts: jax.Array, stage: int) -> jax.Array:
    """Microbatches at the places of all stages (M, S, b, ...) -> the rows at one stage (M x b, ...), as `microbatches` took them."""
    at_stage = jnp.where(stage_number(parts[0]) == stage, parts, 0).sum(axis=1)
    return jnp.moveaxis(at_stage, 0, 1).reshape(-1, *parts.shape[3:])


def in_places(on: Placement, x: jax.Array) -> jax.Array:
    """A buffer (S, b, t, e), each stage's place on its devices."""
    return on.laid_out(x, Layout((on.plan.pipeline.axes, *on.activation(RESIDUAL).dims)))


def stage_number(places: jax.Array) -> jax.Array:
    """The number of the stage at each place of an array (S, ...), in its dims."""
    return jax.lax.broadcasted_iota(jnp.int32, (places.shape[0], *(1,) * (places.ndim - 1)), 0)
