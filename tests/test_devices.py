"""Training on a GPU (`pytest -m gpu`), and on a recorder in its place.

The recorder keeps tensors apart from the environments' arrays, runs the CUDA drivers on the CPU,
and captures as a GPU does: it notes each torch operation and each kernel with its tensors and
numbers, and a replay repeats exactly those. So it finds a number of Python's that a graph bakes in,
and memory that moves. With `Streams` it finds work that does not wait for another stream's.
"""

import contextlib
import ctypes
import math
import shutil
import sys
import traceback
import types
from collections import Counter

import cuda_on_a_cpu
import numpy as np
import pytest
import torch
from conftest import slow_but
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from trainers import NETWORKS

import arena
import engines
import models
import pufferl
from fast import fused, rollout
from vector import make

# A graph cannot hold waits, nor numbers of Python that become a tensor: they are copied to a GPU.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::item",
         "aten::lift_fresh"}


class Recording(TorchDispatchMode):
    """Notes what is called within it, to be called again on the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        result = function(*args, **(kwargs or {}))
        views = any(argument.alias_info is not None for argument in function._schema.returns)
        self.calls.append((function, args, kwargs or {}, None if views else result))
        return result

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            if result is not None:  # what it allocated has its place in the graph's memory
                for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class Recorder:
    """A fused.Gpu of the CPU."""

    torch_device = torch.device("cpu")
    capturing = None

    def __init__(self):
        self.pinned, self.graphs, self.replays, self.kept = [], {}, 0, []

    def pin(self, array):
        assert array.ctypes.data % 4096 == 0, "shares a page with something else"
        self.pinned.append(array)

    def main(self, *actor):
        return contextlib.nullcontext()

    actor = main

    def wait(self):
        assert self.capturing is None

    def replay_or_call(self, key, function, *arguments):
        if key in self.graphs:
            self.replays += 1
            self.graphs[key].replay()
        else:
            function(*arguments)

    def capture(self, actor, calls):
        owners = [function.__self__ for _, function, _ in calls]
        buffers = getattr(owners[0], "buffers", owners[0])
        memory = [buffers.arena.memory,
                  *(tensor for tensor in buffers.host.values() if tensor is not None)]
        optimizer = getattr(getattr(owners[-1], "optimizer", None), "optimizer", None)
        if optimizer is not None:
            memory += [tensor for state in optimizer.state.values() for tensor in state.values()]
        for key, function, arguments in calls:
            before = [tensor.clone() for tensor in memory]
            Recorder.capturing = Recording()
            try:
                with Recorder.capturing:
                    function(*arguments)
                self.graphs[key] = Recorder.capturing
            finally:
                Recorder.capturing = None
                for tensor, old in zip(memory, before, strict=True):  # a capture runs nothing
                    tensor.copy_(old)

    def graph_handles(self, actor, calls):
        """Return numbers for graphs, and functions that call back into Python."""
        graphs = [self.graphs.get(key) for key, *_ in calls]
        if not all(graphs):
            return None

        def launch(number, stream):
            try:
                assert stream == actor
                self.replays += 1
                graphs[number].replay()
            except BaseException:
                traceback.print_exc()
                return 1
            return 0

        functions = (ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 2)(launch),
                     ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(
                         lambda stream: int(stream != actor)))
        self.kept.append(functions)
        addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        return *addresses, actor, np.arange(len(graphs))

    def drop_graphs(self):
        self.graphs.clear()

    release = drop_graphs


def install(monkeypatch, execute):
    """Put the recorder instead of a GPU; `execute` runs numba's drivers."""
    monkeypatch.setattr(arena, "SIMULATOR", True)
    monkeypatch.setattr(arena, "_launch", recorded(execute))
    monkeypatch.setattr(fused, "find_gpu", lambda actors: Recorder())
    cupy = cuda_on_a_cpu.install(monkeypatch)
    monkeypatch.setattr(cupy, "execute", recorded(cupy.execute))


def on_a_cpu(function, lanes, arguments):
    function(0, lanes, *arguments)


def recorded(execute):
    def launch(*call):
        if Recorder.capturing is not None:
            Recorder.capturing.calls.append((execute, call, {}, None))
        execute(*call)

    return launch


def skip_without_gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.fixture(params=["recorder", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cuda":
        skip_without_gpu()
    else:
        install(monkeypatch, on_a_cpu)


ON_RECORDER = pytest.mark.parametrize("device", ["recorder"], indirect=True)
TRAINERS = []


@pytest.fixture(autouse=True)
def released(monkeypatch):  # which ends later
    yield
    while TRAINERS:
        TRAINERS.pop().release()


def make_trainer(env="breakout", num_envs=64, network="mingru", env_kwargs=None, squash=False,
                 vec=None, **settings):
    torch.manual_seed(1)
    if vec is None:
        vec = ({"backend": "serial"} if env.startswith("gym/")
               else {"num_buffers": 4, "num_threads": 2})
    vecenv = make(env, num_envs=num_envs, seed=1, env_kwargs=env_kwargs, **vec)
    if network == "mingru":
        policy = models.MinGRUPolicy(vecenv, hidden_size=16, num_layers=2)
    else:
        policy = NETWORKS.get(network, network)(vecenv)
    if squash:
        models.squash(policy, vecenv.single_action_space)
    settings = {"horizon": 8, "minibatch_size": 128, "replay_ratio": 1.3, "total_timesteps": 10**5,
                "device": "cuda", "log_interval": 1e9, "data_dir": None, "ent_coef": 0.01,
                "anneal_ent_coef": True, **settings}
    TRAINERS.append(pufferl.PuffeRL(settings, vecenv, policy))
    return TRAINERS[-1]


def train(trainer, epochs):
    """Train some epochs; return the losses of the last one."""
    for _ in range(epochs):
        trainer.evaluate()
        losses = trainer.train()
    return losses


def copies(trainer):
    """Return [weights, values, actions, bootstraps]."""
    buffers = trainer.buffers
    tensors = (trainer.arena.flat("weights"), buffers.values, buffers.storage["actions"],
               buffers.bootstraps)
    return [tensor.to("cpu", copy=True) for tensor in tensors]


def run(epochs, tf32=True, **settings):
    """Train; return `copies`, losses and replays."""
    trainer = make_trainer(**settings)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    losses = train(trainer, epochs)
    replays = getattr(getattr(trainer.buffers, "gpu", None), "replays", None)
    return copies(trainer), losses, replays


def all_equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


SHORT = {"env": "cartpole", "env_kwargs": {"max_steps": 7}}
PLACES = {  # where environments step
    "tensors": {"env": "examples/torch_cartpole.py:make", "num_envs": 1,
                "env_kwargs": {"num_envs": 64}, "vec": {}},
    "plain": {**SHORT, "vec": {"device": "cpu"}},
    "host": {**SHORT, "vec": {"num_buffers": 1, "num_threads": 1}},
}


def frozen_encoder(vecenv):
    policy = models.MinGRUPolicy(vecenv, hidden_size=16, num_layers=2)
    policy.encoder.requires_grad_(False)
    return policy


CASES = {
    "breakout": {},
    "frozen": {"network": frozen_encoder, "env": "squared", "weight_decay": 0.1},
    "continuous, truncated": {"env": "cartpole",
                              "env_kwargs": {"continuous": True, "max_steps": 11}},
    "masks": {"env": "masked"},
    "several heads": {"env": "spaces"},
    "state zero, clipped": {"state": "zero", "reward_clip": 0.5, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "learning_rate": 0.001},
    "pieces of a minibatch": {"max_minibatch_size": 64},
    "lstm": {"network": "lstm"},
    "lstm, truncated, in pieces": {"network": "lstm", "env": "cartpole",
                                   "env_kwargs": {"max_steps": 11}, "max_minibatch_size": 64},
    "gru": {"network": "gru"},
    "feed-forward, adam": {"network": models.FeedForward, "optimizer": "adam",
                           "learning_rate": 0.001},
    "encoded": {"network": models.MultiInputPolicy, "env": "gym/FrozenLake-v1"},
    "feed-forward, continuous": {"network": models.FeedForward, "env": "cartpole",
                                 "env_kwargs": {"continuous": True}},
    "squashed": {"env": "pendulum", "env_kwargs": {"max_steps": 11}, "squash": True},
    "squashed, lstm": {"network": "lstm", "env": "pendulum", "squash": True},
}
FAST = ("breakout", "frozen", "continuous, truncated", "masks", "several heads", "lstm", "gru",
        "encoded", "squashed, lstm")


def as_if_it_did_not_fit(monkeypatch):
    """Step the default network product by product, as with too little shared memory."""
    monkeypatch.setattr(rollout.PolicyStep, "is_supported", lambda *sizes: False)


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("case", slow_but(CASES, *FAST))
def test_graphs_change_no_result(device, case, monkeypatch):
    """Compare an epoch from graphs with one without, as schedules change."""
    if case in ("several heads", "continuous, truncated"):
        as_if_it_did_not_fit(monkeypatch)
    rollouts, in_graphs = [], fused._rollout_cuda
    monkeypatch.setattr(fused, "_rollout_cuda",
                        lambda *call: rollouts.append(0) or in_graphs(*call))
    eager, eager_losses, replays = run(4, **CASES[case], cudagraphs=-1)
    assert not replays
    graphs, losses, replays = run(4, **CASES[case], cudagraphs=2)
    is_fused = CASES[case].get("network") in (None, frozen_encoder)
    buffers, pieces = 1 if case == "encoded" else 4, 1 if is_fused else 5
    assert replays is None or replays > 2 * (buffers * 9 + 1 + pieces * 4) - 1
    assert len(rollouts) == (2 * buffers if is_fused else 0)
    assert all_equal(graphs, eager) and losses == eager_losses
    assert not np.isnan(list(losses.values())).any()


def launches(trainer, key):
    """List what a graph launches, without views and allocations."""
    calls = trainer.buffers.gpu.graphs[key].calls
    return [call[0] for call in calls if not hasattr(call[0], "_schema") or (
        "empty" not in str(call[0]) and (call[3] is not None or call[0]._schema.is_mutable))]


@ON_RECORDER
@pytest.mark.parametrize("fits, step, final", [(True, 4, 5), (False, 10, 14)],
                         ids=["in one kernel", "by products"])
def test_a_rollouts_step_is_few_launches(device, fits, step, final, monkeypatch):
    """Count copies from the host, the policy's step and a copy of the actions."""
    if not fits:
        as_if_it_did_not_fit(monkeypatch)
    trainer = make_trainer(cudagraphs=1)
    train(trainer, 3)
    for key, count in ((("step", 0, 1), step), (("final", 0), final)):
        assert len(launches(trainer, key)) == count, launches(trainer, key)
    step = type(trainer)._minibatch_step.__get__(trainer)
    assert 27 < len(launches(trainer, step)) <= 29, launches(trainer, step)


@ON_RECORDER
@pytest.mark.parametrize("network, step, minibatch", [("lstm", 22, 313), ("gru", 18, 308)])
def test_a_recurrent_step_is_two_launches(device, network, step, minibatch):
    """Count a rollout's step, and the gradients of 64 steps forward and backward."""
    trainer = make_trainer(network=network, cudagraphs=1, horizon=64, minibatch_size=1024)
    train(trainer, 3)
    learn = type(trainer)._compute_gradients.__get__(trainer)
    for key, count in ((("step", 0, 1), step), (learn, minibatch)):
        assert len(launches(trainer, key)) == count, launches(trainer, key)


@ON_RECORDER
@pytest.mark.parametrize("case, precision, near",
                         [("masks", "float32", 1e-5), ("squashed", "bfloat16", 0.02)])
def test_the_first_ratios_are_one(device, case, precision, near):
    """Round alike in the rollout and in learning, but for the order of sums."""
    settings = {"precision": precision, "replay_ratio": 0.25, "learning_rate": 1e-9}
    trainer = make_trainer(**{**CASES[case], **settings})
    train(trainer, 1)
    ratios = trainer.buffers.new_ratios
    assert (ratios - 1).abs().max() < near and ratios.min() > 0


def test_nothing_is_captured_before_it_has_run(device):
    """Train with few minibatches; the first one makes the moments of Adam."""
    settings = {"optimizer": "adam", "learning_rate": 0.001, "replay_ratio": 0.25,
                "minibatch_size": 512}
    eager, _, _ = run(12, **settings, cudagraphs=-1)
    graphs, _, replays = run(12, **settings, cudagraphs=2)
    assert (replays is None or replays > 0) and all_equal(graphs, eager)


@pytest.mark.parametrize("case", slow_but(CASES, *FAST))
def test_the_first_epochs_are_those_of_a_cpu(device, case, monkeypatch):
    """Compare the first rollout and updates with a CPU's; they agree but for rounding."""
    with monkeypatch.context() as patch:
        patch.setattr(arena, "SIMULATOR", False)  # else the CPU's arrays count as a GPU's
        here, losses, _ = run(2, **CASES[case], device="cpu")
    there, other, _ = run(2, **CASES[case], tf32=False)
    assert torch.isfinite(there[0]).all()
    torch.testing.assert_close(there[0], here[0], rtol=1e-2, atol=1e-3)
    assert torch.equal(there[3] != 0, here[3] != 0), "bootstraps"
    for name, value in losses.items():
        assert other[name] == pytest.approx(value, rel=2e-2, abs=2e-3), name


class Waits(models.FeedForward):
    def encode_observations(self, observations, state=None):
        hidden = super().encode_observations(observations)
        return hidden if hidden.sum().item() > -1e9 else -hidden


class Counts(models.FeedForward):
    calls = 0

    def encode_observations(self, observations, state=None):
        self.calls += 1  # a number outside of tensors: a graph keeps the one it was captured with
        return super().encode_observations(observations) * (1 + self.calls % 5)


class DriverError(Exception): ...  # numba's is no RuntimeError either


@pytest.mark.parametrize("network", [Waits, Counts, None])
def test_what_cannot_be_captured_runs_without_graphs(device, network, capsys, monkeypatch):
    """Try a wait, a graph that differs, and an error of the driver."""
    def capture(actor, calls):
        raise DriverError

    trainer = make_trainer(network=network or "mingru", cudagraphs=2)
    if network is None:
        monkeypatch.setattr(trainer.buffers.gpu, "capture", capture)
    assert math.isfinite(train(trainer, 4)["policy_loss"])
    text, replays = capsys.readouterr().err, getattr(trainer.buffers.gpu, "replays", 0)
    assert ("train.cudagraphs" if network else "DriverError") in text
    assert replays < 9 if network is Counts else replays == 0  # the comparison's own


def test_what_is_not_finite_is_named_and_changes_no_weight(device):
    trainer = make_trainer(cudagraphs=1)
    train(trainer, 2)
    trainer.evaluate()
    trainer.storage["rewards"][3, 5] = math.nan
    before = trainer.arena.flat("weights").clone()
    with pytest.raises(FloatingPointError, match="rewards"):
        trainer.train()
    assert torch.equal(trainer.arena.flat("weights"), before)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_resume_goes_on_bit_for_bit(device, tmp_path, optimizer):
    """Resume in another trainer, and in one that has graphs."""
    settings = {"cudagraphs": 1, "optimizer": optimizer, "learning_rate": 0.002}
    whole, path, results = make_trainer(**settings), tmp_path / "state.pt", []
    train(whole, 3)
    whole.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    tensors = [*saved["model"].values(), *saved["tensors"].values()]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    for trainer in (whole, make_trainer(**settings), whole):
        if results:
            trainer.load_checkpoint(path)
        train(trainer, 2)
        weights, gradients = map(trainer.arena.flat, ("weights", "gradients"))
        results.append([weights.clone(), gradients.clone(), trainer.storage["actions"].clone()])
    assert all_equal(results[1], results[0]) and all_equal(results[2], results[0])


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("network", slow_but(["mingru", models.FeedForward], "mingru"),
                         ids=["fused", "feed-forward"])
def test_what_is_frozen_after_graphs_were_made_stays(device, network, optimizer):
    trainer = make_trainer(network=network, cudagraphs=1, optimizer=optimizer, learning_rate=0.002,
                           weight_decay=0.1)

    weights = dict(trainer.policy.named_parameters())

    def names_that_change(epochs):
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        train(trainer, epochs)
        assert trainer.engine.is_captured
        return {name for name, weight in weights.items() if not torch.equal(weight, before[name])}

    assert names_that_change(3) == weights.keys()
    trainer.policy.encoder.requires_grad_(False)
    assert names_that_change(4) == {name for name in weights if not name.startswith("encoder")}
    trainer.policy.requires_grad_(True)
    assert names_that_change(4) == weights.keys()


@pytest.mark.slow
@pytest.mark.parametrize("network", ["feed-forward", "wrapped mingru", "lstm"])
@pytest.mark.parametrize("where", [
    {"device": "cpu"},
    *(pytest.param({"device": "cuda", "cudagraphs": graphs}, marks=pytest.mark.gpu)
      for graphs in (-1, 2))], ids=["cpu", "eager", "graphs"])
def test_torch_compile_changes_no_result(network, where):
    if where["device"] == "cuda":
        skip_without_gpu()
    elif shutil.which("c++") is None:
        pytest.skip("torch.compile wants a C++ compiler")
    settings = {"network": network, "env": "cartpole", **where}
    plain, losses, _ = run(4, **settings)
    traced, others, _ = run(4, **settings, compile=True)
    # values, because Muon amplifies the rounding of weights with almost no gradient
    torch.testing.assert_close(traced[1], plain[1], rtol=1e-3, atol=1e-4)
    assert others == pytest.approx(losses, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("fails_at", [None, 4, 5, 6])
def test_graphs_are_replayed_by_the_driver(fails_at, monkeypatch):
    """Replay two steps and the last values, up to a call that fails."""
    called, integer = [], ctypes.c_int64

    def call(*what):
        called.append(what)
        return 700 if len(called) == fails_at else 0

    @ctypes.CFUNCTYPE(ctypes.c_int, integer, integer)
    def launch(graph, stream):
        return call("launch", graph, stream)

    @ctypes.CFUNCTYPE(ctypes.c_int, integer)
    def synchronize(stream):
        return call("synchronize", stream)

    @ctypes.CFUNCTYPE(None, integer, integer, integer, integer)
    def step(environments, first, last, truncated):
        ctypes.c_uint8.from_address(truncated).value = 1
        call("step", environments)

    driver = types.SimpleNamespace(cuGraphLaunch=launch, cuStreamSynchronize=synchronize)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    gpu = object.__new__(fused.Gpu)
    gpu.streams = [None, types.SimpleNamespace(cuda_stream=7)]
    gpu._graphs = {key: types.SimpleNamespace(raw_cuda_graph_exec=lambda key=key: key)
                   for key in range(4)}
    calls = [(key, None, ()) for key in range(4)]
    assert gpu.graph_handles(1, [*calls, ("another", None, ())]) is None
    terminals, truncations, resets = (np.zeros((steps, 5), np.uint8) for steps in (2, 2, 3))
    cut, cut_step = np.zeros(5, np.uint8), np.zeros(1, np.int64)
    # agent 3 is truncated each time
    rows = np.array([truncations[t, 3:].ctypes.data for t in range(2)])
    error, share = fused._rollout_cuda(
        2, 4, (ctypes.cast(step, ctypes.c_void_p).value, 500, 0, 2, rows),
        *gpu.graph_handles(1, calls), terminals, truncations, resets, cut, cut_step)
    expected = [("launch", 0, 7), ("synchronize", 7), ("step", 500), ("launch", 3, 7),
                ("launch", 1, 7), ("synchronize", 7), ("step", 500), ("launch", 3, 7),
                ("launch", 2, 7), ("synchronize", 7)]
    if fails_at:
        assert (error, called) == (700, expected[:fails_at])
        return
    assert error == 0 and 0 <= share <= 1 and called == expected
    assert cut_step == 1 and cut.tolist() == [0, 0, 0, 1, 0]
    assert resets[1:, 3].all() and resets.sum() == 2


def test_a_capture_that_fails_leaves_the_allocator_as_it_was(monkeypatch):
    """End the allocator's pool, which torch 2.11 forgets if its capture_end fails."""
    called = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            called.append(("begin", pool))

        def capture_end(self):
            called.append("end")
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    stream = types.SimpleNamespace(device=torch.device("cuda", 3))
    gpu = object.__new__(fused.Gpu)
    gpu.torch_device, gpu.main_stream, gpu._graphs = stream.device, stream, {}
    for name, function in {"synchronize": lambda device: None,
                           "stream": lambda stream: contextlib.nullcontext(),
                           "graph_pool_handle": lambda: 5, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr("numba.cuda.defer_cleanup", contextlib.nullcontext)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *call: called.append(call),
                        raising=False)
    with pytest.raises(ZeroDivisionError):
        gpu.capture(None, [("minibatch", lambda: 1 / 0, ())])
    assert called == [("begin", 5), "end", (3, 5)] and not gpu._graphs


def pin_where_no_memory_is_locked():
    def refuse(error):
        raise RuntimeError("operation not supported")

    gpu = object.__new__(fused.Gpu)
    gpu._pinned, gpu._is_refused = [], False
    with pytest.MonkeyPatch.context() as patch:
        cudart = types.SimpleNamespace(cudaHostRegister=lambda *call: 801)
        patch.setattr(torch.cuda, "cudart", lambda: cudart)
        patch.setattr(torch.cuda, "check_error", refuse)
        for _ in range(3):
            gpu.pin(np.zeros(4096, np.uint8))
    assert gpu._pinned == []


def find_gpu(available=True, implementation="NVIDIA", knows_numpy=True, has_cupy=True):
    """Ask for a GPU on a system that lacks some of what it takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: available)
        patch.setattr("numba.cuda.implementation", implementation)
        if not knows_numpy:
            patch.setitem(sys.modules, "numba.cuda.np", types.ModuleType("np"))
        if not has_cupy:
            patch.setattr("importlib.util.find_spec", lambda name: None)
        fused.find_gpu(1)


# -- Streams


class Stream:
    """A stream that knows how much of the others' work comes before its own next."""

    cuda_stream = cuda_on_a_cpu.STREAM
    # all streams; those that are entered; the work that the host has waited for
    every, here, host = [], [], Counter()

    def __init__(self, device=None):
        self.given, self.seen = 0, Counter()
        self.every.append(self)

    def before(self):
        return self.seen | Counter({self: self.given})

    def wait_stream(self, other):
        self.seen |= other.before()

    def synchronize(self):
        Stream.host |= self.before()

    def take(self):
        """Give this stream work, which must come after all that the others have."""
        for other in self.every:
            done = max(self.seen[other], Stream.host[other])
            assert other is self or done == other.given, "work does not wait for another stream's"
        self.given += 1


@contextlib.contextmanager
def entered(stream):
    Stream.here.append(stream)
    yield
    Stream.here.pop()


class InOrder(TorchDispatchMode):
    """Within it, what touches a trainer's arena is work of the current stream."""

    def __init__(self, arena):
        super().__init__()
        self.first, self.end = arena.memory.data_ptr(), arena.memory.data_ptr() + len(arena.memory)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(isinstance(one, torch.Tensor) and self.first <= one.data_ptr() < self.end
               for one in tree_flatten((args, kwargs))[0]):
            Stream.here[-1].take()
        return function(*args, **(kwargs or {}))


class Streams(Recorder):
    main, actor, wait = fused.Gpu.main, fused.Gpu.actor, staticmethod(fused.Gpu.wait)

    def __init__(self):
        super().__init__()
        self.main_stream, self.streams = Stream(), [Stream()]


@pytest.mark.parametrize("place", PLACES)
@ON_RECORDER
def test_streams_wait_for_each_other(device, place, monkeypatch):
    """Run in order, also two rollouts in a row, wherever the environments are."""
    monkeypatch.setattr(Stream, "every", [])
    monkeypatch.setattr(Stream, "here", [Stream()])
    monkeypatch.setattr(Stream, "host", Counter())
    nothing = lambda *arguments: contextlib.nullcontext()  # noqa: E731
    for name, value in {"current_stream": lambda device=None: Stream.here[-1],
                        "stream": entered, "device": nothing,
                        "nvtx": types.SimpleNamespace(range=nothing)}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(fused, "find_gpu", lambda actors: Streams())
    trainer = make_trainer(**PLACES[place], cudagraphs=-1)
    run_kernel = sys.modules["cupy"].execute
    monkeypatch.setattr(sys.modules["cupy"], "execute",
                        lambda *call: (Stream.here[-1].take(), run_kernel(*call)))
    with InOrder(trainer.arena):
        for rollouts in (1, 2, 1):
            for _ in range(rollouts):
                trainer.evaluate()
            trainer.train()
    assert len([stream for stream in Stream.every if stream.given]) >= 2


@ON_RECORDER
def test_what_the_host_does_not_read_is_neither_pinned_nor_copied(device):
    """Copy no observations of environments on the GPU but those that a log reads."""
    trainer, copied = make_trainer(**PLACES["tensors"]), {}
    pinned = {array.ctypes.data for array in trainer.buffers.gpu.pinned}
    used = {name for name, tensor in trainer.buffers.host.items()
            if tensor is not None and tensor.data_ptr() in pinned}
    assert used == {"terminals", "truncations"}
    on_host = trainer.buffers.on_host

    def copy(name, *part):
        copied.setdefault(name, []).append(on_host(name, *part))
        return copied[name][-1]

    trainer.buffers.on_host = copy
    trainer.evaluate()
    trainer.train()
    trainer.mean_and_log()
    largest = max(part.numel() for part in copied["observations"])
    assert largest <= trainer.storage["observations"].numel() / 2
    assert copied["actions"][0].shape[1] == 16 and copied["rewards"][0].shape[1] == 64


def test_torch_has_its_precision_back_after_a_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    chosen = torch.backends.cuda.matmul
    for before in (True, False):
        chosen.allow_tf32 = before
        gpu = fused.Gpu(torch.device("cuda", 0), actors=1)
        assert chosen.allow_tf32
        gpu.release()
        assert chosen.allow_tf32 == before


# -- What only a GPU can show


@pytest.mark.gpu
def test_after_warm_up_nothing_is_allocated_and_nothing_waits_but_for_the_actions():
    skip_without_gpu()
    trainer = make_trainer(num_envs=1024, horizon=16, minibatch_size=4096, cudagraphs=2)
    train(trainer, 4)
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_reserved()
    with torch.profiler.profile() as profile:
        train(trainer, 1)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    assert torch.cuda.memory_reserved() == reserved
    # Those for the actions are the driver's, not the runtime's: no interpreter makes them.
    events = {event.key: event.count for event in profile.key_averages()}
    waits = sum(count for key, count in events.items()
                if key.startswith("cuda") and "Synchronize" in key)
    assert waits <= trainer.vecenv.num_buffers + 16, events


@pytest.mark.gpu
def test_environments_of_tensors_step_on_the_default_stream():
    """Use the default stream, by which simulators order their work."""
    skip_without_gpu()
    here = {"device": torch.device("cuda", torch.cuda.current_device()), "num_envs": 64}
    trainer = make_trainer(**PLACES["tensors"] | {"env_kwargs": here}, cudagraphs=-1)
    env, streams = trainer.vecenv.driver_env, set()
    step = env.step_into
    env.step_into = lambda row: (streams.add(torch.cuda.current_stream()), step(row))
    trainer.evaluate()
    assert streams == {torch.cuda.default_stream()}


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["mingru", "lstm"])
def test_bfloat16_stays_finite(network):
    skip_without_gpu()
    tensors, losses, _ = run(20, network=network, precision="bfloat16", num_envs=256)
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors)
    assert all(map(math.isfinite, losses.values()))


def test_a_minibatch_is_one_part_on_a_gpu(device, monkeypatch):
    monkeypatch.setattr(engines, "MAX_NUMBERS_IN_PASS", 1)  # a CPU's has single segments then
    trainer = make_trainer()
    assert trainer.engine.at_once == 128
