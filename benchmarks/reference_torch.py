"""Reference: a Llama-style training step in plain eager PyTorch, in one file.

This is what `scaling_lab` is measured against. It imports nothing from the package and shares no code with it. It is
frozen: written without sight of the package, committed before it and not tuned since, so that a ratio means something.

The model and the step are those of `reference_jax.py`: a pre-norm decoder with RMSNorm, rotary positions in the
half-split ("rotate_half") pairing, grouped-query attention, SwiGLU, no biases, untied head, float32. The loss is the
sum of the cross-entropies of the labels that are not -1, divided by their number. AdamW decays matrices (the embedding
and the head too), not norms.

Shapes: B batch, T sequence, E embed, H heads, K kv_heads, D head_dim, F mlp, V vocab.

    python benchmarks/reference_torch.py --size S --batch 4 --sequence 512 --steps 20 [--compile]
"""

import argparse
import dataclasses
import json
import os
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

EPS, THETA = 1e-5, 10000.0
BETAS, ADAM_EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int = 8192


SIZES = {"S": Size(4, 256, 8, 4, 32, 688), "M": Size(8, 512, 8, 4, 64, 1376)}


def rope_tables(sequence, head_dim):
    frequency = THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # (D/2,)
    angle = torch.arange(sequence, dtype=torch.float64)[:, None] * frequency  # (T, D/2)
    return angle.cos().float(), angle.sin().float()


def rope(x, cos, sin):  # x: (B, heads, T, D)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.head_dim, self.groups = size.head_dim, size.heads // size.kv_heads
        self.wq = nn.Linear(size.embed, size.heads * size.head_dim, bias=False)
        self.wk = nn.Linear(size.embed, size.kv_heads * size.head_dim, bias=False)
        self.wv = nn.Linear(size.embed, size.kv_heads * size.head_dim, bias=False)
        self.wo = nn.Linear(size.heads * size.head_dim, size.embed, bias=False)

    def forward(self, x, cos, sin):  # x: (B, T, E)
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups > 1)  # (B, H, T, D)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(size.embed, eps=EPS), nn.RMSNorm(size.embed, eps=EPS)
        self.attention = Attention(size)
        self.gate = nn.Linear(size.embed, size.mlp, bias=False)
        self.up = nn.Linear(size.embed, size.mlp, bias=False)
        self.down = nn.Linear(size.mlp, size.embed, bias=False)

    def forward(self, x, cos, sin):  # x: (B, T, E)
        x = x + self.attention(self.attn_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocab, size.embed)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.embed, eps=EPS)
        self.head = nn.Linear(size.embed, size.vocab, bias=False)
        self.tables = {}

    def forward(self, tokens, labels):  # (B, T) int64 each; a label of -1 does not count
        x = self.embed(tokens)  # (B, T, E)
        t = tokens.shape[1]
        if t not in self.tables:
            self.tables[t] = rope_tables(t, self.size.head_dim)
        cos, sin = self.tables[t]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def init(size, seed, *, lr=3e-4):
    """The model and its optimizer."""
    torch.manual_seed(seed)
    model = Model(size)
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.02)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=ADAM_EPS, fused=True)


def grad_norm(model):
    """The global norm, row by row: over a whole matrix torch's float32 norm on a CPU is 5e-5 off (S, the embedding)."""
    rows = [torch.linalg.vector_norm(p.grad, dim=-1).flatten() for p in model.parameters()]
    return torch.linalg.vector_norm(torch.cat(rows))


def make_step(model, optimizer, *, compile=False):
    """A step, (tokens, labels) -> {"loss", "grad_norm"}, that updates the model. `grad_norm` is before clipping."""
    forward = torch.compile(model) if compile else model

    def step(tokens, labels):
        loss = forward(tokens, labels)
        loss.backward()
        norm = grad_norm(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), "grad_norm": norm}

    return step


def measure(size, args):
    step = make_step(*init(size, 0), compile=args.compile)
    rows = np.random.default_rng(0).integers(0, size.vocab, (args.batch, args.sequence + 1))
    tokens, labels = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
    seconds, cpu = [], []
    for _ in range(args.steps + 2):  # the first step compiles, the second is warm-up
        wall, used = time.perf_counter(), time.process_time()
        loss = step(tokens, labels)["loss"].item()
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - used)
    median = statistics.median(seconds[2:])
    return {
        "median_step_seconds": median,
        "tokens_per_s": tokens.numel() / median,
        "compile_seconds": max(0.0, seconds[0] - median),
        "first_step_seconds": seconds[0],
        "cpu_seconds_per_step": statistics.median(cpu[2:]),
        "last_loss": loss,
        "load": os.getloadavg()[0],
    }


def main():
    parser = argparse.ArgumentParser(description="Time the PyTorch reference step; prints one JSON line.")
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward and backward pass")
    args = parser.parse_args()
    result = measure(dataclasses.replace(SIZES[args.size], vocab=args.vocab), args)
    print(json.dumps({"reference": "torch", **vars(args), **result}))


if __name__ == "__main__":
    main()
