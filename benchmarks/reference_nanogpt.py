"""Reference: a plain nanoGPT-style trainer in PyTorch, in one file.

This is what the training runs of `scaling_lab` are measured against for quality. It imports nothing from the package
and shares no code with it. It is frozen: written without sight of the package, committed before it, not tuned since.

A byte-level GPT-2: LayerNorm with bias, learned positions, tanh-approximated GELU, biases everywhere but in the head,
which is tied to the embedding. Trained on random windows of the first 90 % of the text; the last 10 % are for
validation, all of which is scored in windows that do not overlap. The text is Python's own help topics (of one Python
version: compare `text_sha256`), or `--text FILE`. `train_loss` is the mean of the last 100 steps.

Shapes: B batch, T context, E width, H heads, V vocab (256 bytes).

    python benchmarks/reference_nanogpt.py [--text FILE] [--steps 2000] [--seed 0]
"""

import argparse
import dataclasses
import hashlib
import json
import math
import pathlib
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    vocab: int = 256
    batch: int = 12
    steps: int = 2000
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 100
    betas: tuple = (0.9, 0.99)
    decay: float = 0.1
    clip: float = 1.0


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.attention_out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.up, self.mlp_out = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)

    def forward(self, x):  # x: (B, T, E)
        b, t, e = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, e // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, E/H) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(b, t, e))
        return x + self.mlp_out(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c.vocab, c.width), nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith("_out.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens):  # (B, T) -> logits (B, T, V)
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def default_text():
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode()


def learning_rate(c, step):
    """Linear warm-up, then a cosine down to `min_lr` at the last step (nanoGPT's formula)."""
    if step < c.warmup:
        return c.lr * (step + 1) / (c.warmup + 1)
    progress = (step - c.warmup) / max(1, c.steps - c.warmup)
    return c.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (c.lr - c.min_lr)


def loss_of(model, x, y, reduction="mean"):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model, data, context, rows=64):
    """Mean loss of every byte of `data` but the first, in windows of `context` that do not overlap."""
    total, whole = 0.0, (len(data) - 1) // context * context
    inputs, targets = data[:whole].view(-1, context), data[1 : whole + 1].view(-1, context)
    for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
        total += loss_of(model, x, y, "sum").item()
    if whole < len(data) - 1:  # the last, shorter window
        total += loss_of(model, data[None, whole:-1], data[None, whole + 1 :], "sum").item()
    return total / (len(data) - 1)


def train(text, config=Config(), seed=0, log=None):
    """Train on bytes; returns the numbers that `main` prints. `log(step, loss)` is called at every 100th step."""
    c = config
    data = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    data, held_out = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = GPT(c)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": c.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, fused=True)
    windows = data.unfold(0, c.context + 1, 1)  # (every start, T + 1), a view
    losses, start = [], time.perf_counter()
    for step in range(c.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(c, step)
        rows = windows[torch.from_numpy(rng.integers(0, len(windows), c.batch))]  # (B, T + 1)
        loss = loss_of(model, rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if log and step % 100 == 0:
            log(step, losses[-1])
    seconds = time.perf_counter() - start
    return {
        "val_loss": evaluate(model, held_out, c.context),
        "train_loss": statistics.mean(losses[-100:]),
        "steps": c.steps,
        "tokens_per_s": c.steps * c.batch * c.context / seconds,
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "text_bytes": len(text),
    }


def main():
    parser = argparse.ArgumentParser(description="Train the nanoGPT-style reference; prints one JSON line.")
    parser.add_argument("--text", type=pathlib.Path, help="file to train on (default: Python's help topics)")
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="also print a loss every 100 steps")
    args = parser.parse_args()
    text = args.text.read_bytes() if args.text else default_text()
    log = (lambda step, loss: print(f"step {step}: {loss:.4f}", flush=True)) if args.verbose else None
    print(json.dumps(train(text, Config(steps=args.steps), args.seed, log)))


if __name__ == "__main__":
    main()
