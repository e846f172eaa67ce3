"""Errors that a user can act on, and how a command prints one.

    raise ConfigError("train.gamma = 2: must lie within 0 and 1.")     # setting = value: problem
    with exit_on_error("pufferl.py train"):                            # prints no traceback
        ...

An error in a user's file (an environment, a network, a loss) is shown by that file's lines. Any
other exception is a fault of this project and keeps its traceback.
"""

import contextlib
import errno
import itertools
import sys
import sysconfig
import traceback
from pathlib import Path


class UserError(ValueError):
    """An error that its message explains; commands print that alone."""


class ConfigError(UserError):
    """A setting, an argument or a file is missing, has a wrong type or cannot work."""


class EnvError(UserError):
    """An environment does not return what its interface or its spaces say."""


class NetworkError(UserError):
    """A network does not return what a policy must."""


class WorkerError(UserError):
    """A process that steps environments has failed, ended or does not answer."""


class RankError(UserError):
    """Another rank has ended or does not answer, or the ranks do not agree."""


def require(is_right, problem, kind=ConfigError):
    """Raise ConfigError, or another class, with this text unless a condition holds."""
    if not is_right:
        raise kind(problem)


PROJECT = {str(Path(__file__).parent / folder)
           for folder in (".", "fast", "ocean", "families", "tools", "tools/sweep")}
LIBRARIES = ("site-packages", "dist-packages", "<frozen", sysconfig.get_path("stdlib"))
OUT_OF_MEMORY = "out of memory", "allocate memory", "bad_alloc"  # as CUDA, torch and C++ say it
REFUSED_PATHS = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM,
                 errno.EROFS}


def _is_of_project(frame):
    return str(Path(frame.filename).parent) in PROJECT


def user_traceback(error):
    """Return (a traceback, whether the error is in a user's code).

    A user's begins with the first file that this project calls and that is no library's.
    """
    info = traceback.TracebackException.from_exception(error)
    called = itertools.dropwhile(lambda frame: not _is_of_project(frame), info.stack)
    frames = list(itertools.dropwhile(
        lambda frame: _is_of_project(frame) or any(part in frame.filename for part in LIBRARIES),
        called))
    if frames:
        info.stack = traceback.StackSummary.from_list(frames)
    return "".join(info.format()).rstrip(), bool(frames)


def error_text(error):
    """Return the text that a command prints for an error.

    None for a fault of this project, which needs a traceback.
    """
    (lines, is_users), text = user_traceback(error), str(error)
    is_explained = (isinstance(error, UserError)
                    or type(error).__name__ == "DependencyNotInstalled")  # Gymnasium's
    is_refused_path = isinstance(error, OSError) and error.errno in REFUSED_PATHS
    parts = []
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError)
                                          and any(part in text for part in OUT_OF_MEMORY)):
        parts.append("out of memory: lower vec.total_agents (or env.num_envs, vec.num_envs), "
                     "train.horizon, train.minibatch_size, train.max_minibatch_size or "
                     f"policy.hidden_size. ({(text or type(error).__name__).splitlines()[0]})")
    if is_users and not is_explained:
        parts.append(f"an error in the environment, the network or the loss:\n{lines}")
    elif is_explained or is_refused_path or isinstance(error, FloatingPointError):
        parts += [text or type(error).__name__, *getattr(error, "__notes__", ())]
    return "\n".join(parts) or None


@contextlib.contextmanager
def exit_on_error(program, expected=()):
    """Exit if the block raises, with the program's name and the `error_text`.

    An error for which `error_text` has no text is raised again, unless it is of the classes
    `expected`. A rank whose error another rank prints (its attribute `elsewhere`) prints nothing.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        text = error_text(error)
        is_expected = isinstance(error, expected) and not isinstance(error, BrokenPipeError)
        if text is None and not is_expected:
            raise  # to processes.run_command, which knows whether stdout is the broken pipe
        sys.exit(1 if getattr(error, "elsewhere", False) else f"{program}: {text or error}")
