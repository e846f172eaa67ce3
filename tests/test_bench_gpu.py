"""`make gpu` without a GPU: its runner and report, with stand-ins for the real steps; and what the
Makefile, the Dockerfile and the requirements do for a GPU."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest

from bench import bench_gpu

ROOT = Path(__file__).resolve().parent.parent
GARBAGE = bytes(range(256)) * 9 + b"\x1b[31m{not JSON}\n```\n"
VERSIONS = {"gpu": "Some GPU", "cores": 16, "torch": "2.11.0", "driver": "580.1, 700 W"}
TRAIN = {"sps": 12345678.0, "num_layers": 4, "hidden_size": 32, "shares": {"busy": 0.625}}
SOLVED = {"environments": {"breakout": {
    "0": {"threshold": 800.0, "seconds": 7.25, "end": 858.0, "end_seconds": 9.0}}}}
EPOCH = {"epoch": {"8192": {"milliseconds": 29.4, "idle": 2.8,
                            "kernels": [["draw", 45, 0.45], ["clip", 45, 0.25]]}}}
ROW = "microseconds", "gb_per_second", "share_of_copy_of_its_size"
KERNELS = {"copy_gb_per_second": 4000.0, "kernels": {
    name: dict(zip(ROW, row, strict=True)) for name, row in {
        "gather": (9.0, 3500.0, 0.9), "policy step, in one kernel": (9.0, 600.0, 0.3),
        "draw": (20.0, 10.0, 0.2)}.items()}}


def prints(value):
    return f"print({json.dumps(value)!r})"


def stand_in(name, figures):
    """A step of the real name and goal that prints these figures."""
    step = next(step for step in bench_gpu.STEPS if step.name == name)
    return step._replace(arguments=["-c", prints(figures)])


def report(folder):
    steps = json.loads((folder / "report.json").read_text())["steps"]
    return steps, (folder / "report.md").read_text()


def run(*command, **options):
    """A finished command; without what a make that runs these tests would tell the one within."""
    env = {key: value for key, value in os.environ.items()
           if key not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "PYTHON")}
    options = {"cwd": ROOT, "text": True, "env": env | options.pop("env", {}), **options}
    return subprocess.run(command, capture_output=True, **options)


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    if bench_gpu.gpus():
        pytest.skip("there is a GPU")
    done = run("make", "--no-print-directory", "gpu", f"OUT={tmp_path}/out", f"PYTHON={sys.executable}")
    assert done.returncode != 0 and not (tmp_path / "out").exists()
    line, = (line for line in done.stderr.splitlines() if not line.startswith("make: "))
    assert "libcuda" in line and "bench/bench_gpu.py" in done.stdout


SLEEP = "import time; time.sleep(77.5)"
HANGS = f"""
import subprocess, sys
subprocess.Popen([sys.executable, '-c', '{SLEEP}'])
print('so far', flush=True)
{SLEEP}
"""
OUTCOMES = {  # program -> result
    "print('x' * 9000)\n" + prints({"speed": 2}): "passed",
    "import sys; print('before'); sys.exit('a reason')": "failed, exit status 1: a reason",
    HANGS: "took longer than 2 s",
    f"import sys; sys.stdout.buffer.write({GARBAGE!r})": "failed: it printed no figures",
    prints({"speed": 0.5}): "only 0.5",
    prints({"another": 0.5}): "failed: its figures are not what is expected (KeyError('speed'))",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "failed, ended by SIGSEGV: ",
}


def test_a_step_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '10, 100.5\\n30, 200.5\\n[N/A], [N/A]\\n'\nexec sleep 60\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    written = []

    def goal(figures):
        written.append(len(report(tmp_path)[0]) if written else 0)
        return None if figures["speed"] > 1 else f"only {figures['speed']}"

    bench_gpu.run_all([bench_gpu.Step(code, 2 if code == HANGS else 60, ["-c", code], goal)
                       for code in OUTCOMES], tmp_path)
    steps, page = report(tmp_path)
    assert {name: step["result"] for name, step in steps.items()} == OUTCOMES
    assert written == [0, 4, 5], "the report is written after each step"
    first, failed, hung, *_ = steps.values()
    assert first["figures"] == {"speed": 2} and len(first["tail"]) == bench_gpu.TAIL
    assert failed["tail"] == "before\na reason\n" and hung["tail"] == "so far\n"
    assert hung["load"] == {"mean": 20.0, "most": 30.0} and 2 <= hung["seconds"] < 60
    assert hung["watts"] == {"mean": 150.5, "most": 200.5}
    assert "\n    a reason\n" in page and "\n    ```\n" in page
    assert all(line.isprintable() for line in page.splitlines())
    for process in psutil.process_iter(["cmdline"]):
        assert SLEEP not in (process.info["cmdline"] or []), "it outlives its step"


def test_tests_that_only_skip_have_not_passed():
    step = bench_gpu.Step("tests", 100, bench_gpu.tests())
    figures = [bench_gpu.figures_of(step, f"s\n{line} in 1s\n")
               for line in ("3 skipped", "1 failed, 2 passed")]
    assert figures == [{"passed": 0, "skipped": 3}, {"passed": 2, "failed": 1}]
    assert [bool(bench_gpu.some_passed(each)) for each in figures] == [True, False]


def test_the_report_has_what_was_measured_and_what_others_left(tmp_path, monkeypatch):
    measured = {"versions": VERSIONS, "kernels": KERNELS, "train-4096x32-host-bfloat16": TRAIN,
                "train-4096x32-cuda-bfloat16": TRAIN, "learn-host": SOLVED,
                "resume-host": {"whole": "a", "whole_again": "a", "resumed": "b"}}
    with monkeypatch.context() as patch:
        patch.setattr(bench_gpu, "has_device_setting", lambda: False)
        bench_gpu.run_all(map(stand_in, measured, measured.values()), tmp_path)
    bench_gpu.run_all([stand_in("epoch", EPOCH)], tmp_path)
    steps, page = report(tmp_path)
    results = {name: step["result"] for name, step in steps.items()}
    assert results == dict.fromkeys([*measured, "epoch"], "passed") | {
        "kernels": "below 70% of a copy of their size: draw 20%",
        "train-4096x32-cuda-bfloat16":
            "not there: the configuration has no setting vec.device",
        "resume-host": "resumed, it has other weights"}
    assert [*steps][:3] == ["versions", "kernels", "epoch"]
    for line in ("| machine | Some GPU, 16 cores, torch 2.11.0, driver 580.1 |",
                 "network 4 layers × 32, bfloat16, environments on the host | 12,345,678, GPU busy 62% |",
                 "| Breakout to 800 of 864, environments on the host | 7.2 s; 858 ",
                 "1 of 3 at 70% or more, the slowest at 20%", "| draw | 20.0 | 10 | 20% |",
                 "minibatches of 8,192 | 29.4 ms; most take draw 0.5, clip 0.2; nothing runs in 2.8"):
        assert line in page
    never = json.loads(json.dumps(SOLVED).replace("7.25", "null"))
    bench_gpu.run_all([stand_in("learn-host", never)], tmp_path)
    steps, page = report(tmp_path)
    assert steps["learn-host"]["result"] == "ended at 858, below 800"
    assert "| never; 858 at the end" in page
    unexpected = {"versions": steps["versions"], "epoch": 5,
                  "kernels": {"result": "passed", "seconds": 1, "figures": {"kernels": 3}}}
    for content, kept in ((json.dumps({"steps": unexpected}), ["versions"]), ("{", []), ("[]", [])):
        (tmp_path / "report.json").write_text(content)
        assert [*bench_gpu.kept(tmp_path)] == kept


def test_each_step_runs_what_there_is():
    assert bench_gpu.has_device_setting()
    tests = re.findall(r"^def (test_\w+)", (ROOT / "tests/test_devices.py").read_text(), re.M)
    for word in bench_gpu.CAPTURES.split(" or "):
        assert any(word in name for name in tests), word
    options = (ROOT / "bench/bench_train.py").read_text().replace("_", "-")
    for step in bench_gpu.STEPS:
        for argument in step.arguments:
            if argument.startswith("tests/"):
                assert (ROOT / argument).exists()
            if argument.startswith("--") and step.name.startswith("train-"):
                assert f" {argument[2:]}: " in options, argument


def test_requirements_of_a_gpu_are_those_that_make_and_the_container_install():
    for name, cuda in (("cuda", 13), ("cuda12", 12)):
        text = (ROOT / f"requirements/{name}.txt").read_text()
        packages = set(re.findall(r"^[a-z][\w-]+(?:\[\w+\])?", text, re.M))
        assert packages == {f"numba-cuda[cu{cuda}]", f"cupy-cuda{cuda}x", "nvidia-ml-py"}
    assert "-r requirements/cuda.txt" in (ROOT / "Makefile").read_text()
    choice = re.search(r"case .* esac", (ROOT / "Dockerfile").read_text())[0]
    for torch, file in (("cpu", ""), ("cu130", "-r requirements/cuda.txt"),
                        ("cu126", "-r requirements/cuda12.txt")):
        assert run("sh", "-c", f'TORCH={torch}; {choice}; echo "$CUDA"').stdout.strip() == file


def test_make_takes_the_python_that_is_named_or_that_of_the_venv(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())

    def command(*arguments, **env):
        return run("make", "-n", "gpu", *arguments, cwd=tmp_path, env=env).stdout.strip()

    assert command("MINUTES=9") == 'python3 bench/bench_gpu.py --out "docs/gpu" --minutes 9'
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert command("STEPS=versions kernels") == (
        '.venv/bin/python bench/bench_gpu.py --out "docs/gpu" versions kernels')
    for named in (command("PYTHON=python3.12", "OUT=/a b"), command(PYTHON="python3.12", OUT="/a b")):
        assert named == 'python3.12 bench/bench_gpu.py --out "/a b"'


@pytest.mark.slow
@pytest.mark.parametrize("env, number", [({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "5"}, "5")])
def test_streams_have_queues_of_their_own_unless_the_user_says_otherwise(env, number, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    code = ("import os, pufferl, torch; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'], "
            "torch.cuda.is_initialized())")
    assert run(sys.executable, "-c", code, env=env).stdout.split() == [number, "False"]


def test_an_epochs_kernels_and_gaps_are_counted(monkeypatch):
    """Three kernels, of which the second lies within the first: 8 µs of two profiled epochs."""
    from bench import bench_train

    def event(start, end, name):
        span = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return types.SimpleNamespace(time_range=span, name=name)

    events = [event(0.0, 5.0, "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64>"),
              event(1.0, 4.0, "nvjet_sm90_tst"),
              event(7.0, 10.0, "arena::_gather_cuda[abi:v11][abi:cw51]")]
    calls = []
    trainer = types.SimpleNamespace(evaluate=lambda: calls.append("evaluate"),
                                    train=lambda: calls.append("train"))
    traced = types.SimpleNamespace(gpu_events=lambda function: (function(), (events, 1.0))[1],
                                   busy_us=bench_train.busy_us)
    epoch = bench_gpu.one_epoch(traced, trainer, epochs=10)
    assert calls == ["evaluate", "train"] * (10 + 2)
    assert epoch["milliseconds"] - epoch["idle"] == pytest.approx(0.004)
    assert epoch["kernels"] == [["products", 1, pytest.approx(0.004)],
                                ["_gather_cuda", 0.5, pytest.approx(0.0015)]]
    monkeypatch.setattr(bench_train, "gpu_events", traced.gpu_events)
    assert bench_train.gpu_shares(trainer, 5e-6, epochs=2)["busy"] == pytest.approx(0.8)
    names = {"policy_step": "policy_step", "Memcpy DtoH (Device -> Pageable)": "Memcpy DtoH",
             "void at::native::copy<4, float>(int)": "torch's own",
             "void mine::scan<2>(int)": "scan"}
    assert {name: bench_gpu.kernel_name(name) for name in names} == names
