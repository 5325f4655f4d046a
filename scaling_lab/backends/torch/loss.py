"""Cross-entropy summed over valid tokens, in float32 whatever the logits are. Must not know how tokens are counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from scaling_lab.backends.torch.collectives import all_gather
from scaling_lab.backends.torch.sharding import part_start

#: What `F.cross_entropy` skips; every label < 0 is turned into it.
IGNORED = -100


def cross_entropy_sum(logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
    """Sum over labels that are not IGNORED of logsumexp(logits) - logits[label]: a float32 scalar of this process's rows.

    logits: [batch, sequence, padded vocab], whole or split over the vocabulary; those from `vocab` on never take part.
    labels: int64 [batch, sequence].
    """
    if not isinstance(logits, DTensor):
        return F.cross_entropy(
            logits[..., :vocab].flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
    split = [axis for axis, placement in enumerate(logits.placements) if placement.is_shard(2)]
    if not split:
        return cross_entropy_sum(logits.to_local(), labels, vocab)
    names = tuple(logits.device_mesh.mesh_dim_names or ())
    group = logits.device_mesh[tuple(names[axis] for axis in split)]
    start = part_start(logits, 2)
    local = _without_padding(logits.to_local().flatten(0, 1).float(), vocab - start)
    return _SplitCrossEntropy.apply(local, labels.flatten(), start, group)


def _without_padding(logits: Tensor, used: int) -> Tensor:
    """The columns from `used` on so low that no softmax gives them anything; finite, as a process may have no other."""
    if used >= logits.shape[1]:
        return logits
    padding = torch.arange(logits.shape[1], device=logits.device) >= used
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min / 2)


class _SplitCrossEntropy(torch.autograd.Function):
    """The same where each process has some columns: two numbers of a token are exchanged, never its logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, mesh: Any) -> Tensor:
        """logits: float32 [tokens, local vocab], the columns from `start` on; mesh: of the processes with the others."""
        shares = logits.log_softmax(dim=-1)
        local_sum = logits[:, 0] - shares[:, 0]  # logsumexp of the columns here
        index = labels - start
        inside = (index >= 0) & (index < logits.shape[1])
        index = index.where(inside, 0)
        chosen = logits.gather(1, index[:, None])[:, 0] * inside
        sums, chosen = _exchange(torch.stack([local_sum, chosen]), mesh)
        normaliser = sums.logsumexp(dim=0)
        valid = labels != IGNORED
        ctx.save_for_backward(shares, local_sum - normaliser, index, inside & valid, valid)
        return ((normaliser - chosen.sum(dim=0)) * valid).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """softmax minus one at the label, on the columns here, where the label is valid."""
        shares, shift, index, chosen, valid = ctx.saved_tensors
        gradient = (shares + shift[:, None]).exp_().mul_(valid[:, None])
        gradient.scatter_add_(1, index[:, None], -chosen[:, None].to(gradient.dtype))
        return gradient.mul_(scale), None, None, None


def _exchange(pair: Tensor, mesh: Any) -> tuple[Tensor, Tensor]:
    """Every process's two rows of tokens: a (processes, tokens) tensor of each."""
    group = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    every = all_gather(pair, group)
    return every[:, 0], every[:, 1]
