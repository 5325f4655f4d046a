"""Cross-entropy against log_softmax in float64, its gradient against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scaling_lab.backends.jax.loss import cross_entropy_sum

LOGITS = np.random.default_rng(0).standard_normal((2, 3, 5)) * 4
LABELS = np.array([[0, 4, -1], [2, -1, 2]])


def written_out(logits, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(labels >= 0, chosen, 0.0).sum()


def test_it_is_the_sum_over_valid_labels():
    shifted = LOGITS - LOGITS.max(axis=-1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    wanted = -sum(log_softmax[b, t, LABELS[b, t]] for b, t in ((0, 0), (0, 1), (1, 0), (1, 2)))
    got = cross_entropy_sum(jnp.asarray(LOGITS, jnp.float32), jnp.asarray(LABELS))
    assert float(got) == pytest.approx(wanted, rel=1e-6)


def test_its_gradient_equals_autodiff():
    logits, labels = jnp.asarray(LOGITS, jnp.float32), jnp.asarray(LABELS)
    got, wanted = (jax.grad(lambda x, f=f: 3 * f(x, labels))(logits) for f in (cross_entropy_sum, written_out))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


def test_with_every_label_ignored_the_sum_and_the_gradient_are_zero():
    value, gradient = jax.value_and_grad(cross_entropy_sum)(jnp.asarray(LOGITS, jnp.float32), jnp.full((2, 3), -1))
    assert float(value) == 0.0
    assert not np.asarray(gradient).any()


def test_bfloat16_logits_are_summed_in_float32():
    # 300 equal logits: each loss is log 300 = 5.70378; bfloat16 would stop counting at 256 and have 2 decimal digits
    value = cross_entropy_sum(jnp.zeros((1, 7, 300), jnp.bfloat16), jnp.zeros((1, 7), jnp.int32))
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(7 * np.log(300), rel=1e-6)
