"""The command `doctor`: it prints what is installed, and what is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pufferl
from tools import doctor


def test_a_sound_machine_has_nothing_missing(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "train", lambda seconds: f"{seconds:g} s, 123 steps")
    pufferl.main(["doctor", "--seconds", "3"])
    shown = "\n" + capsys.readouterr().out
    assert "3 s, 123 steps" in shown and "nothing is missing" in shown
    for look in doctor.LOOKS:
        assert f"\n{look.__name__.removeprefix('look_'):12} " in shown


def test_what_is_missing_is_at_the_end_and_training_is_left_out(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "LOOKS",
                        (doctor.look_compiler, doctor.look_packages, doctor.look_disk))
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no_such_package"))
    monkeypatch.setattr(doctor, "LEAST_DISK", 2**80)
    monkeypatch.setattr(doctor, "train", lambda _: pytest.fail("trained without what it needs"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(SystemExit) as end:
        pufferl.main(["doctor"])
    assert end.value.code == 1
    last = capsys.readouterr().out.partition("missing:")[2]
    assert "compiler: " in last and "packages: no_such_package" in last
    assert "disk: " in last and "--data-dir" in last


def test_it_starts_where_torch_cannot_be_imported(tmp_path):
    """In a copy without the rest, in which importing torch raises."""
    root = Path(doctor.__file__).parents[1]
    (tmp_path / "tools").mkdir()
    for name in ("tools/doctor.py", "processes.py", "errors.py"):
        shutil.copy(root / name, tmp_path / name)
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is broken')")
    done = subprocess.run([sys.executable, "tools/doctor.py", "--seconds", "0"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "torch: ImportError: libtorch.so is broken" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_it_trains(capsys):
    assert doctor.examine(0.2) == []
    assert "steps a second of Breakout" in capsys.readouterr().out
