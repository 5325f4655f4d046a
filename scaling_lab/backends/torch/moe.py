"""The mixture of experts: the equations of `models.moe`, as plain modules. How tokens reach their experts: `dispatch`.

Every position of every row takes part, in the room of the experts and in what the router reports too: those whose label is
ignored and those of empty rows are tokens like any other.
The router is computed whole on every device that shares the tokens, and beyond it each device computes its part of every
expert's width, with local tensors: one collective per pass sums the output, or the gradients of all that is whole.
Shapes: b batch, t sequence, e embed, f expert_mlp, k experts_per_token, n experts, r rows of this process's experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from scaling_lab.backends.torch.context import whole_rows
from scaling_lab.backends.torch.dispatch import Dispatch, counts_of, dropless, limited, ranks_of
from scaling_lab.backends.torch.grouped import grouped_product
from scaling_lab.backends.torch.mlp import Mlp, activated
from scaling_lab.backends.torch.products import described, use
from scaling_lab.backends.torch.sharding import RESIDUAL, Placement, local_of
from scaling_lab.models import model as sizes
from scaling_lab.plan.experiment import Experiment

#: What a mixture reports, each summed over this process's rows.
REPORTED = ("balance_loss", "z_loss", "dropped_tokens")


class Moe(nn.Module):
    """x (b, t, e) -> (b, t, e), and what the router reports (3,): the numbers of REPORTED, float32."""

    router: Any

    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        super().__init__()
        assert experiment.model.moe is not None
        self.on, self.moe, self.split = on, experiment.model.moe, on.split_axes(f"{prefix}down")
        self.router = described(on, f"{prefix}router")
        self.shared = Mlp(on, f"{prefix}shared_") if self.moe.shared_experts else None
        self.experts = Experts(experiment, on, prefix)

    def forward(self, x):
        on, moe, x = self.on, self.moe, local_of(x)
        logits = x.float() @ local_of(self.router).float()  # (b, t, n), float32
        chosen, weights = routed(moe, logits)  # (b, t, k)
        every = whole_rows(chosen, on)  # of whole rows, in the order of the text
        chosen, dropped = with_room(moe, chosen, every, on)
        reported = torch.stack([balance_loss(moe, logits, every), z_loss(logits, every.shape[1]), dropped])
        x, weights = on.spread(x, moe.routed_scale * weights, over=self.split)
        # Before the experts, whose backward pass then comes first: it gathers their weights before anything is recomputed.
        shared = 0.0 if self.shared is None else self.shared(x)
        y = self.experts(x, chosen, weights) + shared
        return on.constrain(on.partial(y, self.split), RESIDUAL), reported


class Experts(nn.Module):
    """x (b, t, e) -> (b, t, e): sum over a token's experts of weight x mlp(x).

    chosen, weights (b, t, k): n is no expert.
    """

    gate: Any
    up: Any
    down: Any

    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        super().__init__()
        assert experiment.model.moe is not None
        self.on, self.moe = on, experiment.model.moe
        for name in Experts.__annotations__:
            setattr(self, name, described(on, f"{prefix}{name}"))
        axes = on.described[f"{prefix}down"].compute.drop_dim(0).dims[0]
        self.group = on.group(axes) if axes else None

    def forward(self, x, chosen, weights):
        way = self.dispatch(chosen)
        rows = way.out(x)  # (r, e), by expert
        hidden = self.product(rows, self.up, way)  # (r, f)
        hidden = activated(hidden, None if self.gate is None else self.product(rows, self.gate, way))
        y = way.home(self.product(hidden, self.down, way))  # (b, t, k, e)
        return (weights.to(y.dtype)[..., None] * y).sum(dim=2)

    def dispatch(self, chosen: Tensor) -> Dispatch:
        """The way of every assignment to its expert."""
        if self.moe.capacity_factor is None:
            return dropless(chosen, self.moe.experts, self.group)
        return limited(chosen, self.moe.experts, room(self.moe, self.on.plan.sequence.length), self.group)

    def product(self, rows: Tensor, weight: nn.Parameter, way: Dispatch) -> Tensor:
        """Each row by the weight of its expert."""
        return grouped_product(rows, local_of(use(self.on, weight)), way.sizes)


def routed(moe: sizes.Moe, logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits (b, t, n) -> each token's experts, best first (of equal ones the lower index), and their weights (b, t, k)."""
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[..., : moe.experts_per_token]
    if moe.routing == "topk_softmax":
        return chosen, logits.gather(-1, chosen).softmax(dim=-1)
    weights = logits.softmax(dim=-1).gather(-1, chosen)
    if moe.routing == "softmax_topk_normalised":
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights


def balance_loss(moe: sizes.Moe, logits: Tensor, every: Tensor) -> Tensor:
    """n x sum over experts of (their share of the row's assignments x their mean probability), summed over rows.

    every (b, sequence, k): the choices of whole rows; of a row in parts this process's tokens give their part of the sum.
    """
    share = counts_of(every.flatten(1), moe.experts) / every[0].numel()  # (b, n)
    probability = logits.softmax(dim=-1).sum(dim=1) / every.shape[1]  # (b, n)
    return moe.experts * (share * probability).sum()


def z_loss(logits: Tensor, sequence: int) -> Tensor:
    """The mean of logsumexp(logits) squared, summed over rows; of a row in parts this process's part."""
    return logits.logsumexp(dim=-1).square().sum() / sequence


def room(moe: sizes.Moe, sequence: int) -> int:
    """How many assignments of a sequence an expert takes."""
    assert moe.capacity_factor is not None
    return math.ceil(moe.capacity_factor * sequence * moe.experts_per_token / moe.experts)


def with_room(moe: sizes.Moe, chosen: Tensor, every: Tensor, on: Placement) -> tuple[Tensor, Tensor]:
    """chosen (b, t, k) with n, no expert, in place of experts without room; how many assignments that drops, float32.

    An expert takes its first ones in the order of the text, of one token's in the order of its choices; a row counts whole
    (every: its choices in that order), on however many devices it lies.
    """
    if moe.capacity_factor is None:
        return chosen, chosen.new_zeros((), dtype=torch.float32)
    ranks = ranks_of(every.flatten(1), moe.experts).view_as(every)[:, on.positions]
    fits = ranks < room(moe, every.shape[1])
    return chosen.where(fits, moe.experts), (~fits).sum().float()
