"""What a pipeline costs and saves: the bubble, planned and measured, time and memory, by schedule and number of microbatches.

    python benchmarks/pipeline.py [--stages 2] [--microbatches 2 4 8 16] [--steps 8] [--backends jax torch]

Real runs of the lab on as many simulated devices as there are stages, each microbatch of `--rows` rows, so that more of them are more
work. The measured bubble: in torch as the lab reports it; in JAX, which is one program, the share of a step that one microbatch's
time, the slope between the fewest and the most of them, does not account for: (t - m x slope) / t, all that is outside the stages
included. Memory: in JAX the temporaries of the compiled step; in torch, which cannot say on a CPU, what the largest process had resident.
"""

import argparse

from lab_run import machine, train

SCHEDULES = ("gpipe", "1f1b", "interleaved")
MODEL = {"layers": 8, "embed": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "mlp": 768, "vocab": 512}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    options = parser.parse_args()
    print(f"{options.stages} stages on simulated devices, {options.rows} x {options.sequence} tokens a microbatch\n")
    print("| backend | schedule | microbatches | bubble, planned | measured | step, s | memory, MiB |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for backend in options.backends:
        for schedule in SCHEDULES:
            results = {m: trained(backend, schedule, m, options) for m in options.microbatches}
            for microbatches, result in results.items():
                print(f"| {backend} | {schedule} | {microbatches} | {row(result, microbatches, results)} |", flush=True)
    print(f"\n{machine(result)}, simulated devices")


def trained(backend, schedule, microbatches, options):
    """The result of a run."""
    keys = {"workload__pipeline__schedule": schedule, "workload__pipeline__microbatches": microbatches}
    where = {"sharding": "pipeline", "mesh__devices": options.stages, "mesh__pipeline": options.stages}
    rows = options.rows * microbatches
    return train(backend, MODEL, options.sequence, options.steps, rows=rows, untimed=2, **where, **keys)


def row(result, microbatches, results):
    measured = result["measured"]
    bubble = measured["bubble_share"]
    if bubble is None:
        bubble = 1 - microbatches * slope(results) / measured["step_time_s"]
    memory = measured["bytes_per_device"].get("temporaries") or measured["resident_bytes"] / result["plan"]["devices"]
    planned = result["plan"]["pipeline"]["bubble_share"]
    return f"{planned:.1%} | {bubble:.1%} | {measured['step_time_s']:.3f} | {memory / 2**20:,.0f}"


def slope(results):
    """Seconds that one microbatch more adds to a step."""
    few, many = min(results), max(results)
    seconds = {m: results[m]["measured"]["step_time_s"] for m in (few, many)}
    return (seconds[many] - seconds[few]) / (many - few)


if __name__ == "__main__":
    main()
