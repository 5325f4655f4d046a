"""A coordinator as a process of its own, for signals: runs a job and prints its records, then the error's kind and message.

Arguments: the config as JSON, the run folder, and optionally the command that starts a worker as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scaling_lab.cluster import found, hosts, local
from scaling_lab.config import experiment_from
from scaling_lab.errors import LabError
from scaling_lab.plan.plan import make_plan


def main() -> int:
    experiment = experiment_from(json.loads(sys.argv[1]))
    plan = make_plan(experiment, found.find(experiment))
    command = json.loads(sys.argv[3]) if len(sys.argv) > 3 else hosts.COMMAND
    try:
        local.run(experiment, plan, Path(sys.argv[2]), lambda record: print(json.dumps(record), flush=True), command)
    except LabError as error:
        print(json.dumps({"kind": "end", "error": error.kind, "message": str(error)}), flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
