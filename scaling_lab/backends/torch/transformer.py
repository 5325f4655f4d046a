"""The decoder as plain modules: equations only. Where things lie is asked of `Placement`; values are made elsewhere.

Modules hold parameters whose dotted paths are the names in `models.decoder`, described (shape and dtype, on the meta device) before
any has a value; a parameter of a stack is one tensor per layer, without the dim of the stack.
Shapes: b batch, t sequence, e embed, h heads or kv_heads, d head_dim, f mlp, v vocab.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scaling_lab.backends.torch import context
from scaling_lab.backends.torch.latent import LatentAttention
from scaling_lab.backends.torch.loss import cross_entropy_sum
from scaling_lab.backends.torch.mlp import Mlp
from scaling_lab.backends.torch.moe import Moe
from scaling_lab.backends.torch.norm import Norm, rms_norm
from scaling_lab.backends.torch.products import described, lookup, plus, product, use
from scaling_lab.backends.torch.remat import rematerialise
from scaling_lab.backends.torch.rotary import rotary, rotary_tables
from scaling_lab.backends.torch.runtime import World
from scaling_lab.backends.torch.sharding import RESIDUAL, Placement, on_shards
from scaling_lab.backends.torch.weights import name_of
from scaling_lab.models.decoder import stacks
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Found, make_plan

INPUT = ("batch", "sequence", "embed")
QUERY = ("batch", "sequence", "heads", "head_dim")
KEY_VALUE = ("batch", "sequence", "kv_heads", "head_dim")
LOGITS = ("batch", "sequence", "vocab")


class Decoder(nn.Module):
    """x, tokens (b, t) -> logits (b, t, v), or with labels (b, t) the sum of their cross-entropies, and what routers report.

    The latter is summed over layers, see `Moe`; None without experts.
    documents, positions (b, t): of packed rows, see `contract.Batch`.
    Of a pipeline it has one chunk of the layers: without the first of them it takes what the chunk before gives, without the
    last it gives the like: the residual stream, and what routers have reported so far.
    """

    def __init__(self, experiment: Experiment, on: Placement, chunk: int = 0):
        super().__init__()
        self.experiment, self.on, model = experiment, on, experiment.model
        chunks = on.plan.pipeline.chunks
        self.first, self.last = chunk == 0, chunk == len(chunks) - 1
        # A tied table is the head's weight, so it is needed at both ends.
        tables = {"tokens", "positions"} if self.first else {"tokens"} if self.last and model.tied_head else set()
        self.embed = Embedding(on, tables)
        for stack, numbers in stacks(model).items():
            own = [number - numbers.start for number in numbers if number in chunks[chunk]]
            setattr(self, stack, nn.ModuleDict({str(index): Layer(experiment, on, stack) for index in own}))
        self.final_norm: Any = Norm(experiment, on, "final_norm") if self.last else None
        self.head: Any = Head(on) if self.last else None
        self.tables: tuple[Tensor, Tensor] | None = None

    def forward(self, x, reported=None, labels=None, documents=None, positions=None):
        tables = self._tables(positions)
        positions = self.on.positions if positions is None else positions
        if self.first:
            x = self.on.constrain(self.embed(x, positions), RESIDUAL)  # (b, t, e)
        for layer in self.every_layer():
            x, more = layer(x, tables, documents)
            reported = more if reported is None else reported + more
        if not self.last:
            return x, reported
        found = self.finish(x, labels)
        return found if labels is None else (found, reported)

    def finish(self, x, labels):
        """What follows the layers; the loss is part of it so that a compiler can join it to the product before."""
        x = self.on.constrain(self.final_norm(x), INPUT)
        if labels is None:
            return self.logits(x)
        chunks = self.experiment.workload.loss_chunks
        if chunks == 1:
            return self.loss(x, labels)
        parts = zip(x.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True)
        return sum(checkpoint(self.loss, *part, use_reentrant=False) for part in parts)

    def logits(self, x):
        """x (b, t, e) -> (b, t, v)."""
        table = self.embed.tokens if self.experiment.model.tied_head else None
        return self.on.constrain(self.head(x, table), LOGITS)

    def loss(self, x, labels):
        """The sum of cross-entropies; in a checkpoint, logits are made again in the backward pass."""
        return cross_entropy_sum(self.logits(x), labels, self.experiment.model.vocab)

    def every_layer(self) -> list[Layer]:
        """The layers of all stacks in order."""
        return [layer for stack in stacks(self.experiment.model) for layer in getattr(self, stack).values()]

    def compile_parts(self) -> None:
        """Compile each layer, and what follows them unless the vocabulary is split: its exchange is not for the compiler.

        Nor are experts, whose shapes differ from step to step.
        """
        for layer in self.every_layer():
            for module in layer.apart():
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
            layer.compile()
        if self.last and self.on.compute_mesh is None:
            self.finish = torch.compile(self.finish)  # type: ignore[method-assign]

    def _tables(self, positions: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """The rotary tables of this process's tokens, made once but for packed rows."""
        if self.experiment.model.positions == "rope" and positions is not None:
            return rotary_tables(self.experiment.model, positions)
        if self.experiment.model.positions == "rope" and self.tables is None:
            self.tables = rotary_tables(self.experiment.model, self.on.positions)
        return self.tables


class Embedding(nn.Module):
    """tokens (b, t) -> (b, t, e). tables: those of its parameters that are held here."""

    tokens: Any
    positions: Any

    def __init__(self, on: Placement, tables: Collection[str]):
        super().__init__()
        self.on = on
        for name in Embedding.__annotations__:
            setattr(self, name, described(on, f"embed.{name}") if name in tables else None)

    def forward(self, tokens, positions):
        x = self.on.constrain(lookup(self.on, self.tokens, tokens), RESIDUAL)
        if self.positions is None:
            return x
        return x + self.on.constrain(lookup(self.on, self.positions, positions), RESIDUAL[-positions.ndim - 1 :])


class Layer(nn.Module):
    """x (b, t, e) -> x (b, t, e), and what a router reports."""

    def __init__(self, experiment: Experiment, on: Placement, stack: str):
        super().__init__()
        self.on, model = on, experiment.model
        self.attention_norm = Norm(experiment, on, f"{stack}.attention_norm")
        self.attention = (LatentAttention if model.latent else Attention)(experiment, on, f"{stack}.attention.")
        self.mlp_norm = Norm(experiment, on, f"{stack}.mlp_norm")
        mixture = model.moe is not None and stack == "layers"
        self.mlp: Any = None if mixture else Mlp(on, f"{stack}.mlp.")
        self.moe: Any = Moe(experiment, on, f"{stack}.moe.") if mixture else None
        self.compute = rematerialise(self.equations, experiment.workload.remat)

    def forward(self, x, tables, documents):
        return self.compute(x, tables, documents)

    def equations(self, x, tables, documents):
        """The layer itself."""
        y = self.on.constrain(self.attention_norm(x), INPUT)
        x = x + self.attention(y, tables, documents)
        y = self.on.constrain(self.mlp_norm(x), INPUT)
        if self.moe is None:
            return x + self.mlp(y), None
        y, reported = self.moe(y)
        return x + y, reported

    def apart(self) -> tuple[nn.Module, ...]:
        """Modules whose weights may lie on other axes than the rest of the layer."""
        return () if self.moe is None else (self.moe.experts,)


class Attention(nn.Module):
    """x (b, t, e) -> (b, t, e): query head h attends with key and value head h // (heads / kv_heads)."""

    query: Any
    query_bias: Any
    query_norm: Any
    key: Any
    key_bias: Any
    key_norm: Any
    value: Any
    value_bias: Any
    output: Any
    output_bias: Any

    def __init__(self, experiment: Experiment, on: Placement, prefix: str):
        super().__init__()
        self.on, self.form, self.eps = on, experiment.backend.attention, experiment.model.norm_eps
        for name in Attention.__annotations__:
            setattr(self, name, described(on, f"{prefix}{name}"))

    def forward(self, x, tables, documents):
        on = self.on
        query = on.constrain(plus(on, product(on, "bte,ehd->bthd", x, self.query), self.query_bias), QUERY)
        key = on.constrain(plus(on, product(on, "bte,ehd->bthd", x, self.key), self.key_bias), KEY_VALUE)
        value = on.constrain(plus(on, product(on, "bte,ehd->bthd", x, self.value), self.value_bias), KEY_VALUE)
        norms = (None if scale is None else use(on, scale) for scale in (self.query_norm, self.key_norm))
        mixed = on_shards(
            lambda q, k, v, *norms: self.mix(q, k, v, norms, tables, documents),
            query,
            *_match_heads(on, query, key, value),
            *norms,
        )  # (b, t, h, d)
        y = on.constrain(product(on, "bthd,hde->bte", mixed, self.output), RESIDUAL)
        return plus(on, y, self.output_bias)

    def mix(self, query, key, value, norms, tables, documents):
        """Attention of the heads on one device, queries and keys normed where the model says so and turned by their positions."""
        if norms[0] is not None:
            query, key = (rms_norm(x, scale, self.eps) for x, scale in zip((query, key), norms, strict=True))
        if tables is not None:
            query, key = rotary(query, tables), rotary(key, tables)
        return context.attend(query, key, value, documents, form=self.form, on=self.on)


class Head(nn.Module):
    """x (b, t, e) -> logits (b, t, v), with its own weight or the embedding's table."""

    def __init__(self, on: Placement):
        super().__init__()
        self.on = on
        self.weight = described(on, "head.weight")

    def forward(self, x, table):
        if self.weight is None:
            return product(self.on, "bte,ve->btv", x, table)
        return product(self.on, "bte,ev->btv", x, self.weight)


def _match_heads(on: Placement, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the heads that the device's queries read: repeated where heads are split and kv_heads are not."""
    if on.compute_mesh is None or query.placements == key.placements:  # type: ignore[attr-defined]
        return key, value
    group = query.shape[2] // key.shape[2]
    every = (x.unsqueeze(3).expand(-1, -1, -1, group, -1).flatten(2, 3) for x in (key, value))
    key, value = (on.constrain(x, QUERY) for x in every)
    return key, value


def logits(experiment: Experiment, weights: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits (b, t, v), float32, of tokens (b, t) on one device. weights: global arrays by parameter name."""
    ones: dict[str, Any] = dict.fromkeys(experiment.mesh.order, 1)
    alone = replace(experiment.mesh, **ones, devices=1, hosts=1, devices_per_host=None)
    workload = replace(experiment.workload, global_batch=tokens.shape[0], sequence=tokens.shape[1], accumulation=1)
    experiment = replace(experiment, mesh=alone, workload=workload)
    plan = make_plan(experiment, Found("cpu", 1, True, None))
    on = Placement(plan, workload.precision, World(torch.device("cpu"), None, owns_group=False), 0)
    decoder = Decoder(experiment, on).to_empty(device="cpu")
    for path, parameter in decoder.named_parameters():
        name, layer = name_of(path)
        parameter.data.copy_(torch.from_numpy(np.array(weights[name] if layer is None else weights[name][layer])))
    with torch.no_grad():
        found = decoder(torch.from_numpy(tokens.astype(np.int64)))
    return found[..., : experiment.model.vocab].float().numpy()
