"""The decoder as plain modules: equations only. Where things lie is asked of `Placement`; values are made elsewhere.

Modules hold parameters whose dotted paths are the names in `models.decoder`, described (shape and dtype, on the meta device) before
any has a value; a parameter of `layers` is one tensor per layer, without the dim of the stack.
Shapes: b batch, t sequence, e embed, h heads or kv_heads, d head_dim, f mlp, v vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scaling_lab.backends.torch import context
from scaling_lab.backends.torch.attention import attend
from scaling_lab.backends.torch.loss import cross_entropy_sum
from scaling_lab.backends.torch.products import lookup, product, use
from scaling_lab.backends.torch.remat import rematerialise
from scaling_lab.backends.torch.rotary import rotary, rotary_tables
from scaling_lab.backends.torch.runtime import World
from scaling_lab.backends.torch.sharding import Placement, dtype_of, on_shards
from scaling_lab.backends.torch.weights import name_of
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Found, make_plan

RESIDUAL = ("batch", "residual_sequence", "embed")
INPUT = ("batch", "sequence", "embed")
QUERY = ("batch", "sequence", "heads", "head_dim")
KEY_VALUE = ("batch", "sequence", "kv_heads", "head_dim")
HIDDEN = ("batch", "sequence", "mlp")
LOGITS = ("batch", "sequence", "vocab")


class Decoder(nn.Module):
    """tokens (b, t) -> logits (b, t, v), or with labels (b, t) the sum of their cross-entropies.

    documents, positions (b, t): of packed rows, see `contract.Batch`.
    """

    def __init__(self, experiment: Experiment, on: Placement):
        super().__init__()
        self.experiment, self.on = experiment, on
        self.embed = Embedding(on)
        self.layers = nn.ModuleList(Layer(experiment, on) for _ in range(experiment.model.layers))
        self.final_norm = Norm(experiment, on, "final_norm")
        self.head = Head(on)
        self.tables: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens, labels=None, documents=None, positions=None):
        tables = self._tables(positions)
        positions = self.on.positions if positions is None else positions
        x = self.on.constrain(self.embed(tokens, positions), RESIDUAL)  # (b, t, e)
        for layer in self.layers:
            x = layer(x, tables, documents)
        return self.finish(x, labels)

    def finish(self, x, labels):
        """What follows the layers; the loss is part of it so that a compiler can join it to the product before."""
        x = self.on.constrain(self.final_norm(x), INPUT)
        table = self.embed.tokens if self.experiment.model.tied_head else None
        logits = self.on.constrain(self.head(x, table), LOGITS)  # (b, t, v)
        return logits if labels is None else cross_entropy_sum(logits, labels)

    def compile_parts(self) -> None:
        """Compile each layer, and what follows them unless the vocabulary is split: its exchange is not for the compiler."""
        for layer in self.layers:
            layer.compile()
        if self.on.compute_mesh is None:
            self.finish = torch.compile(self.finish)  # type: ignore[method-assign]

    def _tables(self, positions: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """The rotary tables of this process's tokens, made once but for packed rows."""
        if self.experiment.model.positions == "rope" and positions is not None:
            return rotary_tables(self.experiment.model, positions)
        if self.experiment.model.positions == "rope" and self.tables is None:
            self.tables = rotary_tables(self.experiment.model, self.on.positions)
        return self.tables


class Embedding(nn.Module):
    """tokens (b, t) -> (b, t, e)."""

    tokens: nn.Parameter
    positions: nn.Parameter | None

    def __init__(self, on: Placement):
        super().__init__()
        self.on = on
        for name in ("tokens", "positions"):
            setattr(self, name, described(on, f"embed.{name}"))

    def forward(self, tokens, positions):
        x = self.on.constrain(lookup(self.on, self.tokens, tokens), RESIDUAL)
        if self.positions is None:
            return x
        return x + self.on.constrain(lookup(self.on, self.positions, positions), RESIDUAL[-positions.ndim - 1 :])


class Layer(nn.Module):
    """x (b, t, e) -> x (b, t, e)."""

    def __init__(self, experiment: Experiment, on: Placement):
        super().__init__()
        self.on = on
        self.attention_norm = Norm(experiment, on, "layers.attention_norm")
        self.attention = Attention(experiment, on)
        self.mlp_norm = Norm(experiment, on, "layers.mlp_norm")
        self.mlp = Mlp(on)
        self.compute = rematerialise(self.equations, experiment.workload.remat)

    def forward(self, x, tables, documents):
        return self.compute(x, tables, documents)

    def equations(self, x, tables, documents):
        """The layer itself."""
        y = self.on.constrain(self.attention_norm(x), INPUT)
        x = x + self.attention(y, tables, documents)
        y = self.on.constrain(self.mlp_norm(x), INPUT)
        return x + self.mlp(y)


class Norm(nn.Module):
    """x (b, t, e) -> (b, t, e), statistics in float32: RMSNorm, or LayerNorm where the model says so."""

    scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, experiment: Experiment, on: Placement, name: str):
        super().__init__()
        self.on, self.eps = on, experiment.model.norm_eps
        for part in ("scale", "bias"):
            setattr(self, part, described(on, f"{name}.{part}"))

    def forward(self, x):
        return on_shards(
            self.normalise, x, use(self.on, self.scale), self.bias if self.bias is None else use(self.on, self.bias)
        )

    def normalise(self, x, scale, bias):
        """The norm where the embed dim is whole."""
        norm = F.rms_norm if bias is None else F.layer_norm
        y = norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * scale
        return y if bias is None else y + bias


class Attention(nn.Module):
    """x (b, t, e) -> (b, t, e): query head h attends with key and value head h // (heads / kv_heads)."""

    query: nn.Parameter
    key: nn.Parameter
    value: nn.Parameter
    output: nn.Parameter
    query_bias: nn.Parameter | None
    key_bias: nn.Parameter | None
    value_bias: nn.Parameter | None
    output_bias: nn.Parameter | None

    def __init__(self, experiment: Experiment, on: Placement):
        super().__init__()
        self.on, self.form = on, experiment.backend.attention
        for name in ("query", "key", "value", "output"):
            setattr(self, name, described(on, f"layers.attention.{name}"))
            setattr(self, f"{name}_bias", described(on, f"layers.attention.{name}_bias"))

    def forward(self, x, tables, documents):
        on = self.on
        query = on.constrain(_plus(on, product(on, "bte,ehd->bthd", x, self.query), self.query_bias), QUERY)
        key = on.constrain(_plus(on, product(on, "bte,ehd->bthd", x, self.key), self.key_bias), KEY_VALUE)
        value = on.constrain(_plus(on, product(on, "bte,ehd->bthd", x, self.value), self.value_bias), KEY_VALUE)
        mixed = on_shards(
            lambda q, k, v: self.mix(q, k, v, tables, documents), query, *_match_heads(on, query, key, value)
        )  # (b, t, h, d)
        y = on.constrain(product(on, "bthd,hde->bte", mixed, self.output), RESIDUAL)
        return _plus(on, y, self.output_bias)

    def mix(self, query, key, value, tables, documents):
        """Attention of the heads on one device, queries and keys turned by their positions."""
        if tables is not None:
            query, key = rotary(query, tables), rotary(key, tables)
        if self.on.plan.sequence.parts == 1:
            return attend(query, key, value, documents, form=self.form)
        return context.attend(query, key, value, documents, form=self.form, on=self.on)


class Mlp(nn.Module):
    """x (b, t, e) -> (b, t, e): SwiGLU where there is a gate, else GELU in GPT-2's tanh form."""

    up: nn.Parameter
    down: nn.Parameter
    gate: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    gate_bias: nn.Parameter | None

    def __init__(self, on: Placement):
        super().__init__()
        self.on = on
        for name in ("gate", "gate_bias", "up", "up_bias", "down", "down_bias"):
            setattr(self, name, described(on, f"layers.mlp.{name}"))

    def forward(self, x):
        on = self.on
        hidden = on.constrain(_plus(on, product(on, "bte,ef->btf", x, self.up), self.up_bias), HIDDEN)  # (b, t, f)
        if self.gate is None:
            hidden = F.gelu(hidden, approximate="tanh")
        else:
            gate = on.constrain(_plus(on, product(on, "bte,ef->btf", x, self.gate), self.gate_bias), HIDDEN)
            hidden = hidden * F.silu(gate)
        y = on.constrain(product(on, "btf,fe->bte", hidden, self.down), RESIDUAL)
        return _plus(on, y, self.down_bias)


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


def described(on: Placement, name: str) -> nn.Parameter | None:
    """A parameter without a value yet, in its compute layout, or None where the model has none of that name."""
    planned = on.described.get(name)
    if planned is None:
        return None
    shape, layout = planned.parameter.shape, planned.compute
    if planned.parameter.stacked:
        shape, layout = shape[1:], layout.drop_dim(0)
    local = torch.empty(layout.local_shape(shape, on.plan.mesh), dtype=dtype_of(on.precision.params), device="meta")
    if on.compute_mesh is None:
        return nn.Parameter(local)
    return nn.Parameter(DTensor.from_local(local, on.compute_mesh, on.placements(layout), run_check=False))


def _plus(on: Placement, x: Tensor, bias: nn.Parameter | None) -> Tensor:
    return x if bias is None else x + use(on, bias)


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
        return decoder(torch.from_numpy(tokens.astype(np.int64))).float().numpy()
