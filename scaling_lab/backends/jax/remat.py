"""Activation checkpointing of one layer: what the backward pass finds saved, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

#: Names that `attention` gives to what its backward pass needs, so that `dots` need not repeat the attention.
ATTENTION_OUTPUT, ATTENTION_NORMALISER = "attention_output", "attention_normaliser"


def rematerialise(layer: Callable[..., Any], remat: Literal["none", "dots", "full"], *, scanned: bool) -> Callable[..., Any]:
    """The layer, saving everything (`none`), only outputs of products (`dots`) or only its input (`full`)."""
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    products = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(ATTENTION_OUTPUT, ATTENTION_NORMALISER),
    )
    policy = products if remat == "dots" else policies.nothing_saveable
    # Inside a scan the loop itself keeps the two passes apart; the barriers that prevent_cse adds would only cost time.
    return jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)
