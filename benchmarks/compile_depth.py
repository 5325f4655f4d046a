"""Is compile time flat in depth: the JAX train step with 4 and with 32 scanned layers, in fresh processes, alternating.

python benchmarks/compile_depth.py [--rounds 3] [--size S]
"""

import argparse
import os
import statistics
import subprocess
import sys

DEPTHS = (4, 32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="S")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layers:
        from lab_step import open_lab

        print(open_lab("jax", options.size, 4, 512, layers=options.layers)[2])
        return
    times = {depth: [] for depth in DEPTHS}
    for _ in range(options.rounds):
        for depth in DEPTHS:
            command = [sys.executable, __file__, "--size", options.size, "--layers", str(depth)]
            env = {**os.environ, "JAX_PLATFORMS": "cpu"}
            times[depth].append(float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout))
    for depth, seconds in times.items():
        print(f"{depth:3d} layers: median {statistics.median(seconds):.2f} s  {' '.join(f'{s:.2f}' for s in seconds)}")
    ratio = statistics.median(b / a for a, b in zip(times[DEPTHS[0]], times[DEPTHS[1]], strict=True))
    print(f"{DEPTHS[1]} layers over {DEPTHS[0]}: {ratio:.2f}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
