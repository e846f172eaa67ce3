"""Several ranks on one policy; the fast tests share one run of this file on two ranks."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import conftest
import numpy as np
import psutil
import pytest
import torch
from trainers import NETWORKS, initial_state, make_trainer, run_epochs

import data_parallel
import kernels
import pufferl
import vector
from errors import ConfigError, RankError

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("one_torch_thread")
CLEAN = {name: value for name, value in os.environ.items()
         if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}


# -- one rank, python tests/test_scale.py FOLDER: its results go to FOLDER/rank{R}.pt

AGENTS, HORIZON, DRAWN = 12, 8, 10  # of a rank; agents an environment times 12, steps, segments
CASES = {  # name -> (environment, its settings, network, train settings)
    "fused": ("cartpole", {"max_steps": 5}, "mingru", {}),
    "continuous": ("cartpole", {"continuous": True}, "mingru", {"optimizer": "adam"}),
    "lstm": ("cartpole", {"max_steps": 5}, "lstm", {"max_minibatch_size": 3 * HORIZON}),
    "dead agents": ("target", {"num_agents": 4, "patience": 6}, "mingru", {}),
}


def make_case(case, folder, ranks=1, **settings):
    env, env_kwargs, network, train = CASES[case]

    def change(policy):
        if data_parallel.connect().rank > 0:  # rank 0's weights must win
            for parameter in policy.parameters():
                parameter.data.add_(1.0)

    settings = {"minibatch_size": 2 * DRAWN * HORIZON, "log_interval": 1e9, "seed": 7, **train,
                **settings}
    num_envs = ranks * (AGENTS // 4 if case == "dead agents" else AGENTS)
    return make_trainer(folder, env, NETWORKS[network], num_envs=num_envs, env_kwargs=env_kwargs,
                        num_buffers=1, num_threads=1, change=change, **settings)


def learn_from_given_segments(trainer, members):
    """Return gradient and statistics of a minibatch of fixed draws of these ranks."""
    found, agents, index, weights = {}, trainer.num_agents // len(members), [], []
    for i, rank in enumerate(members):
        generator = np.random.default_rng(rank)
        index += [*(np.sort(generator.integers(0, agents, DRAWN)) + i * agents)]
        weights += [*generator.uniform(0.5, 2.0, DRAWN).astype(np.float32)]

    def draw(priorities, cumulative, out, out_weights, **options):
        out.copy_(torch.tensor(index))
        out_weights.copy_(torch.tensor(weights))
        found["first"] = options["first"]

    def update():
        found["gradient"] = trainer.arena.flat("gradients").clone()
        found["settings"] = trainer.buffers.settings.clone()

    trainer._minibatches_owed = 1.0
    dict.__setitem__(trainer.config, "replay_ratio", 0.0)
    with mock.patch.object(kernels, "draw_segments", draw), (
            mock.patch.object(trainer, "_step_optimizer", update)):
        found["losses"] = trainer.train()
    return found


def keep(trainer):
    arrays = {name: tensor.clone() for name, tensor in trainer.storage.items() if tensor is not None}
    arrays |= {name: getattr(trainer.buffers, name).clone()
               for name in ("logprobs", "values", "bootstraps")}
    return arrays, initial_state(trainer)


def weights_after(trainer, epochs):
    run_epochs(trainer, epochs)
    return trainer.arena.flat("weights").clone()


def message(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "elsewhere", False)


def check_collectives(group):
    numbers = torch.tensor([1.0 + group.rank, 1e-17], dtype=torch.float64)
    assert group.sum(numbers).tolist() == [3.0, 2e-17]
    assert [group.any(flag) for flag in (False, group.rank == 1, True)] == [False, True, True]
    assert group.first(lambda: "only " + "once") == "only once"
    fail = mock.Mock(side_effect=ConfigError("it cannot be"))
    assert message(group.first, fail) == ("ConfigError: it cannot be", group.rank == 1)
    assert (group.broadcast_object(group.rank), group.gather(group.rank)) == (0, [0, 1])
    assert group.scatter(["a", "b"]) == "ab"[group.rank]


def main(folder):
    group, seen = data_parallel.connect(), {}
    check_collectives(group)
    for case in CASES:
        trainer = make_case(case, folder)
        weights = trainer.arena.flat("weights").clone()
        trainer.evaluate()
        # many more on one rank than on the other: the mean is over all that live
        if case == "dead agents":
            trainer.storage["valid"][2:, : 10 * group.rank + 1] = 0
        arrays, state = keep(trainer)
        seen[case] = {"weights": weights, "arrays": arrays, "state": state,
                      **learn_from_given_segments(trainer, [group.rank])}
        trainer.release()

    whole, half, resumed = (make_case("fused", folder, replay_ratio=1.3) for _ in range(3))
    seen["whole"] = weights_after(whole, 4)
    seen["environment"], seen["global_step"] = dict(whole.environment), whole.global_step
    whole.run.save = mock.Mock(side_effect=OSError("No space left on device"))  # rank 0 calls it
    seen["lost"] = message(whole.close)
    run_epochs(half, 2)
    half.save_checkpoint(folder / "half.pt")
    resumed.load_checkpoint(folder / "half.pt")
    seen["resumed"] = weights_after(resumed, 2)
    if group.rank == 1:  # what only a mistake in a user's code can do
        resumed.arena.flat("weights")[3] += 1e-6
    seen["unequal"] = message(group.check_equal, resumed.arena.flat("weights"), "the weights")

    for name, settings in (("seeds", {"seed": group.rank}), ("few", {"minibatch_size": HORIZON}),
                           ("gpus", {"gpus": 5})):
        seen[name] = message(make_case, "fused", folder, **settings)
    torch.save(seen, folder / f"rank{group.rank}.pt")


# -- the tests of its results


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return what each of two ranks saw, and what they printed."""
    folder, processes = tmp_path_factory.mktemp("ranks"), []
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for rank in "01":
        processes.append(conftest.start(
            [sys.executable, __file__, str(folder)], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=CLEAN | shared | {"RANK": rank, "LOCAL_RANK": rank}))
    outputs = [process.communicate(timeout=570)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)], outputs


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_two_ranks_is_that_of_one_process_on_the_joined_batch(two, tmp_path, case):
    parts = [seen[case] for seen in two[0]]
    trainer = make_case(case, tmp_path, ranks=2)
    # rank 0's weights are those of all
    assert all(torch.equal(part["weights"], trainer.arena.flat("weights")) for part in parts)
    trainer.evaluate()
    arrays, state = keep(trainer)
    for name, tensor in arrays.items():
        dim = 0 if name == "final_observations" else 1
        joined = torch.cat([part["arrays"][name] for part in parts], dim)
        # Environments, agents and random words are numbered through: the rollout is that of one
        # process, but for rounding, which matters to nothing that is drawn before the first action.
        if name in ("actions", "observations"):
            torch.testing.assert_close(joined[0].double(), tensor[0].double(), atol=1e-5, rtol=0)
        if name == "observations":
            assert not torch.equal(*(part["arrays"][name][0] for part in parts)), "each has others"
        target = trainer.storage[name] if name in trainer.storage else getattr(trainer.buffers, name)
        target.copy_(joined)
    for name, tensor in state.items():
        joined = torch.cat([part["state"][name] for part in parts], dim=1)
        assert tensor.shape == joined.shape
        trainer.arena[f"initial_state/{name}"].copy_(joined)

    one = learn_from_given_segments(trainer, [0, 1])
    two_gradient = parts[0]["gradient"]
    assert torch.equal(two_gradient, parts[1]["gradient"]), "all ranks have the same bits"
    error = (one["gradient"] - two_gradient).double().norm() / one["gradient"].double().norm()
    assert error < 1e-5, error
    torch.testing.assert_close(one["settings"], parts[0]["settings"], rtol=1e-5, atol=1e-7)
    assert [part["first"] for part in parts] == [0, DRAWN]  # draws are numbered through as well
    for name, value in one["losses"].items():
        if name != "grad_norm":
            assert parts[0]["losses"][name] == parts[1]["losses"][name]
            assert parts[0]["losses"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    trainer.release()


def test_weights_stay_equal_and_a_run_of_two_ranks_resumes_bit_for_bit(two):
    (first, second), _ = two
    assert torch.equal(first["whole"], second["whole"])
    assert torch.equal(first["resumed"], second["resumed"])
    assert torch.equal(first["whole"], first["resumed"])
    assert first["global_step"] == 4 * 2 * AGENTS * HORIZON
    assert first["environment"] == second["environment"] and first["environment"]["n"] > AGENTS


@pytest.mark.parametrize(("name", "kind", "subject"), [
    ("unequal", "RankError", "weights"), ("seeds", "RankError", "train.seed"),
    ("few", "ConfigError", "minibatch_size"), ("gpus", "ConfigError", "train.gpus"),
    ("lost", "ConfigError", "No space left on device")])
def test_what_ranks_cannot_do_is_an_error(two, name, kind, subject):
    for rank, seen in enumerate(two[0]):
        if name == "lost" and rank == 1:  # only rank 0 writes
            assert seen[name] is None
        else:
            assert kind in seen[name][0] and subject in seen[name][0]


def test_rank_0_says_once_what_the_numbers_mean(two):
    first, second = two[1]
    assert all(re.search(rf"\b{number}\b", first) for number in (2, 12, 80, 160)) and "minibatch_size" in first
    assert "minibatch_size" not in second


def test_ranks_of_one_machine_share_its_cores(monkeypatch):
    alone = vector.physical_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert vector.physical_cores() == max(1, alone // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert vector.physical_cores() == 1


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    uuids, current = ["A", "B"], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1] if current else 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda gpu: SimpleNamespace(uuid=uuids[gpu]))
    second = data_parallel.Ranks(rank=1, count=2, local_rank=1, local_count=2)
    monkeypatch.setattr(second, "gather", lambda own: [(own[0], "A"), own])
    assert second.choose_gpu() == 1 and current == [1]
    current[:], second.has_user_group = [0], True  # a script has chosen
    with pytest.raises(RankError, match="GPU"):
        second.choose_gpu()


def test_one_rank_is_no_group(monkeypatch):
    monkeypatch.setattr(data_parallel, "_connected", None)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    group = data_parallel.connect()
    assert (group.rank, group.count) == (0, 1) and not torch.distributed.is_initialized()
    assert group.gather(3) == [3] and group.broadcast_object(4) == 4 and group.first(lambda: 4) == 4
    assert group.scatter([5]) == 5 and group.gather_to_first(6) == [6] and group.any(1) is True


# -- whole runs under torchrun

SMALL = ["--env.num-envs", "64", "--train.minibatch-size", "1024", "--logger", "none",
         "--vec.num-buffers", "1"]
FOREVER = [*SMALL, "--train.total-timesteps", "1000000000", "--train.checkpoint-interval", "5"]
CHANGE = re.compile(r"(\d) ranks, now there are (\d)")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PUFFERL = str(ROOT / "pufferl.py")
SQUARED = [sys.executable, PUFFERL, "train", "squared"]
TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]


def start(command, folder, **environment):
    with open(folder / "output.txt", "a") as output:
        return conftest.start(command, cwd=folder, stdout=output, stderr=output,
                              env=CLEAN | environment)


def finish(process, folder, timeout=300):
    try:
        return process.wait(timeout), (folder / "output.txt").read_text()
    except subprocess.TimeoutExpired:
        raise AssertionError((folder / "output.txt").read_text()) from None


def run(command, folder, **environment):
    code, text = finish(start(command, folder, **environment), folder)
    assert code == 0, text
    return text


def ranks_of(process):
    """{rank: psutil.Process} of what a launcher has started."""
    found = {}
    for child in psutil.Process(process.pid).children():
        if "RANK" in child.environ():
            found[int(child.environ()["RANK"])] = child
    return found


def wait_for(condition, process, folder, seconds=240):
    deadline = time.time() + seconds
    while time.time() < deadline and process.poll() is None:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError((folder / "output.txt").read_text())


def checkpoints(folder):
    """The checkpoints of this folder's runs, but for the one before the first epoch."""
    return list({model.with_name("trainer_state.pt")
                 for model in folder.glob("experiments/*/model_*.pt")})


def steps(folder):
    metrics = next(folder.glob("experiments/*/metrics.jsonl"))
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()]


@pytest.mark.slow
def test_gpus_trains_interrupts_and_resumes_with_one_rank_and_two(tmp_path):
    process = start([*SQUARED, *FOREVER, "--train.gpus", "2"], tmp_path)
    wait_for(lambda: checkpoints(tmp_path), process, tmp_path)
    process.send_signal(signal.SIGINT)
    code, text = finish(process, tmp_path)
    assert code == 0, text
    assert text.count("stopping") == text.count("checkpoint ") == 1 and "Traceback" not in text
    (state,) = checkpoints(tmp_path)
    saved = torch.load(state, weights_only=True)
    assert saved["global_step"] == saved["epoch"] * 2 * 64 * 64 and len(saved["others"]) == 1

    stop = saved["global_step"]
    for ranks, epochs, change in ((1, 10, ("2", "1")), (2, 10, ("1", "2")), (None, 1, None)):
        stop += epochs * (ranks or 2) * 64 * 64  # the run remembers that it has two ranks
        options = ["--train.gpus", str(ranks)] if ranks else []
        text = run([*SQUARED, "--resume", "latest", "--logger", "none", *options,
                    "--train.total-timesteps", str(stop)], tmp_path)
        assert CHANGE.findall(text)[-1] == (change or ("1", "2"))
        assert steps(tmp_path)[-1] == stop
    assert len(CHANGE.findall(text)) == 2 and steps(tmp_path) == sorted(steps(tmp_path))


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(tmp_path):
    process = start([*SQUARED, *FOREVER, "--train.gpus", "2"], tmp_path)
    wait_for(lambda: checkpoints(tmp_path), process, tmp_path)
    members = ranks_of(process)
    members[1].kill()
    killed = time.time()
    code, text = finish(process, tmp_path, timeout=60)
    assert code == 1 and time.time() - killed < 15, text
    assert not members[0].is_running() and "Signal 9 (SIGKILL)" in text
    assert re.search(r"rank 0 .* rank ", text), text
    run([*SQUARED, "--resume", "latest", "--train.total-timesteps", "1"], tmp_path)


FAULTY = """
import gymnasium, itertools, os
count = itertools.count()

def act(action):
    if os.environ["RANK"] == "1" and next(count) == 300:
        raise ValueError("the sky has fallen")
    return action

def make():
    return gymnasium.wrappers.TransformAction(gymnasium.make("CartPole-v1"), act, None)
"""


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_others_and_is_shown(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    command = [*TWO_RANKS, PUFFERL, "train", "faulty.py:make", "--vec.num-envs", "4",
               "--vec.backend", "serial", "--train.total-timesteps", "1000000", "--logger", "none"]
    code, text = finish(start(command, tmp_path), tmp_path)
    assert code == 1 and text.count("ValueError: the sky has fallen") == 1, text
    assert re.search(r"rank +: 1 ", text), text  # rank 0 may end before the launcher looks


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "options", "word"), [
    ("train", ["--train.gama", "0.9"], "train.gama"), ("train", ["--train.gpus", "3"], "train.gpus"),
    ("eval", [], "eval")])
def test_settings_that_cannot_work_are_said_once(tmp_path, verb, options, word):
    code, text = finish(start([*TWO_RANKS, PUFFERL, verb, "squared", *options], tmp_path), tmp_path)
    assert code == 1 and word in text and text.count("train.gama") == (word == "train.gama"), text


@pytest.mark.slow
def test_elastic_restart_goes_on_from_the_last_checkpoint(tmp_path):
    process = start([*TWO_RANKS, "--max-restarts=1", PUFFERL, "train", "squared", "--resume", "auto",
                     *FOREVER], tmp_path)
    (state,) = wait_for(lambda: checkpoints(tmp_path), process, tmp_path)
    before = torch.load(state, weights_only=True)["epoch"]
    members = ranks_of(process)
    members[0].kill()
    wait_for(lambda: "resumed " in (tmp_path / "output.txt").read_text(), process, tmp_path)
    text = (tmp_path / "output.txt").read_text()
    assert f"resumed {state.parent.relative_to(tmp_path)} at step" in text
    resumed = int(re.search(r"resumed .* at step ([\d,]+)", text)[1].replace(",", ""))
    assert resumed >= before * 2 * 64 * 64 and resumed % (5 * 2 * 64 * 64) == 0
    wait_for(lambda: state.with_name("metrics.jsonl").exists() and (steps(tmp_path) or [0])[-1] > resumed,
             process, tmp_path)
    process.send_signal(signal.SIGTERM)
    _, text = finish(process, tmp_path)
    assert text.count("checkpoint   ") == 1, "torchrun hands SIGTERM to its ranks, which save"
    assert len(list((tmp_path / "experiments").glob("squared_*/metrics.jsonl"))) == 1


def test_a_restart_that_begins_a_new_run_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    options = ["--train.total-timesteps", "5000", "--env.num-envs", "64", "--data-dir", str(tmp_path)]
    for resume in ("none", "auto"):
        pufferl.train("squared", pufferl.load_config("squared", [*options, "--resume", resume]))
        assert ("a new run begins" in "".join(capfd.readouterr())) is (resume == "none")


SCRIPT = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pufferl import PuffeRL, load_config, load_env, load_policy
args = load_config("squared", ["--env.num-envs", "32", "--train.total-timesteps", "20000"])
vecenv = load_env("squared", args)
policy = load_policy(args, vecenv, "squared")
trainer = PuffeRL({{**args["train"], "env": "squared"}}, vecenv, policy)
while trainer.global_step < args["train"]["total_timesteps"]:
    trainer.evaluate()
    logs = trainer.train()
trainer.close()
weights = trainer.arena.flat("weights").sum()
print(f"rank done: {{trainer.global_step}} {{logs['entropy']:.6f}} {{weights:.6f}}", flush=True)
"""


@pytest.mark.slow
def test_a_script_of_your_own_on_two_nodes_unchanged(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    port, nodes = free_port(), []
    for address in ("127.0.0.1", "127.0.0.2"):
        folder = tmp_path / f"node{address}"
        folder.mkdir()
        command = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--local-addr={address}",
                   "--rdzv-backend=c10d", "--rdzv-id=test", f"--rdzv-endpoint=127.0.0.1:{port}"]
        nodes.append((start([*command, str(tmp_path / "train.py")], folder), folder))
    codes, texts = zip(*(finish(*node) for node in nodes), strict=True)
    assert codes == (0, 0), "\n".join(texts)
    results = [re.search("rank done: .*", text)[0] for text in texts]
    assert results[0] == results[1] and results[0].startswith("rank done: 20480 ")
    assert sum("2 machines" in text for text in texts) == 1
    folders = list(tmp_path.glob("node*/experiments/*/trainer_state.pt"))
    assert len(folders) == 1, "one rank writes"


PYTHON = ["gym/CartPole-v1", "--vec.num-envs", "8", "--vec.backend"]
BACKENDS = {  # name -> (the number of ranks, options)
    "serial lstm": (2, [*PYTHON, "serial", "--rnn.name", "lstm", "--policy.name", "feed-forward",
                        "--train.max-minibatch-size", "256"]),
    "ray": (2, [*PYTHON, "ray", "--vec.num-workers", "1"]),
    "C under multiprocessing": (2, ["cartpole", "--vec.backend", "multiprocessing",
                                    "--vec.num-workers", "1", "--vec.num-envs", "8",
                                    "--env.num-envs", "2"]),
    "uneven shares": (3, ["cartpole", "--env.num-envs", "16"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BACKENDS)
def test_every_vectorizer_and_wrapper(tmp_path, case):
    if case == "ray":
        pytest.importorskip("ray")
    ranks, options = BACKENDS[case]
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", PUFFERL, "train", *options,
               "--train.minibatch-size", "512" if ranks == 3 else "256", "--train.total-timesteps",
               "4000", "--logger", "none"]
    text = run(command, tmp_path, RAY_raylet_start_wait_time_s="240")
    assert f"{ranks} ranks" in text and steps(tmp_path)[-1] >= 4000


if __name__ == "__main__":
    main(Path(sys.argv[1]))
