"""Count the instructions of an environment's step and of every kernel.

    apt-get install valgrind
    python bench/bench_instructions.py [--env breakout] [--only mingru]

Valgrind's counts do not depend on the load of the machine. It knows no AVX-512, so they are of AVX2
code: compare them with another version of the code, not with another program. The kernels run on
the cases of bench_kernels.py, without torch's operations in them (Muon's products, a cumsum). The
environment runs in its standalone program; its step includes the draw of its random action. Takes
some minutes. The last line of the output is one JSON object.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent

COUNTER = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""

CHILD = """
import ctypes, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests", sys.argv[1] + "/bench"]
import bench_kernels, kernels
counter = ctypes.CDLL(sys.argv[2])
calls, run = [], kernels.run
def record(function, lanes, cost, *arguments):
    calls.append((function, lanes, arguments))
    run(function, lanes, cost, *arguments)
kernels.run = record
for name, case in bench_kernels.cases():
    if sys.argv[3] not in name:
        continue
    calls.clear()
    if case.prepare:
        case.prepare()
    case.run()
    if case.prepare:
        case.prepare()
    counter.begin()
    for function, lanes, arguments in calls:
        function(0, lanes, *arguments)
    counter.end(f"{name.replace('Muon.step', 'Muon.step without its products')}|{case.elements}".encode())
"""


@dataclass
class Arguments:
    env: str = "breakout"
    """A C environment."""
    only: str = ""
    """Kernels whose name contains this."""


def counts(command, folder, *options, env=None):
    """Return {name of a dump, "" for the whole run: instructions}."""
    out = f"--callgrind-out-file={folder}/out"
    done = subprocess.run(["valgrind", "-q", "--tool=callgrind", out, *options, *command],
                          cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:200]}\n{done.stderr}")
    result = {}
    for path in folder.glob("out*"):
        text = path.read_text()
        path.unlink()
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        result[name[1] if name else ""] = int(re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)[1])
    return result


def environment_step(name, folder):
    """Return the instructions per step of the standalone program at random actions.

    The difference of a long and a short run.
    """
    program, header = folder / name, f'-DENV_HEADER="{ROOT}/ocean/{name}/{name}.h"'
    flags = ["-std=gnu11", "-O3", "-march=x86-64-v3", "-fno-math-errno"]
    command = ["cc", *flags, "-I", ROOT / "ocean", header, ROOT / "ocean" / "main.c", "-o",
               program, "-lm"]
    subprocess.run(command, check=True)
    runs = [counts([program, "--episodes", "1000000", "--steps", str(steps)], folder)[""]
            for steps in (20000, 120000)]
    return (runs[1] - runs[0]) / 100_000


def kernel_counts(only, folder):
    """Return {kernel: instructions per element}."""
    library = folder / "counter.so"
    build = ["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(build, input=COUNTER, text=True, check=True)
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    child = [sys.executable, "-c", CHILD, ROOT, library, only]
    dumps = counts(child, folder, "--instr-atstart=no", env=env)
    dumps.pop("", None)
    result = {}
    for name, instructions in dumps.items():
        kernel, elements = name.split("|")
        result[kernel] = instructions / int(elements)
    return result


def main():
    a = tyro.cli(Arguments, description=__doc__)
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        step = environment_step(a.env, Path(folder))
        print(f"{a.env + ', a step at a random action':40} {step:10,.1f} instructions", flush=True)
        kernels = kernel_counts(a.only, Path(folder))
    for name, instructions in kernels.items():
        print(f"{name:40} {instructions:10,.1f} instructions an element")
    print(json.dumps({"benchmark": "instructions", "env": a.env, "step": step, "kernels": kernels}))


if __name__ == "__main__":
    main()
