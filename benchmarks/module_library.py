"""Flax or Equinox: the same JAX train step from each module library, and how much code each library's modules are.

    python benchmarks/module_library.py [--rounds 5] [--steps 5]

On one device, AdamW, float32. In a round each library has a fresh process for each variant, and the two take turns at every stage:
the library's import after JAX's, tracing the step (nothing was traced before, as in a run), lowering it, compiling it, then step
by step. Figures are medians over rounds, of a round's steps the median: of the time that passed, and of the processor's time,
which others at work on the machine disturb far less. A ratio is the median of the rounds' ratios. Lines of code
are those of the library's own file without comments and docstrings, each statement written in one line.
"""

import argparse
import ast
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LIBRARIES = ("flax", "equinox")
#: Name -> benchmark size, layers (None: as it is), rows of 256 tokens, scanned.
VARIANTS = {
    "tiny, 4 layers, scanned": ("tiny", None, 16, True),
    "S, 12 layers, scanned": ("S", 12, 4, True),
    "S, 12 layers, unrolled": ("S", 12, 4, False),
}
STAGES = ("import", "trace", "lower", "compile")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--variant", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        return serve(*options.variant)
    for library in LIBRARIES:
        print(f"{library:8s} {lines_of_code(modules(library))} lines of code in {modules(library).name}")
    for name in VARIANTS:
        report(name, [in_turns(name, options.steps, first=number % 2) for number in range(options.rounds)])
    print(f"{options.rounds} rounds of {options.steps} steps, load {os.getloadavg()[0]:.1f}")
    return 0


def in_turns(name, steps, first):
    """One round of a variant: seconds of each figure by library."""
    workers = {library: start(name, library) for library in (LIBRARIES[first], LIBRARIES[1 - first])}
    try:
        for worker in workers.values():
            ask(worker)  # until JAX is imported
        found = {library: {} for library in workers}
        for stage in STAGES:
            for library, worker in workers.items():
                found[library][stage] = ask(worker)
        times = [{library: ask(worker) for library, worker in workers.items()} for _ in range(steps + 1)]
        for library in workers:
            found[library]["step"] = [
                statistics.median(both) for both in zip(*(time[library] for time in times[1:]), strict=True)
            ]
        return found
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def start(name, library):
    command = [sys.executable, __file__, "--variant", name, library]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker):
    worker.stdin.write("\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def report(name, rounds):
    """One variant's figures, printed."""
    print(f"{name}\n  {'':18s} {'flax':>9s} {'equinox':>9s}  equinox / flax (each round)")
    for figure in (*STAGES, "step"):
        for kind, clock in enumerate(("passed", "processor")):
            ratios = [found["equinox"][figure][kind] / found["flax"][figure][kind] for found in rounds]
            times = (statistics.median(found[library][figure][kind] for found in rounds) for library in LIBRARIES)
            shown = " ".join(f"{seconds * 1e3:6.0f} ms" for seconds in times)
            spread = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"  {figure:8s} {clock:9s} {shown}  {statistics.median(ratios):.2f}  ({spread})", flush=True)


def serve(name, library):
    """A library's process: does the next stage for each line of standard input, and prints how long it took."""
    stages = work(name, library)
    for _ in sys.stdin:
        print(json.dumps(next(stages)), flush=True)


def work(name, library):
    """Does the stages one after the other, then steps, and gives the seconds of each."""
    import importlib

    import jax
    import optax  # noqa: F401  (what both need is loaded before)

    from scaling_lab.backends.jax import optimizer, sharding, train, transformer  # noqa: F401

    yield None
    _, seconds = timed(importlib.import_module, {"flax": "flax.nnx"}.get(library, library))
    yield seconds
    step, given = prepared(name, library)
    traced, seconds = timed(jax.jit(step, donate_argnums=(0, 1)).trace, *given)
    yield seconds
    lowered, seconds = timed(traced.lower)
    yield seconds
    compiled, seconds = timed(lowered.compile)
    yield seconds
    weights, state, *more = given
    while True:
        (weights, state, *_), seconds = timed(lambda *given: jax.block_until_ready(compiled(*given)), weights, state, *more)
        yield seconds


def timed(function, *arguments):
    """What a function gives, and the seconds that passed and that this process was at work.

    As in `timeit` no garbage is collected meanwhile: one collection takes half as long as the tracing that it may fall into.
    """
    gc.collect()
    gc.disable()
    passed, worked = time.perf_counter(), time.process_time()
    found = function(*arguments)
    seconds = time.perf_counter() - passed, time.process_time() - worked
    gc.enable()
    return found, seconds


def prepared(name, library):
    """The train step of a variant, and what it takes."""
    import jax
    import numpy as np
    from lab_step import planned

    from scaling_lab.backends.jax import optimizer, sharding, train
    from scaling_lab.backends.jax.runtime import mesh_of

    size, layers, rows, scanned = VARIANTS[name]
    keys = {"backend": "jax", "sharding": "single", "backend.module": library, "backend.scan_layers": scanned}
    experiment, plan = planned(size, rows, 256, 1, keys | ({"layers": layers} if layers else {}))
    on = sharding.Placement(mesh_of(plan, jax.devices()), plan, experiment.workload.precision)
    transform = optimizer.transformation(experiment.workload.optimizer, on)
    tokens = np.random.default_rng(0).integers(0, experiment.model.vocab, (1, rows, 257), dtype=np.int32)
    batch = {"tokens": jax.device_put(tokens[..., :-1], on.batch), "labels": jax.device_put(tokens[..., 1:], on.batch)}
    weights = sharding.place_initial(on, 0)
    state = optimizer.initial_state(*optimizer.state_shardings(transform, on))
    return train.train_step(experiment, on, transform), (weights, state, batch, np.float32(1e-4))


def modules(library):
    """The file that is the library's own."""
    import scaling_lab

    return Path(scaling_lab.__file__).parent / "backends" / "jax" / f"{library}_modules.py"


def lines_of_code(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


if __name__ == "__main__":
    sys.exit(main())
