"""The import rules, in fresh interpreters: import-linter reads the source, this sees what really gets loaded."""

import subprocess
import sys

import pytest


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_the_coordinator_loads_neither_jax_nor_torch():
    loaded = loaded_after("import scaling_lab.__main__, scaling_lab.lab, scaling_lab.sweep, scaling_lab.explain")
    assert "scaling_lab" in loaded
    assert not loaded & {"jax", "jaxlib", "flax", "equinox", "optax", "torch"}


def test_nothing_imports_wandb_before_a_run_tracks():
    assert "wandb" not in loaded_after("import scaling_lab.lab")


@pytest.mark.parametrize(("backend", "other"), [("jax", "torch"), ("torch", "jax")])
def test_a_backend_does_not_load_the_other_one(backend, other):
    loaded = loaded_after(f"import scaling_lab.worker, scaling_lab.backends.{backend}.train")
    assert backend in loaded
    assert other not in loaded


@pytest.mark.parametrize(("module", "other"), [("flax", "equinox"), ("equinox", "flax")])
def test_a_module_library_is_loaded_only_where_it_is_asked_for(module, other):
    assert not loaded_after("import scaling_lab.worker, scaling_lab.backends.jax.train") & {module, other}
    loaded = loaded_after(f"import scaling_lab.backends.jax.{module}_modules")
    assert module in loaded
    assert other not in loaded
