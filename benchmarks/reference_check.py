"""Reference: that `reference_jax.py` and `reference_torch.py` are the same computation.

Both get the same weights and batches and take three steps; loss and gradient norm must agree to 1e-5 (relative). Part
of the frozen references: it imports nothing from `scaling_lab`.

    python benchmarks/reference_check.py --check
"""

import argparse
import itertools
import json
import sys

import jax
import numpy as np
import reference_jax
import reference_torch
import torch

TOLERANCE = 1e-5


def load(model, params):
    """Copy JAX parameters (`scan=False`) into the torch model: its matrices are (out, in), those of JAX (in, out)."""

    def copy(target, value):
        with torch.no_grad():
            target.copy_(torch.from_numpy(np.array(value)))

    copy(model.embed.weight, params["embed"])
    copy(model.norm.weight, params["norm"])
    copy(model.head.weight, params["head"].T)
    for layer, weights in zip(model.layers, params["layers"], strict=True):
        for name, value in weights.items():
            if name.endswith("norm"):
                copy(getattr(layer, name).weight, value)
            else:
                owner = layer.attention if name in ("wq", "wk", "wv", "wo") else layer
                copy(getattr(owner, name).weight, value.T)


def batches(size, batch, sequence, steps):
    """Random tokens (steps, B, T) and labels of which ragged tails do not count."""
    rows = np.random.default_rng(1).integers(0, size.vocab, (steps, batch, sequence + 1), dtype=np.int32)
    tokens, labels = rows[..., :-1], rows[..., 1:].copy()
    for row in range(batch):
        labels[:, row, sequence - row * (sequence // batch) :] = -1
    return tokens, labels


def run_jax(size, tokens, labels, lr, **options):
    state = reference_jax.init(size, 0, scan=options["scan"])
    step = reference_jax.make_step(size, lr=lr, **options)
    for x, y in zip(tokens, labels, strict=True):
        state, metrics = step(state, x, y)
        yield float(metrics["loss"]), float(metrics["grad_norm"])


def run_torch(size, tokens, labels, lr, compile):
    model, optimizer = reference_torch.init(reference_torch.Size(**vars(size)), 0, lr=lr)
    load(model, reference_jax.init(size, 0)["params"])
    step = reference_torch.make_step(model, optimizer, compile=compile)
    for x, y in zip(tokens, labels, strict=True):
        metrics = step(torch.from_numpy(x).long(), torch.from_numpy(y).long())
        yield metrics["loss"].item(), metrics["grad_norm"].item()


def check(size, *, batch=4, sequence=64, steps=3, lr=3e-4, devices=2, compile=False):
    """All variants against torch eager: a list of (name, losses and norms, largest relative difference).

    `lr` is the references' own. Adam's first steps are lr * sign(gradient), so at 1e-2 the rounding of gradients near
    zero alone moves the norm by 7e-5 in float32; cast to float64, plain attention agrees to 1e-14 there too.
    """
    data = *batches(size, batch, sequence, steps), lr
    runs = {"torch eager": np.array(list(run_torch(size, *data, False)))}  # (steps, 2)
    for attention, scan in itertools.product(("fused", "plain"), (False, True)):
        options = {"attention": attention, "scan": scan}
        runs[f"jax {attention} {'scan' if scan else 'unrolled'}"] = np.array(list(run_jax(size, *data, **options)))
    runs[f"jax fused unrolled on {devices} devices"] = np.array(list(run_jax(size, *data, scan=False, devices=devices)))
    if compile:
        runs["torch compiled"] = np.array(list(run_torch(size, *data, True)))
    base = runs["torch eager"]
    return [(name, values, float(np.max(np.abs(values / base - 1)))) for name, values in runs.items()]


def main():
    parser = argparse.ArgumentParser(description="Check that the JAX and torch references agree; one JSON line each.")
    parser.add_argument("--check", action="store_true", help="what this file does; accepted so that calls say so")
    parser.add_argument("--size", choices=reference_jax.SIZES, default="S")
    parser.add_argument("--compile", action="store_true", help="check torch.compile as well (slow)")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    rows = check(reference_jax.SIZES[args.size], compile=args.compile)
    for name, values, gap in rows:
        print(json.dumps({"run": name, "loss": values[:, 0].tolist(), "grad_norm": values[:, 1].tolist(), "gap": gap}))
    worst = max(gap for *_, gap in rows)
    print(json.dumps({"worst_gap": worst, "tolerance": TOLERANCE, "agree": worst <= TOLERANCE}))
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
