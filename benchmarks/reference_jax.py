"""Reference: a Llama-style training step in JAX alone, in one file.

This is what `scaling_lab` is measured against. It imports nothing from the package and shares no code with it. It is
frozen: written without sight of the package, committed before it and not tuned since, so that a ratio means something.

The model is a pre-norm decoder: RMSNorm, rotary positions in the half-split ("rotate_half") pairing, grouped-query
attention, SwiGLU, no biases, untied head, float32. The loss is the sum of the cross-entropies of the labels that are
not -1, divided by their number. AdamW by hand: matrices decay (the embedding and the head too), norms do not.

Shapes: B batch, T sequence, E embed, H heads, K kv_heads, G = H / K, D head_dim, F mlp, V vocab, L layers.

    python benchmarks/reference_jax.py --size S --batch 4 --sequence 512 --steps 20 [--scan]
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

EPS, THETA = 1e-5, 10000.0
B1, B2, ADAM_EPS, DECAY, CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0


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


def init(size, seed, *, scan=False):
    """The training state. `scan` must be the one given to `make_step`; the weights are the same either way."""
    e, f, q, kv = size.embed, size.mlp, size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = {"wq": (e, q), "wk": (e, kv), "wv": (e, kv), "wo": (q, e), "gate": (e, f), "up": (e, f), "down": (f, e)}

    def normal(key, shape):
        return 0.02 * jax.random.normal(key, shape, jnp.float32)

    def layer(key):
        keys = jax.random.split(key, len(shapes))
        weights = {name: normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
        return weights | {"attn_norm": jnp.ones(e), "mlp_norm": jnp.ones(e)}

    keys = jax.random.split(jax.random.key(seed), size.layers + 2)
    layers = [layer(key) for key in keys[2:]]
    params = {
        "embed": normal(keys[0], (size.vocab, e)),
        "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers) if scan else layers,
        "norm": jnp.ones(e),
        "head": normal(keys[1], (e, size.vocab)),
    }
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return {"params": params, "mu": zeros(params), "nu": zeros(params), "count": jnp.zeros((), jnp.int32)}


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * scale


def rope_tables(sequence, head_dim):
    frequency = THETA ** (-np.arange(0, head_dim, 2) / head_dim)  # (D/2,)
    angle = np.arange(sequence)[:, None, None] * frequency  # (T, 1, D/2)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rope(x, cos, sin):  # x: (B, T, heads, D)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def plain_attention(q, k, v):  # q: (B, T, H, D), k and v: (B, T, K, D) -> (B, T, H, D)
    t, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))  # (B, H, T, D)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    out = jnp.einsum("bhts,bhsd->bhtd", weights, v) / weights.sum(axis=-1, keepdims=True)
    return out.swapaxes(1, 2)


ATTENTION = {"fused": functools.partial(jax.nn.dot_product_attention, is_causal=True), "plain": plain_attention}


def block(size, attend, cos, sin, x, w):  # x: (B, T, E)
    b, t, _ = x.shape
    y = rms_norm(x, w["attn_norm"])
    q, k, v = ((y @ w[name]).reshape(b, t, -1, size.head_dim) for name in ("wq", "wk", "wv"))
    x = x + attend(rope(q, cos, sin), rope(k, cos, sin), v).reshape(b, t, -1) @ w["wo"]
    y = rms_norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def loss_fn(params, tokens, labels, size, attend):  # tokens and labels: (B, T) integers; a label of -1 does not count
    cos, sin = rope_tables(tokens.shape[1], size.head_dim)
    layer = functools.partial(block, size, attend, cos, sin)
    x = params["embed"][tokens]  # (B, T, E)
    if isinstance(params["layers"], dict):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
    else:
        for w in params["layers"]:
            x = layer(x, w)
    logits = rms_norm(x, params["norm"]) @ params["head"]  # (B, T, V)
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]  # (B, T)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    counted = labels != -1
    return jnp.where(counted, losses, 0.0).sum() / counted.sum()


def adamw(state, grads, lr):
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    clip = jnp.minimum(1.0, CLIP / (norm + 1e-6))
    count = state["count"] + 1
    step_size, nu_scale = lr / (1 - B1**count), 1 / (1 - B2**count)

    def update(path, p, g, mu, nu):
        decay = 0.0 if path[-1].key.endswith("norm") else DECAY
        g = g * clip
        mu, nu = B1 * mu + (1 - B1) * g, B2 * nu + (1 - B2) * g * g
        return p * (1 - lr * decay) - step_size * mu / (jnp.sqrt(nu * nu_scale) + ADAM_EPS), mu, nu

    trees = state["params"], grads, state["mu"], state["nu"]
    updated = jax.tree_util.tree_map_with_path(update, *trees)
    params, mu, nu = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), updated)
    return {"params": params, "mu": mu, "nu": nu, "count": count}, norm


def make_step(size, *, scan, devices=1, attention="fused", lr=3e-4):
    """A jitted step, (state, tokens, labels) -> (state, {"loss", "grad_norm"}), which consumes the state it is given.

    With several devices the batch is split over them and the state is repeated on each. `grad_norm` is before clipping.
    """
    attend = ATTENTION[attention]

    def step(state, tokens, labels):
        if isinstance(state["params"]["layers"], dict) != scan:
            raise TypeError("init and make_step must be given the same `scan`")
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens, labels, size, attend)
        state, norm = adamw(state, grads, lr)
        return state, {"loss": loss, "grad_norm": norm}

    if devices == 1:
        return jax.jit(step, donate_argnums=0)
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    same, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(step, donate_argnums=0, in_shardings=(same, split, split), out_shardings=same)


def measure(size, args):
    state = init(size, 0, scan=args.scan)
    step = make_step(size, scan=args.scan, devices=args.devices, attention=args.attention)
    rows = np.random.default_rng(0).integers(0, size.vocab, (args.batch, args.sequence + 1), dtype=np.int32)
    tokens, labels = rows[:, :-1], rows[:, 1:]
    jax.block_until_ready(state)
    start = time.perf_counter()
    step = step.lower(state, tokens, labels).compile()
    compile_seconds = time.perf_counter() - start
    seconds, cpu = [], []
    for _ in range(args.steps + 1):  # the first step is warm-up
        wall, used = time.perf_counter(), time.process_time()
        state, metrics = step(state, tokens, labels)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - used)
    return {
        "median_step_seconds": statistics.median(seconds[1:]),
        "tokens_per_s": tokens.size / statistics.median(seconds[1:]),
        "compile_seconds": compile_seconds,
        "first_step_seconds": compile_seconds + seconds[0],
        "cpu_seconds_per_step": statistics.median(cpu[1:]),
        "last_loss": loss,
        "load": os.getloadavg()[0],
    }


def main():
    parser = argparse.ArgumentParser(description="Time the JAX reference step; prints one JSON line.")
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--scan", action="store_true", help="scan over stacked layers instead of unrolling them")
    parser.add_argument("--attention", choices=ATTENTION, default="fused")
    parser.add_argument("--devices", type=int, default=1, help="data parallel over this many (simulated) devices")
    args = parser.parse_args()
    if args.devices > 1:
        jax.config.update("jax_num_cpu_devices", args.devices)
    result = measure(dataclasses.replace(SIZES[args.size], vocab=args.vocab), args)
    print(json.dumps({"reference": "jax", **vars(args), **result}))


if __name__ == "__main__":
    main()
