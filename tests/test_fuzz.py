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
