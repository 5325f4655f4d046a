"""The peak that MFU is measured against: published, or measured once by the libraries themselves and kept."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from experiments import FOUND, experiment

from scaling_lab.plan.plan import Found, make_plan
from scaling_lab.predict import peak
from scaling_lab.predict.peak import MachinePeak, device_peak, machine_peak
from scaling_lab.predict.products import best_rate


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def measured(cache: Path) -> MachinePeak:
    """One real measurement by NumPy, JAX and torch, for all tests here."""
    found = machine_peak(cache, "float32", load=0.0)
    assert found is not None
    return found


def test_every_library_is_measured_and_the_best_one_counts(measured: MachinePeak) -> None:
    assert set(measured.libraries) == {"numpy", "jax", "torch"}
    rates = [rate for rate in measured.libraries.values() if rate]
    assert len(rates) == 3
    assert measured.flops_per_s == max(rates) == measured.libraries[measured.library]
    assert 1e8 < measured.flops_per_s < 1e15


def test_the_second_time_it_is_read_and_not_measured(cache: Path, measured: MachinePeak) -> None:
    said: list[str] = []
    assert machine_peak(cache, "float32", said.append) == measured
    assert said == []
    assert json.loads(Path(measured.cache).read_text()) == dataclasses.asdict(measured)


def test_a_peak_of_a_busy_machine_is_measured_again_once_it_is_quiet(measured: MachinePeak, tmp_path: Path) -> None:
    path = tmp_path / Path(measured.cache).name
    busy = dataclasses.replace(measured, flops_per_s=1.0, load=50.0, cache=str(path))
    path.write_text(json.dumps(dataclasses.asdict(busy)))
    assert machine_peak(tmp_path, "float32", load=50.0) == busy
    again = machine_peak(tmp_path, "float32", load=0.0)
    assert again is not None
    assert again.flops_per_s > 1.0
    assert machine_peak(tmp_path, "float32", load=50.0) == again


def test_a_cpu_device_has_its_share_of_the_machine(cache: Path, measured: MachinePeak) -> None:
    for backend in ("jax", "torch"):
        asked = experiment(backend=backend)
        found = device_peak(asked, make_plan(asked, FOUND), cache)
        assert found.flops_per_s_per_device == measured.flops_per_s / 8
        own = measured.libraries[backend]
        assert own is not None
        assert found.of_library_flops_per_s_per_device == own / 8
        assert f"({measured.library}) / 8 devices" in found.source


def test_one_device_has_the_machines_whole_peak_and_shares_it_with_nobody(cache: Path, measured: MachinePeak) -> None:
    asked = experiment(mesh="one")
    found = device_peak(asked, make_plan(asked, FOUND), cache)
    assert found.flops_per_s_per_device == measured.flops_per_s
    assert found.source == f"best float32 matrix product on this machine ({measured.library})"


def test_an_accelerator_has_its_published_peak_by_compute_dtype(tmp_path: Path) -> None:
    numbers = {"hardware.peak_bf16_tflops": 989.4, "hardware.peak_f32_tflops": None}
    for dtype, expected in (("bfloat16", 989.4e12), ("float32", None)):
        asked = experiment(**numbers, **{"workload.precision.compute": dtype})
        found = device_peak(asked, make_plan(asked, Found("gpu", 8, False, None)), tmp_path)
        assert found.flops_per_s_per_device == expected
        assert found.machine is None
    assert "hardware.peak_f32_tflops of `this` is null" in found.source
    assert list(tmp_path.iterdir()) == []


def test_where_no_library_can_measure_the_peak_is_unknown_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "MEASURED_BY", {"numpy": "scaling_lab.no_such_module"})
    assert machine_peak(tmp_path, "float32") is None
    asked = experiment()
    found = device_peak(asked, make_plan(asked, FOUND), tmp_path)
    assert found.flops_per_s_per_device is None
    assert list(tmp_path.glob("*.json")) == []


def test_a_torn_cache_is_measured_again_and_a_folder_that_cannot_be_written_costs_only_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "MEASURED_BY", {"numpy": "scaling_lab.predict.products"})
    first = machine_peak(tmp_path, "float32")
    assert first is not None
    Path(first.cache).write_text('{"dtype": "flo')
    again = machine_peak(tmp_path, "float32")
    assert again is not None
    assert json.loads(Path(first.cache).read_text()) == dataclasses.asdict(again)
    assert machine_peak(Path("/proc/nowhere"), "float32") is not None


def test_a_product_of_n_by_n_matrices_counts_two_n_cubed_flops_at_its_best_repetition() -> None:
    tried: list[int] = []

    def maker(size: int):
        tried.append(size)
        duration_s = 0.02 if size == 512 else 0.2  # the second size is slow: no larger one is tried
        return lambda: spin(duration_s)

    def spin(duration_s: float) -> None:
        until = time.perf_counter() + duration_s
        while time.perf_counter() < until:
            pass

    assert best_rate(maker) == pytest.approx(max(2 * 512**3 / 0.02, 2 * 1024**3 / 0.2), rel=0.05)
    assert tried == [512, 1024]
