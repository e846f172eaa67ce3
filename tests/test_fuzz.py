"""Senseless input ends in an error of a few lines and harms nothing: some cases of tests/fuzz.py,
and (slow) a thousand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("cases", "options", "timeout"), [
    (8, ["--seed", "1", "--environments", "squared", "cartpole", "snake"], 300),
    pytest.param(1000, [], 4 * 3600, marks=pytest.mark.slow)])
def test_made_up_cases_end_as_they_should(cases, options, timeout):
    fuzz = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, "-u", fuzz, "--cases", str(cases), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["cases"], figures["faults"]) == (cases, 0), done.stdout
