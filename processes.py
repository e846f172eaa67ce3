"""Handle child processes, signals, the limits of a machine, and whole files.

    subprocess.Popen(guarded([sys.executable, "train.py"]))  # gets SIGTERM when this process ends
    check_count("train.gpus", 50, *processes_at_most())      # ConfigError: the most is 16
    say("progress")                                          # survives a closed pipe or terminal

Each process that this project starts begins with this file, so it imports the standard library
only.
"""

import contextlib
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

# --------------------------------------------------------------------------------------------------
# Child processes and files

ORPHAN_SECONDS = 2.0  # that a worker's environments have to close after their parent was killed


def guarded(command, number=signal.SIGTERM):
    """Return a command line for `command` that gets a signal when this process ends.

    Also after `kill -9`.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def die_with(parent, number):
    """Have Linux send this process a signal when its parent, a process number, ends.

    Now, if it is gone already. An exec does not change that. The parent is the thread that started
    this process, so that thread must live as long. On other systems a rank or a trial outlives a
    killed parent; workers of Multiprocessing do not (see leave_with).
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def leave_with(fd, parent, closing):
    """End this process when the other side of a socket is gone, even within a step.

    Before that the main thread, which notices it too, has `closing` seconds to close what it has,
    or ORPHAN_SECONDS if `parent`, a process number, is gone as well.
    """

    def watch():
        poller = select.poll()
        poller.register(fd, 0)  # only hang-ups
        poller.poll()
        start = time.monotonic()
        while time.monotonic() - start < (closing if os.getppid() == parent else ORPHAN_SECONDS):
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_children(seconds=5.0):
    """End all descendants of this process: SIGTERM, and SIGKILL `seconds` later."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(child)
        children = psutil.wait_procs(children, timeout=seconds)[1]


def write_whole(path, write):
    """Have `write(file)` write a file that is complete or does not exist.

    It is written under another name, synced and renamed.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# What this machine can hold


def cores():
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_at_most():
    """Return (the largest useful number of processes or threads, why)."""
    return max(16, 4 * cores()), f"this machine has {cores()} core{'s' * (cores() > 1)}"


def available_memory():
    """Return the bytes that are free on the machine and in its container."""
    import psutil

    free = psutil.virtual_memory().available
    for folder, limit, used, cache in (
            ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
             "total_inactive_file")):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limit, used = (int(Path(folder, name).read_text()) for name in (limit, used))
            lines = Path(folder, "memory.stat").read_text().splitlines()
            free = min(free, limit - used + int(dict(map(str.split, lines)).get(cache, 0)))
    return max(0, free)


def check_count(name, count, most, why):
    """Raise ConfigError if a setting asks for more than `most`, or less than one."""
    from errors import require  # here, because `guarded` runs this file alone

    require(count is None or 1 <= count <= most,
            f"{name} = {count}: must be 1 or more, and {why}; the most is {most}.")


def check_memory(size, name):
    """Raise MemoryError if `size` bytes are not free.

    Linux would promise them and end the process later.
    """
    free = available_memory()
    if size > free:
        raise MemoryError(f"{name} would take {size / 1e9:,.3g} GB, and {free / 1e9:,.3g} GB are "
                          "free; use less")


def keep_memory():
    """Have glibc keep up to half a gigabyte of freed memory for the next allocation.

    torch frees and allocates all the time, and each page that returns from the system is a fault:
    2,000 in a pass through an image network, a fifth of its time (docs/findings.md). Does nothing
    if MALLOC_TRIM_THRESHOLD_ is set, or with another C library.
    """
    import ctypes

    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        with contextlib.suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-1, 512 << 20)  # M_TRIM_THRESHOLD
            mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: smaller blocks are not mapped one by one


def spare_folder(name):
    """Return a folder to use when the project's and the home folder are read-only."""
    import stat
    import tempfile

    folder = Path(tempfile.gettempdir(), f"kept-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()  # of a link itself, which another user may have made
    # Code is loaded from the folder, so no other user may write there.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp())
    print(f"{name} kept in {folder}, because neither {Path(__file__).parent} nor the home folder "
          "can be written", file=sys.stderr)
    return folder


# --------------------------------------------------------------------------------------------------
# A command line that others stop or stop reading


def say(text, file=None):
    """Print a line to stdout or `file`; if it is closed, discard all later output."""
    try:
        print(text, file=file or sys.stdout, flush=True)
    except OSError:
        discard_output()


say_once = functools.cache(say)


def discard_output():
    """Send what is written to stdout and stderr to the null device."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)


@contextlib.contextmanager
def progress():
    """Yield a function that shows a text in the last line of a terminal.

    Lines that are printed meanwhile appear above it. Without a terminal it does nothing.
    """
    from rich.console import Console

    with Console(stderr=True).status("", refresh_per_second=2) as status:
        yield status.update


class Interrupts:
    """Stop at the epoch's end after a first SIGINT, SIGTERM or SIGHUP.

    A second SIGINT raises KeyboardInterrupt at once. Another SIGHUP or SIGTERM is ignored, because
    a closed terminal and `die_with` may send several. With nohup SIGHUP stays ignored. In a call
    into C that does not return no handler runs: only SIGQUIT (Ctrl-\\) or SIGKILL ends it.
    is_silent: print nothing.
    """

    def __init__(self, is_silent=False):
        self.is_silent = is_silent
        self.requested = False
        self._handlers = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number, frame):
        if number == signal.SIGHUP:  # another one must not interrupt the last checkpoint
            signal.signal(number, signal.SIG_IGN)
            self._handlers.pop(number, None)  # two may come at once
        elif self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested and not self.is_silent:
            say("\nstopping after this epoch, with a checkpoint; once more to leave at once, "
                "without one (Ctrl-\\ where that does nothing)", sys.stderr)
        self.requested = True

    def __exit__(self, *_):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def stop_at_once():
    """Have Ctrl-C end this process without a traceback.

    For the time in which packages are imported. A process that ignores Ctrl-C, because it was
    started in the background, continues to.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_command(function):
    """Run the main function of a command line.

    Ctrl-C raises KeyboardInterrupt in `function`, and ends the process without a traceback. A crash
    in C, for example of an environment, prints where Python was.
    """
    for name in ("stdout", "stderr"):
        # Some daemons start jobs without them.
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        stream.reconfigure(errors="replace")  # a locale may lack × and ▁
        setattr(sys, name, stream)
    with contextlib.suppress(OSError, ValueError):  # stderr has no file
        faulthandler.enable(all_threads=False)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        function()
        sys.stdout.flush()
    except KeyboardInterrupt:
        stop_at_once()
        os.kill(os.getpid(), signal.SIGINT)  # so that a shell sees how it ended
    except BrokenPipeError:
        poller = select.poll()
        poller.register(1, 0)
        if not poller.poll(0):  # the error is of another pipe
            raise
        discard_output()  # `| head -1` has read enough
    finally:
        stop_at_once()  # a Ctrl-C while Python shuts down must show no traceback either


if __name__ == "__main__":  # processes.py PARENT SIGNAL COMMAND...: become the command, guarded
    die_with(int(sys.argv[1]), int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
