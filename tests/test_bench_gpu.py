"""`make gpu` without a GPU: its runner and report, tested with stand-ins for the real steps, and what
it says if there is no GPU."""

import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from bench import bench_gpu

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {"copy_gb_per_second": 4000.0, "kernels": {
    "gather": {"microseconds": 9.0, "gb_per_second": 3500.0, "share_of_copy_of_its_size": 0.9},
    "policy step, in one kernel": {"microseconds": 9.0, "gb_per_second": 600.0, "share_of_copy_of_its_size": 0.3},
    "draw": {"microseconds": 20.0, "gb_per_second": 10.0, "share_of_copy_of_its_size": 0.2}}}
TRAIN = {"sps": 12345678.0, "num_layers": 4, "hidden_size": 32, "shares": {"busy": 0.625}}
SOLVED = {"environments": {"breakout": {
    "0": {"threshold": 800.0, "seconds": 7.25, "score": 858.0, "end_seconds": 9.0}}}}
EPOCH = {"epoch": {"8192": {"milliseconds": 29.4, "idle": 2.8, "kernels": [["draw", 45, 0.45], ["clip", 45, 0.25]]}}}
GARBAGE = bytes(range(256)) * 9 + b"\x1b[31m{not JSON}\n```\n"
VERSIONS = {"gpu": "Some GPU", "cores": 16, "torch": "2.11.0", "driver": "580.1, 700 W",
            "sees_it": True}


def script(text, *, seconds=60, wrong=lambda figures: None, name="step"):
    return bench_gpu.Step(name, seconds, ["-c", text], wrong)


def says(value):
    return f"print({json.dumps(value)!r})"


def stand_in(name, figures):
    """A step of the real name and goal that prints these figures."""
    return next(step for step in bench_gpu.STEPS if step.name == name)._replace(arguments=["-c", says(figures)])


def report(folder):
    return json.loads((folder / "report.json").read_text())["steps"], (folder
                                                                       / "report.md").read_text()


def without_make():
    """The environment, without what a make that runs these tests would tell the one within."""
    return {key: value for key, value in os.environ.items()
            if key not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    if bench_gpu.gpus():
        pytest.skip("there is a GPU")
    done = subprocess.run(["make", "--no-print-directory", "gpu", f"OUT={tmp_path}/out",
                           f"PYTHON={sys.executable}"],
                          cwd=ROOT, capture_output=True, text=True, env=without_make())
    assert done.returncode != 0 and not (tmp_path / "out").exists()
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ")]
    assert len(said) == 1 and "finds no GPU" in said[0] and "bench/bench_gpu.py" in done.stdout
    done = subprocess.run([sys.executable, "bench/bench_gpu.py", "smoke"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines() == said


def test_a_step_that_fails_does_not_end_the_others(tmp_path, capsys):
    seen = []

    def goal(figures):
        seen.append(report(tmp_path)[0].keys())  # what was written before this one ended
        return None if figures["speed"] > 1 else f"only {figures['speed']}"

    hangs = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77.5)'])\n"
    bench_gpu.run_all([
        script("print('x' * 9000)\n" + says({"speed": 1}), name="one"),
        script("import sys; print('before'); sys.exit('a reason')", name="two"),
        script(hangs + "print('so far', flush=True); time.sleep(77.5)", seconds=5, name="three"),
        script(f"import sys; sys.stdout.buffer.write({GARBAGE!r})", name="four"),
        script(says({"speed": 0.5}), wrong=goal, name="five"),
        script(says({"another": 0.5}), wrong=goal, name="six"),
        script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", name="seven"),
        script(says({"speed": 2}), wrong=goal, name="eight"),
    ], tmp_path)
    steps, page = report(tmp_path)
    results = {name: step["result"] for name, step in steps.items()}
    assert results["one"] == results["eight"] == "passed"
    assert (results["two"] == "failed, exit status 1: a reason"
            and steps["two"]["tail"] == "before\na reason\n")
    assert results["three"] == "took longer than 5 s" and steps["three"]["tail"] == "so far\n"
    assert results["four"] == "failed: it printed no figures"
    assert results["five"] == "only 0.5"
    assert results["six"] == "failed: its figures are not what is expected (KeyError('speed'))"
    assert results["seven"] == "failed, ended by SIGSEGV: "
    assert steps["one"]["figures"] == {"speed": 1} and len(steps["one"]["tail"]) == bench_gpu.TAIL
    assert 5 <= steps["three"]["seconds"] < 60 and steps["six"]["figures"] is None
    assert [list(each)[-1] for each in seen] == ["four", "five", "seven"]
    assert ("| two | " in page and "\n    a reason\n" in page and "\n    ```\n" in page
            and "\x1b" not in page)
    assert all(line.isprintable() for line in page.splitlines())
    assert "a reason" in capsys.readouterr().out
    for process in psutil.process_iter(["cmdline"]):
        assert "import time; time.sleep(77.5)" not in (process.info["cmdline"] or []), (
            "it outlives its step")


def test_the_time_for_all_of_them_is_kept(tmp_path):
    begun = time.monotonic()
    bench_gpu.run_all([script("import time; time.sleep(60)", name="one"), script(says({}), name="two")], tmp_path, 2)
    assert time.monotonic() - begun < 30
    results = [step["result"] for step in report(tmp_path)[0].values()]
    assert results == ["took longer than 2 s", "not begun: the 0 minutes were over"]
    assert (sum(1 for step in bench_gpu.STEPS if step.seconds > 8 * 60) == 0
            and bench_gpu.ALL <= 25 * 60)


def test_tests_that_only_skip_have_not_passed(tmp_path):
    for name, body, result in (("test_skips", "pytest.skip('it')", "no test ran"),
                               ("test_passes", "pass", "passed"),
                               ("test_fails", "assert 1 == 2", "failed, exit status 1: 1 failed")):
        path = tmp_path / f"{name}.py"
        path.write_text(f"import pytest\ndef {name}():\n    {body}\n")
        command = bench_gpu.tests("--rootdir", str(tmp_path), str(path))
        found = bench_gpu.run(bench_gpu.Step("smoke", 100, command, bench_gpu.some_passed), 100)
        assert found["result"].startswith(result), found["tail"]
        assert found["figures"] == {"passed": int(name == "test_passes"),
                                    **({"skipped": 1} if "skips" in name else {"failed": 1}
                                       if "fails" in name else {})}


def test_a_part_keeps_what_the_others_left(tmp_path):
    bench_gpu.run_all([stand_in("versions", VERSIONS), stand_in("kernels", KERNELS)], tmp_path)
    bench_gpu.run_all([stand_in("epoch", EPOCH)], tmp_path)
    steps, page = report(tmp_path)
    assert list(steps) == ["versions", "kernels", "epoch"]
    assert steps["kernels"]["result"] == "below 70% of a copy of their size: draw 20%"
    assert "| draw | 20.0 | 10 | 20% |" in page and "1 of 3 at 70% or more, the slowest at 20%" in page
    assert "minibatches of 8,192 | 29.4 ms; most take draw 0.5, clip 0.2; nothing runs in 2.8 |" in page
    assert "| draw | 45 | 0.45 | 10.0 |" in page
    other = {"result": "passed", "seconds": 1, "figures": {"kernels": 3}}
    broken = {"steps": {**steps, "kernels": other, "epoch": 5}}
    (tmp_path / "report.json").write_text(json.dumps(broken))
    assert list(bench_gpu.kept(tmp_path)) == ["versions"]
    for garbage in ("{", "[]", '{"steps": 1}', "null"):
        (tmp_path / "report.json").write_text(garbage)
        assert bench_gpu.kept(tmp_path) == {}


def test_the_table_has_what_was_measured_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_gpu, "has_device_setting", lambda: False)
    never = json.loads(json.dumps(SOLVED).replace("7.25", "null"))
    bench_gpu.run_all([stand_in("versions", VERSIONS),
                       stand_in("train-4096x32-host-bfloat16", TRAIN),
                       stand_in("train-4096x32-cuda-bfloat16", TRAIN),
                       stand_in("learn-host", SOLVED),
                       stand_in("resume-host", {"whole": "a", "whole_again": "a", "resumed": "b"})],
                      tmp_path)
    table = bench_gpu.summary(bench_gpu.kept(tmp_path))
    assert "| machine | Some GPU, 16 cores, torch 2.11.0, driver 580.1 |" in table
    assert ("| trained steps a second: 4,096 × 32, network 4 layers × 32, bfloat16, environments on the host | "
            "12,345,678, GPU busy 62% |") in table
    assert ("on the GPU" not in table
            and "| Breakout to 800 of 864, environments on the host | 7.2 s; 858 " in table)
    assert "| killed and resumed, beside the same run undisturbed, environments on the host | resumed, it has " in table
    results = {name: step["result"] for name, step in report(tmp_path)[0].items()}
    assert results["train-4096x32-cuda-bfloat16"] == "not there: the configuration has no setting vec.device"
    assert (results["resume-host"] == "resumed, it has other weights"
            and results["learn-host"] == "passed")
    bench_gpu.run_all([stand_in("learn-host", never)], tmp_path)
    assert report(tmp_path)[0]["learn-host"]["result"] == "ended at 858, below 800"
    assert "| never; 858 at the end" in bench_gpu.summary(bench_gpu.kept(tmp_path))


@pytest.mark.slow
def test_load_and_power_are_sampled(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '10, 100.5\\n30, 200.5\\n[N/A], [N/A]\\n'\nexec sleep 60\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = bench_gpu.run(script("import time; time.sleep(4)\n" + says({})), 30)
    assert (found["load"] == {"mean": 20.0, "most": 30.0}
            and found["watts"] == {"mean": 150.5, "most": 200.5})


def test_the_setting_is_looked_for_where_it_is():
    import configuration

    assert bench_gpu.has_device_setting() == hasattr(configuration.Vec(), "device")


def test_each_step_runs_what_there_is():
    """Files and options of the commands, and the tests that -k names."""
    named = re.findall(r"^def (test_\w+)", (ROOT / "tests/test_devices.py").read_text(),
                       re.MULTILINE)
    for word in bench_gpu.CAPTURES.split(" or "):
        assert any(word in name for name in named), word
    options = {"bench/bench_train.py": (ROOT / "bench/bench_train.py").read_text().replace("_", "-")}
    for step in bench_gpu.STEPS:
        for argument in step.arguments:
            if argument.startswith("tests/"):
                assert (ROOT / argument).exists()
            if argument.startswith("--") and step.name.startswith("train-"):
                assert f" {argument[2:]}: " in options["bench/bench_train.py"], argument


def test_requirements_of_a_gpu_are_those_that_make_and_the_container_install():
    for name, cuda in (("cuda", 13), ("cuda12", 12)):
        text = (ROOT / f"requirements/{name}.txt").read_text()
        packages = set(re.findall(r"^[a-z][\w-]+(?:\[\w+\])?", text, re.MULTILINE))
        assert packages == {f"numba-cuda[cu{cuda}]", f"cupy-cuda{cuda}x", "nvidia-ml-py"}
    assert "-r requirements/cuda.txt" in (ROOT / "Makefile").read_text()
    choice = re.search(r"case .* esac", (ROOT / "Dockerfile").read_text())[0]
    for torch, file in (("cpu", ""), ("cu130", "-r requirements/cuda.txt"),
                        ("cu126", "-r requirements/cuda12.txt")):
        done = subprocess.run(["sh", "-c", f'TORCH={torch}; {choice}; echo "$CUDA"'],
                              capture_output=True, text=True)
        assert done.stdout.strip() == file


def test_make_takes_the_python_that_is_named_or_that_of_the_venv(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "play.txt").write_text("torch==1.0\n")
    environment = {key: value for key, value in without_make().items() if key != "PYTHON"}

    def command(*arguments, **more):
        return subprocess.run(["make", "-n", "gpu", *arguments], cwd=tmp_path, capture_output=True, text=True,
                              env={**environment, **more}).stdout.strip()

    assert command() == 'python3 bench/bench_gpu.py --out "docs/gpu"'
    assert command("MINUTES=9").endswith(" --minutes 9")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert command("STEPS=smoke kernels") == '.venv/bin/python bench/bench_gpu.py --out "docs/gpu" smoke kernels'
    for where in ({"PYTHON": "python3.12", "OUT": "/tmp/a b"}, {}):
        named = () if where else ("PYTHON=python3.12", "OUT=/tmp/a b")
        assert command(*named, **where) == 'python3.12 bench/bench_gpu.py --out "/tmp/a b"'


def test_warnings_of_pip_are_no_part_of_the_line_that_changes(tmp_path):
    """They have lines of their own, in their order; nothing is shown of an attempt that may fail."""
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin/python"
    pip.write_text("#!/bin/sh\necho Collecting torch\nsleep 0.2\necho WARNING: old >&2\nsleep 0.2\necho Installing\n")
    pip.chmod(0o755)
    clear = "\r\x1b[K"
    for more, warned in ((" 2>/dev/null", ""), ("", f"{clear}WARNING: old\n")):
        rule = f"try:; @$(call install,{tmp_path},torch){more}"
        done = subprocess.run(["make", "-f", str(ROOT / "Makefile"), "UV=", "WATCHED=yes", "--eval", rule, "try"],
                              cwd=ROOT, env=without_make(), capture_output=True)
        assert done.stderr.decode() == warned and done.returncode == 0
        assert done.stdout.decode() == f"{clear}Collecting torch{clear}Installing{clear}"
    done = subprocess.run(["make", "-f", str(ROOT / "Makefile"), "UV=", "WATCHED=yes", "--eval", f"{rule} 2>&1", "try"],
                          cwd=ROOT, env=without_make(), capture_output=True)
    assert done.stdout.decode() == f"{clear}Collecting torch{clear}WARNING: old\n{clear}Installing{clear}"


@pytest.mark.slow
def test_streams_have_queues_of_their_own_unless_the_user_says_otherwise():
    code = "import os, pufferl, torch; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'], torch.cuda.is_initialized())"
    environment = {key: value for key, value in os.environ.items()
                   if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
    for given, kept in (({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "5"}, "5")):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**environment, **given},
                              capture_output=True, text=True)
        assert done.stdout.split() == [kept, "False"], done.stderr


def test_an_epochs_kernels_and_gaps_are_counted(monkeypatch):
    """Three kernels, of which the second lies within the first: 8 µs of two epochs that are profiled, which is the
    share of an epoch without a profiler. Two are products."""
    from bench import bench_train

    def event(start, end, name):
        span = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return types.SimpleNamespace(time_range=span, name=name)

    events = [event(0.0, 5.0, "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64>"),
              event(1.0, 4.0, "nvjet_sm90_tst"), event(7.0, 10.0, "arena::_gather_cuda[abi:v11][abi:cw51]")]
    calls = []
    trainer = types.SimpleNamespace(evaluate=lambda: calls.append("evaluate"), train=lambda: calls.append("train"))
    traced = types.SimpleNamespace(gpu_events=lambda function: (function(), (events, 1.0))[1],
                                   busy_us=bench_train.busy_us)
    found = bench_gpu.one_epoch(traced, trainer, epochs=10)
    assert calls == ["evaluate", "train"] * (10 + 2)
    assert found["milliseconds"] - found["idle"] == pytest.approx(0.004)
    assert found["kernels"] == [["products", 1, pytest.approx(0.004)], ["_gather_cuda", 0.5, pytest.approx(0.0015)]]
    monkeypatch.setattr(bench_train, "gpu_events", traced.gpu_events)
    assert bench_train.gpu_shares(trainer, 5e-6, epochs=2)["busy"] == pytest.approx(0.8)
    names = {"policy_step": "policy_step", "void at::native::copy<4, float>(int)": "torch's own",
             "Memcpy DtoH (Device -> Pageable)": "Memcpy DtoH", "void mine::scan<2>(int)": "scan"}
    assert {name: bench_gpu.kernel_name(name) for name in names} == names
