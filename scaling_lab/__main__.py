"""The command line: `scaling-lab VERB [Hydra overrides]`. The only file that knows Hydra: compose -> plain dict -> lab."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scaling_lab import __version__
from scaling_lab.cluster.interrupts import obeyed
from scaling_lab.errors import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_REQUEST, ConfigError, LabError

USAGE = """\
scaling-lab VERB [Hydra overrides]

  run                  plan, start workers, train, measure            scaling-lab run backend=torch sharding=fsdp
  run -m               a sweep, ending in one table                   scaling-lab run -m backend=jax,torch sharding=data,fsdp
  draw                 show what would be decided, start nothing      scaling-lab draw mesh.devices=16
  show PATH...         the table of each finished run, then of all    scaling-lab show runs/2026-11-30/12-00-00-jax-fsdp
  report PATH...       runs and sweeps side by side                   scaling-lab report runs/

Every Hydra flag works: --cfg job, --info, -m, experiment=NAME, hydra.run.dir=FOLDER; hydra/launcher=NAME once its plugin is
installed (pip install hydra-joblib-launcher).
scaling-lab run --help lists the config groups. Exit code 0: done; 2: the request is wrong or infeasible; 1: something failed."""

#: Kinds of error after which a sweep does not carry on: somebody asked it to stop.
STOPPED = ("interrupted", "preempted")


def main() -> int:
    """Run one verb and return its exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return EXIT_DONE if arguments else EXIT_WRONG_REQUEST
    if arguments[0] == "--version":
        print(f"scaling_lab {__version__}")
        return EXIT_DONE
    verb, rest = arguments[0], arguments[1:]
    verbs: dict[str, Callable[[list[str]], int]] = {"run": _run, "draw": _draw, "show": _show, "report": _report}
    try:
        with obeyed():
            if verb not in verbs:
                from scaling_lab.plan.rules import nearest

                raise ConfigError(f"unknown verb {verb!r}{nearest(verb, verbs)}. `scaling-lab --help` shows what each does.")
            return verbs[verb](rest)
    except LabError as error:
        print(f"scaling-lab: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except OSError as error:
        print(f"scaling-lab: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt as stop:
        print(f"scaling-lab: {str(stop) or 'interrupted'}", file=sys.stderr)
        return EXIT_FAILED


def _show(paths: list[str]) -> int:
    from scaling_lab import lab

    return lab.show(_paths("show", paths))


def _report(paths: list[str]) -> int:
    from scaling_lab import lab

    return lab.report(_paths("report", paths))


def _paths(verb: str, paths: list[str]) -> list[Path]:
    if {"-h", "--help"} & {*paths}:
        print(USAGE)
        sys.exit(EXIT_DONE)
    if not paths:
        raise ConfigError(f"`scaling-lab {verb}` needs the path of at least one run folder or sweep folder.")
    return [Path(path) for path in paths]


def _draw(overrides: list[str]) -> int:
    from scaling_lab import lab

    def job(config: Any) -> int:
        _check_sweep()
        return _in_sweep(lambda: lab.draw(_plain(config)))

    with tempfile.TemporaryDirectory() as nowhere:  # Hydra keeps a file of its own in a sweep's folder
        folders = ("hydra.run.dir=.", f"hydra.sweep.dir={nowhere}")
        unsaid = [one for one in folders if not any(said.startswith(one.partition("=")[0]) for said in overrides)]
        return _hydra([*overrides, *unsaid], job)


def _run(overrides: list[str]) -> int:
    from scaling_lab import lab, sweep

    hook = [f"+hydra.callbacks.sweep._target_={sweep.__name__}.SweepHook"] if {"-m", "--multirun"} & {*overrides} else []
    try:
        code = _hydra([*overrides, *hook], run_job)
    finally:
        ended = lab.end_sweep(sweep.folders[-1]) if sweep.folders else None
    return code if ended is None else ended


def run_job(config: Any) -> int:
    """One Hydra job. In a sweep an expected failure is kept in the job's result.json and the sweep carries on."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from scaling_lab import lab, sweep

    _check_sweep()
    hydra = HydraConfig.get()
    in_sweep = hydra.mode == RunMode.MULTIRUN
    request = lab.Request(
        config=_plain(config),
        folder=Path(hydra.runtime.output_dir),
        command=" ".join(["scaling-lab run", *sweep.typed(hydra.overrides.task)]),
        sweep=Path(hydra.sweep.dir).resolve().name if in_sweep else None,
        started=time.time() if in_sweep else lab.process_started(),
        folder_named=in_sweep or sweep.names(sweep.typed(hydra.overrides.hydra), "hydra.run.dir"),
    )
    return _in_sweep(lambda: lab.run(request))


def _in_sweep(job: Callable[[], int]) -> int:
    """The exit code of a job. A sweep carries on past what the lab can explain, and past a crash; alone, either is raised."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from scaling_lab import sweep

    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return job()
    try:
        return job()
    except LabError as error:
        print(f"scaling-lab: job {hydra.job.num} ({' '.join(sweep.typed(hydra.overrides.task))}): {error}", file=sys.stderr)
        if error.kind in STOPPED:
            raise KeyboardInterrupt from None
        return EXIT_DONE if error.status == "infeasible" else error.exit_code
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED


def _check_sweep() -> None:
    """An experiment that names what to sweep over is not one job."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from scaling_lab import sweep

    hydra = HydraConfig.get()
    chosen = {override.partition("=")[0].lstrip("+") for override in sweep.typed(hydra.overrides.task)}
    params = {key: value for key, value in (hydra.sweeper.get("params") or {}).items() if key not in chosen}
    if params and hydra.mode != RunMode.MULTIRUN:
        swept = " ".join(f"{key}={value}" for key, value in params.items())
        raise ConfigError(f"this experiment is a sweep over {swept}: add -m, or choose a value for each of these keys.")


def _plain(config: Any) -> dict[str, Any]:
    """The resolved config as a plain dict, with relative input paths made absolute from the launch directory."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', '')}: {str(error).splitlines()[0]}") from None
    for key in ("path", "validation_path", "tokenizer"):
        path = plain["data"].get(key) if isinstance(plain.get("data"), dict) else None
        if isinstance(path, str) and path:
            plain["data"][key] = str(Path(path).expanduser().absolute())
    plain.pop("experiment", None)
    return plain


def _hydra(overrides: list[str], job: Callable[[Any], int]) -> int:
    """Let Hydra compose and launch; its errors become one message each."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from scaling_lab import own_config
    from scaling_lab.explain import explain

    flags = [one for one in overrides if one in ("-m", "--multirun")]  # argparse wants the overrides in one piece
    overrides = own_config.with_absolute_path([*flags, *(one for one in overrides if one not in flags)])
    own_config.check_presets(overrides, conf_folder())
    codes: list[int] = []
    errors: list[LabError] = []
    crashes: list[Exception] = []

    def task(config: Any) -> int:
        try:
            codes.append(job(config))
        except LabError as error:  # kept, so that Hydra does not print it a second time in its own words
            errors.append(error)
            return error.exit_code
        except Exception as error:
            crashes.append(error)
            raise
        return codes[-1]

    sys.argv = ["scaling-lab", *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as exceptions instead of Hydra's own print and exit
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(task)()
    except Exception as error:  # Hydra meets a wrong value with whatever its code happens to raise
        if error in crashes or isinstance(error, BrokenPipeError):
            raise
        if not isinstance(error, HydraException | OmegaConfBaseException | ValueError | OSError):
            raise ConfigError(f"Hydra cannot compose {' '.join(overrides)} ({type(error).__name__}: {error}).") from None
        raise ConfigError(explain(str(error), overrides)) from None
    if errors:
        raise errors[0]
    return max(codes, default=EXIT_DONE)


def conf_folder() -> Path:
    """Where the config groups are: inside an installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


if __name__ == "__main__":
    # Re-imported under its real name, so that jobs can be sent to other processes by reference.
    from scaling_lab.__main__ import main as real_main

    sys.exit(real_main())
