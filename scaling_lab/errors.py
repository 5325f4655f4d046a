"""The three kinds of failure, and the exit code of each.

Owns what a user sees when something goes wrong: one message, no traceback. Must not know who raises it.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_REQUEST = 2


class LabError(Exception):
    """Anything the lab can explain: shown as one message. `kind` is stored in result.json."""

    kind = "error"
    status = "failed"
    exit_code = EXIT_FAILED


class ConfigError(LabError):
    """The request is wrong: an unknown key, a wrong type, an impossible value. Exit code 2."""

    kind = "config"
    exit_code = EXIT_WRONG_REQUEST


class PlanError(LabError):
    """The request is understood but infeasible: sizes that do not divide, idle axes, too little memory. Exit code 2."""

    kind = "infeasible"
    status = "infeasible"
    exit_code = EXIT_WRONG_REQUEST


class WorkerError(LabError):
    """A process of the job raised, exited, was killed or made no progress. Exit code 1, or 2 where it found the request wrong."""

    kind = "worker"

    def __init__(self, message: str, kind: str = "worker"):
        super().__init__(message)
        self.kind = kind
        if kind in (
            ConfigError.kind,
            PlanError.kind,
        ):  # found only by a worker, as a file's contents are: still a wrong request
            self.exit_code = EXIT_WRONG_REQUEST
