"""The torch step on one device and, where it needs more, over the pool: forms of the same equations, precision, empty batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Outcome, choices, differences, ragged_batches, run_session
from experiments import FOUND, plain

from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import local_batch
from scaling_lab.backends.torch.loss import IGNORED, cross_entropy_sum
from scaling_lab.backends.torch.optimizer import square_sum
from scaling_lab.backends.torch.train import open_session
from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("torch_parity")


def job_of(**changes: Any) -> Job:
    experiment = experiment_from(plain(**choices("llama", "single", "torch", **changes)))
    return Job(experiment, make_plan(experiment, FOUND), 0, "")


def outcome_of(**changes: Any) -> Outcome:
    job = job_of(**changes)
    session = open_session(job)
    try:
        return run_session(session, job, ragged_batches())
    finally:
        session.close()


@functools.cache
def alone() -> Outcome:
    return outcome_of()


@pytest.mark.parametrize(
    "change", [{"workload.remat": "dots"}, {"workload.remat": "full"}, {"backend.attention": "plain"}], ids=lambda c: str(c)
)
def test_another_form_of_the_same_equations_gives_the_same_steps(change):
    assert differences(outcome_of(**change), alone()) == []


def test_bfloat16_products_come_near_float32_and_keep_weights_in_float32():
    found = outcome_of(**{"workload.precision.compute": "bfloat16"})
    assert found.losses == pytest.approx(alone().losses, rel=0.02)
    assert found.losses != alone().losses
    assert all(value.dtype == np.float32 for value in found.weights.values())


def test_a_batch_without_a_valid_label_has_loss_zero_and_moves_nothing():
    job = job_of(**{"workload.optimizer.weight_decay": 0.0})
    session = open_session(job)
    tokens = np.zeros((16, 16), np.int32)
    batch = local_batch(job, tokens, np.full_like(tokens, -1))
    session.prepare(batch)
    before = session.weights()
    metrics = session.step(batch).result()
    after = session.weights()
    session.close()
    assert (metrics["loss"], metrics["grad_norm"], metrics["valid_tokens"]) == (0.0, 0.0, 0)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


def split_cross_entropy(session: Any, job: Job, batches: Any) -> list[Any]:
    """Runs on a rank: loss and gradient of logits whose columns lie on the mesh's innermost axis."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    logits, labels = (torch.from_numpy(array) for array in batches)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("columns",))
    split = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
    loss = cross_entropy_sum(split, labels, 24)
    loss.backward()
    assert split.grad is not None
    return [loss.item(), split.grad.full_tensor().numpy()]


def test_cross_entropy_over_a_split_vocabulary_equals_the_whole_one(torch_ranks):
    random = np.random.default_rng(0)
    logits = (random.standard_normal((2, 5, 24)) * 30).astype(np.float32)
    labels = random.integers(0, 24, (2, 5))
    labels[0, :2] = IGNORED
    whole = torch.from_numpy(logits).requires_grad_()
    wanted = F.cross_entropy(whole.flatten(0, 1), torch.from_numpy(labels).flatten(), ignore_index=IGNORED, reduction="sum")
    wanted.backward()
    assert whole.grad is not None
    experiment = plain(**choices("llama", "data", "torch"))
    answers = torch_ranks.run(experiment, [logits, labels], call=split_cross_entropy)["results"]
    assert len(answers) == 8
    for loss, gradient in answers:
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        np.testing.assert_allclose(gradient, whole.grad.numpy(), atol=1e-5)


def test_the_norm_of_millions_of_numbers_is_as_exact_as_that_of_a_few():
    """As large as an embedding; torch's own float32 norm of the first is 1e-4 too small. The last counts on another device."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape, dtype=np.float32) for shape in ((50257, 64), (3, 5), (1 << 16,), (7,))]
    found = square_sum([torch.from_numpy(x) for x in arrays], torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    wanted = sum(np.square(x, dtype=np.float64).sum() for x in arrays[:3])
    assert found.item() == pytest.approx(wanted, rel=2e-6)
