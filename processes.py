"""Processes: none outlives the one that started it, none is started that this machine cannot hold,
none leaves half a file.

    subprocess.Popen(guarded([sys.executable, "train.py"]))     # gets SIGTERM when this process is gone
    check_count("train.gpus", 50, *processes_at_most())         # ValueError: the most is 16
    say("progress")                                             # a closed pipe or terminal ends no run

All files that start processes use these functions. This one imports Python's own library only,
because each process begins with it.
"""

import contextlib
import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

# --------------------------------------------------------------------------------------------------
# Nothing is left behind, nothing is half written

# seconds that a worker's environments have to close after its parent process was killed
ALONE = 2.0


def guarded(command, number=signal.SIGTERM):
    """A command line that runs `command` and has it get the signal `number` when this process is
    gone, also by `kill -9`."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def die_with(parent, number):
    """Have Linux send this process a signal when its parent, the process number `parent`, is
    gone, or now if it is gone already. An exec does not change that. The parent is the thread
    that started this process, so that thread must live as long. Other systems cannot do it: a
    rank or a trial there goes on if its parent is killed. Workers of Multiprocessing end on all
    systems (see leave_with)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def leave_with(fd, parent, closing):
    """End this process when the other side of the socket `fd` is gone, even in the middle of a
    step. The main thread sees it too and closes what it has: for that it has `closing` seconds, or
    ALONE if `parent`, a process number, is gone as well."""

    def watch():
        poller = select.poll()
        poller.register(fd, 0)  # only hang-ups
        poller.poll()
        begun = time.monotonic()
        while time.monotonic() - begun < (closing if os.getppid() == parent else ALONE):
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_children(seconds=5.0):
    """End all processes that this one started, and theirs: SIGTERM, and SIGKILL `seconds` later."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for how in ("terminate", "kill"):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(child, how)()
        children = psutil.wait_procs(children, timeout=seconds)[1]


def write_whole(path, write):
    """Have `write(file)` write a file under another name, sync and rename it: it is whole or not
    there at all."""
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
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_at_most():
    """(how many processes or threads may be asked for, why). More would
    only wait for each other."""
    return max(16, 4 * cores()), f"this machine has {cores()} core{'s' * (cores() > 1)}"


def available_memory():
    """Bytes that this process may still take, by what the machine and its container have left."""
    import psutil

    free = psutil.virtual_memory().available
    for folder, limit, used, cache in (
            ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
             "total_inactive_file")):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            bound, taken = (int(Path(folder, name).read_text()) for name in (limit, used))
            stat = dict(line.split()
                        for line in Path(folder, "memory.stat").read_text().splitlines())
            free = min(free, bound - taken + int(stat.get(cache, 0)))
    return max(0, free)


def check_count(name, count, most, why):
    """ConfigError if a setting asks for more than `most`, or for less than one."""
    if count is not None and not 1 <= count <= most:
        from errors import ConfigError  # not above: `guarded` runs this file where no other is found

        raise ConfigError(f"{name} = {count}: {why}; the most is {most}." if count > 0 else
                         f"{name} = {count}: must be above 0.")


def check_memory(size, what):
    """MemoryError if `size` bytes are not free. Linux would promise them and
    end the process later."""
    free = available_memory()
    if size > free:
        raise MemoryError(f"{what} would take {size / 1e9:,.3g} GB, and {free / 1e9:,.3g} GB are free; take less")


def keep_memory():
    """Have glibc keep what is freed, up to half a gigabyte, in place of giving it back to the system. torch frees and
    asks again all the time, and each page that comes back is a fault: 2,000 in a pass through a network of images,
    a fifth of its time (docs/findings.md). If MALLOC_TRIM_THRESHOLD_ is set, or the C library is another, nothing
    is changed."""
    import ctypes

    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        with contextlib.suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-1, 512 << 20)  # M_TRIM_THRESHOLD
            mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: smaller blocks are not mapped one by one


def spare_folder(what):
    """A folder for what is kept if neither the project's nor the home folder
    can be written; says so."""
    import stat
    import tempfile

    folder = Path(tempfile.gettempdir(), f"kept-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # of a link itself, which somebody else may have put there
    others_write = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    # Code is loaded from it, so nobody else may write there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or others_write:
        folder = Path(tempfile.mkdtemp())
    print(f"{what} kept in {folder}, because neither {Path(__file__).parent} nor the home folder "
          "can be written", file=sys.stderr)
    return folder


# --------------------------------------------------------------------------------------------------
# A command line that others stop or stop reading


def say(text, file=None):
    """Print a line, on stdout if there is no `file`. If that fails, because a terminal or a pipe was
    closed, the null device takes all later output and the process runs on."""
    try:
        print(text, file=file or sys.stdout, flush=True)
    except OSError:
        discard_output()


def discard_output():
    """Send what is written to stdout and stderr to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


@contextlib.contextmanager
def progress():
    """A function that shows a text in the last line of a terminal, at most twice a second; elsewhere
    it shows nothing."""
    due = time.monotonic() if sys.stderr.isatty() else math.inf

    def show(text):
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + 0.5
            with contextlib.suppress(OSError, ValueError):  # stderr has no file
                text = text[: os.get_terminal_size(sys.stderr.fileno()).columns - 1]
            print(f"\r{text}", end="\033[K", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if due < math.inf:
            print(end="\r\033[K", file=sys.stderr, flush=True)


class Interrupts:
    """Within it, the first SIGINT, SIGTERM or SIGHUP asks for a stop at the epoch's end. A second
    SIGINT or SIGTERM raises KeyboardInterrupt at once; a second SIGHUP does not, because a terminal
    that closes may send several. With nohup SIGHUP stays ignored. A call into C that does not return
    lets no handler run: only SIGQUIT (Ctrl-\\) or SIGKILL ends it. is_silent: prints nothing."""

    def __init__(self, is_silent=False):
        self.is_silent = is_silent
        self.requested = False
        self.closed = False  # the terminal
        self._before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number, frame):
        self.closed |= number == signal.SIGHUP
        if self.requested and number != signal.SIGHUP:
            raise KeyboardInterrupt
        if not self.requested and not self.is_silent:
            say("\nstopping after this epoch, with a checkpoint; once more to leave at once, without one "
                "(Ctrl-\\ where that does nothing)", sys.stderr)
        self.requested = True

    def __exit__(self, *_):
        for number, handler in self._before.items():
            if number != signal.SIGHUP or not self.closed:  # else the next would end the last checkpoint
                signal.signal(number, handler)


def stop_at_once():
    """Have Ctrl-C end this process without a traceback, as it does while packages are imported. A
    process that ignores Ctrl-C, because it was started in the background, goes on ignoring it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_command(function):
    """Run the main function of a command line. Within it Ctrl-C raises KeyboardInterrupt; after it
    no traceback is printed. A crash in C, of an environment for example, prints where it was."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  as some daemons start jobs
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


def main():
    """processes.py PARENT SIGNAL COMMAND...: become the command, guarded."""
    parent, number, *command = sys.argv[1:]
    die_with(int(parent), int(number))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
