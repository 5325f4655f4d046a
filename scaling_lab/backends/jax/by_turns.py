"""Pipeline stages that work forward and backward by turns, inside one program: the loss and its gradients in one pass over ticks.

Differentiating `pipeline.through` gives all forward passes and then all backward ones, so that activations of all microbatches
are held. Here the backward pass is written out: in every tick each stage computes a chunk forward on one microbatch and backward on
another, whose input it has kept; what lies between is computed again, so a stage holds inputs of 2 x stages - 1 microbatches at
most and activations of one. What leaves the last stage goes into its loss and straight back. Both ways through the stages cost a
tick each, so that the bubble is of 2 x (stages - 1) ticks. Microbatches, places and rows as in `pipeline`; must not know what a
layer or the loss computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaling_lab.backends.jax import pipeline
from scaling_lab.backends.jax.pipeline import Chunk, Turn, stage_number
from scaling_lab.backends.jax.sharding import Placement

#: (weights of what follows the layers, x (b, t, e), labels (b, t)) -> the sum of the losses
Finish = Callable[[Any, jax.Array, jax.Array], jax.Array]


class Carried(NamedTuple):
    """What a tick leaves to the next one.

    left, back: what each stage has made, forward and backward (S, b, t, e)
    kept: inputs of the last 2 S - 1 ticks (2 S - 1, S, b, t, e); then sums over microbatches
    """

    left: Any
    back: Any
    kept: Any
    loss: Any
    d_stack: Any
    d_ending: Any


class Tick(NamedTuple):
    """What happens in a tick: number; forward, backward: whose turn it is at each stage; ends: which microbatch ends, and whether."""

    number: Any
    forward: Turn
    backward: Turn
    ends: Turn


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def loss(
    on: Placement, chunk: Chunk, finish: Finish, stack: Any, ending: Any, x: jax.Array, rows: Any, labels: Any
) -> jax.Array:
    """The sum of the losses of all rows. stack, x, rows: as for `pipeline.through`; ending: weights of what follows the layers."""
    return finish(ending, pipeline.through(on, chunk, stack, x, rows)[0], labels)


def _forward(on, chunk, finish, stack, ending, x, rows, labels):
    return _loss_and_gradients(on, chunk, finish, stack, ending, x, rows, labels)


def _backward(on, chunk, finish, gradients, d_loss):
    return (*jax.tree.map(lambda gradient: (gradient * d_loss).astype(gradient.dtype), gradients), None, None)


loss.defvjp(_forward, _backward)


def ticks(stages: int, microbatches: int) -> Tick:
    """The schedule, every array with a dim of ticks in front: microbatch m is at stage s forward in tick m + s, and backward as many
    ticks after the end of the pipeline as s is before it."""
    number, stage = np.arange(microbatches + 2 * (stages - 1)), np.arange(stages)

    def turn(microbatch: np.ndarray) -> Turn:
        within = np.clip(microbatch, 0, microbatches - 1)
        return Turn(within, np.zeros_like(within), within == microbatch)

    forward, backward = turn(number[:, None] - stage), turn(number[:, None] - 2 * (stages - 1) + stage)
    return Tick(number, forward, backward, turn(number - (stages - 1)))


def _loss_and_gradients(on, chunk, finish, stack, ending, x, rows, labels):
    """The loss, and gradients of stack, ending and x."""
    split = on.plan.pipeline
    stages, held, axes = split.stages, 2 * split.stages - 1, split.axes
    stored = stack
    stack = jax.tree.map(lambda weight: weight.reshape(stages, split.room, *weight.shape[1:]), stored)
    real = np.array([layer is not None for layer in split.slots]).reshape(stages, split.room)
    entering = pipeline.at_first_stage(on, x)
    labels, rows = (jax.tree.map(partial(pipeline.microbatches, on), one) for one in (labels, rows))
    last = stage_number(entering[0]) == stages - 1

    def applied(real: Any, turn: Turn, own: Any, x: jax.Array) -> jax.Array:
        return chunk(own, real, x, jax.tree.map(lambda one: one[turn.microbatch], rows))[0]

    def forward(own: Any, real: Any, turn: Turn, x: jax.Array) -> jax.Array:
        return applied(real, turn, own, x)

    def backward(own: Any, real: Any, turn: Turn, x: jax.Array, gradient: jax.Array) -> tuple[Any, jax.Array]:
        _, pull = jax.vjp(partial(applied, real, turn), own, x)
        return pull(jnp.where(turn.working, gradient, 0))

    def end(ends: Turn, left: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        """The loss of the microbatch that leaves the last stage, and its gradients; zeros where none does."""
        x = on.constrain(jnp.where(last, left, 0).sum(axis=0), pipeline.RESIDUAL)
        found = jax.value_and_grad(finish, (0, 1))(ending, x, labels[ends.microbatch])
        one_loss, (d_ending, dx) = jax.tree.map(lambda value: jnp.where(ends.working, value, 0), found)
        return one_loss, d_ending, dx

    def tick(carried: Carried, now: Tick) -> tuple[Carried, jax.Array]:
        first = stage_number(carried.left) == 0
        given = jnp.where(first, entering[now.forward.microbatch[0]], pipeline.moved_on(carried.left))
        kept = carried.kept.at[now.number % held].set(pipeline.in_places(on, given))
        left = jax.vmap(forward, spmd_axis_name=axes)(stack, real, now.forward, kept[now.number % held])
        one_loss, d_ending, d_last = end(now.ends, pipeline.in_places(on, left))
        gradient = pipeline.in_places(on, jnp.where(last, d_last, jnp.roll(carried.back, -1, axis=0)))
        then = (now.number - 2 * (stages - 1 - np.arange(stages))) % held  # when each stage had what it now goes back over
        inputs = jax.vmap(lambda kept, then: kept[then], (1, 0), spmd_axis_name=axes)(kept, then)
        d_stack, back = jax.vmap(backward, spmd_axis_name=axes)(stack, real, now.backward, inputs, gradient)
        sums = jax.tree.map(jnp.add, (carried.loss, carried.d_stack, carried.d_ending), (one_loss, d_stack, d_ending))
        return Carried(left, pipeline.in_places(on, back), kept, *sums), back

    nothing = jnp.zeros_like(entering[0])
    kept = jnp.zeros((held, *nothing.shape), nothing.dtype)
    zeros = jax.tree.map(jnp.zeros_like, (stack, ending))
    start = Carried(nothing, nothing, kept, jnp.zeros((), jnp.float32), *zeros)
    done, back = jax.lax.scan(tick, start, ticks(stages, split.microbatches))
    dx = pipeline.rows_at(back[2 * (stages - 1) :], 0)  # of what entered
    d_stack = jax.tree.map(lambda gradient, weight: gradient.reshape(weight.shape), done.d_stack, stored)
    return done.loss, (d_stack, done.d_ending, dx)
