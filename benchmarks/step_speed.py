"""The lab's step against the hand-written references, interleaved in one run on one machine.

    python benchmarks/step_speed.py                    # sizes S and M on one device, then the `data` table on 8
    python benchmarks/step_speed.py --sizes S --rounds 3 --tokens 2048

Every variant lives in a process of its own and waits while the others measure. A round gives each variant the same number of
steps in turn; the figure of a round is the median of its steps, and a ratio is the median over rounds of reference time / lab
time within the round, so the machine's drift cancels. Above 1 the lab is faster. Float32, AdamW, clipping, as the references.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

SINGLE = ("reference jax scan", "reference jax unrolled", "reference jax plain unrolled", "lab jax", "lab jax unrolled")
TORCH = ("reference torch", "lab torch")
COMPILED = ("reference torch compiled", "lab torch compiled")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="+", default=["S", "M"])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step on one device, in rows of 512")
    parser.add_argument("--data-tokens", type=int, default=16384, help="tokens of a step of the 8-device comparison")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["jax", "torch", "compiled", "data"])
    options = parser.parse_args()
    if options.variant:
        return serve(json.loads(options.variant))
    for size in options.sizes:
        for group in options.only:
            report(size, group, options)
    return 0


def report(size, group, options):
    """One interleaved comparison, printed."""
    tokens = options.data_tokens if group == "data" else options.tokens
    names = {"jax": SINGLE, "torch": TORCH, "compiled": COMPILED, "data": ("lab jax", "lab jax data 8")}[group]
    variants = [{"name": name, "size": size, "batch": tokens // 512, "sequence": 512} for name in names]
    steps = 2 if group == "data" else options.steps
    times = interleave(variants, options.rounds, steps)
    print(f"\n{size}, {tokens} tokens a step, {options.rounds} rounds of {steps} steps, load {os.getloadavg()[0]:.1f}")
    for name, rounds in times.items():
        median = statistics.median(rounds)
        print(f"  {name:28s} {median:8.4f} s  {tokens / median:9.0f} tokens/s")
    pairs = [(ref, lab) for ref in names if "reference" in ref for lab in names if lab.startswith("lab")]
    for ref, lab in pairs or [("lab jax", "lab jax data 8")]:
        ratio = statistics.median(a / b for a, b in zip(times[ref], times[lab], strict=True))
        print(f"  {lab} over {ref}: {ratio:.3f}", flush=True)


def interleave(variants, rounds, steps):
    """Median step time of each variant in each round."""
    workers = {v["name"]: start(v) for v in variants}
    try:
        for worker in workers.values():
            ask(worker, 2)  # compile and warm up
        times = {name: [] for name in workers}
        for _ in range(rounds):
            for name, worker in workers.items():
                times[name].append(statistics.median(ask(worker, steps)))
        return times
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def start(variant):
    env = dict(os.environ)
    if variant["name"].startswith("lab"):
        backend, devices = variant["name"].split()[1], 8 if "data 8" in variant["name"] else 1
        line = subprocess.run(
            [sys.executable, "benchmarks/lab_step.py", backend, str(devices)], capture_output=True, check=True
        )
        env |= json.loads(line.stdout)
    command = [sys.executable, __file__, "--variant", json.dumps(variant)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def ask(worker, steps):
    worker.stdin.write(f"{steps}\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def serve(variant):
    """A variant's process: reads a number of steps from standard input, runs them, prints their seconds."""
    step = build(variant)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


def build(variant):
    name, size, batch, sequence = variant["name"], variant["size"], variant["batch"], variant["sequence"]
    if name.startswith("reference jax"):
        return reference_jax(size, batch, sequence, scan="scan" in name, attention="plain" if "plain" in name else "fused")
    if name.startswith("reference torch"):
        return reference_torch(size, batch, sequence, compiled="compiled" in name)
    from lab_step import open_lab

    backend = name.split()[1]
    extra = {"backend.scan_layers": False} if "unrolled" in name else {}
    extra |= {"backend.compile": True} if "compiled" in name else {}
    session, local, _ = open_lab(backend, size, batch, sequence, 8 if "data 8" in name else 1, **extra)
    return lambda: session.step(local).result()


def reference_jax(size, batch, sequence, *, scan, attention):
    import jax
    import numpy as np
    import reference_jax as reference

    sizes = reference.SIZES[size]
    state, step = reference.init(sizes, 0, scan=scan), reference.make_step(sizes, scan=scan, attention=attention)
    rows = np.random.default_rng(0).integers(0, sizes.vocab, (batch, sequence + 1), dtype=np.int32)

    def run():
        nonlocal state
        state, metrics = step(state, rows[:, :-1], rows[:, 1:])
        float(metrics["loss"])
        jax.block_until_ready(state)

    return run


def reference_torch(size, batch, sequence, *, compiled):
    import numpy as np
    import reference_torch as reference
    import torch

    step = reference.make_step(*reference.init(reference.SIZES[size], 0), compile=compiled)
    rows = np.random.default_rng(0).integers(0, reference.SIZES[size].vocab, (batch, sequence + 1))
    tokens, labels = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
    return lambda: step(tokens, labels)["loss"].item()


if __name__ == "__main__":
    sys.exit(main())
