"""JAX's matrix product on this machine's processor, timed: `python -m scaling_lab.backends.jax.peak DTYPE` prints JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from scaling_lab.predict.products import Maker, answer


def products(dtype: str) -> Maker:
    """The compiled product on one CPU device, which has all of the machine's cores."""
    multiply = jax.jit(jnp.matmul)

    def maker(size: int) -> Callable[[], object]:
        left, right = (jnp.full((size, size), 0.5, dtype) for _ in range(2))
        return lambda: multiply(left, right).block_until_ready()

    return maker


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(answer("jax", products(sys.argv[-1])))
