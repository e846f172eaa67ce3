"""The engines from inside: how they notice an edit of their own sources, which threads run what, and how
few calls a step takes. A rewrite of engines.py and fast/compiled.py may change all of this;
tests/test_engines.py holds what it must keep."""

import functools
import math
import os
import subprocess
import sys
import threading
import time

import numba
import numpy as np
import pytest
import torch
from torch import nn
from trainers import NETWORKS, learn, make_trainer, run_epochs

import arena
import engines
import kernels
import models
import vector
from fast import c_calls, compiled, products, verify

# -- Calls and caches


def count_calls(function):
    """The names of the Python functions that are called."""
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_a_minibatch_is_few_calls():
    """However large it is: no Python goes between its segments."""
    numbers = []
    for segments, minibatch in ((64, 128), (256, 2048)):
        trainer = make_trainer(env="squared", num_envs=segments, num_threads=1, horizon=16, num_layers=1,
                               minibatch_size=minibatch, replay_ratio=4, log_interval=1e9)
        # to be counted
        trainer.engine.pool.run = lambda function, numbers: [function(number) for number in numbers]
        run_epochs(trainer, 2)
        trainer.evaluate()
        calls = count_calls(trainer.train)
        trainer.release()
        places = [i for i, name in enumerate(calls) if name == "_compute_gradients"]
        assert len(places) == segments * 16 * 4 // minibatch
        numbers.append(np.median(np.diff(places)))  # a collection of garbage may call something between two
    assert numbers[0] == numbers[1] < 90


def test_a_step_of_python_environments_is_one_call():
    trainer = make_trainer(env="squared", backend="serial", num_envs=8)
    trainer.evaluate()
    calls = count_calls(functools.partial(trainer.engine.loop._step, 0, 0, 3))
    trainer.release()
    # numba tells a profiler of its function up to Python 3.11
    assert [name for name in calls if name != "_act_cpu"] == ["_step", "run"]


def test_a_compiled_driver_depends_on_the_cells_that_it_inlines():
    """numba looks at a driver's own file alone; the cells are in another one."""
    drivers = [compiled._learn_cpu, compiled._rollout_cpu, kernels._mingru_scan_lanes, c_calls.step_environments]
    assert all(driver._cache._cache_file._source_stamp[-1] == arena.SOURCES_HASH for driver in drivers)


@pytest.mark.slow
def test_kernels_of_a_gpu_are_kept_until_their_file_is_edited(tmp_path):
    pytest.importorskip("numba_cuda")
    file, script = tmp_path / "own.py", tmp_path / "script.py"
    file.write_text("def fill(begin, end, a):\n    a[begin] = 1\n")
    script.write_text(f"""if True:
        import sys, types
        sys.path[:0] = [{str(tmp_path)!r}, {str(arena.FOLDER)!r}]
        import arena, own
        code = types.SimpleNamespace(magic_tuple=lambda: ("a GPU",))

        def keep(what, signature="int64"):
            cache = arena._cached_kernel(own.fill)._cache
            cache._impl.rebuild = lambda context, kept: types.SimpleNamespace(**kept)
            before = cache._load_overload(("int64",), types.SimpleNamespace(codegen=lambda: code))
            left = {{"what": what, "signature": types.SimpleNamespace(args=(signature,))}}
            cache._save_overload(("int64",), types.SimpleNamespace(codegen=code, _reduce_states=lambda: left))
            return before and before.what

        print(keep(sys.argv[1]))
        if sys.argv[1] == "second":
            print(keep("another's", "float64"), keep("third"))
            open(own.__file__, "a").write("# edited")
            print(keep("fourth"), keep("fifth"))
        """)

    def run(what):
        done = subprocess.run([sys.executable, script, what], capture_output=True, text=True, check=True,
                              env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")})
        return done.stdout.split()

    assert run("first") == ["None"]
    assert run("second") == ["first", "second", "None", "None", "fourth"]


def test_the_clock_leaves_out_compiling(monkeypatch):
    announced = []
    monkeypatch.setattr(arena.compile_timer, "announce", lambda: announced.append(1))
    monkeypatch.setattr(arena.compile_timer, "_duration", 2.0)  # so it takes a while, however quick this machine is
    before, wall = arena.compile_timer.duration, arena.clock()
    function = numba.njit(lambda x: x + 1)
    function(1)
    function(1.0)
    spent = arena.compile_timer.duration - before
    assert announced == [1] and spent > 0
    function(2)
    assert arena.compile_timer.duration - before == spent, "nothing is compiled twice"
    assert arena.clock() - wall < spent


# -- Comparison with the network's own forward


def test_loaded_weights_are_compared_again(tmp_path, capsys, monkeypatch):
    trainer = make_trainer()
    assert trainer.engine.name == "compiled"
    trainer.save_checkpoint(tmp_path / "weights.pt")
    monkeypatch.setattr(verify, "TOLERANCE", 0.0)
    trainer.load_checkpoint(tmp_path / "weights.pt")
    assert trainer.engine.name == "autograd" and "engine:" in capsys.readouterr().err
    learn(trainer, 1)


@pytest.mark.parametrize("precision", ["none", "tf32"])
def test_a_comparison_is_without_tf32_and_changes_nothing(precision, monkeypatch):
    matmul, during, inputs = torch.backends.cuda.matmul, [], verify.sample_inputs
    monkeypatch.setattr(verify, "sample_inputs",
                        lambda *call: (during.append(matmul.fp32_precision), inputs(*call))[1])
    trainer = make_trainer(normalize=True)
    before = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
    try:
        matmul.fp32_precision = precision
        assert verify.compare(trainer.policy, trainer.vecenv, compiled.Sample) is None
        assert matmul.fp32_precision == precision and during[-1] == "ieee"
    finally:
        matmul.fp32_precision = "none"
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.policy.state_dict().items())
    weight = trainer.policy.encoder.weight
    assert weight.grad.data_ptr() == trainer.arena["gradients/policy.encoder.weight"].data_ptr()
    trainer.release()


# -- Threads

small_trainer = functools.partial(make_trainer, env="squared", num_envs=8, minibatch_size=32)
autograd_trainer = functools.partial(small_trainer, policy=NETWORKS["feed-forward"], engine="autograd")


@pytest.mark.usefixtures("several_learners")
@pytest.mark.parametrize(("make", "place", "name"), [
    (small_trainer, compiled, "_learn_cpu"),
    (functools.partial(small_trainer, backend="serial"), compiled, "_learn_cpu"),
    (autograd_trainer, engines.TorchPolicy, "add_gradients"), (autograd_trainer, engines.Buffers, "sample_arguments")])
def test_threads_run_side_by_side(make, place, name, monkeypatch):
    """Also if one actor steps all environments."""
    trainer, function, both = make(), getattr(place, name), threading.Barrier(2, timeout=60)
    monkeypatch.setattr(place, name, lambda *arguments: (both.wait(), function(*arguments))[1])
    learn(trainer, 1)


@pytest.mark.parametrize(("shares", "learners"), [(0.5, 1), (1.9, 1), (2, 2), (100, 2)])
def test_a_small_minibatch_has_fewer_learners_than_threads(monkeypatch, shares, learners):
    """To wake a thread takes as long as some millions of operations."""
    weights = sum(weight.numel() for weight in NETWORKS["feed-forward"](vector.make("squared", 2)).parameters())
    monkeypatch.setattr(compiled, "MIN_FLOPS_FOR_LEARNER", 6 * 32 * weights / shares)
    trainer = small_trainer(policy=NETWORKS["feed-forward"])
    assert trainer.engine.num_learners == learners
    trainer.evaluate()
    assert math.isfinite(trainer.train()["policy_loss"])
    trainer.release()


def test_a_minibatch_goes_through_in_parts_of_equal_size(monkeypatch):
    """They add up to the whole; a layer that takes moments of its batch gets all of it."""
    whole = learn(make_trainer(engine="autograd"))
    monkeypatch.setattr(engines, "MAX_NUMBERS_IN_PASS", 3 * 8 * 48)  # three segments; hgp is 48 wide
    trainer = make_trainer(engine="autograd")
    assert trainer.engine.at_once == 3 * 8, "8 segments: 3, 3 and 2"
    torch.testing.assert_close(learn(trainer), whole, atol=2e-4, rtol=1e-3)
    for settings in ({"change": lambda policy: setattr(policy, "norm", nn.BatchNorm1d(4))}, {"max_minibatch_size": 64},
                     {"loss": lambda minibatch: 0 * minibatch.values.mean()}):
        trainer = make_trainer(**{"engine": "autograd", **settings})
        assert trainer.engine.at_once == 64
        trainer.release()


class Custom(models.FeedForward):
    operations = "not a number"


class Safe(models.FeedForward):
    """It refuses what no environment gives, and keeps a function."""

    thread_safe = True

    def __init__(self, env):
        super().__init__(env, 16)
        self.activation = torch.tanh

    def encode_observations(self, observations, state=None):
        assert observations.flatten(1).any(-1).all(), "squared shows where the agent is"
        return self.activation(super().encode_observations(observations))


class Normed(models.FeedForward):
    """Threads would write its moments at once."""

    thread_safe = True

    def __init__(self, env):
        super().__init__(env, 16)
        self.encoder.append(nn.BatchNorm1d(16))
        self.eval()


def hook(policy):
    policy.register_forward_hook(lambda *_: None)


LEARNERS = [  # (network, change, settings, how many learn, the classes that would have to be thread_safe)
    (NETWORKS["feed-forward"], None, {}, 2, []),
    (Custom, None, {}, 1, ["Custom"]),
    (Custom, lambda policy: setattr(policy, "activation", torch.tanh), {}, 1, ["Custom"]),
    (Custom, hook, {}, 1, []),
    (Safe, None, {}, 2, []),
    (Safe, hook, {}, 1, []),
    (Normed, None, {}, 1, []),
    (NETWORKS["feed-forward"], None, {"max_minibatch_size": 16}, 1, []),
    (NETWORKS["feed-forward"], lambda policy: setattr(policy, "drop", nn.Dropout(0.1)), {}, 1, []),
    (NETWORKS["feed-forward"], lambda policy: hook(policy.encoder[0]), {}, 1, []),
    (NETWORKS["feed-forward"], lambda policy: next(policy.parameters()).register_hook(lambda grad: grad), {}, 1, []),
    (NETWORKS["feed-forward"], lambda policy: policy.encoder.requires_grad_(False), {}, 2, []),
    (NETWORKS["feed-forward"], lambda policy: setattr(policy, "initial_state", lambda agents: {}), {}, 1,
     ["FeedForward"]),
    (NETWORKS["feed-forward"], lambda policy: setattr(policy, "decode_actions", policy.decode_actions), {}, 1, []),
    (NETWORKS["feed-forward"], lambda policy: setattr(policy, "noise", nn.RReLU()), {}, 1, []),
]


@pytest.mark.usefixtures("several_learners")
@pytest.mark.parametrize(("network", "change", "settings", "learners", "unsafe"), LEARNERS)
def test_one_thread_learns_what_is_not_thread_safe(network, change, settings, learners, unsafe):
    change = change or (lambda policy: None)
    trainer = autograd_trainer(policy=network, change=change, **settings)
    assert trainer.engine.num_learners == learners and list(trainer.engine.blocking_classes) == unsafe
    trainer.release()
    if not unsafe:  # also if the change comes later
        trainer = autograd_trainer(policy=network, **settings)
        run_epochs(trainer, 1)
        change(trainer.policy)
        learn(trainer, 1)
        assert trainer.engine.num_learners == learners
        assert settings or trainer.engine.is_threaded == (learners == 2)


def test_a_parametrization_needs_one_thread():
    policy = NETWORKS["feed-forward"](vector.make("squared", num_envs=2))
    assert engines.is_thread_safe(policy)
    nn.utils.parametrizations.weight_norm(policy.encoder[0])
    assert not engines.is_thread_safe(policy)


def test_no_actor_writes_after_a_rollout_that_was_left(monkeypatch):
    trainer, written = make_trainer(), []

    def rollout(actor):
        if actor == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        written.append(actor)

    monkeypatch.setattr(trainer.engine, "_run_in_one_call", rollout)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    assert written == [1]
    trainer.release()


@pytest.mark.usefixtures("several_learners")
def test_actors_act_side_by_side_with_the_results_of_one():
    results = []
    for threads in (1, 2):
        trainer = autograd_trainer(num_threads=threads)
        trainer.evaluate()
        assert trainer.engine.is_threaded == (threads == 2)
        results.append([trainer.storage["actions"].clone(), trainer.buffers.values.clone()])
        trainer.release()
    assert all(map(torch.equal, *results))


def test_the_linear_maps_of_a_custom_network_go_through_tile_c(monkeypatch):
    """With more threads only if torch multiplies by no other matrix: its threads spin on the cores."""
    multiply, threads_within = products.multiply, []

    def watch(*tensors):
        threads_within.append(torch.get_num_threads())
        return multiply(*tensors)

    monkeypatch.setattr(products, "multiply", watch)

    def train(threads, change=lambda policy: None):
        threads_within.clear()
        return learn(make_trainer(policy=lambda env: models.FeedForward(env, 128), num_envs=512, num_threads=threads,
                                  minibatch_size=4096, engine="autograd", change=change), 1)

    def picture(policy):
        policy.convolution = nn.Conv1d(2, 2, 2)

    weights = train(2)
    steps = 9  # of the horizon, and one that only gives values; the middle map is large enough
    assert len(threads_within) >= steps + 2 and set(threads_within) == {1}
    train(1, picture)
    assert threads_within
    train(2, picture)
    assert not threads_within
    monkeypatch.setattr(products, "find_problem", lambda: "no compiler")
    torch.testing.assert_close(weights, train(2), atol=2e-4, rtol=1e-3)
    assert not threads_within
