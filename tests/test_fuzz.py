"""Senseless input ends in an error of a few lines and harms nothing: some cases of tests/fuzz.py,
and (slow) a thousand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pufferl

FUZZ = Path(__file__).resolve().parent / "fuzz.py"


@pytest.mark.parametrize(("cases", "options", "timeout"), [
    (8, ["--seed", "1", "--environments", "squared", "cartpole", "snake"], 300),
    pytest.param(1000, [], 4 * 3600, marks=pytest.mark.slow)])
def test_made_up_cases_end_as_they_should(cases, options, timeout):
    command = [sys.executable, "-u", FUZZ, "--cases", str(cases), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["cases"], figures["faults"]) == (cases, 0), done.stdout


@pytest.mark.parametrize("option", ["--load-model-path", "--resume", "--data-dir", "--policy.name",
                                    "--train.loss"])
def test_a_path_that_the_system_refuses(option, tmp_path, monkeypatch):
    """The thousand cases found one: a name of 300 letters."""
    monkeypatch.chdir(tmp_path)
    value = 300 * "a" + (".py:x" if "." in option else "")
    with pytest.raises(SystemExit, match="aaa"):
        pufferl.main(["train", "squared", option, value, "--logger", "none",
                      "--train.total-timesteps", "65536"])
    assert not list(tmp_path.iterdir())


def test_each_kind_of_fault_is_found(tmp_path):
    script = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(FUZZ.parent)!r})
import fuzz
whole = Path({str(tmp_path)!r}, "whole")
whole.write_text("whole")
faults = {{"a traceback": lambda: 1 / 0, "it hangs": lambda: time.sleep(50),
          "12 lines": lambda: sys.exit("x\\n" * 12), "it ended with 7": lambda: sys.exit(7),
          "left behind": lambda: os.system("sleep 50 & true") and None,
          "harmed": lambda: whole.write_text("other") and None, "0 lines": lambda: sys.exit(1),
          "None": lambda: sys.exit("one line")}}
for expected, run in faults.items():
    fuzz.KINDS = {{"x": (lambda draw, here: ("x", run, {{whole}}), 1)}}
    *_, wrong = fuzz.case(0, 0, None, patience=2)
    assert str(wrong).startswith(expected), (expected, wrong)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
