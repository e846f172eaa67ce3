"""Processes: none outlives the one that started it, none is started that this machine cannot hold.

    subprocess.Popen(guarded([sys.executable, "train.py"]))     # gets SIGTERM when this process is gone
    check_count("train.gpus", 50, *processes_at_most())         # ValueError: the most is 16
    outlive_readers()                                           # `| head -1` and a closed ssh end no run

All files that start processes use these functions. This one imports Python's own library only,
because each process begins with it.
"""

import contextlib
import faulthandler
import io
import math
import os
import select
import signal
import sys
import termios
import threading
import time
from pathlib import Path

from errors import ConfigError

# --------------------------------------------------------------------------------------------------
# Nothing is left behind

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


def born(pid):
    """When a process began. It tells the process from a later one with the same number, and setting
    the machine's clock does not change it. Raises psutil.NoSuchProcess."""
    import psutil

    with contextlib.suppress(OSError):
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return psutil.Process(pid).create_time()


def end_children(seconds=5.0):
    """End all processes that this one started, and theirs: SIGTERM, and SIGKILL `seconds` later."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for how in ("terminate", "kill"):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(child, how)()
        children = psutil.wait_procs(children, timeout=seconds)[1]


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
        raise ConfigError(f"{name} = {count}: {why}; the most is {most}." if count > 0 else
                         f"{name} = {count}: must be above 0.")


def check_memory(size, what):
    """MemoryError if `size` bytes are not free. Linux would promise them and
    end the process later."""
    free = available_memory()
    if size > free:
        raise MemoryError(f"{what} would take {in_bytes(size)}, and {in_bytes(free)} are "
                          "free; take less")


def keep_memory():
    """Have glibc keep what is freed, up to half a gigabyte, in place of giving it back to the system. torch frees and
    asks again all the time, and each page that comes back is a fault: 2,000 in a pass through a network of images,
    a fifth of its time (docs/LOG.md). If MALLOC_TRIM_THRESHOLD_ is set, or the C library is another, nothing
    is changed."""
    import ctypes

    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        with contextlib.suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-1, 512 << 20)  # M_TRIM_THRESHOLD
            mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: smaller blocks are not mapped one by one


def in_bytes(count):
    """A number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1e6 else f"{count:.0e} TB"


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


class Heard(io.FileIO):
    """An output that goes on when nobody can read it any more; then `lost` says why."""

    lost = None

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            return len(data)


def outlive_readers():
    """Once stdout or stderr is closed at the other end, drop what is written instead of raising
    BrokenPipeError."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is None:  # closed from the beginning
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(before, "buffer") and before.fileno() == fd:
            before.flush()
            heard = Heard(fd, "w", closefd=False)
            # unbuffered with python -u
            buffer = heard if before.write_through else io.BufferedWriter(heard)
            lossy = before.errors in ("strict", "surrogateescape")  # a locale may not have all our signs
            setattr(sys, name, io.TextIOWrapper(buffer, before.encoding, "replace" if lossy else before.errors,
                                                line_buffering=before.line_buffering,
                                                write_through=before.write_through))


def lost_output():
    """Why nobody reads stdout any more; None if somebody may."""
    buffer = getattr(sys.stdout, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "lost", None)


def in_front():
    """Whether a terminal's keys are for this process: its shell waits for it, or for the launcher of its rank."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # torchrun gives a rank a session of its own
        with contextlib.suppress(OSError):
            launcher = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
            return "TORCHELASTIC_RUN_ID" in os.environ and launcher[2] == launcher[5]  # its group, the terminal's group
    return False


@contextlib.contextmanager
def progress():
    """A function that shows a text in the last line of a terminal, at most twice a second; elsewhere
    it shows nothing."""
    due = time.monotonic() if sys.stderr.isatty() else math.inf

    def show(text):
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + 0.5
            print(f"\r{text}", end="\033[K", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if due < math.inf:
            print(end="\r\033[K", file=sys.stderr, flush=True)


_reading = []  # the Keys that have changed the terminal


class Keys:
    """Within it, a terminal at stdin gives each key as it is pressed, without Enter, and does not show it. At the end,
    and while Ctrl-Z stops the process, the terminal is as it was. `possible` says whether there is one to read: only
    the main thread can."""

    def __init__(self, wanted=True):
        self.possible = wanted and os.isatty(0) and threading.current_thread() is threading.main_thread()
        self._usual = None  # the terminal's mode before

    def __enter__(self):
        if self.possible:
            _reading.append(self)
            self._gives_lines()
            self._before = signal.signal(signal.SIGTSTP, self._stop)
        return self

    def __exit__(self, *_):
        if self.possible:
            _reading.remove(self)
            self.leave()
            signal.signal(signal.SIGTSTP, self._before)

    def _gives_lines(self):
        """Whether the terminal is in its usual mode, which is remembered."""
        mode = termios.tcgetattr(0)
        if mode[3] & termios.ICANON:
            self._usual = mode
        return bool(mode[3] & termios.ICANON)

    def pressed(self):
        """The keys since the last call, as bytes; never waits. None are read while the process is in the background."""
        if self.possible and in_front():
            with contextlib.suppress(OSError, termios.error):  # the terminal was closed
                if self._gives_lines():  # at first, and again after Ctrl-Z
                    mode = [*self._usual]
                    mode[3] &= ~(termios.ICANON | termios.ECHO)
                    termios.tcsetattr(0, termios.TCSANOW, mode)
                if select.select([0], [], [], 0)[0]:
                    return os.read(0, 1024)
        return b""

    def leave(self):
        """Give the terminal back as it was; may be called by a signal's handler."""
        if self._usual is not None and in_front():  # in the background Linux would stop this process for it
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSANOW, self._usual)
                os.write(0, b"\x1b[?25h")  # the cursor, which a live panel hides

    def _stop(self, number, frame):
        self.leave()
        signal.signal(number, self._before)
        os.kill(os.getpid(), number)  # returns once `fg` has it go on
        signal.signal(number, self._stop)


def stop_at_once():
    """Have Ctrl-C end this process without a traceback, as it does while packages are imported. A
    process that ignores Ctrl-C, because it was started in the background, goes on ignoring it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


STUCK = 3.0  # seconds without an answer


@contextlib.contextmanager
def unstuck():
    """Within it, a second SIGINT or SIGTERM ends the process also if the main thread does not return from C, from an
    environment with an endless loop for example: there no handler of Python's ever runs. (C that keeps Python's lock,
    unlike ours, is not left.) Called by another thread than the main one it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    (reading, writing), answers = os.pipe(), []
    os.set_blocking(writing, False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not ours
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGURG, lambda *_: answers.append(True))
    hearing = threading.Thread(target=_hear, args=(reading, threading.get_ident(), answers), daemon=True)
    hearing.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        hearing.join(timeout=1)  # it may just ask this thread, which answers here
        signal.signal(signal.SIGURG, handler)


def _hear(reading, main, answers):
    """What unstuck's thread does. From `reading` come the numbers of the signals, which are written in C."""
    warned = False
    with open(reading, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM) or not _is_stuck(main, answers):
                continue
            if warned:
                for keys in _reading:
                    keys.leave()
                print("left at once, in the middle of that call", file=sys.stderr, flush=True)
                os._exit(128 + number[0])
            while select.select([signals], [], [], 0)[0] and signals.read(1024):
                pass  # what came before the sentence below
            print(f"\nthe process has been in one call into C for {STUCK:.0f} s (an environment's step that does not "
                  "end, if not a long step of learning); once more to leave at once, without a checkpoint",
                  file=sys.stderr, flush=True)
            warned = True


def _is_stuck(main, answers):
    """Whether the main thread does not answer a signal of ours, which is ignored elsewhere, within STUCK seconds."""
    answers.clear()
    signal.pthread_kill(main, signal.SIGURG)
    deadline = time.monotonic() + STUCK
    while not answers and time.monotonic() < deadline:
        time.sleep(0.05)
    return not answers


def run_command(function):
    """Run the main function of a command line. Within it Ctrl-C raises KeyboardInterrupt; after it
    no traceback is printed. A crash in C, of an environment for example, prints where it was; a call into C that
    does not return is left at the second signal."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr may be closed
        faulthandler.enable(all_threads=False)
    outlive_readers()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with unstuck():
            function()
    except KeyboardInterrupt:
        stop_at_once()
        os.kill(os.getpid(), signal.SIGINT)  # so that a shell sees how it ended
    finally:
        stop_at_once()  # a Ctrl-C while Python shuts down must show no traceback either


def main():
    """processes.py PARENT SIGNAL COMMAND...: become the command, guarded."""
    parent, number, *command = sys.argv[1:]
    die_with(int(parent), int(number))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
