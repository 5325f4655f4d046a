"""The optimizer on the tensors it steps: this device's parts, as plain tensors. Must not know how they are laid out.

Owns weight decay by a parameter's role, the learning rate of a step, the global norm and the clipping factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scaling_lab.backends.torch.weights import Piece
from scaling_lab.errors import WorkerError
from scaling_lab.plan.experiment import Optimizer

#: Elements whose squares are added up in float32 on a CPU.
LONGEST_SUM = 1 << 15


def make_optimizer(config: Optimizer, pieces: Sequence[Piece], stepped: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The configured optimizer of `stepped`, one tensor of each piece. Raises WorkerError where nothing would be decayed."""
    decayed = [x for piece, x in zip(pieces, stepped, strict=True) if piece.planned.parameter.decayed]
    others = [x for piece, x in zip(pieces, stepped, strict=True) if not piece.planned.parameter.decayed]
    if not decayed or not others:
        raise WorkerError(
            f"workload.optimizer.weight_decay={config.weight_decay} would apply to {len(decayed)} of {len(stepped)} tensors: "
            "the roles of this model's parameters are wrong."
        )
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.b1, config.b2), eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def square_sum(gradients: Sequence[Tensor], counted: Tensor) -> Tensor:
    """Sum of squares of those gradients that this device counts (1 in `counted`, 0 elsewhere), float64."""
    parts = [_short_parts(gradient) for gradient in gradients]
    norms = torch.stack(torch._foreach_norm([part for some in parts for part in some], 2, torch.float32)).double()
    numbers = torch.tensor([len(some) for some in parts], device=counted.device)
    return (norms.square() * counted.repeat_interleave(numbers)).sum()


def _short_parts(x: Tensor) -> tuple[Tensor, ...]:
    """On a CPU torch adds squares up in a few float32 numbers: of 6 million elements a norm is 2e-4 too small, of these 1e-6."""
    return x.flatten().split(LONGEST_SUM) if x.device.type == "cpu" and x.numel() > LONGEST_SUM else (x,)


def scale_gradients(gradients: Sequence[Tensor], norm: Tensor, count: Tensor, clip: float | None) -> None:
    """Turn sums over `count` tokens into means, and clip them to a global norm; `norm` is that of the means, before clipping."""
    factor = 1.0 / count
    if clip is not None:
        factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(list(gradients), factor.to(gradients[0].dtype))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state on this device, the step counts left out."""
    values = (x for state in optimizer.state.values() for name, x in state.items() if name != "step")
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor))
