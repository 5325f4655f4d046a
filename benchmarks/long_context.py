"""Does memory fall with the devices that share a long sequence: 32,768 tokens, ring attention, a tiny model, real runs of the lab.

    python benchmarks/long_context.py [--sequence 32768] [--backends jax torch] [--parts 1 2 4 8]

Memory of a device: in JAX state and temporaries of the compiled step; in torch, which cannot say on a CPU, the most that a process
had resident over what it had with 256 tokens. `gather` on as many devices as the widest ring stands beside, for contrast.
"""

import argparse
import time

from lab_run import machine, resident_over, train

TINY = {"layers": 1, "embed": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "mlp": 128, "vocab": 256}
SHORT = 256


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    began = time.perf_counter()
    cases = [(parts, "ring") for parts in options.parts] + [(options.parts[-1], "gather")]
    print(f"{options.sequence:,} tokens a row, one row, simulated devices\n")
    print("| backend | attention | devices | memory of a device | state, MiB | step, s | processor time, s | loss |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    result = None
    for backend in options.backends:
        for parts, strategy in cases:
            result = trained(backend, parts, strategy, options.sequence, options.steps)
            print(f"| {backend} | {row(result, backend, parts, strategy)} |", flush=True)
    assert result is not None
    print(f"\n{machine(result)}, simulated devices; {time.perf_counter() - began:.0f} s in all")


def trained(backend, parts, strategy, sequence, steps):
    """The result of a run on `parts` devices; one device needs no strategy."""
    where = {"sharding": "single", "mesh__devices": 1}
    if parts > 1:
        where = {"sharding": "context", "mesh__devices": parts, "mesh__context": parts}
    return train(backend, TINY, sequence, steps, workload__context__strategy=strategy, **where)


def row(result, backend, parts, strategy):
    measured = result["measured"]
    held = measured["bytes_per_device"]
    state = sum(held.get(part) or 0 for part in ("parameters", "gradients", "optimizer"))
    if backend == "jax":
        memory = held["total"]
    else:
        memory = resident_over(result, trained(backend, parts, strategy, SHORT, 2))
    name = strategy if parts > 1 else "whole"
    seconds = f"{measured['step_time_s']:.1f} | {measured['cpu_time_per_step_s']:.1f}"
    return f"{name} | {parts} | {memory / 2**20:,.0f} MiB | {state / 2**20:.2f} | {seconds} | {measured['loss'][-1]:.6f}"


if __name__ == "__main__":
    main()
