"""What a loss in chunks saves and costs: Llama 3's vocabulary of 128,256, the whole step of a tiny model, real runs of the lab.

    python benchmarks/cross_entropy.py [--sequence 4096] [--chunks 1 8] [--rounds 3] [--backends jax torch]

All forms run once a round, one after the other, so the machine's drift meets them alike; a time is the median of the rounds, beside it
the processor time of a step, of all processes, which other jobs disturb less.
Memory of a device: in JAX the temporaries of the compiled step; in torch, which cannot say on a CPU, the most that a process had
resident over what it had with 256 tokens. One row of 8,192 tokens has logits of 4.2 GB, and the plain form holds three such tensors:
the default is half of it, for machines of 16 GiB.
"""

import argparse
import os
import statistics

from lab_run import machine, resident_over, train

MODEL = {"layers": 1, "embed": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "mlp": 128, "vocab": 128256}
#: Name and keys of where the vocabulary lies.
LAYOUTS = {
    "whole": {"sharding": "single", "mesh__devices": 1},
    "over tensor 2": {"sharding": "tensor", "mesh__devices": 2, "mesh__tensor": 2},
}
SHORT = 256


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    options = parser.parse_args()
    forms = [(b, layout, chunks) for b in options.backends for layout in LAYOUTS for chunks in options.chunks]
    results = {form: [] for form in forms}
    for _ in range(options.rounds):
        for form in forms:
            results[form].append(trained(*form, options.sequence, 3))
    logits = options.sequence * MODEL["vocab"] * 4 / 2**20
    print(f"vocabulary 128,256, {options.sequence:,} tokens a step, float32: logits of {logits:,.0f} MiB")
    print(f"medians of {options.rounds} rounds of 2 steps; load {os.getloadavg()[0]:.1f}; {machine(results[forms[0]][0])}\n")
    print("| backend | vocabulary | chunks | temporaries of a device | step | processor time | loss |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for form in forms:
        print(row(form, results), flush=True)


def row(form, results):
    backend, layout, chunks = form
    plain = min(other for *where, other in results if tuple(where) == form[:2])
    cells = [_against(results[form], results[backend, layout, plain], key) for key in ("step_time_s", "cpu_time_per_step_s")]
    loss = results[form][0]["measured"]["loss"][-1]
    kept = f"{temporaries(form, results[form][0]) / 2**20:,.0f} MiB"
    return f"| {backend} | {layout} | {chunks} | {kept} | {' | '.join(cells)} | {loss:.6f} |"


def _against(own, plain, key):
    """The median of the rounds, and that of the ratios to the plain form within a round."""
    mine, other = ([result["measured"][key] for result in results] for results in (own, plain))
    ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
    return f"{statistics.median(mine):.2f} s ({ratio:.2f} x)"


def temporaries(form, result):
    backend, layout, _ = form
    if backend == "jax":
        return result["measured"]["bytes_per_device"]["temporaries"]
    return resident_over(result, trained(backend, layout, 1, SHORT, 2))


def trained(backend, layout, chunks, sequence, steps):
    return train(backend, MODEL, sequence, steps, workload__loss_chunks=chunks, **LAYOUTS[layout])


if __name__ == "__main__":
    main()
