"""Run policies on a GPU: streams, pinned memory and CUDA graphs.

    python pufferl.py train breakout --train.device cuda

Each actor of the rollout has a stream for its copies, forward passes and graphs (`GpuEngine`);
learning has the main stream. After train.cudagraphs epochs the steps of the rollout and the
minibatch are captured as graphs and replayed. `Graphs` runs any network by its forward and torch's
autograd. `Fused` runs the default network by kernels. If the weights fit into a block's shared
memory, a step is one kernel, and so is a rollout with environments on the GPU (fast/rollout.py);
other rollouts are replayed without the interpreter. Captured functions read and write memory that
keeps its address (the arena), take changing numbers from there, and never wait for the GPU. `Gpu`
holds streams and graphs:

    gpu = Gpu(torch.device("cuda"), actors=4)
    gpu.pin(array)                                      # copies from and to it are asynchronous
    with gpu.actor(0):                                  # on that actor's stream, in any thread
        gpu.replay_or_call("step", function, argument)  # calls it, until it is captured
        gpu.wait()                                      # until this stream is done
    gpu.capture(0, [("step", function, (argument,))])   # from now on it is replayed
    gpu.graph_handles(0, [("step", function, (argument,))])  # to replay without the interpreter
"""

import contextlib  # noqa: I001  (the names of arena on few lines)
import ctypes
import importlib.util
import math
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

import engines
import kernels
import data_parallel
from arena import as_array, clock, driver, on_gpu, stream_between, threads
from errors import ConfigError
from fast.c_calls import LONG, WORD, call_address, cycles, step_environments
from fast.rollout import PolicyStep, Rollout
from vector import POLICY_INPUTS, aligned_zeros


class Gpu:
    """Hold the streams, pinned memory and graphs of one device.

    device: a torch.device of type cuda. actors: number of streams beside the main one.
    """

    def __init__(self, device, actors):
        self.torch_device = device
        # Buffers of an actor share its activations, so they must follow one another: one stream.
        self.streams = [torch.cuda.Stream(device) for _ in range(actors)]
        self.main_stream = torch.cuda.Stream(device)
        self._pinned = []
        self._graphs = {}
        self._is_refused = False  # whether the system refused to pin memory
        # for an object that is dropped without release()
        weakref.finalize(self, _unlock, device, self._pinned).atexit = False
        self._has_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = True  # as cuDNN's is by default

    def pin(self, array):
        """Lock a numpy array's pages in memory until `release`.

        The array must own its pages. If the system refuses, as containers and limits of locked
        memory do, one warning is printed and copies are slower.
        """
        if not array.nbytes or self._is_refused:
            return
        try:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0))
            self._pinned.append(array)
        except RuntimeError as error:
            self._is_refused = True
            print("train.device = cuda: the system locks no memory "
                  f"({str(error).splitlines()[0]}), so copies are slower. Run ulimit -l unlimited, "
                  "or docker run --ulimit memlock=-1.", file=sys.stderr)

    def main(self):
        """Send work to the main stream, in order with the caller's stream."""
        return stream_between(self.main_stream, torch.cuda.current_stream(self.torch_device))

    @contextlib.contextmanager
    def actor(self, number):
        """Send this thread's work to an actor's stream, in order with the main stream."""
        with (torch.cuda.device(self.torch_device),
              stream_between(self.streams[number], self.main_stream),
              torch.cuda.nvtx.range(f"actor {number}")):
            yield

    @staticmethod
    def wait():
        """Wait until the current stream is done; other Python threads run meanwhile."""
        torch.cuda.current_stream().synchronize()

    def replay_or_call(self, key, function, *arguments):
        """Replay the graph captured under `key`; without one call the function."""
        graph = self._graphs.get(key)
        with torch.cuda.nvtx.range(str(key)):
            graph.replay() if graph else function(*arguments)

    def graph_handles(self, actor, calls):
        """Return what replays captured graphs without the interpreter, or None.

        These are the addresses of `int launch(graph, stream)` and `int synchronize(stream)`, which
        return 0 or an error number, the actor's stream, and the graphs, int64 (calls,). None if a
        call is not captured, or if torch is too old to return a graph's address.
        """
        graphs = [self._graphs.get(key) for key, *_ in calls]
        if not all(hasattr(graph, "raw_cuda_graph_exec") for graph in graphs):
            return None
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        launch, synchronize = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (library.cuGraphLaunch, library.cuStreamSynchronize))
        addresses = np.array([graph.raw_cuda_graph_exec() for graph in graphs], np.int64)
        return launch, synchronize, self.streams[actor].cuda_stream, addresses

    def capture(self, actor, calls):
        """Capture [(key, function, arguments), ...] as graphs, without running them.

        actor: whose stream; None for the main one. Each function must have run once, so that its
        kernels are compiled. Raises RuntimeError for what a graph cannot hold, such as a wait.
        """
        from numba import cuda

        torch.cuda.synchronize(self.torch_device)
        stream = self.main_stream if actor is None else self.streams[actor]
        pool = torch.cuda.graph_pool_handle()
        # numba frees no memory meanwhile, which would wait for the GPU
        with torch.cuda.stream(stream), cuda.defer_cleanup():
            for key, function, arguments in calls:
                graph = torch.cuda.CUDAGraph()
                # Graphs of one stream never overlap, and exchange data in the arena only: one pool.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    function(*arguments)
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # repeats that the capture failed
                        graph.capture_end()
                    # before 2.12, torch does not end the allocation (pytorch#180395)
                    with contextlib.suppress(RuntimeError):
                        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
                    raise
                graph.capture_end()
                self._graphs[key] = graph
        torch.cuda.synchronize(self.torch_device)

    def drop_graphs(self):
        """Drop all graphs when they are done; functions are called again."""
        torch.cuda.synchronize(self.torch_device)
        self._graphs.clear()

    def usage(self):
        """Return {"GPU": "87%", "GPU memory": "1,234 of 143,771 MiB"} for a dashboard.

        "GPU" is there if nvidia-ml-py reports it.
        """
        free, total = torch.cuda.mem_get_info(self.torch_device)
        figures = {"GPU memory": f"{(total - free) / 2**20:,.0f} of {total / 2**20:,.0f} MiB"}
        with contextlib.suppress(Exception):  # no package, no library, or MIG
            figures = {"GPU": f"{torch.cuda.utilization(self.torch_device)}%", **figures}
        return figures

    def release(self):
        """Unlock the pinned arrays, drop the graphs, restore torch's precision."""
        _unlock(self.torch_device, self._pinned)
        self.drop_graphs()
        torch.backends.cuda.matmul.allow_tf32 = self._has_tf32


def _unlock(device, arrays):
    """Unlock pinned arrays when all work is done; their memory is freed later."""
    if arrays:
        torch.cuda.synchronize(device)
    while arrays:
        torch.cuda.cudart().cudaHostUnregister(arrays.pop().ctypes.data)


def check_gpu():
    """Check that a GPU and its packages are here. Raises ConfigError."""
    setting, install = "train.device = cuda", "pip install -r requirements/cuda.txt"
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        raise ConfigError(f"{setting}: torch {torch.__version__}, built for {build}, finds no GPU. "
                          "Run nvidia-smi, or take cpu.")
    from numba import cuda

    if cuda.implementation != "NVIDIA":
        # on PYTHONPATH, only a sitecustomize.py that imports the redirector replaces numba.cuda
        raise ConfigError(f"{setting}: numba.cuda is numba's own here, not numba-cuda. {install} "
                          "(on PYTHONPATH: import _numba_cuda_redirector in sitecustomize.py).")
    try:
        from numba.cuda.np import arrayobj  # noqa: F401  (every kernel needs it)
    except (AttributeError, ImportError) as error:
        raise ConfigError(f"{setting}: this numba-cuda does not run with numpy {np.__version__} "
                          f"({error}). pip install 'numpy<2.5'.") from None
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError(f"{setting}: needs CuPy, which compiles kernels.cu. {install}, or "
                          "pip install cupy-cuda13x (cupy-cuda12x for CUDA 12).")


def find_gpu(actors):
    """Return this process's GPU. Raises ConfigError if there is none."""
    check_gpu()
    return Gpu(torch.device("cuda", data_parallel.connect().choose_gpu()), actors)


# --------------------------------------------------------------------------------------------------
# Any network


class GpuBuffers(engines.Buffers):
    """Hold the buffers of a run on a GPU.

    Environments on the host write pinned arrays (`host`), which are copied to the GPU (`storage`).
    Environments on the GPU (vector.Tensors) write `storage`, and the host gets copies of the ends
    of episodes. If graphs step them too (`batched`: vector.GpuEnvs), it gets sums only.
    """

    def __init__(self, policy, vecenv, config, segments, first_agent):
        super().__init__(policy, vecenv, config, segments, first_agent)
        self.gpu = find_gpu(vecenv.num_actors)
        self.torch_device = self.gpu.torch_device
        self.heads = None if self.heads is None else self.heads.to(self.torch_device)
        self.envs_on_gpu = vecenv.device == self.torch_device
        self.batched = self.envs_on_gpu and vecenv.in_graphs
        policy.to(self.torch_device)

    def register(self, arena, num_learners, minibatches):
        super().register(arena, num_learners, minibatches)
        for name, tensor in self.host.items():
            if tensor is not None:
                arena.register(f"storage/{name}", tensor.shape, tensor.dtype)
        arena.register("cut", (self.num_agents,), torch.uint8)
        arena.register("cut_values", (self.num_agents,))
        arena.register("cut_step", (self.vecenv.num_buffers,), torch.int64)

    def bind(self):
        if self.batched:
            self.host = self._make_storage()
        super().bind()
        cut = aligned_zeros((self.num_agents,), np.uint8)
        cut_step = aligned_zeros((self.vecenv.num_buffers,), np.int64)
        names = ENDS if self.envs_on_gpu else self.host  # what the host reads or writes
        names = () if self.batched else names
        arrays = [self.host[name].numpy() for name in names if self.host[name] is not None]
        for array in (*arrays, cut, cut_step):
            self.gpu.pin(array)
        self.host_cut = torch.from_numpy(cut)
        self.host_cut_step = torch.from_numpy(cut_step)
        if self.envs_on_gpu:
            self.vecenv.write_to(self.storage)

    def _make_storage(self):
        storage = {name: None if tensor is None else self.arena[f"storage/{name}"]
                   for name, tensor in self.host.items()}
        storage["valid"].copy_(self.host["valid"])  # it stays 1 if agents are always active
        return storage

    def _make_row(self, agents, t):
        row = super()._make_row(agents, t)
        row["copied"] = row["copied_back"] = []  # [(target, source), ...]
        if self.envs_on_gpu:
            return row
        row["copied"] = [(row[name], self.host[name][t, agents])
                         for name in POLICY_INPUTS
                         if row[name] is not None and (name != "valid" or self.vecenv.has_valid)]
        if t < self.horizon:
            row["copied_back"] = [(self.host["actions"][t, agents], row["actions"])]
        return row

    def begin_rollout(self, number):
        super().begin_rollout(number)
        if not self.batched:
            self.gpu.wait()  # environments overwrite what is copied from the host

    def on_host(self, name, index=...):
        tensor = self.storage[name] if self.envs_on_gpu else self.host[name]
        return tensor[index].cpu()

    def usage(self):
        return self.gpu.usage()

    def release(self):
        self.gpu.release()


class GpuEngine(engines.Engine):
    """Roll out on a GPU, with a stream for each actor; capture CUDA graphs.

    Rollouts and learning are captured. A subclass has `act`, a step of the network as in
    engines.StepByStep, and may replace `act_on_row`, `values_of_cut` and `run_actor`.
    """

    num_learners = 1
    Buffers = GpuBuffers

    def __init__(self, buffers):
        super().__init__(buffers)
        self.gpu = buffers.gpu
        self.at_once = buffers.steps_at_once()  # a GPU is faster with all of a minibatch
        self.pool = engines.ThreadPool(self.vecenv)
        self.loop = engines.StepByStep(buffers, self.act, self._replay_step, self._bootstrap)
        self.actor_of = {}  # buffer -> the actor that serves it
        self.functions = []  # of an epoch's learning, in their order
        self._called = set()  # of them, in this epoch
        self._ever_called = set()
        self._epochs = 0
        self.is_captured = False

    # -- acting

    def rollout(self, number):
        """Roll out all agents for `horizon` steps; return the seconds in environments."""
        vecenv, buffers = self.vecenv, self.buffers
        with self.gpu.main(), engines.torch_threads(1):
            self.capture_if_due()
            buffers.begin_rollout(number)
            with engines.torch_threads(vecenv.threads_per_actor):
                seconds = max(self.pool.run(self.run_actor, range(vecenv.num_actors)))
            if not buffers.envs_on_gpu:
                for name in ("rewards", "terminals", "truncations"):
                    buffers.storage[name].copy_(buffers.host[name], non_blocking=True)
        return seconds

    @torch.no_grad()
    def run_actor(self, actor):
        """Run one actor's share of a rollout; return its seconds in environments."""
        with self.gpu.actor(actor):
            if not self.buffers.batched:
                return self.loop.run(actor)
            self.actor_of[0] = actor
            for key, function, arguments in self.calls(actor, 0):
                self.gpu.replay_or_call(key, function, *arguments)
        return 0.0  # only a profile shows the environments' share

    def calls(self, actor, buffer):
        """Return [(key, function, arguments)] of a buffer's rollout.

        These are its steps and its final values.
        """
        horizon = self.buffers.horizon
        if self.buffers.batched:
            return [(("rollout", buffer, first), self._run_steps, (actor, first))
                    for first in range(0, horizon + 1, STEPS_A_GRAPH)]
        steps = [(("step", buffer, t), self._run_step, (actor, buffer, t))
                 for t in range(horizon + 1)]
        return [*steps, (("final", buffer), self.write_final_values, (actor, buffer))]

    def _run_steps(self, actor, first):
        """Run STEPS_A_GRAPH steps of policy and environments on this GPU.

        The host does not know which agents are truncated, so if agents can be, the final values are
        computed after each step.
        """
        buffers = self.buffers
        for t in range(first, min(first + STEPS_A_GRAPH, buffers.horizon + 1)):
            if t > 0 and self.vecenv.truncates:
                ends = (buffers.storage[name][t - 1] for name in ENDS)
                self.values_of_cut(actor, slice(None), *ends, buffers.bootstraps[t - 1])
            self._run_step(actor, 0, t)
            if t < buffers.horizon:
                self.vecenv.launch(t)

    def _replay_step(self, actor, buffer, t):
        self.actor_of[buffer] = actor
        self.gpu.replay_or_call(("step", buffer, t), self._run_step, actor, buffer, t)
        if not self.buffers.envs_on_gpu:
            self.gpu.wait()  # for the actions

    def _run_step(self, actor, buffer, t):
        row = self.buffers.rows[buffer][t]
        for target, source in row["copied"]:
            target.copy_(source, non_blocking=True)
        self.act_on_row(actor, buffer, t)
        for target, source in row["copied_back"]:
            target.copy_(source, non_blocking=True)

    def act_on_row(self, actor, buffer, t):
        """Write actions, logprobs and values of row t of a buffer."""
        self.loop.act_on_row(actor, buffer, t)

    def _bootstrap(self, actor, buffer, t):
        agents, row = self.vecenv.ranges[buffer], self.buffers.rows[buffer][t]
        cut = row["truncations"] & ~row["terminals"]  # after a terminal nothing follows
        self.buffers.host_cut[agents] = torch.as_tensor(cut)
        self.buffers.host_cut_step[buffer] = t
        self.gpu.replay_or_call(("final", buffer), self.write_final_values, actor, buffer)

    def write_final_values(self, actor, buffer):
        """Write V of all of a buffer's final observations to the bootstraps of a step.

        The host sets the step and which agents are cut off; for others it is 0. Shapes are fixed,
        as in all graphs.
        """
        buffers, agents = self.buffers, self.vecenv.ranges[buffer]
        arena, place = buffers.arena, slice(buffer, buffer + 1)
        cut = arena["cut"][agents]
        step = arena["cut_step"][place]
        if not buffers.envs_on_gpu:
            name = "final_observations"
            buffers.storage[name][agents].copy_(buffers.host[name][agents], non_blocking=True)
        cut.copy_(buffers.host_cut[agents], non_blocking=True)
        step.copy_(buffers.host_cut_step[place], non_blocking=True)
        values = arena["cut_values"][agents]
        self.values_of_cut(actor, agents, cut, buffers.final_flags[0][agents], values)
        buffers.bootstraps[:, agents].index_copy_(0, step, values.unsqueeze(0))

    def values_of_cut(self, actor, agents, truncations, terminals, out):
        """Write V of the final observations of agents, a slice, to `out` (n,).

        V is computed from the state of the last step; it is 0 for agents that are not cut off.
        """
        buffers = self.buffers
        state = {name: tensor[:, agents] for name, tensor in buffers.state.items()}
        flags = (flag[agents] for flag in buffers.final_flags)
        with engines.running_moments(buffers.policy):
            outputs, _ = self.act(actor, buffers.storage["final_observations"][agents],
                                  buffers.copy_state(actor, state), *flags)
        # not a product with 0, because a NaN may be among the values
        out.copy_(outputs[:, -1]).masked_fill_(truncations <= terminals, 0.0)

    # -- graphs

    def capture(self, function):
        """Return a callable that replays the function after train.cudagraphs epochs."""
        self.functions.append(function)

        def replay():
            self._called.add(function)
            self.gpu.replay_or_call(function, function)

        return replay

    @contextlib.contextmanager
    def learning(self):
        """Send work to the main stream; count an epoch if it has learnt."""
        self._called.clear()
        # torch's threads do nothing on a GPU; torch.compile recompiles for another number of them
        num_threads = self.vecenv.num_threads
        with threads(num_threads), engines.torch_threads(1), self.gpu.main():
            yield
        self._ever_called |= self._called
        self._epochs += len(self._called) > 1  # more than the advantages

    def capture_if_due(self):
        """Capture an epoch as graphs, which replace it; nothing runs or changes.

        If that fails, a warning is printed, and the run continues without graphs.
        """
        if self.is_captured or self._epochs != self.config["cudagraphs"]:
            return
        self.is_captured = True
        functions = [function for function in self.functions if function in self._ever_called]
        try:
            with torch.no_grad():
                self._capture_rollout()
            self.gpu.capture(None, [(function, function, ()) for function in functions])
            self._check_capture(functions)
        except Exception as error:  # numba's CudaAPIError is not a RuntimeError
            self._drop_graphs()
            if data_parallel.connect().rank == 0:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                print("train.cudagraphs: the network cannot be captured and runs without, which is "
                      f"slower: {reason}", file=sys.stderr)
        except BaseException:  # an interrupt leaves half of the graphs
            self._drop_graphs()
            raise

    def _capture_rollout(self):
        for buffer, actor in self.actor_of.items():
            self.gpu.capture(actor, self.calls(actor, buffer))

    def _check_capture(self, functions):
        """Raise what forbids the graphs of these functions."""

    def _drop_graphs(self):
        self.gpu.drop_graphs()

    def refresh(self):
        """Drop the graphs, whose memory is replaced; they are captured again."""
        self._drop_graphs()
        self._epochs = 0
        self.is_captured = False

    def release(self):
        """Stop the threads, and drop the graphs."""
        super().release()
        self._drop_graphs()


class Graphs(GpuEngine):
    """Run any nn.Module on a GPU (train.engine autograd)."""

    name = "graphs"
    whole_minibatches = False  # each part is a graph, so that gradients can be compared

    def __init__(self, buffers):
        super().__init__(buffers)
        self.network = engines.TorchPolicy(buffers, self.precision)

    def act(self, *arguments):
        """Run one step of the network."""
        return self.network.act(*arguments)

    def backward(self):
        """Compute the gradients and the loss of the segments `buffers.index`.

        New values, new ratios and the sums of the loss are in `buffers`.
        """
        self.buffers.gradients[0].zero_()
        step, index = self.at_once // self.buffers.span, self.buffers.index
        for start in range(0, len(index), step):
            self.network.add_gradients(index[start : start + step], start, self.buffers.sums[0])
        self.network.compare_with_rollout()
        self._has_learned = True

    def _check_capture(self, functions):
        """Compare the gradients of graphs with those without. Raises RuntimeError."""
        if not functions:
            return
        memory = self.buffers.arena.memory.clone()
        called = []
        self._has_learned = False
        while not self._has_learned:
            function = functions[len(called)]
            called.append(function)
            function()
        expected = self._take_gradients(memory)
        for function in called:
            self.gpu.replay_or_call(function, function)
        error = (self._take_gradients(memory) - expected).norm() / (expected.norm() + 1e-8)
        if not error < 1e-2:
            raise RuntimeError(f"its gradients from a graph differ by {float(error):.2g} from "
                               "those without. Has it random numbers, or state outside of tensors?")

    def _take_gradients(self, memory):
        """Return a copy of the gradients, and restore the arena's memory."""
        gradients = self.buffers.gradients[0].clone()
        self.buffers.arena.memory.copy_(memory)
        return gradients


# --------------------------------------------------------------------------------------------------
# The default network without autograd: matrix products and fused kernels in preallocated buffers


# A graph of 64 steps takes half a millisecond to launch, in which the GPU waits.
STEPS_A_GRAPH = 8
ENDS = "truncations", "terminals"


class Layers:
    """Run the default network without autograd, in buffers of the arena.

        layers = Layers(policy, arena, "actor 0", steps=64, rows=16)     # before arena.allocate
        layers.bind()                                                    # after
        chunk = layers.chunk(n)                              # the buffers of n <= rows segments
        layers.gather(chunk, observations, index, start)
        layers.forward(chunk, resets, valid, index, start, initial)      # -> chunk.outputs
        layers.backward(chunk, resets, valid, index, start, add=False)   # from chunk.grad_outputs

    Each actor has one. With steps=0 it holds only what `step`, a rollout's step, needs.

    precision: torch.bfloat16 for the products of encoder and layers and for activations, forward
    and backward, and for the decoder's weights in its input's gradient. Weights, states, the
    decoder's product and the sums of gradients are float32. Call `refresh` after every change of
    the weights: the products have rounded copies.
    """

    def __init__(self, policy, arena, name, *, steps, rows, precision=torch.float32):
        self.policy = policy
        self.arena = arena
        self.name = name
        self.precision = precision
        inputs, width = policy.encoder.in_features, policy.decoder.out_features
        H, L, T = policy.hidden_size, policy.num_layers, max(steps, 1)
        is_half = precision != torch.float32
        # name -> the shape of its buffer for T steps of n segments
        rounded = {"observations": lambda T, n: (T, n, inputs)}
        rounded |= {f"hgp{i}": lambda T, n: (T, n, 3 * H) for i in range(L if steps else 1)}
        rounded |= {f"x{i}": lambda T, n: (T, n, H) for i in range(L if steps else 2)}
        exact = {"last": lambda T, n: (T, n, H), "outputs": lambda T, n: (T, n, width)}
        if steps:
            rounded |= {"grad_x": lambda T, n: (T, n, H),
                        "rounded_grad": lambda T, n: (T, n if is_half else 0, width)}
            exact |= {f"states{i}": lambda T, n: (T + 1, n, H) for i in range(L)}
            exact |= {f"sums{i}": lambda T, n: (n, 3 * H) for i in range(L)}
            exact |= {"grad_outputs": lambda T, n: (T, n, width),
                      "grad_log_std": lambda T, n: (T, n, width - 1)}
        for shapes, dtype in ((rounded, precision), (exact, torch.float32)):
            for key, shape in shapes.items():
                arena.register(f"{name}/{key}", shape(T, rows), dtype)
        self._shapes = rounded | exact
        self._steps = T
        self._chunks = {}
        self._rounded = [key for key, _ in policy.named_parameters()
                         if is_half and key not in ("decoder.bias", "decoder.log_std")]
        for key in self._rounded:
            shape = policy.get_parameter(key).shape
            arena.register(f"{name}/weights/{key}", shape, precision)
            arena.register(f"{name}/products/{key}", shape, precision)

    def bind(self):
        """Make the views of the allocated arena, and round the weights."""
        arena, memory = self.arena, self.arena.memory
        self.masters = {key: parameter.data for key, parameter in self.policy.named_parameters()}
        self.gradients = {key: arena[f"gradients/policy.{key}"] for key in self.masters}
        self.weights = self.masters | {key: arena[f"{self.name}/weights/{key}"]
                                       for key in self._rounded}
        self.refresh()
        is_small = on_gpu(memory) and PolicyStep.is_supported(self.policy, self.precision,
                                                              memory.device)
        self.step_kernel = PolicyStep(self) if is_small else None

    def refresh(self):
        """Round the weights, after every change of them."""
        for key in self._rounded:
            self.weights[key].copy_(self.masters[key])

    def chunk(self, n, steps=None):
        """Return the buffers of n segments, made once for each n; by default of all steps.

        Each is the contiguous beginning of the whole buffer. `flat_` and a buffer's name: the same
        memory as a matrix (steps · n, width), for the products.
        """
        steps = self._steps if steps is None else steps
        if (n, steps) not in self._chunks:
            views = {}
            for key, shape in self._shapes.items():
                shape = shape(steps, n)
                views[key] = self.arena[f"{self.name}/{key}"].view(-1)[: math.prod(shape)].view(shape)
            flat = {f"flat_{key}": view.flatten(0, 1)
                    for key, view in views.items() if view.dim() == 3}
            for stack in ("hgp", "x", "states"):
                names = [f"{stack}{i}" for i in range(self.policy.num_layers + 1)]
                names = [name for name in names if name in views]
                views[stack] = [views[name] for name in names]
                flat[f"flat_{stack}"] = [flat[f"flat_{name}"] for name in names]
            self._chunks[n, steps] = SimpleNamespace(**views, **flat)
        return self._chunks[n, steps]

    def _linear(self, name, x, out):
        """Write x · W^T + b to `out`, all (rows, width); the decoder's is float32."""
        weights = self.masters if x.dtype == torch.float32 else self.weights
        torch.addmm(weights[f"{name}.bias"], x, weights[f"{name}.weight"].t(), out=out)

    def _weight_gradient(self, name, grad, x, *, add):
        """Write, or add, grad^T · x to the weight's gradient.

        A product in bfloat16 is rounded, then added in float32.
        """
        gradient = self.gradients[f"{name}.weight"]
        if grad.dtype != gradient.dtype:
            rounded = torch.mm(grad.t(), x, out=self.arena[f"{self.name}/products/{name}.weight"])
            gradient.add_(rounded) if add else gradient.copy_(rounded)
        elif add:
            torch.addmm(gradient, grad.t(), x, out=gradient)
        else:
            torch.mm(grad.t(), x, out=gradient)

    def step(self, observations, state, resets, valid, **options):
        """Compute one rollout step; return outputs (n, A + 1).

        The next call overwrites them. observations (n, *obs) of any dtype; state (n, H) a layer,
        updated in place; resets and valid (n,) uint8. options: keyword arguments of PolicyStep.
        """
        chunk = self.chunk(len(observations), 1)
        observations = observations.view(len(observations), -1)
        if self.step_kernel is not None:
            return self.step_kernel(observations, state, resets, valid, chunk.flat_outputs,
                                    **options)
        assert not options, "for PolicyStep only"
        layers, linear = self.policy.num_layers, self._linear
        x, y, hgp = chunk.flat_x[0], chunk.flat_x[1], chunk.flat_hgp[0]
        if self.policy.normalizer is not None:
            self.gather(chunk, observations.unsqueeze(0), None, 0)
            observations = chunk.flat_observations
        elif observations.dtype != chunk.observations.dtype:
            observations = chunk.flat_observations.copy_(observations)
        linear("encoder", observations, x)
        for i in range(layers):
            linear(f"rnn.layers.{i}", x, hgp)
            out = y if i + 1 < layers else chunk.flat_last
            kernels.mingru_step(hgp, x, state[i], resets, valid, out)
            x, y = y, x
        linear("decoder", chunk.flat_last, chunk.flat_outputs)
        return chunk.flat_outputs

    def gather(self, chunk, observations, index, start):
        """Copy the segments index[start : start + n] of observations into the chunk.

        observations (>= steps, N, D); they are normalised if the policy has a normalizer.
        """
        norm = self.policy.normalizer
        shift, scale = (None, None) if norm is None else (norm.shift, norm.scale)
        kernels.gather(observations, index, chunk.observations, start=start, shift=shift,
                       scale=scale)

    def forward(self, chunk, resets, valid, index, start, initial):
        """Run all steps of the segments index[start : start + n] into chunk.outputs.

        They start from chunk.observations and the initial states, (N, H) a layer; resets, valid
        (>= steps, N) uint8 of all agents; outputs (steps, n, A + 1).
        """
        linear = self._linear
        linear("encoder", chunk.flat_observations, chunk.flat_x[0])
        for i, out in enumerate([*chunk.x[1:], chunk.last]):
            linear(f"rnn.layers.{i}", chunk.flat_x[i], chunk.flat_hgp[i])
            kernels.mingru_scan(chunk.hgp[i], chunk.x[i], chunk.states[i], resets, valid, out,
                                index=index, start=start, initial=initial[i])
        linear("decoder", chunk.flat_last, chunk.flat_outputs)

    def backward(self, chunk, resets, valid, index, start, *, add):
        """Write the gradients of all weights, or add them, given chunk.grad_outputs.

        Overwrites the activations.
        """
        grad_x, grad_outputs = chunk.flat_grad_x, chunk.flat_grad_outputs
        vectors = {"decoder.bias": grad_outputs}
        if self.policy.decoder.log_std is not None:
            vectors["decoder.log_std"] = chunk.flat_grad_log_std
        self._weight_gradient("decoder", grad_outputs, chunk.flat_last, add=add)
        if self._rounded:
            grad_outputs = chunk.flat_rounded_grad.copy_(grad_outputs)
        torch.mm(grad_outputs, self.weights["decoder.weight"], out=grad_x)
        for i in reversed(range(self.policy.num_layers)):
            sums, name, hgp = getattr(chunk, f"sums{i}"), f"rnn.layers.{i}", chunk.flat_hgp[i]
            vectors[f"{name}.bias"] = sums
            kernels.mingru_scan_grad(chunk.hgp[i], chunk.x[i], chunk.states[i], resets, valid,
                                     chunk.grad_x, sums, index=index, start=start)
            self._weight_gradient(name, hgp, chunk.flat_x[i], add=add)
            torch.addmm(grad_x, hgp, self.weights[f"{name}.weight"], out=grad_x)
        self._weight_gradient("encoder", grad_x, chunk.flat_observations, add=add)
        vectors["encoder.bias"] = grad_x
        kernels.add_bias_gradients(
            [(rows, self.gradients[name]) for name, rows in vectors.items()], add)


class Sample:
    """Hold the network as `verify.compare` runs it: forward, backward, then steps."""

    def __init__(self, policy, arena, steps, rows, precision=torch.float32):
        layers = self.layers = Layers(policy, arena, "sample", steps=steps, rows=rows,
                                      precision=precision)
        self.bind = layers.bind
        self.refresh = layers.refresh
        self.step = layers.step
        self.rows = rows

    def forward(self, observations, initial, resets, valid):
        """Run all steps of segments; return outputs (T, rows, A + 1).

        observations (T, rows, D); initial (rows, H) a layer.
        """
        chunk = self.layers.chunk(self.rows)
        index = torch.arange(self.rows, device=observations.device)
        self.flags = resets, valid, index, 0
        self.layers.gather(chunk, observations, index, 0)
        self.layers.forward(chunk, *self.flags, initial)
        return chunk.outputs

    def backward(self, grad_outputs, grad_log_std=None):
        """Write the gradients of all weights, after `forward`."""
        chunk = self.layers.chunk(self.rows)
        chunk.grad_outputs.copy_(grad_outputs)
        if grad_log_std is not None:
            chunk.grad_log_std.copy_(grad_log_std)
        self.layers.backward(chunk, *self.flags, add=False)


# --------------------------------------------------------------------------------------------------
# The default network on a GPU: its rollout in graphs, then the engine, Fused


@intrinsic
def _call_driver(typing, function, arguments):
    """Call int function(...) by its address, with the integers of a tuple."""

    def codegen(context, builder, signature, values):
        numbers = [builder.extract_value(values[1], i) for i in range(signature.args[1].count)]
        return builder.sext(call_address(builder, WORD, values[0], *numbers), LONG)

    return types.int64(types.int64, types.UniTuple(types.int64, arguments.count)), codegen


@driver
def _rollout_cuda(begin, end, environments, launch, synchronize, stream, graphs, terminals,
                  truncations, resets, cut, cut_step):
    """Run the rollout of agents begin to end by graphs and calls of environments.

    launch, synchronize, stream, graphs: Gpu.graph_handles of T + 1 steps and of the final values.
    terminals, truncations (T, N); resets (T + 1, N). Written for the graph of final values: cut
    (N,) uint8, the agents that are cut off, and cut_step (1,) int64, the step. Returns the driver's
    error number and the share of the time that the environments took.
    """
    horizon, in_environments, started = len(terminals), 0, cycles()
    for t in range(horizon + 1):
        error, any_cut = 0, False
        if t > 0:
            for i in range(begin, end):
                # after a terminal nothing follows
                cut[i] = truncations[t - 1, i] != 0 and terminals[t - 1, i] == 0
                any_cut |= cut[i] != 0
        if any_cut:
            cut_step[0] = t - 1
            error = _call_driver(launch, (graphs[horizon + 1], stream))
        if error == 0:
            error = _call_driver(launch, (graphs[t], stream))
        if error == 0:
            error = _call_driver(synchronize, (stream,))
        if error != 0:
            return error, 0.0
        if t < horizon:
            in_environments += step_environments(environments, t, begin, end, terminals,
                                                 truncations, resets)
    return 0, in_environments / (cycles() - started)


class Fused(GpuEngine):
    """Run the default network on a GPU by kernels, a whole minibatch at once."""

    name = "fused"
    Sample = Sample

    def __init__(self, buffers):
        super().__init__(buffers)
        self.handles = {}  # buffer -> Gpu.graph_handles of its rollout

    def register(self, arena):
        """Register everything that lives as long as the engine."""
        buffers, rows = self.buffers, self.at_once // self.buffers.horizon
        self.chunks = [(start, min(rows, buffers.segments - start))
                       for start in range(0, buffers.segments, rows)]
        self.actor_layers = [
            Layers(self.policy, arena, f"actor {actor}", steps=0, rows=buffers.max_agents,
                   precision=self.precision) for actor in range(self.vecenv.num_actors)]
        self.layers = Layers(self.policy, arena, "learner", steps=buffers.horizon,
                             rows=min(rows, buffers.segments), precision=self.precision)

    def bind(self):
        """Make the views of the allocated arena."""
        buffers, log_std = self.buffers, self.policy.decoder.log_std
        self.inspected = engines.inspect_modules(self.policy)
        self.log_std = None if log_std is None else log_std.data
        observations = buffers.storage["observations"]
        self.observation_columns = buffers.as_columns(
            observations.view(buffers.horizon + 1, buffers.num_agents, -1))
        for layers in (*self.actor_layers, self.layers):
            layers.bind()
        self.whole_rollout = self._make_rollout()

    def _make_rollout(self):
        """Return a Rollout, if environments step on this GPU and one kernel can hold it, or None."""
        step, vecenv = self.actor_layers[0].step_kernel, self.vecenv
        if not self.buffers.batched or step is None or not Rollout.is_supported(vecenv):
            return None
        try:
            return Rollout(step, self.buffers)
        except Exception as error:  # CuPy's CompileException is nothing but an Exception
            print(f"{vecenv.name}: the rollout does not compile as one kernel and runs step by "
                  f"step, which is slower: {str(error).splitlines()[0]}", file=sys.stderr)
            return None

    def backward(self):
        """Compute the gradients and the loss of the segments `buffers.index`.

        New values, new ratios and the sums of the loss are in `buffers`.
        """
        buffers, layers, index = self.buffers, self.layers, self.buffers.index
        layers.refresh()
        for start, count in self.chunks:
            chunk = layers.chunk(count)
            layers.gather(chunk, self.observation_columns, index, start)
            flags = buffers.storage["resets"], buffers.storage["valid"], index, start
            layers.forward(chunk, *flags, buffers.initial_state["mingru"])
            buffers.loss(chunk.outputs, chunk.grad_outputs, start, buffers.sums[0, : kernels.SUMS],
                         self.log_std, chunk.grad_log_std)
            layers.backward(chunk, *flags, add=start > 0)

    # -- acting

    def run_actor(self, actor):
        """Run one actor's share, without the interpreter where possible."""
        with torch.no_grad(), self.gpu.actor(actor):
            self.actor_layers[actor].refresh()
            if self.whole_rollout is not None:
                self.whole_rollout()
                return 0.0
            buffers = range(actor, self.vecenv.num_buffers, self.vecenv.num_actors)
            if self.vecenv.can_step_in_kernels and all(map(self.handles.get, buffers)):
                return sum(map(self._replay_buffer, buffers))
        return super().run_actor(actor)

    def act(self, actor, observations, state, resets, valid):
        """Run one step of the network."""
        outputs = self.actor_layers[actor].step(observations, state["mingru"], resets, valid)
        return outputs, self.log_std

    def act_on_row(self, actor, buffer, t):
        """Act, and sample the actions in the same kernel if the network fits into one."""
        layers, agents = self.actor_layers[actor], self.vecenv.ranges[buffer]
        row = self.buffers.rows[buffer][t]
        if layers.step_kernel is None:
            return super().act_on_row(actor, buffer, t)
        state = self.buffers.state["mingru"][:, agents]
        inputs = row["observations"], state, row["resets"], row["valid"]
        if t == self.buffers.horizon:
            return row["values"].copy_(layers.step(*inputs, commit=False)[:, -1])
        arguments = {**self.buffers.sample_arguments(row, agents), "log_std": self.log_std}
        return layers.step(*inputs, drawn=arguments)

    def values_of_cut(self, actor, agents, truncations, terminals, out):
        """Write V of the agents that are cut off, in one kernel if the network fits."""
        layers = self.actor_layers[actor]
        if layers.step_kernel is None:
            return super().values_of_cut(actor, agents, truncations, terminals, out)
        observations = self.buffers.storage["final_observations"][agents]
        state = self.buffers.state["mingru"][:, agents]
        flags = (flag[agents] for flag in self.buffers.final_flags)
        return layers.step(observations, state, *flags, commit=False,
                          final=(truncations, terminals, out))

    def _replay_buffer(self, buffer):
        """Run all steps of one buffer without the interpreter; return its seconds."""
        begin, buffers, agents = clock(), self.buffers, self.vecenv.ranges[buffer]
        self.gpu.wait()  # this thread may have work on the GPU
        host_arrays = [buffers.host[name] for name in ("terminals", "truncations", "resets")]
        host_arrays += buffers.host_cut, buffers.host_cut_step[buffer : buffer + 1]
        error, share = _rollout_cuda(agents.start, agents.stop, self.vecenv.addresses(buffer),
                                     *self.handles[buffer], *map(as_array, host_arrays))
        if error:
            torch.cuda.synchronize()  # its error says more
            raise RuntimeError(f"fused: the GPU's driver reports error {error}.")
        return share * (clock() - begin)

    def _capture_rollout(self):
        for buffer, actor in self.actor_of.items():  # not every environment truncates
            with self.gpu.actor(actor):
                self.write_final_values(actor, buffer)
        super()._capture_rollout()
        if self.buffers.batched:
            return
        for buffer, actor in self.actor_of.items():
            # Launched by handle: CUDAGraph.replay() also advances torch's random generator, which
            # this network does not use.
            calls = self.calls(actor, buffer)
            self.handles[buffer] = self.gpu.graph_handles(actor, calls)

    def _drop_graphs(self):
        super()._drop_graphs()
        self.handles.clear()
