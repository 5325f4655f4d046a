"""Activation checkpointing of one layer: what the backward pass finds saved, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def rematerialise(layer: Callable[..., Any], remat: Literal["none", "dots", "full"]) -> Callable[..., Any]:
    """The layer, saving everything (`none`), only outputs of products and of attention (`dots`) or only its input (`full`)."""
    if remat == "none":
        return layer
    # Nothing here draws random numbers, so their state need not be kept.
    again = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
    return again if remat == "full" else partial(again, context_fn=_save_products)


def _save_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _products() else CheckpointPolicy.PREFER_RECOMPUTE


def _products() -> tuple[Any, ...]:
    """Products with weights, those of experts too, and attention in each of its kernels."""
    aten = torch.ops.aten
    return (
        aten.mm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    )
