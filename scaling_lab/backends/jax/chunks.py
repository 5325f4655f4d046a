"""Cross-entropy of logits that are made of a chunk of tokens at a time and never kept. Owns both passes of head and loss together.

The head's gradient is summed over the chunks before it is summed over devices: each set of devices with tokens of its own keeps its
own sum in a part of one array, which only leaves the devices at the end. Must not know what came before the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from scaling_lab.backends.jax import typed
from scaling_lab.backends.jax.loss import cross_entropy_sum
from scaling_lab.backends.jax.products import Use
from scaling_lab.plan.layout import Layout

LOGITS = ("batch", "sequence", "vocab")


@dataclass(frozen=True)
class Chunked:
    """A head's `equation`, x (b, t, e) and weight -> logits (b, t, v), `vocab` of them used, in so many chunks of the tokens."""

    use: Use
    equation: str
    vocab: int
    chunks: int

    def logits(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Of a chunk."""
        return self.use.placement.constrain(self.use.einsum(self.equation, x, weight), LOGITS)

    def parts(self, x: jax.Array) -> jax.Array:
        """(b, t, ...) -> (chunks, b, t / chunks, ...): every chunks-th token, so that each has some of each part of a split sequence."""
        return jnp.moveaxis(x.reshape(x.shape[0], -1, self.chunks, *x.shape[2:]), 2, 0)

    def whole(self, parts: jax.Array) -> jax.Array:
        """The way back."""
        x = jnp.moveaxis(parts, 0, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def own_sums(self, weight: jax.Array) -> jax.Array:
        """Zeros for the weight's gradient, of each of the places that divide batch and sequence: (places, places, ...)."""
        batch, sequence, _ = self._divided
        mesh = self.use.placement.plan.mesh
        zeros = jnp.zeros((mesh.split(batch), mesh.split(sequence), *weight.shape), self.use.reduce_dtype)
        return self._kept(zeros)

    def added(self, sums: jax.Array, x: jax.Array, d_logits: jax.Array) -> jax.Array:
        """Sums with the gradient of a chunk, which no device needs another for."""
        on, (batch, sequence, vocab) = self.use.placement, self._divided
        rows, columns = sums.shape[:2]

        def placed(x: jax.Array, last: tuple[str, ...]) -> jax.Array:  # (b, t, n) -> (rows, b / rows, columns, t / columns, n)
            shape = (rows, x.shape[0] // rows, columns, x.shape[1] // columns, x.shape[2])
            return typed.reshaped(on, x, shape, Layout((batch, (), sequence, (), last)))

        inputs, output = self.equation.split("->")
        left, right = (letters.replace("b", "xb").replace("t", "yt") for letters in (inputs.split(",")[0], output))
        equation = f"{left},{right}->xy{inputs.split(',')[1]}"
        more = self.use.einsum(equation, placed(x, ()), placed(d_logits, vocab), preferred_element_type=sums.dtype)
        return self._kept(sums + more)

    @property
    def _divided(self) -> tuple[tuple[str, ...], ...]:
        return self.use.placement.activation(LOGITS).dims

    def _kept(self, sums: jax.Array) -> jax.Array:
        on, (batch, sequence, _) = self.use.placement, self._divided
        layout = Layout((batch, sequence, *on.planned[self.use.name].compute.dims))
        return on.laid_out(sums, layout)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_cross_entropy_sum(head: Chunked, x: jax.Array, stored: jax.Array, labels: jax.Array) -> jax.Array:
    """`cross_entropy_sum` of the logits of x (b, t, e), in the compute dtype, and labels (b, t)."""
    return _forward(head, x, stored, labels)[0]


def _forward(head, x, stored, labels):
    weight = head.use.gather(stored)

    def add(total, part):
        x, labels = part
        return total + cross_entropy_sum(head.logits(x, weight), labels, head.vocab), None

    total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), (head.parts(x), head.parts(labels)))
    return total, (x, stored, labels)


def _backward(head, saved, scale):
    x, stored, labels = saved
    weight = head.use.gather(stored)
    inputs, output = head.equation.split("->")
    left, right = inputs.split(",")

    def add(sums, part):
        x, labels = part
        _, pull = jax.vjp(lambda logits: cross_entropy_sum(logits, labels, head.vocab), head.logits(x, weight))
        (d_logits,) = pull(scale)
        return head.added(sums, x, d_logits), head.use.einsum(f"{output},{right}->{left}", d_logits, weight)

    sums, dx = jax.lax.scan(add, head.own_sums(weight), (head.parts(x), head.parts(labels)))
    return head.whole(dx), head.use.scatter(sums.sum(axis=(0, 1))).astype(stored.dtype), None


chunked_cross_entropy_sum.defvjp(_forward, _backward)
