"""Initial weights: element i is a function of (seed, name, i) alone, whoever draws it."""

import math

import numpy as np
import pytest
from experiments import FOUND, experiment
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling_lab.backends.initial import initial_values
from scaling_lab.models import decoder
from scaling_lab.models.parameters import Parameter
from scaling_lab.plan.plan import make_plan

#: Drawn once with this code; nothing but their staying the same is claimed.
KNOWN = [0.00087273121, -0.036141127, -0.01477297, 0.0044032619]


def weight(*shape, name="w", std=1.0):
    return Parameter(name, shape, (None,) * len(shape), "matrix", "normal", std)


def whole(parameter, seed=0):
    return initial_values(parameter, seed, tuple(slice(0, size) for size in parameter.shape))


@st.composite
def parts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple(slice(a, draw(st.integers(a + 1, size))) for a, size in zip(starts, shape, strict=True))


@given(parts(), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_a_part_is_the_slice_of_the_whole_to_the_last_bit(case, seed):
    shape, part = case
    parameter = weight(*shape)
    assert np.array_equal(initial_values(parameter, seed, part), whole(parameter, seed)[part])


@pytest.mark.parametrize("table", ["single", "fsdp", "fsdp_tensor", "zero1"])
def test_the_parts_of_every_layout_put_together_are_the_same_weights(table):
    plan = make_plan(experiment(sharding=table, **{"model.layers": 2}), FOUND)
    for planned in plan.parameters:
        parameter = planned.parameter
        together = np.full(parameter.shape, np.nan, np.float32)
        for device in range(plan.mesh.devices):
            part = planned.weights.local_slices(parameter.shape, plan.mesh, plan.mesh.coordinates(device))
            together[part] = initial_values(parameter, 3, part)
        assert np.array_equal(together, whole(parameter, 3)), parameter.name


def test_known_values_do_not_change():
    """Results of earlier runs must stay reproducible: seed 0, `embed.tokens` of the tiny model, its first four elements."""
    tokens = decoder.parameters(experiment().model)[0]
    first = initial_values(tokens, 0, (slice(0, 1), slice(0, 4)))[0]
    np.testing.assert_allclose(first, KNOWN, rtol=1e-5)


def test_values_are_normal_with_the_asked_deviation():
    values = whole(weight(400, 1000, std=0.02)).ravel() / 0.02
    # 400,000 draws: the mean's standard error is 1 / 632, the variance's 1.41 / 632; six of each are allowed
    assert abs(values.mean()) < 6 / 632
    assert abs(values.var() - 1) < 6 * 1.41 / 632
    assert abs((values**4).mean() - 3) < 6 * 9.8 / 632  # kurtosis 3, its standard error sqrt(96) / 632
    for border, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((np.abs(values) < border).mean() - share) < 6 * 0.47 / 632
    assert np.isfinite(values).all()


def test_neighbours_in_every_dim_are_independent():
    values = whole(weight(60, 60, 60))
    for dim in range(3):
        left, right = np.take(values, range(59), dim).ravel(), np.take(values, range(1, 60), dim).ravel()
        assert abs(np.corrcoef(left, right)[0, 1]) < 6 / np.sqrt(left.size)


def test_layers_names_and_seeds_give_independent_values():
    stacked = whole(weight(2, 200, 200))
    pairs = [
        (stacked[0], stacked[1]),
        (whole(weight(200, 200)), whole(weight(200, 200, name="v"))),
        (whole(weight(200, 200)), whole(weight(200, 200), seed=1)),
        (whole(weight(200, 200), seed=1), whole(weight(200, 200), seed=2)),
    ]
    for one, other in pairs:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 6 / 200
        assert not np.isin(one, other).all()


def test_no_value_is_drawn_twice_more_than_24_bits_allow():
    values = whole(weight(100_000))
    # 2^48 pairs of uniforms: repeats come from rounding to float32 only, some percent near the centre
    assert len(np.unique(values)) > 0.97 * values.size


def test_ones_and_zeros_and_dtype():
    ones = Parameter("n", (3, 4), (None, None), "norm", "ones")
    assert np.array_equal(initial_values(ones, 0, (slice(1, 3), slice(0, 2))), np.ones((2, 2)))
    zeros = Parameter("b", (3,), (None,), "bias", "zeros")
    assert np.array_equal(whole(zeros), np.zeros(3))
    assert {whole(p).dtype for p in (ones, zeros, weight(2))} == {np.dtype(np.float32)}


def test_elements_past_two_to_the_32_are_drawn_apart():
    huge = weight(3, 1 << 31)
    last = initial_values(huge, 0, (slice(2, 3), slice((1 << 31) - 2, 1 << 31)))  # elements 3 x 2^31 - 2 and - 1
    first = initial_values(huge, 0, (slice(0, 1), slice((1 << 31) - 2, 1 << 31)))
    assert not np.isin(last, first).any()


@pytest.mark.parametrize("name", ["embed.tokens", "head.weight"])
def test_padding_the_vocabulary_changes_no_value_and_is_zero(name):
    plain, padded = (
        next(
            p for p in decoder.parameters(experiment(**{"model.vocab": 253, "model.vocab_multiple": n}).model) if p.name == name
        )
        for n in (1, 8)
    )
    assert (padded.size, math.prod(padded.shape)) == (128 * 253, 128 * 256)
    whole = [initial_values(p, 0, tuple(slice(0, size) for size in p.shape)) for p in (plain, padded)]
    np.testing.assert_array_equal(whole[1][tuple(slice(size) for size in plain.shape)], whole[0])
    assert np.abs(whole[1]).sum() == pytest.approx(np.abs(whole[0]).sum(), rel=1e-6)
    part = tuple(slice(size - 5, size) for size in padded.shape)
    np.testing.assert_array_equal(initial_values(padded, 0, part), whole[1][part])
