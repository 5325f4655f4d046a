"""Mixtures of experts, latent attention and query-key norms: torch in every layout equals one device in JAX; both, Hugging Face.

What only one backend has to show is in `test_moe_jax` and `test_moe_torch`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import test_moe_torch as in_torch
from cases import choices, ragged_batches
from experiments import FOUND, experiment
from test_huggingface_logits import compare
from test_moe_jax_equations import MIXTURES

from scaling_lab.backends.contract import Job
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("torch_parity")

MODELS = (
    "dropless",
    "limited rooms",
    "one dense layer, a shared expert",
    "normed queries, three of four experts",
    "latent attention",
)
#: Every layout with one of the models, each of the others on one device and in the layout with most kinds of parts.
FULLY = "one dense layer, a shared expert"
LAYOUTS = {"single": ("single", 1, {}), **in_torch.LAYOUTS}
PAIRS = [(m, layout) for m in MODELS for layout in LAYOUTS if m == FULLY or layout in ("single", "fsdp_expert_tensor")]


@functools.cache
def one_device_in_jax(model: str) -> dict[str, Any]:
    """As `test_moe_torch.trained` has it."""
    from scaling_lab.backends.jax.train import open_session

    keys = {**choices("llama", "single", "jax"), "model": "tiny_moe", **in_torch.SIZES, **in_torch.MODELS[model]}
    asked = experiment(**keys)
    job = Job(asked, make_plan(asked, FOUND), 0, "127.0.0.1:0")
    session = open_session(job)
    try:
        return in_torch.trained(session, job, ragged_batches())
    finally:
        session.close()


@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_torch_equals_one_device_in_jax(model, layout, torch_ranks):
    table, accumulation, changes = LAYOUTS[layout]
    found = in_torch.found_of(torch_ranks, table, accumulation, **{**in_torch.MODELS[model], **changes})
    in_torch.assert_equal(found, one_device_in_jax(model))


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_in_torch_equal_those_of_the_mixture_in_hugging_face(name):
    changes, config_class, model_class = MIXTURES[name]

    def eager(config: Any) -> Any:
        theirs = model_class(config)
        theirs.set_experts_implementation("eager")
        return theirs

    compare("torch", "tiny_moe", changes, 24, config_class, eager)
