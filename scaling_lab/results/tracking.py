"""The process that talks to Weights & Biases: the only file that imports wandb.

It reads JSON lines from `tracker.Tracker` on its standard input, first the request, then rows, and answers with lines on its
standard output. A process of its own because wandb may take seconds to start, may hang on a dead network and keeps state
after a failure: none of that may reach a run. Must not know what a metric means.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import shutil
import signal
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil

#: Seconds: until the server must have answered anything at all; until it must have accepted the run.
PROBE_LIMIT_S = 3.0
INIT_LIMIT_S = 5.0

#: Seconds after the end of the run until this process gives up, by mode: offline only writes a file.
FINISH_LIMIT_S = {"offline": 10.0, "online": 12.0}

#: How often rows are handed to the operating system; wandb's own 15 s would lose them when a run is killed.
FLUSH_S = 0.5

STAGING = "staging"

Tell = Callable[[dict[str, Any]], None]


def main() -> None:
    """Serve one run until the end of the input. Ends with the coordinator, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the job: its end reaches us as the end of the input
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever wandb prints goes to the log

    def tell(answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the coordinator was killed: nobody is listening
            answers.write(json.dumps(answer) + "\n")

    try:
        _serve(_lines(), tell)
    except Exception as error:
        tell({"notice": f"W&B tracking stopped: {_first_line(error)}"})
    _leave()


def _leave() -> None:
    """End here and now, wandb-core with us: wandb's own exit hooks may wait for a server for ever."""
    children = psutil.Process().children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(children, timeout=1)
    if tempfile.tempdir and os.path.basename(tempfile.tempdir) == STAGING:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    os._exit(0)


def _lines() -> queue.SimpleQueue[dict[str, Any] | None]:
    """The input, read ahead by a thread so that the coordinator never waits; None at its end."""
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _serve(lines: queue.SimpleQueue[dict[str, Any] | None], tell: Tell) -> None:
    request = lines.get()
    if request is None:
        return
    run, mode = _start(request, tell)
    row: dict[str, Any] = {}
    step, exit_code = 0, 1  # unless told otherwise: an input that just ends is a coordinator that was killed
    while (line := lines.get()) is not None:
        if row and line.get("step") != step:  # what belongs to one step is one row
            run.log(row, step=step, commit=True)
            row = {}
        row, step = row | line.get("row", {}), line.get("step", step)
        run.summary.update(line.get("summary", {}))
        exit_code = line.get("exit_code", exit_code)
    if row:
        run.log(row, step=step, commit=True)
    _finish(run, exit_code, FINISH_LIMIT_S[mode], tell)


def _finish(run: Any, exit_code: int, limit_s: float, tell: Tell) -> None:
    import wandb

    folder = os.path.dirname(run.dir)
    _give_up_after(limit_s, tell, folder)
    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        tell({"notice": f"W&B did not take everything in time: upload it later with `wandb sync {folder}`"})
    wandb.teardown()  # only now has wandb-core written everything
    tell({"finished": True})


def _start(request: dict[str, Any], tell: Tell) -> tuple[Any, str]:
    """The run and its mode: `online` only where a key and a server are found, else `offline`, said once."""
    # wandb-core's own log goes here, whatever the mode: nothing is left outside the run folder.
    own = os.path.join(request["init"]["dir"], "wandb")
    os.environ["WANDB_CACHE_DIR"] = os.path.join(own, "cache")
    # wandb makes staging folders when it is imported and removes them in exit hooks that `_leave` does not wait for.
    tempfile.tempdir = os.path.join(own, STAGING)
    os.makedirs(tempfile.tempdir, exist_ok=True)
    import wandb

    why_not = ""
    if request["mode"] == "online":
        try:
            _check_online(wandb)
            run = _init(wandb, request, "online")
            tell({"mode": "online", "folder": os.path.dirname(run.dir), "url": run.url})
            return run, "online"
        except Exception as error:
            why_not = _first_line(error)
            wandb.teardown()
            for half_made in pathlib.Path(request["init"]["dir"], "wandb").glob(f"run-*-{request['init']['id']}"):
                shutil.rmtree(half_made, ignore_errors=True)
    run = _init(wandb, request, "offline")
    folder = os.path.dirname(run.dir)
    tell({"mode": "offline", "folder": folder, "url": None})
    if why_not:
        tell({"notice": f"W&B online is not possible ({why_not}): tracking offline, upload later with `wandb sync {folder}`"})
    return run, "offline"


def _init(wandb: Any, request: dict[str, Any], mode: str) -> Any:
    wanted = {
        "silent": True,
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "symlink": False,
        "init_timeout": INIT_LIMIT_S,
        "finish_timeout": FINISH_LIMIT_S[mode] - 2,
        "finish_timeout_raises": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
        "x_transaction_log_flush_interval": FLUSH_S,
        "x_graphql_retry_max": 1,
        "x_graphql_timeout_seconds": PROBE_LIMIT_S,
    }
    known = {key: value for key, value in wanted.items() if key in wandb.Settings.model_fields}  # wandb 0.19 lacks some
    return wandb.init(**request["init"], mode=mode, settings=wandb.Settings(**known))


def _check_online(wandb: Any) -> None:
    """Raise, within seconds, where nothing answers at the server's address. Whether there is a key, wandb.init finds out."""
    url = f"{wandb.setup().settings.base_url}/graphql"
    query = json.dumps({"query": "query Viewer { viewer { id } }"}).encode()
    failure: list[str] = [f"{url} does not answer within {PROBE_LIMIT_S:.0f} s"]

    def probe() -> None:
        asked = urllib.request.Request(url, query, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=2 * PROBE_LIMIT_S) as answer:  # this thread is given up before
                answer.read(1)
            failure.clear()
        except urllib.error.HTTPError:
            failure.clear()  # it does answer; whether it likes the key is for wandb.init to find out
        except OSError as error:
            failure[0] = f"{url}: {getattr(error, 'reason', error)}"

    asking = threading.Thread(target=probe, daemon=True)  # a thread: looking up a name has no time limit of its own
    asking.start()
    asking.join(PROBE_LIMIT_S)
    if failure:
        raise ConnectionError(failure[0])


def _give_up_after(limit_s: float, tell: Tell, folder: str) -> None:
    def give_up() -> None:
        tell({"notice": f"W&B did not end within {limit_s:.0f} s: upload later with `wandb sync {folder}`"})
        _leave()

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    main()
