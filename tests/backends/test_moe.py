"""Both backends compute the same mixtures of experts and the same latent attention.

On one device: each backend's layouts are compared with its own in `test_moe_jax` and `test_moe_torch`.
"""

import pytest
from cases import choices, ragged_batches
from experiments import FOUND, experiment
from test_moe_torch import MODELS, SIZES, alone, assert_equal, trained

from scaling_lab.backends.contract import Job
from scaling_lab.backends.jax.train import open_session
from scaling_lab.plan.plan import make_plan


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("model", MODELS)
def test_torch_equals_jax(model):
    asked = experiment(**{**choices("llama", "single", "jax"), "model": "tiny_moe", **SIZES, **MODELS[model]})
    job = Job(asked, make_plan(asked, FOUND), 0, "")
    assert_equal(alone(model), trained(open_session(job), job, ragged_batches()))
