"""Runs every test and benchmark of this trainer that needs a GPU, step by step.

    make gpu                             # every step, into docs/gpu
    make gpu STEPS="versions kernels"    # steps with these prefixes; other results stay
    make gpu OUT=/tmp/gpu PYTHON=python3.12 MINUTES=9
    python bench/bench_gpu.py --list     # the steps and their limits

Each step is a process of its own that is ended at its limit; after a failure the next one begins.
Nothing is installed. report.json and report.md are written again after each step, so that an
interrupted command leaves what it has found. nvidia-smi is asked for load and power four times a
second meanwhile. The exit status is 1 if a step did not pass. To add one, add a row to STEPS: a
benchmark's last line is one JSON object, its figures.

This file needs nothing but Python: what is missing for a step is said by the step.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ALL = 25 * 60  # seconds of all steps
TAIL = 4000  # characters of a step's output in its result
GOAL = 0.7  # of the speed of a plain copy
# what figures of another form lead to
UNEXPECTED = ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError
OLDEST_TORCH = 2, 11

# --------------------------------------------------------------------------------------------------
# What the figures must say: each returns what is wrong, or None


def some_passed(figures):
    return None if figures["passed"] else "no test ran"


def near_a_copy(figures):
    """But for the policy's step, whose time is arithmetic."""
    slow = [f"{name} {row['share_of_copy_of_its_size']:.0%}" for name, row in figures["kernels"].items()
            if row["share_of_copy_of_its_size"] < GOAL and not name.startswith("policy step")]
    return f"below {GOAL:.0%} of a copy of their size: {', '.join(slow)}" if slow else None


def solved(figures):
    ((result,),) = (seeds.values() for seeds in figures["environments"].values())
    return (None if result["seconds"] is not None
            else f"ended at {result['end']:.0f}, below {result['threshold']:.0f}")


def same_bits(figures):
    if figures["resumed"] == figures["whole"]:
        return None
    return "resumed, it has other weights" + (
        "" if figures["whole_again"] == figures["whole"]
        else ", but so has the same run undisturbed")


# --------------------------------------------------------------------------------------------------
# The steps


class Step(NamedTuple):
    name: str
    seconds: float  # its limit
    arguments: list  # of Python
    wrong: callable = lambda figures: None
    setting: bool = False  # whether it needs vec.device


def tests(*arguments):
    return ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-q", "--tb=short",
            "-rfE", *arguments]


def of_this_file(name, *arguments):
    return [str(Path(__file__).resolve()), "--run", name, *arguments]


def has_device_setting():
    """Return whether the configuration's section vec has a setting `device`."""
    section = re.search(r"^class Vec:\n(.*?)^(?:@|class )", (ROOT / "configuration.py").read_text(),
                        re.M | re.S)
    return re.search(r"^    device:", section[1], re.M) is not None


def stepped_on(place):
    """Return options of pufferl.py for the network on the GPU.

    The environments are on the host or on the GPU too.
    """
    return ["--train.device", "cuda", *(["--vec.device", place] if has_device_setting() else [])]


def train_speed():
    shapes = {"4096x64": [],
              "4096x32": ["--horizon", "32", "--num-layers", "4", "--hidden-size", "32"]}
    for shape, options in shapes.items():
        for place in ("host", "cuda"):
            for precision in ("float32", "bfloat16"):
                yield Step(f"train-{shape}-{place}-{precision}", 180, [
                    "bench/bench_train.py", "--device", "cuda", "--env-device", place, "--precision", precision,
                    *options], setting=place == "cuda")


def learning():
    for place in ("host", "cuda"):
        command = ["bench/bench_solve.py", "--only", "breakout", "--cores", "64", "--to-end",
                   "--options", *stepped_on(place)]
        yield Step(f"learn-{place}", 180, command, solved, setting=place == "cuda")
    for place in ("host", "cuda"):
        yield Step(f"resume-{place}", 240, of_this_file("resume", *stepped_on(place)), same_bits,
                   setting=place == "cuda")


# In a separate process, because a failed capture affects later tests.
CAPTURES = "cannot_be_captured"
STEPS = [
    Step("versions", 60, of_this_file("versions")),
    Step("tests-kernels", 420, tests("-m", "gpu", "tests/test_cuda.py"), some_passed),
    Step("tests-training", 420,
         tests("-m", "gpu and not slow", "tests/test_devices.py", "-k", f"not ({CAPTURES})"),
         some_passed),
    Step("tests-captures", 150,
         tests("-m", "gpu and not slow", "tests/test_devices.py", "-k", CAPTURES), some_passed),
    Step("kernels", 180, ["bench/bench_kernels.py", "--device", "cuda"], near_a_copy),
    Step("epoch", 180, of_this_file("epoch")),
    *train_speed(),
    *learning(),
    Step("tests-slow", 300, tests("-m", "gpu and slow", "tests/test_devices.py"), some_passed),
]


def versions():
    """Print the machine and the installed versions of the requirements.

    Exit status 1 if torch cannot use the GPU.
    """
    import importlib.metadata

    for command in (["nvidia-smi"], ["nvcc", "--version"],
                    [os.environ.get("CC", "cc"), "--version"]):
        with contextlib.suppress(OSError):
            subprocess.run(command, check=False)
    result = {"python": sys.version.split()[0], "cores": os.cpu_count(), "packages": {}}
    for name in ("requirements/play.txt", "requirements.txt", "requirements/cuda.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if line and line[0] not in "#-":
                package, requested = re.match(r"([\w.-]+)\S*?([<>=~].*?)?\s*(?:#|$)", line).groups()
                try:
                    result["packages"][package] = importlib.metadata.version(package)
                except importlib.metadata.PackageNotFoundError:
                    result["packages"][package] = None
                print(f"{package:24} {result['packages'][package] or 'MISSING':14} "
                      f"asked for: {requested}")
    import torch

    print(torch.__config__.show())
    result |= {"torch": torch.__version__, "cuda": torch.version.cuda,
              "sees_it": torch.cuda.is_available()}
    if result["sees_it"]:
        properties = torch.cuda.get_device_properties(0)
        result |= {"gpu": properties.name, "gigabytes": round(properties.total_memory / 2**30, 1),
                  "multiprocessors": properties.multi_processor_count,
                  "capability": f"{properties.major}.{properties.minor}"}
    with contextlib.suppress(OSError):
        requested = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm",
                 "--format=csv,noheader"]
        result["driver"] = subprocess.run(requested, capture_output=True, text=True).stdout.strip()
    print(json.dumps(result))
    if not result["sees_it"]:
        sys.exit(f"torch {torch.__version__}, made for CUDA {torch.version.cuda}, does "
                 "not see the GPU")
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        sys.exit(f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}")
    from numba import cuda

    if cuda.implementation != "NVIDIA":
        sys.exit("numba.cuda is numba's own, not numba-cuda's (fused.find_gpu says what to do)")


def epoch():
    """Profile an epoch of Breakout on the GPU, with small and with large minibatches."""
    sys.path.insert(0, str(ROOT))
    from bench import bench_train

    result = {}
    for size in (8192, 65536):
        trainer = bench_train.make_trainer(
            bench_train.Arguments(device="cuda", env_device="cuda", minibatch_size=size))
        bench_train.warm_up(trainer)
        result[size] = one_epoch(bench_train, trainer)
        trainer.release()
        print(f"minibatches of {size:,}: {result[size]['milliseconds']:.2f} ms, of which nothing runs in "
              f"{result[size]['idle']:.2f}")
        for name, times, milliseconds in result[size]["kernels"]:
            print(f"    {milliseconds:7.3f} ms {times:7.1f} times {1000 * milliseconds / times:8.2f} us  {name}")
    print(json.dumps({"epoch": result}))


PRODUCTS = re.compile(r"gemm|cutlass|cublas|nvjet|splitK", re.I)


def kernel_name(event):
    """Return a kernel's name; those of one sort get one name."""
    if PRODUCTS.search(event):
        return "products"
    if "at::" in event:
        return "torch's own"
    return re.sub(r"\[abi.*|[<(].*", "", event).split("::")[-1].strip() or event


def one_epoch(bench_train, trainer, epochs=25):
    """Return the times of an epoch on a GPU.

    {"milliseconds": the mean of an epoch, "idle": those in which nothing runs, "kernels": [[name,
    count, milliseconds], ...]}. The profiler slows the host down, so its figures only tell how long
    the GPU is busy. 25 epochs have whole cycles of minibatches; the profiler records five.
    """
    def run(count):
        begun = time.perf_counter()
        for _ in range(count):
            trainer.evaluate()
            trainer.train()
        return 1000 * (time.perf_counter() - begun) / count

    milliseconds, profiled = run(epochs), -(-epochs // 5)
    events, _ = bench_train.gpu_events(lambda: run(profiled))
    result = {}
    for event in events:
        entry = result.setdefault(kernel_name(event.name), [0, 0.0])
        entry[0] += 1 / profiled
        entry[1] += event.time_range.elapsed_us() / 1000 / profiled
    return {"milliseconds": milliseconds, "idle": milliseconds - bench_train.busy_us(events) / 1000 / profiled,
            "kernels": sorted(([name, *entry] for name, entry in result.items()), key=lambda row: -row[2])}


def resume(*options):
    """Compare a killed and resumed Breakout with the undisturbed run.

    Twice if they differ.
    """
    import torch

    sys.path.insert(0, str(ROOT))
    from bench.same_bits import digest

    command = [sys.executable, "pufferl.py", "train", "breakout", "--train.total-timesteps",
               str(40 * 4096 * 64),
               "--train.checkpoint-interval", "10", "--logger", "none", *options]
    with tempfile.TemporaryDirectory() as folder:

        def weights(name, *more):
            subprocess.run([*command, "--data-dir", f"{folder}/{name}", *more],
                           cwd=ROOT, check=True)
            run = max((Path(folder) / name).glob("*/trainer_state.pt"),
                      key=lambda path: path.stat().st_mtime)
            state = torch.load(run, weights_only=True)
            return digest([state["model"], state["tensors"]])

        result = {"whole": weights("whole")}
        process = subprocess.Popen([*command, "--data-dir", f"{folder}/killed"], cwd=ROOT)
        observed = set()  # trainer_state.pt is written as the run begins, and after ten epochs
        while len(observed) < 2 and process.poll() is None:
            observed |= {path.stat().st_mtime_ns
                     for path in Path(folder).glob("killed/*/trainer_state.pt")}
            time.sleep(0.01)
        process.kill()
        if process.wait() != -signal.SIGKILL:
            sys.exit("the run ended before it could be killed")
        (state,) = Path(folder).glob("killed/*/trainer_state.pt")
        result["epoch"] = torch.load(state, weights_only=True)["epoch"]
        result["resumed"] = weights("killed", "--resume", str(state.parent))
        if result["resumed"] != result["whole"]:
            result["whole_again"] = weights("again")
    print(json.dumps(result))


# --------------------------------------------------------------------------------------------------
# Running them


def gpus():
    """Return the number of GPUs that CUDA's driver gives this process.

    It needs no package.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


@contextlib.contextmanager
def watched():
    """Yield a dict that gets mean and maximum of the GPU's load (%) and power (W)."""
    result, smi = {}, shutil.which("nvidia-smi")
    if smi is None:
        yield result
        return
    first, text = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0", bytearray()
    ours, its = os.openpty()  # a file or a pipe would get its lines by the thousand
    process = subprocess.Popen([smi, "-i", first, "--query-gpu=utilization.gpu,power.draw",
                                "--format=csv,noheader,nounits", "-lms", "250"],
                               stdin=subprocess.DEVNULL, stdout=its, stderr=subprocess.DEVNULL)
    os.close(its)

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 4096):
                text.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield result
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(ours)
        rows = [re.findall(r"[\d.]+", line) for line in text.decode(errors="replace").splitlines()]
        rows = [list(map(float, row)) for row in rows if len(row) == 2]
        for name, values in zip(("load", "watts"), zip(*rows, strict=True), strict=False):
            result[name] = {"mean": round(statistics.mean(values), 1), "most": max(values)}


def readable(output):
    """Return a program's bytes as text for Markdown and a terminal."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode(errors="replace")).replace("\r", "\n")
    return "".join(c for c in text if c == "\n" or c.isprintable())


def figures_of(step, text):
    """Return the figures at the end of a step's output, or None.

    The counts of tests, or a benchmark's JSON.
    """
    if "pytest" in step.arguments:
        counts = re.findall(r"(\d+) (passed|failed|skipped|error)",
                            text.rstrip().rpartition("\n")[2])
        return {"passed": 0} | {kind: int(count) for count, kind in counts} if counts else None
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(result := json.loads(line), dict):
                return result
    return None


def run(step, limit):
    """Return one step's result.

    {"result": "passed" or another word, "seconds", "figures", "tail", "load", "watts"}.
    """
    began = time.monotonic()
    with watched() as load, tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, *step.arguments], cwd=ROOT,
                                   stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"})
        try:
            status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # what it has started ends with it, after an interrupt too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = readable(output.read())
    result = {"result": "passed", "seconds": round(time.monotonic() - began, 1),
             "figures": figures_of(step, text), "tail": text[-TAIL:], **load}
    if status is None:
        result["result"] = f"took longer than {limit:.0f} s"
    elif status != 0:
        last = text.rstrip().rpartition("\n")[2][:200]
        how = f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"
        result["result"] = f"failed, {how}: {last}"
    elif result["figures"] is None:
        result["result"] = "failed: it printed no figures"
    else:
        try:
            result["result"] = step.wrong(result["figures"]) or "passed"
            page({step.name: result})
        except UNEXPECTED as error:
            result |= {"result": f"failed: its figures are not what is expected ({error!r})",
                      "figures": None}
    return result


def run_all(steps, folder, seconds=ALL):
    """Run the steps within the total time; return the results.

    The report is written after each step.
    """
    deadline = time.monotonic() + seconds
    results, commit = kept(folder), commit_now()
    for step in steps:
        left = deadline - time.monotonic()
        if step.setting and not has_device_setting():
            result = {"result": "not there: the configuration has no setting vec.device",
                     "seconds": 0.0}
        elif left < 1:
            result = {"result": f"not begun: the {seconds / 60:.0f} minutes were over",
                     "seconds": 0.0}
        else:
            result = run(step, min(step.seconds, left))
        results[step.name] = {**result, "commit": commit, "date": time.strftime("%Y-%m-%d %H:%M")}
        write(folder, results)
        print(f"{step.name:30} {result['seconds']:6.0f} s  {result['result']}", flush=True)
        if result["result"] != "passed" and "tail" in result:
            print("    " + "\n    ".join(result["tail"].rstrip().splitlines()[-12:]), flush=True)
    return results


def commit_now():
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True,
                              text=True, cwd=ROOT)
        return done.stdout.strip() or "unknown"
    return "unknown"


# --------------------------------------------------------------------------------------------------
# The report


def kept(folder):
    """Return the results of an earlier command for the steps that this one leaves out."""
    try:
        results = json.loads((Path(folder) / "report.json").read_text())["steps"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    shown = {}
    for name, result in results:
        with contextlib.suppress(*UNEXPECTED):  # of an older version of this file
            page({name: result})
            shown[name] = result
    return shown


def write(folder, results):
    Path(folder).mkdir(parents=True, exist_ok=True)
    known = [step.name for step in STEPS]
    order = sorted(results, key=lambda name: known.index(name) if name in known else len(known))
    results = {name: results[name] for name in order}
    for name, text in (("report.json", json.dumps({"steps": results}, indent=1) + "\n"),
                       ("report.md", page(results))):
        path = Path(folder) / name
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").replace(path)


def passed(results, name):
    """Return the figures of a step that passed or missed a goal, else None.

    A step that is cut off has no reliable figures.
    """
    result = results.get(name, {"result": "failed"})
    return None if re.match("failed|took longer|not ", result["result"]) else result["figures"]


def summary(results):
    """Return the table of figures as lines of Markdown."""
    rows = []
    if figures := passed(results, "versions"):
        rows.append(("machine",
                     f"{figures['gpu']}, {figures['cores']} cores, torch {figures['torch']}, driver "
                                f"{figures['driver'].partition(',')[0]}"))
    for name in (step.name for step in STEPS if step.name.startswith("train-")):
        if figures := passed(results, name):
            _, shape, place, precision = name.split("-")
            busy = f", GPU busy {figures['shares']['busy']:.0%}" if "shares" in figures else ""
            agents, horizon = shape.split("x")
            place = "on the host" if place == "host" else "on the GPU"
            rows.append((f"trained steps a second: {int(agents):,} × {horizon}, network "
                         f"{figures['num_layers']} layers × {figures['hidden_size']}, {precision}, "
                         f"environments {place}", f"{figures['sps']:,.0f}{busy}"))
    for name, place in (("learn-host", "on the host"), ("learn-cuda", "on the GPU")):
        if figures := passed(results, name):
            ((result,),) = (seeds.values() for seeds in figures["environments"].values())
            reached = "never" if result["seconds"] is None else f"{result['seconds']:.1f} s"
            rows.append((f"Breakout to {result['threshold']:.0f} of 864, environments {place}",
                         f"{reached}; {result['end']:.0f} at the end, after "
                         f"{result['end_seconds']:.1f} s"))
    if figures := passed(results, "kernels"):
        shares = [row["share_of_copy_of_its_size"] for row in figures["kernels"].values()]
        rows.append(("kernels beside a plain copy of as many bytes",
                     f"{sum(share >= GOAL for share in shares)} of {len(shares)} at {GOAL:.0%} or "
                     f"more, the slowest at {min(shares):.0%}; a copy "
                     f"{figures['copy_gb_per_second']:,.0f} GB/s"))
    if figures := passed(results, "epoch"):
        for size, one in figures["epoch"].items():
            most = ", ".join(f"{name} {milliseconds:.1f}" for name, _, milliseconds in one["kernels"][:4])
            rows.append((f"an epoch of Breakout with minibatches of {int(size):,}",
                         f"{one['milliseconds']:.1f} ms; most take {most}; nothing runs in {one['idle']:.1f}"))
    for name, place in (("resume-host", "on the host"), ("resume-cuda", "on the GPU")):
        if figures := passed(results, name):
            rows.append(("killed and resumed, beside the same run undisturbed, "
                         f"environments {place}",
                         "the same bits" if same_bits(figures) is None else same_bits(figures)))
    counts = [results.get(step.name, {}).get("figures") for step in STEPS
              if "pytest" in step.arguments]
    if any(counts):
        total = {kind: sum(count.get(kind, 0) for count in counts if count)
                 for kind in ("passed", "failed", "error")}
        rows.append(("tests on the GPU",
                     f"{total['passed']} passed, {total['failed'] + total['error']} failed"))
    power = max((result["watts"]["most"] for result in results.values() if "watts" in result),
                default=None)
    if power is not None:
        rows.append(("most power", f"{power:.0f} W"))
    return "\n".join(["| what | found |", "| --- | --- |", *(f"| {label} | {value} |" for label, value in rows)]) + "\n"


def page(results):
    """Return the text of report.md."""
    date = max((result.get("date", "") for result in results.values()), default="")
    lines = ["# On a GPU", "", f"Written by `make gpu` (bench/bench_gpu.py), last on {date}.", "",
             summary(results),
             "| step | seconds | GPU load, mean and most | watts, mean and most | "
             "commit | result |", "| --- | --- | --- | --- | --- | --- |"]
    for name, result in results.items():
        load, watts = (f"{result[key]['mean']:.0f}, {result[key]['most']:.0f}"
                       if key in result else ""
                       for key in ("load", "watts"))
        output = result["result"].replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {result['seconds']:.0f} | {load} | {watts} | "
                     f"{result.get('commit', '')} | {output} |")
    if figures := passed(results, "kernels"):
        lines += ["", "## Kernels", "", "| kernel | µs | GB/s | of a copy of its size |",
                  "| --- | --- | --- | --- |"]
        lines += [f"| {name} | {row['microseconds']} | {row['gb_per_second']:,.0f} | "
                  f"{row['share_of_copy_of_its_size']:.0%} |"
                  for name, row in figures["kernels"].items()]
    if figures := passed(results, "epoch"):
        for size, one in figures["epoch"].items():
            lines += ["", f"## An epoch with minibatches of {int(size):,}", "",
                      "| kernel | times | ms | µs each |", "| --- | --- | --- | --- |"]
            lines += [f"| {name} | {times:.0f} | {milliseconds:.2f} | {1000 * milliseconds / times:.1f} |"
                      for name, times, milliseconds in one["kernels"]]
    for name, result in results.items():
        if result.get("tail"):  # indented, since a fence could be within it
            lines += ["", f"## The end of what {name} said", ""]
            lines += [f"    {line}".rstrip() for line in result["tail"].rstrip().splitlines()]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", help="beginnings of names (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/gpu", help="folder of the report")
    parser.add_argument("--minutes", type=float, default=ALL / 60, help="of all steps")
    parser.add_argument("--list", action="store_true", help="name the steps")
    if sys.argv[1:2] == ["--run"]:  # the inside of a step
        name, *options = sys.argv[2:]
        return {"versions": versions, "epoch": epoch, "resume": resume}[name](*options)
    a = parser.parse_args()
    for word in a.steps:
        if not any(step.name.startswith(word) for step in STEPS):
            parser.error(f"no step begins with {word}; there are "
                         f"{', '.join(step.name for step in STEPS)}")
    steps = [step for step in STEPS if not a.steps or step.name.startswith(tuple(a.steps))]
    if a.list:
        print("\n".join(f"{step.name:30} at most {step.seconds:.0f} s" for step in steps))
        return None
    if not gpus():
        sys.exit("bench_gpu.py: CUDA's driver (libcuda) finds no GPU here, so there is "
                 "nothing to measure.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a step ends with this process
    results = run_all(steps, a.out, 60 * a.minutes)
    print(f"the report: {a.out}/report.md")
    return 1 if any(results[step.name]["result"] != "passed" for step in steps) else 0


if __name__ == "__main__":
    sys.exit(main())
