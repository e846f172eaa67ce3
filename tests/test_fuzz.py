"""Senseless input ends in an error of a few lines and harms nothing: some cases of tests/fuzz.py, and
(slow) a thousand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pufferl

FUZZ = Path(__file__).resolve().parent / "fuzz.py"


def fuzz(*options, timeout):
    """(the last line's figures, all that was said)."""
    process = subprocess.run([sys.executable, "-u", str(FUZZ), *options],
                             capture_output=True, text=True, timeout=timeout)
    said = process.stdout + process.stderr
    assert process.returncode == 0, said
    return json.loads(process.stdout.splitlines()[-1]), said


KINDS = ["command line", "ini", "checkpoint", "environment", "in C", "messages"]


def test_a_few_made_up_cases():
    """The same in every run."""
    found, said = fuzz("--cases", "8", "--seed", "1", "--typed", "0.1", "--kind", *KINDS,
                       "--environments", "squared", "cartpole", "snake", timeout=300)
    assert found["cases"] == 8 and found["faults"] == 0, said


@pytest.mark.parametrize("option", ["--load-model-path", "--resume", "--data-dir", "--policy.name", "--train.loss"])
def test_a_path_that_the_system_refuses(option, tmp_path, monkeypatch):
    """The thousand cases found one: a name of 300 letters."""
    monkeypatch.chdir(tmp_path)
    value = 300 * "a" + (".py:x" if "." in option else "")
    with pytest.raises(SystemExit, match=r"the system refuses a path .File name too long.: aaa"):
        pufferl.main(["train", "squared", option, value, "--logger", "none", "--train.total-timesteps", "65536"])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_thousand_made_up_cases():
    found, said = fuzz("--cases", "1000", "--kind", *KINDS, timeout=4 * 3600)
    assert found["cases"] == 1000 and found["faults"] == 0, said


def test_a_fault_is_found(tmp_path):
    """The judge is not blind: a traceback, a hang, too many lines, a process left and
    a file that is harmed."""
    script = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(FUZZ.parent)!r})
import fuzz
def left():
    os.system("sleep 50 & true")
def harm():
    Path({str(tmp_path)!r}, "kept").write_text("other")
faults = {{"a traceback": lambda: 1 / 0, "it hangs": lambda: time.sleep(50), "12 lines": lambda: sys.exit("x\\n" * 12),
          "it ended with 7": lambda: sys.exit(7), "left behind": left, "harmed": harm, "0 lines": lambda: sys.exit(1),
          "None": lambda: sys.exit("one line")}}
kept = Path({str(tmp_path)!r}, "kept")
kept.write_text("whole")
for expected, run in faults.items():
    fuzz.KINDS = {{"x": (lambda draw, here: ("x", run, {{kept}}), 1)}}
    *_, wrong = fuzz.case(0, 0, None, patience=2)
    assert str(wrong).startswith(expected), (expected, wrong)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                             timeout=240)
    assert process.returncode == 0, process.stdout + process.stderr
