"""Every error a user can meet, as one tree.

    UnderstudyError                 one line: what came, what was expected, what to set
    ├── ConfigError                 a recipe (or several places in it) is wrong; holds every problem
    ├── DataError                   a dataset, a row, a tokenizer or a chat template is wrong
    ├── LossInputError (ValueError) a loss got inputs it cannot use, or an objective that makes no sense
    ├── TeacherError                a teacher or one of its replicas cannot give the scores asked for
    │   ├── TeacherReplyError       a reply arrived and is wrong: names teacher, replica, row and position
    │   └── TeacherUnavailable      no replica can answer now
    ├── EngineError                 a generation engine failed
    ├── PolicyError                 the student: a non-finite loss or gradient, a model that does not fit
    ├── DataPlaneError              rows, leases, journal
    │   ├── LeaseLost               a late write or ack: the lease has expired or has a new holder
    │   └── RowsUnreachable         a rank cannot fetch its rows; the run directory has them
    ├── CheckpointError             a checkpoint is missing, torn or does not fit this run
    ├── ClusterError                processes and placement
    │   └── ChildDied               a child process ended; carries the child's last output
    │       └── RankLost            a rank of the student; the run may go back to its last checkpoint
    │           ├── CriticLost      the critic's process, which trains too
    │           └── GivenUp         a rank or the critic made no progress after the user asked to stop
    ├── CallbackError               a function the caller gave (on_step, …) raised; the cause is its exception
    └── RunDirectoryError           a run directory exists already, or is not one

All of them pickle (a child process can send one), because each is built from its message alone. A command
prints the message and exits with `exit_code`; the stack trace only shows with `--debug`.
"""

from __future__ import annotations

from collections.abc import Sequence

LOST_PEER = 4
"""The exit code of a process that ends because another process of its group is gone."""
NO_THREAD = "can't start new thread"
"""In Python's error on a machine without memory, or without room for another process."""


def lacks_memory(error: BaseException) -> bool:
    """Whether this machine, not a GPU, had no memory: as Python, torch's allocator or the system reports it, or a thread that
    could not be started."""
    phrases = ("DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory", NO_THREAD)
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in phrases)


class UnderstudyError(Exception):
    """Base of all errors that Understudy explains to the user."""

    exit_code = 2


class ConfigError(UnderstudyError):
    """A recipe is wrong. `problems` lists every problem, so that a user can fix all of them at once."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


class DataError(UnderstudyError):
    """A dataset, one of its rows, a tokenizer or a chat template is wrong."""


class LossInputError(UnderstudyError, ValueError):
    """A loss was given inputs it cannot use, or an objective was asked for that makes no sense."""


class TeacherError(UnderstudyError):
    """A teacher, or one of its replicas, cannot give the scores asked for."""


class TeacherReplyError(TeacherError):
    """A reply arrived and failed a check; the message names teacher, replica, row and position."""


class TeacherUnavailable(TeacherError):
    """No replica of a teacher can answer now."""

    retry_after: float | None = None
    """Seconds for which the server asks not to be asked again (`Retry-After`)."""


class EngineError(UnderstudyError):
    """A generation engine failed."""


class PolicyError(UnderstudyError):
    """The student being trained: a non-finite loss or gradient, or a model that cannot be trained."""


class DataPlaneError(UnderstudyError):
    """Rows, leases or the journal."""


class LeaseLost(DataPlaneError):
    """A write or an ack came with a lease that has expired or has a new holder."""


class RowsUnreachable(DataPlaneError):
    """A rank could not fetch the columns of its rows; the run directory still has them."""


class CheckpointError(UnderstudyError):
    """A checkpoint is missing, torn, or does not belong to this run."""


class ClusterError(UnderstudyError):
    """Processes and placement."""


class ChildDied(ClusterError):
    """A child process ended unexpectedly; the message starts with the child's last output."""

    killed = False
    """It was ended by a signal, so starting it again may help."""


class RankLost(ChildDied):
    """A rank that trains the student is gone, and with it the rank's shard of the student."""


class CriticLost(RankLost):
    """The critic's process is gone, and with it the critic's training since the last checkpoint."""


class GivenUp(RankLost):
    """A rank or the critic's process made no progress after the user asked to stop: what was learnt since
    the last checkpoint cannot be saved."""


class CallbackError(UnderstudyError):
    """A callback given from Python (`on_step`, `on_eval`, `on_checkpoint`) raised; `__cause__` is its
    exception."""


class RunDirectoryError(UnderstudyError):
    """A run directory exists already, or the folder given is not one."""
