"""Both forms of attention against softmax written out by head in float64, their gradients against autodiff of `plain`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scaling_lab.backends.jax.attention import attend, blocked, plain

#: (batch, sequence, heads, kv_heads, head_dim): one token, odd, one block exactly, a last block of one, a ragged last block.
SHAPES = [(2, 1, 2, 1, 4), (1, 7, 4, 2, 3), (1, 128, 2, 2, 8), (2, 129, 4, 1, 8), (1, 300, 6, 3, 4), (1, 1030, 2, 1, 4)]


def drawn(shape, dtype=jnp.float32):
    batch, sequence, heads, kv_heads, head_dim = shape
    random = np.random.default_rng(0)
    sizes = [(batch, sequence, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(random.standard_normal(size), dtype) for size in sizes]


def by_head(query, key, value):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros_like(query)
    group = query.shape[2] // key.shape[2]
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            scores = query[b, :, h] @ key[b, :, h // group].T / np.sqrt(query.shape[-1])
            weights = np.tril(np.exp(scores - scores.max(axis=1, keepdims=True)))
            out[b, :, h] = weights / weights.sum(axis=1, keepdims=True) @ value[b, :, h // group]
    return out


@pytest.mark.parametrize("form", ["plain", "fused"])
@pytest.mark.parametrize("shape", SHAPES[:5])
def test_a_form_equals_softmax_written_out_by_head(shape, form):
    query, key, value, _ = drawn(shape)
    got = attend(query, key, value, form=form, platform="cpu")
    np.testing.assert_allclose(got, by_head(query, key, value), rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_hand_written_gradient_equals_autodiff(shape):
    *inputs, weight = drawn(shape)

    def pulled(form):
        return jax.jit(jax.grad(lambda *qkv: (form(*qkv) * weight).sum(), argnums=(0, 1, 2)))(*inputs)

    for got, wanted in zip(pulled(blocked), pulled(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


def test_accelerators_get_a_form_with_the_same_values():
    query, key, value, _ = drawn(SHAPES[1])
    got = attend(query, key, value, form="fused", platform="gpu")
    np.testing.assert_allclose(got, plain(query, key, value), rtol=0, atol=1e-5)


def test_softmax_is_in_float32_under_bfloat16():
    query, key, value, _ = drawn((1, 200, 4, 2, 16), jnp.bfloat16)
    got = blocked(query, key, value)
    assert got.dtype == jnp.bfloat16
    wanted = by_head(query, key, value)
    # one rounding of the weights and one of the result, 2^-9 relative each: a bfloat16 softmax would be off by far more
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=0, atol=2**-7 * np.abs(wanted).max())


def test_batch_and_heads_split_over_devices_change_nothing_and_send_nothing():
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    *inputs, weight = drawn((4, 140, 4, 2, 8))
    split = NamedSharding(mesh, P("rows", None, "columns", None))

    def pulled(query, key, value):
        return jax.grad(lambda *qkv: (blocked(*qkv) * weight).sum(), argnums=(0, 1, 2))(query, key, value)

    compiled = jax.jit(pulled, in_shardings=split, out_shardings=split).lower(*inputs).compile()
    assert not any(word in compiled.as_text() for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    for got, wanted in zip(compiled(*(jax.device_put(x, split) for x in inputs)), pulled(*inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
