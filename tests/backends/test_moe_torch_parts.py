"""The parts of a mixture in torch, by hand: routing, rooms, dispatch, the router's losses; and latent attention against Hugging Face."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import ragged_batches
from experiments import experiment
from test_huggingface_logits import randomised
from test_moe_jax_equations import deepseek_config, from_deepseek
from test_moe_torch import job_of
from transformers import DeepseekV3ForCausalLM

from scaling_lab.backends.rows import local_batch
from scaling_lab.backends.torch.dispatch import Dispatch, dropless, limited, ranks_of
from scaling_lab.backends.torch.grouped import in_a_loop, in_one_kernel
from scaling_lab.backends.torch.moe import balance_loss, room, routed, z_loss
from scaling_lab.backends.torch.train import open_session
from scaling_lab.backends.torch.transformer import logits

pytestmark = pytest.mark.xdist_group("torch_parity")

MOE = experiment(model="tiny_moe").model.moe
assert MOE is not None
EXPERTS, TOP = MOE.experts, MOE.experts_per_token  # 4, 2


def logits_like(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_of_equal_logits_the_lower_expert_comes_first():
    moe = replace(MOE, experts=64, experts_per_token=6)
    chosen, weights = routed(moe, torch.zeros(2, 3, 64))
    assert chosen.tolist() == [[[0, 1, 2, 3, 4, 5]] * 3] * 2
    assert routed(MOE, torch.tensor([1.0, 2.0, 2.0, 1.0]))[0].tolist() == [1, 2]
    np.testing.assert_allclose(weights, 1 / 6, rtol=1e-6)


def test_the_three_routings_weigh_the_same_experts_differently():
    """Probabilities 1/10, 2/10, 3/10 and 4/10."""
    given = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
    found = {
        how: routed(replace(MOE, routing=how), given) for how in ("softmax_topk", "softmax_topk_normalised", "topk_softmax")
    }
    assert [chosen.tolist() for chosen, _ in found.values()] == [[3, 2]] * 3
    np.testing.assert_allclose(found["softmax_topk"][1], [0.4, 0.3], rtol=1e-6)
    for how in ("softmax_topk_normalised", "topk_softmax"):
        np.testing.assert_allclose(found[how][1], [4 / 7, 3 / 7], rtol=1e-6)


def test_an_assignment_ranks_behind_those_before_it_in_its_row_at_its_expert():
    flat = torch.tensor([[2, 0, 2, 2, 0, 1], [1, 1, 1, 1, 1, 1]])
    assert ranks_of(flat, 3).tolist() == [[0, 0, 1, 2, 1, 0], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(("factor", "wanted"), [(1.0, 8), (1.25, 10), (1.3, 11)])
def test_the_room_is_the_even_share_times_the_factor_rounded_up(factor, wanted):
    """16 tokens x 2 over 4 experts are 8 each."""
    assert room(replace(MOE, capacity_factor=factor), 16) == wanted


def test_losses_of_the_router_are_those_of_their_formulas():
    """Two rows of three tokens; all choose experts 0 and 1 in the first, all differ in the second."""
    given = logits_like(2, 3, EXPERTS)
    every = torch.tensor([[[0, 1]] * 3, [[0, 1], [2, 3], [0, 3]]])
    shares = np.array([[3, 3, 0, 0], [2, 1, 1, 2]]) / 6
    means = given.double().softmax(-1).mean(1).numpy()
    assert balance_loss(MOE, given, every).item() == pytest.approx(4 * (shares * means).sum())
    assert balance_loss(MOE, torch.zeros_like(given), every).item() == pytest.approx(2.0)  # 1 a row where all is even
    squares = np.square(np.log(np.exp(given.double().numpy()).sum(-1)))
    assert z_loss(given, 3).item() == pytest.approx(squares.mean(1).sum())


def ways(experts: int) -> dict[str, tuple[torch.Tensor, Dispatch]]:
    """Choices (2, 5, 2) of 4 experts, of which expert 3 gets none; and with room for two of a row, where 4 is no expert."""
    chosen = torch.tensor([[[0, 1], [1, 0], [2, 1], [1, 2], [0, 2]], [[1, 2]] * 5])
    fits = (ranks_of(chosen.flatten(1), experts) < 2).view_as(chosen)
    kept = chosen.where(fits, experts)
    return {"dropless": (chosen, dropless(chosen, experts, None)), "limited": (kept, limited(kept, experts, 2, None))}


@pytest.mark.parametrize("form", ["dropless", "limited"])
def test_every_assignment_meets_its_expert_and_comes_home(form):
    chosen, way = ways(EXPERTS)[form]
    x = logits_like(2, 5, 3)
    assert way.sizes.tolist() == ([3, 9, 8, 0] if form == "dropless" else [4, 4, 4, 4])
    number = torch.arange(EXPERTS).repeat_interleave(way.sizes)[:, None]
    back = way.home(way.out(x) * (number + 1))
    factors = (chosen + 1.0).where(chosen < EXPERTS, 0.0)
    torch.testing.assert_close(back, x[:, :, None] * factors[..., None])


@pytest.mark.parametrize("form", ["dropless", "limited"])
def test_the_gradient_of_the_way_to_the_experts_and_back_is_exact(form):
    _, way = ways(EXPERTS)[form]
    x = logits_like(2, 5, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: way.home(way.out(x).sin()), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_the_same_in_both_forms(dtype):
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("torch's kernel has an older form")
    rows, weights, sizes = logits_like(15, 32).to(dtype), logits_like(4, 32, 24).to(dtype), torch.tensor([3, 0, 7, 5])
    found = []
    for form in (in_a_loop, in_one_kernel):
        given = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        product = form(*given, sizes)
        found.append([product, *torch.autograd.grad(product.sin().sum(), given)])
    for loop, kernel in zip(*found, strict=True):
        torch.testing.assert_close(kernel, loop)


def gradients(changes: dict[str, Any], batch: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    job = job_of("single", **changes)
    session = open_session(job)
    try:
        return dict(session.gradients(local_batch(job, *batch))[1])
    finally:
        session.close()


def test_the_routers_losses_add_the_same_gradient_however_many_labels_are_valid():
    tokens, labels = ragged_batches()[0]
    none, few = np.full_like(labels, -1), np.where(np.arange(16) < 1, labels, -1)
    without = {"model.moe.balance_loss": 0.0, "model.moe.z_loss": 0.0}
    wanted = gradients({}, (tokens, none))
    assert np.abs(wanted["layers.moe.router"]).max() > 1e-2
    for some in (labels, few):
        full, bare = gradients({}, (tokens, some)), gradients(without, (tokens, some))
        for name, value in wanted.items():
            np.testing.assert_allclose(full[name] - bare[name], value, atol=2e-6, err_msg=name)


def test_accumulation_does_not_change_what_the_routers_losses_weigh():
    tokens, labels = ragged_batches()[0]
    once, in_four = (gradients({"workload.accumulation": n}, (tokens, np.full_like(labels, -1))) for n in (1, 4))
    for name, value in once.items():
        np.testing.assert_allclose(in_four[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("form", ["plain", "fused"])
@pytest.mark.parametrize(("query_rank", "value_dim"), [(24, 10), (None, 20)])
def test_latent_attention_gives_the_logits_of_deepseek_v3(query_rank, value_dim, form):
    latent = {"query_rank": query_rank, "kv_rank": 16, "rope_dim": 4, "nope_dim": 8, "value_dim": value_dim}
    keys = {"model.latent": latent, "model.head_dim": 12, "model.kv_heads": 4, "model.norm_eps": 1e-6}
    asked = experiment(model="tiny", sharding="single", **keys, **{"workload.sequence": 24, "backend.attention": form})
    model = asked.model
    theirs = randomised(DeepseekV3ForCausalLM(deepseek_config(model)))
    weights = from_deepseek(model, {name: value.numpy() for name, value in theirs.state_dict().items()})
    tokens = np.random.default_rng(0).integers(0, model.vocab, (3, 24), dtype=np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(asked, weights, tokens), expected, rtol=0, atol=1e-4)
