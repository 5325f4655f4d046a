"""The optimizer against torch's own on the same gradients; decay by role; where its state lies."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from experiments import FOUND, experiment

from scaling_lab.backends.contract import Job
from scaling_lab.backends.jax import optimizer, runtime
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.errors import WorkerError
from scaling_lab.plan.plan import make_plan

SMALL = {"model.layers": 2, "model.embed": 8, "model.head_dim": 4, "model.mlp": 8, "model.vocab": 16}
LR = 0.1
KINDS = {
    "adamw": {"name": "adamw", "weight_decay": 0.3, "eps": 1e-3},
    "sgd": {"name": "sgd", "weight_decay": 0.3, "momentum": 0.0},
    "sgd with momentum": {"name": "sgd", "weight_decay": 0.3, "momentum": 0.9},
}


def placement(sharding="single", mesh="one", **more):
    asked = experiment(sharding=sharding, mesh=mesh, **SMALL, **more)
    plan = make_plan(asked, FOUND)
    return Placement(runtime.join(Job(asked, plan, 0, "")), plan, asked.workload.precision)


def draw(on, seed):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(p.shape).astype(np.float32) for name, p in on.described.items()}


def ours(on, settings, weights, gradients):
    transform = optimizer.transformation(settings, on)
    state = optimizer.initial_state(*optimizer.state_shardings(transform, on))
    for gradient in gradients:
        norm = optimizer.global_norm(gradient)
        clipped = {name: g * optimizer.clip_factor(norm, settings.clip) for name, g in gradient.items()}
        weights, state = jax.jit(optimizer.apply, static_argnums=(0, 1))(transform, on, weights, state, clipped, LR)
    return weights


def torchs(on, settings, weights, gradients):
    held = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in weights.items()}
    groups = [
        {"params": [p for n, p in held.items() if on.described[n].decayed is decayed], "weight_decay": decay}
        for decayed, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    if settings.name == "adamw":
        steps = torch.optim.AdamW(groups, lr=LR, betas=(settings.b1, settings.b2), eps=settings.eps)
    else:
        steps = torch.optim.SGD(groups, lr=LR, momentum=settings.momentum)
    for gradient in gradients:
        for name, parameter in held.items():
            parameter.grad = torch.tensor(gradient[name])
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(held.values(), settings.clip)
        steps.step()
    return {name: parameter.detach().numpy() for name, parameter in held.items()}


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_three_updates_equal_those_of_torch(kind, clip):
    on = placement()
    settings = replace(experiment().workload.optimizer, clip=clip, **KINDS[kind])
    weights, gradients = draw(on, 0), [draw(on, seed) for seed in (1, 2, 3)]
    got, wanted = ours(on, settings, dict(weights), gradients), torchs(on, settings, weights, gradients)
    for name in weights:
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-6, atol=2e-6, err_msg=name)


def test_with_gradients_of_zero_only_matrices_embedding_and_head_decay():
    on = placement()
    weights = draw(on, 0)
    zero = {name: np.zeros_like(value) for name, value in weights.items()}
    moved = ours(on, replace(experiment().workload.optimizer, weight_decay=0.5), dict(weights), [zero])
    shrunk = {name for name in weights if np.allclose(moved[name], 0.95 * weights[name])}  # 1 - 0.1 * 0.5
    kept = {name for name in weights if np.array_equal(moved[name], weights[name])}
    assert kept == {"layers.attention_norm.scale", "layers.mlp_norm.scale", "final_norm.scale"}
    assert shrunk == weights.keys() - kept


def test_a_decay_that_reaches_everything_is_an_error():
    on = placement()
    only = tuple(p for p in on.plan.parameters if p.parameter.role == "matrix")
    with pytest.raises(WorkerError, match="7 of 7"):
        optimizer.transformation(experiment().workload.optimizer, replace(on, plan=replace(on.plan, parameters=only)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_starts_as_optax_would_start_it(kind):
    on = placement()
    transform = optimizer.transformation(replace(experiment().workload.optimizer, **KINDS[kind]), on)
    wanted = transform.init({name: jnp.asarray(value) for name, value in draw(on, 0).items()})
    got = optimizer.initial_state(*optimizer.state_shardings(transform, on))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_zero1_splits_the_moments_of_whole_weights():
    on = placement("zero1", "auto")
    transform = optimizer.transformation(experiment().workload.optimizer, on)
    moments = optimizer.initial_state(*optimizer.state_shardings(transform, on))[0]
    planned = on.planned["layers.mlp.up"]
    assert planned.weights.axes == ()
    assert moments.mu["layers.mlp.up"].addressable_shards[0].data.shape == (2, 1, 8)  # embed 8 over 8 devices
    assert moments.count.sharding.is_fully_replicated


def test_moments_are_stored_in_the_parameters_dtype():
    on = placement(**{"workload.precision.params": "bfloat16"})
    settings = experiment().workload.optimizer
    transform = optimizer.transformation(settings, on)
    state = optimizer.initial_state(*optimizer.state_shardings(transform, on))
    weights = {name: jnp.asarray(value, jnp.bfloat16) for name, value in draw(on, 0).items()}
    gradients = {name: jnp.asarray(value) for name, value in draw(on, 1).items()}
    weights, state = optimizer.apply(transform, on, weights, state, gradients, jnp.float32(LR))
    assert {leaf.dtype for leaf in jax.tree.leaves((weights, state[0].mu, state[0].nu))} == {jnp.dtype("bfloat16")}
