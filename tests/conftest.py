"""What all tests share. Hypothesis draws the same examples in every run, so that a test can only begin
to fail because of a change; `pytest --hypothesis-profile=explore` draws new ones.
"""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def one_torch_thread():
    """For small matrices: torch's threads would only wait for each other."""
    import torch  # not before pufferl, which says how torch's threads wait

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def launcher():
    """Kernels as a GPU's compiler leaves them, each compiled once."""
    pytest.importorskip("numba_cuda", reason="pip install -r requirements/test.txt")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    import ptx

    return ptx.Launcher()


@pytest.fixture
def several_learners(monkeypatch):
    """Threads act and learn side by side also where a network is too small to be worth it."""
    import engines
    from fast import compiled

    monkeypatch.setattr(engines, "MIN_FLOPS_FOR_LEARNER", 1)
    monkeypatch.setattr(compiled, "MIN_FLOPS_FOR_LEARNER", 1)
    monkeypatch.setattr(engines, "MIN_FLOPS_FOR_ACTORS", 1)


def slow_but(cases, *fast):
    """The cases of a parametrized test, all of them slow but those in `fast`."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


STARTED = []


def start(command, **options):
    """A subprocess.Popen that ends with its test."""
    STARTED.append(subprocess.Popen(command, **options))
    return STARTED[-1]


def end(process):
    """Kill it, and what it has started."""
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    """Whatever a failed test leaves running would slow all others down."""
    yield
    while STARTED:
        end(STARTED.pop())


def read_until(process, text, seconds=240):
    """What the process prints, as far as the first line that holds `text`."""
    lines, timer = [], threading.Timer(seconds, end, [process])
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if text in line:
                return "".join(lines)
    finally:
        timer.cancel()
    raise AssertionError(f"it ended without saying {text!r}:\n{''.join(lines)}")


def wait_for(get, seconds=300):
    """The first true value of get()."""
    deadline = time.monotonic() + seconds
    while not (value := get()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


@contextlib.contextmanager
def open_chromium(hosts):
    """Yield (a page of headless Chromium, the addresses that it loads, its errors).

    hosts: rules of Chromium that map names to addresses.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("needs Chromium, which was not found (Debian: apt-get install chromium)")
    arguments = ["--no-sandbox", f"--host-resolver-rules={hosts}"]
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=program, args=arguments)
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(120_000)
        requests, problems = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text)
                if message.type == "error" else None)
        yield page, requests, problems
        chromium.close()


@pytest.fixture
def nothing_left():
    """The test leaves no worker process and no file in shared memory."""

    def shared():
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    def command(process):
        try:
            return " ".join(process.cmdline())
        except psutil.Error:  # it has just ended, as those of Ray do in their own time
            return ""

    def children():
        return {p.pid for p in psutil.Process().children(recursive=True)
                if "workers.serve" in command(p)}

    def others_have(name):
        """Whether another program on this machine, which came meanwhile, has
        that file in its memory."""
        ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if int(maps.parent.name) not in ours and f"/dev/shm/{name}" in maps.read_text():
                    return True
        return False

    before = shared(), children()
    yield
    assert children() == before[1]
    assert [name for name in shared() - before[0] if not others_have(name)] == []
