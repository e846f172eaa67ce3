"""The engines of a GPU: streams, pinned memory and CUDA graphs, for any network and for the default one.

    python pufferl.py train breakout --train.device cuda

Each worker of the rollout has a stream, on which its copies, its forward passes and its graphs follow one another
(`GpuRollout`); learning has the main stream. After some epochs the steps of the rollout and the minibatch are captured
as graphs and replayed (`Capture`). `Graphs` runs any network by its own forward and torch's autograd, `Fused` the
default one by kernels; it replays a buffer's whole rollout without the interpreter. A step of it is one kernel,
`PolicyStep`, if the weights fit into a block's shared memory. Whatever is captured must read and write
memory that stays in its place (the arena), take its changing numbers from there, and never wait for the GPU. `Gpu`
holds what CUDA wants for that:

    device = Gpu(torch.device("cuda"), workers=4)
    device.pin(array)                                   # so that copies from and to it overlap with everything else
    with device.worker(0):                              # on that worker's stream, in whatever thread
        device.play("step", function, argument)         # runs function(argument), until it has been captured
        device.wait()                                   # what this stream was given is done
    device.capture(0, [("step", function, (argument,))])    # from now on `play` replays it
    device.handles(0, [("step", function, (argument,))])    # for those who replay it without the interpreter
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
from arena import (
    check_heads,
    check_numbers,
    check_dimensions,
    check_squash,
    check_array,
    clock,
    constant,
    device_array,
    driver,
    host_array,
    numpy_dtype,
    on_gpu,
    optional_masks,
    run,
    stream_between,
    threads,
)
from errors import ConfigError
from vector import LONG, SEEN, WORD, aligned_zeros, call_address, cycles, step_environments


class Gpu:
    """Streams, pinned memory and graphs of one device.

    device: a torch.device of type cuda. workers: how many streams besides the main one.
    """

    def __init__(self, device, workers):
        self.torch_device = device
        # One stream a worker: its buffers share its activations, so they must not overlap with one another.
        self.streams = [torch.cuda.Stream(device) for _ in range(workers)]
        self.main_stream = torch.cuda.Stream(device)
        self._pinned, self._graphs, self._refused = [], {}, False
        weakref.finalize(self, _unlock, device, self._pinned).atexit = False  # dropped without release()
        self._tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"  # cuDNN's is so unless somebody changes it
        torch.backends.cuda.matmul.allow_tf32 = True

    def pin(self, array):
        """Lock a numpy array's pages in memory until `release`; they must be its own. A system that refuses, as some
        containers and limits of locked memory do, is named once, and the run goes on with slower copies."""
        if not array.nbytes or self._refused:
            return
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0))
            self._pinned.append(array)
        except RuntimeError as error:
            self._refused = True
            print(f"train.device = cuda: the system locks no memory for copies ({str(error).splitlines()[0]}), so they "
                  "wait for each other, which is slower. ulimit -l unlimited, or docker run --ulimit memlock=-1, may "
                  "allow it.", file=sys.stderr)

    def main(self):
        """Within it, work goes to the main stream, after what the caller's stream was given and before what follows."""
        return stream_between(self.main_stream, torch.cuda.current_stream(self.torch_device))

    @contextlib.contextmanager
    def worker(self, number):
        """Within it, this thread's work goes to that worker's stream, after what the main stream was given and before
        what follows there."""
        with (torch.cuda.device(self.torch_device), stream_between(self.streams[number], self.main_stream),
              torch.cuda.nvtx.range(f"worker {number}")):
            yield

    @staticmethod
    def wait():
        """Until all that the current stream was given is done; other Python threads run meanwhile."""
        torch.cuda.current_stream().synchronize()

    def play(self, key, function, *arguments):
        """Replay what was captured under `key`; call the function where nothing was."""
        graph = self._graphs.get(key)
        with torch.cuda.nvtx.range(str(key)):
            graph.replay() if graph else function(*arguments)

    def handles(self, worker, calls):
        """What replays captured graphs without the interpreter: the addresses of `int launch(graph, stream)` and
        `int synchronize(stream)`, which return 0 or an error's number, the worker's stream, and the graphs, int64
        (calls,). None where one of them was not captured, or where torch is too old to hand it out."""
        graphs = [self._graphs.get(key) for key, *_ in calls]
        if not all(hasattr(graph, "raw_cuda_graph_exec") for graph in graphs):
            return None
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        launch, synchronize = (ctypes.cast(function, ctypes.c_void_p).value
                               for function in (driver.cuGraphLaunch, driver.cuStreamSynchronize))
        handles = np.array([graph.raw_cuda_graph_exec() for graph in graphs], np.int64)
        return launch, synchronize, self.streams[worker].cuda_stream, handles

    def capture(self, worker, calls):
        """Record [(key, function, arguments), ...] on a worker's stream, or on the main one for None, without running
        them. They must have run before, so that every kernel is compiled. Raises RuntimeError for what a graph cannot
        hold, as a wait for the GPU."""
        from numba import cuda  # gives no memory back meanwhile, which would wait for the GPU

        torch.cuda.synchronize(self.torch_device)
        stream, pool = self.main_stream if worker is None else self.streams[worker], torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream), cuda.defer_cleanup():
            for key, function, arguments in calls:
                graph = torch.cuda.CUDAGraph()
                # The graphs of one stream never run side by side, and hand on nothing but in the arena: one pool does.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    function(*arguments)
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # says again that the capture has failed
                        graph.capture_end()
                    with contextlib.suppress(RuntimeError):  # torch before 2.12 does not, after that (pytorch#180395)
                        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
                    raise
                graph.capture_end()
                self._graphs[key] = graph
        torch.cuda.synchronize(self.torch_device)

    def forget(self):
        """Drop all graphs, once they are done: everything runs as it is written again."""
        torch.cuda.synchronize(self.torch_device)
        self._graphs.clear()

    def usage(self):
        """{"GPU": "87%", "GPU memory": "1,234 of 143,771 MiB"} for a dashboard, the first where nvidia-ml-py knows."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        shown = {"GPU memory": f"{(total - free) / 2**20:,.0f} of {total / 2**20:,.0f} MiB"}
        with contextlib.suppress(Exception):  # no package, no library, or a GPU that does not tell (MIG)
            shown = {"GPU": f"{torch.cuda.utilization(self.torch_device)}%", **shown}
        return shown

    def release(self):
        """Unlock the pinned arrays, drop the graphs, and give torch its precision of products back."""
        _unlock(self.torch_device, self._pinned)
        self.forget()
        torch.backends.cuda.matmul.allow_tf32 = self._tf32


def _unlock(device, arrays):
    """Unlock pinned arrays when all work is done, which must come before their memory is given back."""
    if arrays:
        torch.cuda.synchronize(device)
    while arrays:
        torch.cuda.cudart().cudaHostUnregister(arrays.pop().ctypes.data)


def find_gpu(workers):
    """This process's current GPU. Raises ConfigError if torch or numba cannot use one."""
    if not torch.cuda.is_available():
        made = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        raise ConfigError("train.device = cuda: torch finds no GPU here (nvidia-smi shows what the system has; torch "
                          f"{torch.__version__} is made for {made}). Take cpu.")
    from numba import cuda

    if cuda.implementation != "NVIDIA":
        raise ConfigError("train.device = cuda needs numba-cuda, but numba.cuda is numba's own here: pip install -r "
                          "requirements/cuda.txt (on PYTHONPATH instead of in site-packages it does not take its "
                          "place, until a sitecustomize.py there imports _numba_cuda_redirector).")
    try:
        from numba.cuda.np import arrayobj  # noqa: F401, which every kernel needs
    except (AttributeError, ImportError) as error:
        raise ConfigError(f"train.device = cuda: this numba-cuda does not run with numpy {np.__version__} ({error}): "
                          "pip install 'numpy<2.5', or a newer numba-cuda.") from None
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError("train.device = cuda needs CuPy, which compiles kernels.cu: pip install -r "
                          "requirements/cuda.txt, or pip install cupy-cuda13x (cupy-cuda12x for CUDA 12).")
    return Gpu(torch.device("cuda", data_parallel.connect().choose_gpu()), workers)


# ---------------------------------------------------------------------------------------------------------------------
# Any network


@driver
def _return_range(begin, end, rewards, valid, resets, running, low, high):
    for n in range(begin, end):
        low[n], high[n] = kernels.return_range(rewards[:, n : n + 1], valid[:, n : n + 1], resets[:, n : n + 1],
                                               running[n : n + 1], low[n], high[n])


class GpuBuffers(engines.Buffers):
    """The buffers of a run on a GPU. The environments write pinned arrays (`host`), of which the policy has copies
    there (`storage`). Those that live on this GPU themselves (vector.Tensors) write the policy's arrays, and the host
    gets copies for its statistics. If a graph can step them too (`batched`: vector.OnGpu), the host gets sums alone.
    """

    def __init__(self, policy, vecenv, config, segments, first_agent):
        super().__init__(policy, vecenv, config, segments, first_agent)
        self.device = find_gpu(vecenv.num_workers)
        self.torch_device = self.device.torch_device
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
        arena.register("returns", (2,))
        arena.register("cut_step", (self.vecenv.num_buffers,), torch.int64)

    def bind(self):
        if self.batched:
            self.host = self._make_storage()
        super().bind()
        cut = aligned_zeros((self.num_agents,), np.uint8)
        cut_step = aligned_zeros((self.vecenv.num_buffers,), np.int64)
        used = () if self.batched else READ_BY_HOST if self.envs_on_gpu else self.host
        arrays = [self.host[name].numpy() for name in used if self.host[name] is not None]
        for array in (*arrays, cut, cut_step):
            self.device.pin(array)
        self.host_cut, self.host_cut_step = torch.from_numpy(cut), torch.from_numpy(cut_step)
        if self.envs_on_gpu:
            self.vecenv.write_to(self.storage)

    def _make_storage(self):
        storage = {name: None if tensor is None else self.arena[f"storage/{name}"]
                   for name, tensor in self.host.items()}
        storage["valid"].copy_(self.host["valid"])  # all valid, if agents are never inactive: then it stays
        return storage

    def _make_row(self, agents, t):
        row = super()._make_row(agents, t)
        row["copied"] = [(row[name], self.host[name][t, agents]) for name in SEEN
                         if row[name] is not None and (name != "valid" or self.vecenv.has_valid)]
        row["copied_back"] = [(self.host["actions"][t, agents], row["actions"])] if t < self.horizon else []
        if self.envs_on_gpu:
            row["copied"] = row["copied_back"] = []
        return row

    def begin_rollout(self, number):
        super().begin_rollout(number)
        self.device.wait()  # the environments write over what is copied from the host

    def copy_rewards(self):
        """Copy what the environments wrote in a rollout to where it is read: to the GPU, or from there."""
        if self.envs_on_gpu:
            for name in READ_BY_HOST[2:]:  # for statistics; a step brings terminals and truncations
                self.host[name].copy_(self.storage[name], non_blocking=True)
            self.device.wait()
            return
        for name in ("rewards", "terminals", "truncations"):
            self.storage[name].copy_(self.host[name], non_blocking=True)

    def on_host(self, name, part=...):
        return self.storage[name][part].cpu() if self.envs_on_gpu else self.host[name][part]

    def return_range(self, low, high):
        if not self.batched:
            return super().return_range(low, high)
        with self.device.main():
            self.device.play(self.find_returns, self.find_returns)
            lowest, highest = self.arena["returns"].tolist()
        return min(low, lowest), max(high, highest)

    def find_returns(self):
        """Write the smallest and the largest return of the last rollout to where the host reads them."""
        running = self.running_returns
        lows, highs = torch.full_like(running, math.inf), torch.full_like(running, -math.inf)
        tensors = (*(self.storage[name] for name in ("rewards", "valid", "resets")), running, lows, highs)
        run(_return_range, len(running), 1, *map(device_array if running.is_cuda else host_array, tensors))
        self.arena["returns"].copy_(torch.stack((lows.min(), highs.max())))

    def usage(self):
        return self.device.usage()

    def release(self):
        self.device.release()


class GpuRollout:
    """A rollout on a GPU: each worker has a stream, and the steps of its buffers are captured as graphs.

    act(worker, observations, state, resets, valid): a step of the network, as engines.StepByStep takes it.
    act_on_row(worker, buffer, t), values_of_cut(worker, agents, truncations, terminals, out): what an engine does in
    place of `StepByStep.act_on_row` and `values_of_cut`.
    """

    def __init__(self, vecenv, buffers, act, act_on_row=None, values_of_cut=None):
        self.vecenv, self.buffers, self.device, self.act = vecenv, buffers, buffers.device, act
        self.steps = engines.StepByStep(vecenv, buffers, act, self._play_step, self._bootstrap)
        self.act_on_row = act_on_row or self.steps.act_on_row
        self._values_of_cut = values_of_cut or self.values_of_cut
        self.worker_of = {}  # buffer -> the worker that serves it

    @torch.no_grad()
    def rollout(self, worker):
        """Run one worker's share of the rollout; return its seconds in environments, waits included."""
        with self.device.worker(worker):
            if not self.buffers.batched:
                return self.steps.rollout(worker)
            self.worker_of[0] = worker
            for first in range(0, self.buffers.horizon + 1, PIECE):
                self.device.play(("rollout", 0, first), self._run_piece, worker, first)
            self.vecenv.finish(0)
            self.device.wait()
        return 0.0  # what the environments took of it, only a profile shows

    def _run_piece(self, worker, first):
        """Run PIECE steps of the policy and of the environments on this GPU. Which agents are cut off is not known
        here, so the final values of environments that may do so are worked out after each step."""
        buffers = self.buffers
        for t in range(first, min(first + PIECE, buffers.horizon + 1)):
            if t > 0 and self.vecenv.truncates:
                ends = (buffers.storage[name][t - 1] for name in ENDS)
                self._values_of_cut(worker, slice(None), *ends, buffers.bootstraps[t - 1])
            self._run_step(worker, 0, t)
            if t < buffers.horizon:
                self.vecenv.launch(t)

    def _play_step(self, worker, buffer, t):
        self.worker_of[buffer] = worker
        self.device.play(("step", buffer, t), self._run_step, worker, buffer, t)
        if not self.buffers.envs_on_gpu:
            self.device.wait()  # for the actions

    def _run_step(self, worker, buffer, t):
        row = self.buffers.rows[buffer][t]
        for tensor, source in row["copied"]:
            tensor.copy_(source, non_blocking=True)
        self.act_on_row(worker, buffer, t)
        for tensor, source in row["copied_back"]:
            tensor.copy_(source, non_blocking=True)

    def _bootstrap(self, worker, buffer, t):
        agents, row = self.vecenv.ranges[buffer], self.buffers.rows[buffer][t]
        cut = row["truncations"] & ~row["terminals"]  # terminal as well: nothing follows
        self.buffers.host_cut[agents], self.buffers.host_cut_step[buffer] = torch.as_tensor(cut), t
        self.device.play(("final", buffer), self.write_final_values, worker, buffer)

    def write_final_values(self, worker, buffer):
        """Write V of all of a buffer's final observations into the bootstraps of the step that the host sets, 0 if it
        sets no cut: on a GPU, shapes are fixed."""
        buffers, agents, one = self.buffers, self.vecenv.ranges[buffer], slice(buffer, buffer + 1)
        arena = buffers.arena
        final, cut = buffers.storage["final_observations"][agents], arena["cut"][agents]
        step = arena["cut_step"][one]
        if not buffers.envs_on_gpu:
            final.copy_(buffers.host["final_observations"][agents], non_blocking=True)
        cut.copy_(buffers.host_cut[agents], non_blocking=True)
        step.copy_(buffers.host_cut_step[one], non_blocking=True)
        values = arena["cut_values"][agents]
        self._values_of_cut(worker, agents, cut, buffers.final_flags[0][agents], values)
        buffers.bootstraps[:, agents].index_copy_(0, step, values.unsqueeze(0))

    def values_of_cut(self, worker, agents, truncations, terminals, out):
        """Write V of the final observations of the agents in a slice, from the state before the reset, to `out` (n,); 0
        for those that are not cut off."""
        buffers = self.buffers
        state = {name: tensor[:, agents] for name, tensor in buffers.state.items()}
        resets, valid = (flags[agents] for flags in buffers.final_flags)
        outputs, _ = self.act(worker, buffers.storage["final_observations"][agents],
                              buffers.copy_state(worker, state), resets, valid)
        out.copy_(outputs[:, -1]).masked_fill_(truncations <= terminals, 0.0)  # a NaN may be among them

    def calls(self, worker, buffer):
        """Return [(key, function, arguments)] of a buffer's rollout: its steps, and its final values."""
        if self.buffers.batched:
            return [(("rollout", buffer, first), self._run_piece, (worker, first))
                    for first in range(0, self.buffers.horizon + 1, PIECE)]
        steps = [(("step", buffer, t), self._run_step, (worker, buffer, t))
                 for t in range(self.buffers.horizon + 1)]
        return [*steps, (("final", buffer), self.write_final_values, (worker, buffer))]

    def capture(self):
        """Record the rollouts of all buffers."""
        for buffer, worker in self.worker_of.items():
            self.device.capture(worker, self.calls(worker, buffer))


class Capture:
    """When an engine's rollouts and minibatches become graphs: after train.cudagraphs epochs of learning.

    rollout: a function that records the rollouts. check(functions): called after these are recorded; raises what
    forbids graphs. forget: called when they are dropped.
    """

    def __init__(self, buffers, rollout, check=None, forget=lambda: None):
        self.buffers, self.device = buffers, buffers.device
        self._record_rollout, self._check, self._forget = rollout, check, forget
        self.functions = []  # of an epoch's learning, in their order
        self._played, self._ran = set(), set()  # of them, in this epoch and ever
        self._epochs, self._is_done = 0, False

    def add(self, function):
        """Return what calls the function, and replays it once it has been recorded."""
        self.functions.append(function)

        def play():
            self._played.add(function)
            self.device.play(function, function)

        return play

    @contextlib.contextmanager
    def learning(self):
        """Within it, work goes to the main stream, and an epoch is counted if it has learnt."""
        self._played.clear()
        # torch's threads do nothing on a GPU, and torch.compile compiles again for another number of them
        num_threads = self.buffers.vecenv.num_threads
        with threads(num_threads), engines.torch_threads(1), self.device.main():
            yield
        self._ran |= self._played
        self._epochs += len(self._played) > 1  # more than the advantages

    def record_if_due(self):
        """Record what an epoch does as graphs, which from now on are replayed; nothing runs or changes. If that cannot
        be, the run goes on without, and says why."""
        if self._is_done or self._epochs != self.buffers.config["cudagraphs"]:
            return
        self._is_done = True
        functions = [function for function in self.functions if function in self._ran]
        returns = [self.buffers.find_returns] if self.buffers.batched and self._ran else []
        try:
            with torch.no_grad():
                self._record_rollout()
            self.device.capture(None, [(function, function, ()) for function in (*returns, *functions)])
            if self._check is not None and functions:
                self._check(functions)
        except Exception as error:  # numba's CudaAPIError is no RuntimeError
            self.drop()
            if data_parallel.connect().rank == 0:
                print(f"train.cudagraphs: the network cannot be captured and runs without, which is slower: "
                      f"{(str(error) or type(error).__name__).splitlines()[0]}", file=sys.stderr)
        except BaseException:  # an interrupt: half of the graphs are none
            self.drop()
            raise

    def drop(self):
        self.device.forget()
        self._forget()

    def restart(self):
        """Drop the graphs, because memory that they read is another; they are captured again."""
        self.drop()
        self._epochs, self._is_done = 0, False


class Graphs:
    """The engine of any nn.Module on a GPU: train.engine autograd there."""

    name = "graphs"
    whole_minibatches = False  # each part is a graph of its own, so that gradients can be compared
    num_learners = 1
    blocking_classes = ()
    Buffers = GpuBuffers

    def __init__(self, policy, vecenv, config, buffers):
        self.policy, self.vecenv, self.config, self.buffers = policy, vecenv, config, buffers
        self.device, self.precision = buffers.device, getattr(torch, config["precision"])
        self.network = engines.TorchPolicy(policy, vecenv, config, buffers, self.precision)
        self.at_once = buffers.steps_at_once()  # a GPU is faster with all of a minibatch
        self.workers = engines.Workers(vecenv.num_workers, vecenv.threads_per_worker)
        self.actor = GpuRollout(vecenv, buffers, self.network.act)
        self.captures = Capture(buffers, self.actor.capture, self._check_capture)

    def register(self, arena):
        """Ask the arena for nothing: torch allocates what the network needs."""

    def bind(self, arena):
        """Take the views out of the allocated arena."""
        self.arena, self.gradients = arena, arena.flat("gradients")

    def rollout(self, number):
        """Fill the buffers with `horizon` steps of all agents; return the seconds spent in environments."""
        return rollout_on_gpu(self, number, self.actor.rollout)

    def learning(self):
        """Within it, work goes to the main stream."""
        return self.captures.learning()

    def backward(self, index):
        """Compute the gradients, new values and ratios, and loss sums of the minibatch's segments `index` (M,)."""
        self.gradients.zero_()
        step = self.at_once // self.buffers.span
        for start in range(0, len(index), step):
            self.network.add_gradients(index[start : start + step], start, self.buffers.sums[0])
        self.network.compare_with_rollout()
        self._has_learned = True

    def capture(self, function):
        """Return what calls the function, and replays it as a CUDA graph after train.cudagraphs epochs."""
        return self.captures.add(function)

    def refresh(self):
        """Drop the graphs, which are captured again."""
        self.captures.restart()

    def _check_capture(self, functions):
        """RuntimeError unless the graphs of a custom network's update leave what its code leaves."""
        before, needed, self._has_learned = self.arena.memory.clone(), [], False
        while not self._has_learned:
            needed.append(functions[len(needed)])
            needed[-1]()
        eager = self._take_gradients(before)
        for function in needed:
            self.device.play(function, function)
        error = (self._take_gradients(before) - eager).norm() / (eager.norm() + 1e-8)
        if not error < 1e-2:
            raise RuntimeError(f"its gradients from a graph differ by {float(error):.2g} from those without (has it "
                               "random numbers, or some outside of tensors?)")

    def _take_gradients(self, before):
        """Return a copy of the gradients, and put the arena's memory back."""
        gradients = self.gradients.clone()
        self.arena.memory.copy_(before)
        return gradients

    def release(self):
        """Stop the threads, and drop the graphs."""
        self.workers.release()
        self.captures.drop()


def rollout_on_gpu(engine, number, rollout):
    """Run an engine's rollout on its workers; return the seconds spent in environments."""
    vecenv, buffers = engine.vecenv, engine.buffers
    with buffers.device.main(), engines.torch_threads(1):
        engine.captures.record_if_due()
        buffers.begin_rollout(number)
        with engines.torch_threads(vecenv.threads_per_worker):
            seconds = engine.workers.run(rollout, range(vecenv.num_workers))
        if not buffers.batched:
            buffers.copy_rewards()
    return engines.mean_of_workers(seconds)


# ---------------------------------------------------------------------------------------------------------------------
# The default network without autograd: matrix products and fused kernels in preallocated buffers


class TorchProducts:
    """The matrix products of `Layers`, by torch. In bfloat16 it rounds the weights of encoder and layers, and the
    decoder's for its input's gradient; weights' gradients are rounded before they are added in float32."""

    def __init__(self, policy, arena, name, *, rows, learns, precision):
        self.arena, self.name, self.precision = arena, name, precision
        half = precision != torch.float32
        self.rounded = [key for key, _ in policy.named_parameters()
                        if half and key not in ("decoder.bias", "decoder.log_std")]
        for key in self.rounded:
            shape = policy.get_parameter(key).shape
            arena.register(f"{name}/weights/{key}", shape, precision)
            arena.register(f"{name}/products/{key}", shape, precision)
        if learns:
            arena.register(f"{name}/rounded grad", (rows if half else 0, policy.decoder.out_features), precision)

    def bind(self, masters, gradients):
        """The weights by name and the gradients that are added to, once the arena is allocated."""
        self.masters, self.gradients = masters, gradients
        self.weights = masters | {key: self.arena[f"{self.name}/weights/{key}"] for key in self.rounded}
        self.products = {key: self.arena[f"{self.name}/products/{key}"] for key in self.rounded}

    def refresh(self):
        """Round the weights; due after every change of them."""
        for key in self.rounded:
            self.weights[key].copy_(self.masters[key])

    def linear(self, name, x, out):
        """out = x · W^T + b, all (rows, width); the decoder's in float32."""
        weights = self.masters if x.dtype == torch.float32 else self.weights
        torch.addmm(weights[f"{name}.bias"], x, weights[f"{name}.weight"].t(), out=out)

    def input_gradient(self, name, grad, out, *, add):
        """out (+)= grad · W."""
        if grad.dtype != out.dtype:
            grad = self.arena[f"{self.name}/rounded grad"][: len(grad)].copy_(grad)
        weight = self.weights[f"{name}.weight"]
        torch.addmm(out, grad, weight, out=out) if add else torch.mm(grad, weight, out=out)

    def weight_gradient(self, name, grad, x, *, add):
        """The weight's gradient (+)= grad^T · x."""
        gradient, rounded = self.gradients[f"{name}.weight"], self.products.get(f"{name}.weight")
        if grad.dtype != gradient.dtype:
            torch.mm(grad.t(), x, out=rounded)
            gradient.add_(rounded) if add else gradient.copy_(rounded)
        elif add:
            torch.addmm(gradient, grad.t(), x, out=gradient)
        else:
            torch.mm(grad.t(), x, out=gradient)

    def bias_gradients(self, rows, *, add):
        """Vectors' gradients (+)= the sums over rows (n, columns). rows: {the vector's name: rows}."""
        kernels.add_bias_gradients([(values, self.gradients[name]) for name, values in rows.items()], add)


# What observations may be, as policy_step of kernels.cu numbers them.
DTYPES = {"float32": 0, "uint8": 1, "bool": 1, "int8": 2, "int16": 3, "uint16": 4, "int32": 5, "uint32": 6, "int64": 7,
          "float64": 8}
TILES = 8, 16, 32  # agents that a block takes at once
PIECE = 8  # steps of a rollout in one graph: to launch one of 64 takes half a millisecond, in which the GPU waits
ENDS = "truncations", "terminals"
# What the host gets of a rollout of environments that live on the GPU: of each step the first two, at the end the rest.
READ_BY_HOST = "terminals", "truncations", "rewards", "resets", "valid"


class PolicyStep:
    """A step of the rollout as one kernel: encoder, layers, decoder and the draw of actions, with all weights in the
    shared memory of each block. A network that does not fit there takes its products from cuBLAS (`Layers.step`).

        step = PolicyStep(policy, products)                          # once the weights have their place
        step(observations, state, resets, valid, outputs, drawn=...)   # commit=False: the state stays

    products: the TorchProducts that hold the weights, whose `refresh` is due before a step, after they changed.
    """

    def __init__(self, policy, products):
        self.policy, self.precision = policy, products.precision
        layers = ["encoder", *(f"rnn.layers.{i}" for i in range(policy.num_layers))]
        weights = [products.weights[f"{layer}.{part}"] for layer in layers for part in ("weight", "bias")]
        weights += [products.masters[f"decoder.{part}"] for part in ("weight", "bias")]
        self.addresses = torch.tensor([weight.data_ptr() for weight in weights]).to(weights[0].device)

    @staticmethod
    def size(policy, precision, rows=TILES[-1]):
        """Bytes of shared memory that a block needs for tiles of so many agents, as policy_step lays them out."""
        inputs, width = policy.encoder.in_features, policy.decoder.out_features
        H, L, pitch = policy.hidden_size, policy.num_layers, rows + 4
        inputs_row, hidden_row = ((n + 3) // 8 * 8 + 4 for n in (inputs, H))  # of weights
        fours = [-(-n // 4) * 4 for n in (max(inputs, H), H, rows * width + (3 * L + 1) * H + width)]
        floats = (fours[0] + fours[1]) * pitch + width * hidden_row + fours[2]
        return 4 * floats + precision.itemsize * (H * inputs_row + 3 * L * H * hidden_row)

    @classmethod
    def fits(cls, policy, precision, device):
        """Whether a block of this GPU may have as much shared memory as the network needs, whose normalizer, if it has
        one, has a shift in float32."""
        if policy.normalizer is not None and policy.normalizer.shift.dtype != torch.float32:
            return False
        properties = torch.cuda.get_device_properties(device)
        return cls.size(policy, precision) <= getattr(properties, "shared_memory_per_block_optin", 48 << 10)

    def __call__(self, observations, state, resets, valid, outputs, *, commit=True, final=None, drawn=None):
        """Write and return outputs (n, A + 1): logits or means, then the value. observations (n, ...) of a type in
        DTYPES; state (layers, n, H), each layer contiguous, is updated in place if `commit`; resets, valid (n,) uint8.
        final: (truncations, terminals, values), (n,) uint8 and float32: V of the agents that are cut off is written to
        `values`, and 0 for the others, whose outputs are these or what was there. drawn: the arguments of
        `kernels.sample` behind its first one; nothing is drawn without. Raises ValueError or TypeError for a wrong
        shape or dtype."""
        name, like, norm = "policy_step", outputs, self.policy.normalizer
        n, width = check_dimensions(name, "outputs", outputs, 2)
        inputs, H, L = self.policy.encoder.in_features, self.policy.hidden_size, self.policy.num_layers
        kind = DTYPES.get(str(observations.dtype).removeprefix("torch."))
        if kind is None:
            raise TypeError(f"fused.PolicyStep: observations are {observations.dtype}, expected {', '.join(DTYPES)}.")
        seen = check_array(name, "observations", observations.view(n, -1), (n, inputs), numpy_dtype(observations))
        moments = [constant(("no normalisation",), like, lambda: torch.zeros(0))] * 2
        if norm is not None:
            moments = [check_array(name, what, getattr(norm, what), (inputs,)) for what in ("shift", "scale")]
        first, *_ = [check_array(name, "state", state[i], (n, H)) for i in range(L)]
        flags = check_array(name, "resets", resets, (n,), np.uint8), check_array(name, "valid", valid, (n,), np.uint8)
        weights = check_array(name, "weights", self.addresses, (2 * L + 4,), np.int64)
        outputs = check_array(name, "outputs", outputs, (n, width))
        ends, values = flags, outputs  # not read
        if final is not None:
            assert drawn is None, "both write values"
            *ends, values = final
            ends = [check_array(name, what, end, (n,), np.uint8) for what, end in zip(ENDS, ends, strict=True)]
            values = check_array(name, "values", values, (n,))
        if drawn is None:  # arrays that are not read
            drawing = 0, 0, weights, 0, weights, False, flags[0], outputs, 0, *(outputs for _ in range(4)), values
        else:
            drawing = self._drawing(n, width - 1, like, **drawn)
        properties = torch.cuda.get_device_properties(like.device)
        processors = properties.multi_processor_count
        rows = next((rows for rows in TILES if -(-n // rows) <= processors), TILES[-1])
        shared = self.size(self.policy, self.precision, rows)
        at_once = max(1, properties.shared_memory_per_multiprocessor // (shared + 1024))  # blocks a multiprocessor
        kernels.CUDA.launch(
            name, min(-(-n // rows), processors * at_once), kernels.CREW, n, inputs, H, L, width, rows,
            self.precision != torch.float32, weights, kind, seen, norm is not None, *moments, state.stride(0), commit,
            first, *flags, final is not None, *ends, outputs, drawn is not None, *drawing, shared=shared)
        return like

    @staticmethod
    def _drawing(n, choices, like, actions, logprobs, values, *, seed, step, first_agent=0, heads=None, log_std=None,
                 masks=None, squash=None, samples=None):
        """The kernel's arguments from the seed on, checked as in `kernels.sample`."""
        name = "policy_step"
        nothing = constant(("nothing",), like, lambda: torch.zeros(1))
        if heads is not None:
            heads = check_heads(name, heads, check_dimensions(name, "actions", actions, 2)[1], choices, like)
            masks = None if masks is None else check_array(name, "masks", masks, (n, choices), np.uint8)
            actions = check_array(name, "actions", actions, (n, len(heads)), np.int32)
            how = len(heads), heads, *optional_masks(masks, like, 2), nothing, 0, nothing, actions, nothing
        else:
            heads = constant(("no heads",), like, lambda: torch.zeros(1, dtype=torch.int64))
            log_std = check_array(name, "log_std", log_std, (choices,))
            bounds = check_squash(name, squash, choices, like)
            actions = check_array(name, "actions", actions, (n, choices))
            samples = actions if squash is None else check_array(name, "samples", samples, (n, choices))
            how = 0, heads, *optional_masks(None, like, 2), log_std, bounds.shape[1], bounds, actions, samples
        return (seed, first_agent, check_numbers(name, "step", step, 1, np.int64, like), *how,
                check_array(name, "logprobs", logprobs, (n,)), check_array(name, "values", values, (n,)))


class Layers:
    """The default network without autograd for up to `rows` agents, `steps` at a time, in buffers that live in the
    arena; each worker has its own.

        layers = Layers(policy, arena, "worker 0", steps=64, rows=16)     # before arena.allocate
        layers.bind()                                                    # after
        chunk = layers.chunk(n)                                          # the buffers, cut to n <= rows segments
        layers.gather(chunk, observations, index, start)
        layers.forward(chunk, resets, valid, index, start, initial)      # -> chunk.outputs
        layers.backward(chunk, resets, valid, index, start, add=False)   # from chunk.grad_outputs, into the gradients

    With steps=0 it holds what `step`, the rollout's form, needs.

    precision: torch.bfloat16 for the products of encoder and layers and what flows between them, forward and backward;
    weights, states, the decoder's product and the sums of gradients stay float32. `refresh` is due after every change
    of the weights: the products have them in a form of their own.
    """

    def __init__(self, policy, arena, name, *, steps, rows, precision=torch.float32):
        self.policy, self.arena, self.name, self.steps = policy, arena, name, steps
        inputs, width = policy.encoder.in_features, policy.decoder.out_features
        H, L, T = policy.hidden_size, policy.num_layers, max(steps, 1)
        # name -> the shape of its buffer for n segments
        rounded = {"observations": lambda n: (T, n, inputs)}
        rounded |= {f"hgp{i}": lambda n: (T, n, 3 * H) for i in range(L if steps else 1)}
        rounded |= {f"x{i}": lambda n: (T, n, H) for i in range(L if steps else 2)}
        exact = {"last": lambda n: (T, n, H), "outputs": lambda n: (T, n, width)}
        if steps:
            rounded |= {"grad_x": lambda n: (T, n, H)}
            exact |= {f"states{i}": lambda n: (T + 1, n, H) for i in range(L)}
            exact |= {f"sums{i}": lambda n: (n, 3 * H) for i in range(L)}
            exact |= {"grad_outputs": lambda n: (T, n, width), "grad_log_std": lambda n: (T, n, width - 1)}
        for shapes, dtype in ((rounded, precision), (exact, torch.float32)):
            for key, shape in shapes.items():
                arena.register(f"{name}/{key}", shape(rows), dtype)
        self._shapes, self._chunks = rounded | exact, {}
        self.products = TorchProducts(policy, arena, name, rows=T * rows, learns=steps > 0, precision=precision)

    def bind(self):
        """Take the views out of the allocated arena."""
        weights = {key: parameter.data for key, parameter in self.policy.named_parameters()}
        self.products.bind(weights, {key: self.arena[f"gradients/policy.{key}"] for key in weights})
        self.refresh = self.products.refresh
        self.refresh()
        small = not self.steps and on_gpu(self.arena.memory) and PolicyStep.fits(
            self.policy, self.products.precision, self.arena.memory.device)
        self.in_one = PolicyStep(self.policy, self.products) if small else None

    def chunk(self, n):
        """The buffers for n segments, each the contiguous beginning of the whole one; made once for each n."""
        if n not in self._chunks:
            views = {key: self.arena[f"{self.name}/{key}"].view(-1)[: math.prod(shape(n))].view(shape(n))
                     for key, shape in self._shapes.items()}
            # The same memory as (steps · n, width) matrices, for the products.
            flat = {f"flat_{key}": view.flatten(0, 1) for key, view in views.items() if view.dim() == 3}
            for stack in ("hgp", "x", "states"):
                names = [f"{stack}{i}" for i in range(self.policy.num_layers + 1) if f"{stack}{i}" in views]
                views[stack] = [views[name] for name in names]
                flat[f"flat_{stack}"] = [flat[f"flat_{name}"] for name in names]
            self._chunks[n] = SimpleNamespace(**views, **flat)
        return self._chunks[n]

    def step(self, observations, state, resets, valid, **options):
        """One rollout step. observations (n, *obs) of any dtype, state (n, H) a layer, updated in place, resets and
        valid (n,) uint8 -> outputs (n, A + 1), overwritten by the next call. options: PolicyStep's, if it is one."""
        chunk, observations = self.chunk(len(observations)), observations.view(len(observations), -1)
        if self.in_one is not None:
            return self.in_one(observations, state, resets, valid, chunk.flat_outputs, **options)
        assert not options, "for PolicyStep alone"
        layers, linear = self.policy.num_layers, self.products.linear
        x, y, hgp = chunk.flat_x[0], chunk.flat_x[1], chunk.flat_hgp[0]
        if self.policy.normalizer is not None:
            self.gather(chunk, observations.unsqueeze(0), None, 0)
            observations = chunk.flat_observations
        elif observations.dtype != chunk.observations.dtype:
            observations = chunk.flat_observations.copy_(observations)
        linear("encoder", observations, x)
        for i in range(layers):
            linear(f"rnn.layers.{i}", x, hgp)
            kernels.mingru_step(hgp, x, state[i], resets, valid, y if i + 1 < layers else chunk.flat_last)
            x, y = y, x
        linear("decoder", chunk.flat_last, chunk.flat_outputs)
        return chunk.flat_outputs

    def gather(self, chunk, observations, index, start):
        """Put the segments index[start : start + n] of observations (>= steps, N, D) into the chunk, normalised if the
        policy has it so."""
        norm = self.policy.normalizer
        shift, scale = (None, None) if norm is None else (norm.shift, norm.scale)
        kernels.gather(observations, index, chunk.observations, start=start, shift=shift, scale=scale)

    def forward(self, chunk, resets, valid, index, start, initial):
        """All steps of the segments index[start : start + n], from chunk.observations and the initial states, (N, H) a
        layer, into chunk.outputs (steps, n, A + 1); resets, valid (>= steps, N) uint8 of all agents."""
        linear = self.products.linear
        linear("encoder", chunk.flat_observations, chunk.flat_x[0])
        for i, out in enumerate([*chunk.x[1:], chunk.last]):
            linear(f"rnn.layers.{i}", chunk.flat_x[i], chunk.flat_hgp[i])
            kernels.mingru_scan(chunk.hgp[i], chunk.x[i], chunk.states[i], resets, valid, out, index=index, start=start,
                                initial=initial[i])
        linear("decoder", chunk.flat_last, chunk.flat_outputs)

    def backward(self, chunk, resets, valid, index, start, *, add):
        """The gradients of all weights, written or, with `add`, added to, given chunk.grad_outputs; consumes the
        activations."""
        products, grad_x = self.products, chunk.flat_grad_x
        vectors = {"decoder.bias": chunk.flat_grad_outputs}
        if self.policy.decoder.log_std is not None:
            vectors["decoder.log_std"] = chunk.flat_grad_log_std
        products.weight_gradient("decoder", chunk.flat_grad_outputs, chunk.flat_last, add=add)
        products.input_gradient("decoder", chunk.flat_grad_outputs, grad_x, add=False)
        for i in reversed(range(self.policy.num_layers)):
            vectors[f"rnn.layers.{i}.bias"] = sums = getattr(chunk, f"sums{i}")
            kernels.mingru_scan_grad(chunk.hgp[i], chunk.x[i], chunk.states[i], resets, valid, chunk.grad_x, sums,
                                     index=index, start=start)
            products.weight_gradient(f"rnn.layers.{i}", chunk.flat_hgp[i], chunk.flat_x[i], add=add)
            products.input_gradient(f"rnn.layers.{i}", chunk.flat_hgp[i], grad_x, add=True)
        products.weight_gradient("encoder", grad_x, chunk.flat_observations, add=add)
        products.bias_gradients({**vectors, "encoder.bias": grad_x}, add=add)


class Sample:
    """The network in both of its forms, for `verify.compare`: forward, backward and step."""

    def __init__(self, policy, arena, steps, rows, precision=torch.float32):
        self.layers = Layers(policy, arena, "sample", steps=steps, rows=rows, precision=precision)
        self.actor = Layers(policy, arena, "sample actor", steps=0, rows=rows, precision=precision)
        self.rows, self.step = rows, self.actor.step

    def bind(self):
        self.layers.bind()
        self.actor.bind()

    def refresh(self):
        self.layers.refresh()
        self.actor.refresh()

    def forward(self, observations, initial, resets, valid):
        """All steps of the segments of observations (T, rows, D): outputs (T, rows, A + 1); initial (rows, H) a
        layer."""
        chunk, index = self.layers.chunk(self.rows), torch.arange(self.rows, device=observations.device)
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


# ---------------------------------------------------------------------------------------------------------------------
# The default network on a GPU: its rollout in graphs, then the engine, Fused


@intrinsic
def _call_driver(typing, function, arguments):
    """int function(...) by its address, of the integers in a tuple."""

    def codegen(context, builder, signature, values):
        numbers = [builder.extract_value(values[1], i) for i in range(signature.args[1].count)]
        return builder.sext(call_address(builder, WORD, values[0], *numbers), LONG)

    return types.int64(types.int64, types.UniTuple(types.int64, arguments.count)), codegen


@driver
def _rollout_cuda(begin, end, environments, launch, synchronize, stream, graphs, terminals, truncations, resets, cut,
                  cut_step):
    horizon, inside, begun = len(terminals), 0, cycles()
    for t in range(horizon + 1):
        error, any_cut = 0, False
        if t > 0:
            for i in range(begin, end):
                cut[i] = truncations[t - 1, i] != 0 and terminals[t - 1, i] == 0  # terminal as well: nothing follows
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
            inside += step_environments(environments, t, begin, end, terminals, truncations, resets)
    return 0, inside / (cycles() - begun)


def rollout_in_graphs(agents, environments, handles, storage, cut, cut_step):
    """A rollout of the agents in a slice where the policy is on a GPU: its graphs, T + 1 steps and the one of final
    values, by their `handles` (Gpu.handles), and in between the environments. storage: terminals, truncations (T, N),
    resets (T + 1, N); before the last graph is replayed, cut (N,) uint8 says whose final observation it is for,
    cut_step (1,) int64 of which step. Returns the share of the time that the environments took; RuntimeError for what
    the GPU reports."""
    error, share = _rollout_cuda(agents.start, agents.stop, environments, *handles, *map(host_array, storage),
                                 host_array(cut), host_array(cut_step))
    if error:
        torch.cuda.synchronize()  # says more
        raise RuntimeError(f"fused.rollout_in_graphs: the GPU's driver reports error {error}.")
    return share


class Fused:
    """An engine of the default network on a GPU: the kernels' forward and backward, all segments of a minibatch at
    once."""

    name, Sample = "fused", Sample
    whole_minibatches = True
    num_learners = 1
    blocking_classes = ()
    Buffers = GpuBuffers

    def __init__(self, policy, vecenv, config, buffers):
        self.policy, self.vecenv, self.config, self.buffers = policy, vecenv, config, buffers
        self.device, self.precision = buffers.device, getattr(torch, config["precision"])
        self.at_once = buffers.steps_at_once()
        self.workers = engines.Workers(vecenv.num_workers, vecenv.threads_per_worker)
        self.actor = GpuRollout(vecenv, buffers, self._act, self._act_on_row, self._values_of_cut)
        self.handles = {}  # buffer -> what replays its rollout's graphs without the interpreter
        self.captures = Capture(buffers, self._capture_rollout, forget=self.handles.clear)

    def register(self, arena):
        """Ask the arena for everything that lives as long as the engine."""
        buffers, rows = self.buffers, self.at_once // self.buffers.horizon
        self.chunks = [(start, min(rows, buffers.segments - start)) for start in range(0, buffers.segments, rows)]
        self.actors = [Layers(self.policy, arena, f"actor {w}", steps=0, rows=buffers.largest,
                              precision=self.precision) for w in range(self.vecenv.num_workers)]
        self.layers = Layers(self.policy, arena, "learner", steps=buffers.horizon, rows=min(rows, buffers.segments),
                             precision=self.precision)

    def bind(self, arena):
        """Take the views out of the allocated arena."""
        buffers, log_std = self.buffers, self.policy.decoder.log_std
        self.modules = list(self.policy.named_modules())
        self.log_std = None if log_std is None else log_std.data
        self.observation_columns = buffers.as_columns(
            buffers.storage["observations"].view(buffers.horizon + 1, buffers.num_agents, -1))
        for layers in (*self.actors, self.layers):
            layers.bind()

    # -- the engine's four methods

    def rollout(self, number):
        """Fill the buffers with `horizon` steps of all agents; return the seconds spent in environments."""
        return rollout_on_gpu(self, number, self._rollout)

    def learning(self):
        """Within it, work goes to the main stream."""
        return self.captures.learning()

    def backward(self, index):
        """Compute the gradients, new values and ratios, and loss sums of the minibatch's segments `index` (M,)."""
        buffers, layers = self.buffers, self.layers
        layers.refresh()
        for start, count in self.chunks:
            chunk = layers.chunk(count)
            layers.gather(chunk, self.observation_columns, index, start)
            flags = buffers.storage["resets"], buffers.storage["valid"], index, start
            layers.forward(chunk, *flags, buffers.initial_state["mingru"])
            buffers.loss(chunk.outputs, chunk.grad_outputs, start, buffers.sums[0, : kernels.SUMS],
                         self.log_std, chunk.grad_log_std)
            layers.backward(chunk, *flags, add=start > 0)

    def capture(self, function):
        """Return what calls the function, and replays it as a CUDA graph after train.cudagraphs epochs."""
        return self.captures.add(function)

    def refresh(self):
        """Drop the graphs, which are captured again."""
        self.captures.restart()

    def release(self):
        """Stop the threads, and drop the graphs."""
        self.workers.release()
        self.captures.drop()

    # -- acting

    def _rollout(self, worker):
        with torch.no_grad(), self.device.worker(worker):
            self.actors[worker].refresh()
            buffers = range(worker, self.vecenv.num_buffers, self.vecenv.num_workers)
            if self.vecenv.can_step_in_kernels and all(map(self.handles.get, buffers)):
                return sum(map(self._rollout_in_graphs, buffers))
        return self.actor.rollout(worker)

    def _act(self, worker, observations, state, resets, valid):
        return self.actors[worker].step(observations, state["mingru"], resets, valid), self.log_std

    def _act_on_row(self, worker, buffer, t):
        actor, agents, row = self.actors[worker], self.vecenv.ranges[buffer], self.buffers.rows[buffer][t]
        if actor.in_one is None:
            return self.actor.steps.act_on_row(worker, buffer, t)
        inputs = row["observations"], self.buffers.state["mingru"][:, agents], row["resets"], row["valid"]
        if t == self.buffers.horizon:
            return row["values"].copy_(actor.step(*inputs, commit=False)[:, -1])
        arguments = {**self.buffers.draw_arguments(row, agents), "log_std": self.log_std}
        return actor.step(*inputs, drawn=arguments)

    def _values_of_cut(self, worker, agents, truncations, terminals, out):
        actor, final_observations = self.actors[worker], self.buffers.storage["final_observations"][agents]
        if actor.in_one is None:
            return self.actor.values_of_cut(worker, agents, truncations, terminals, out)
        resets, valid = (flags[agents] for flags in self.buffers.final_flags)
        return actor.step(final_observations, self.buffers.state["mingru"][:, agents], resets, valid, commit=False,
                          final=(truncations, terminals, out))

    def _rollout_in_graphs(self, buffer):
        """Run all steps of one buffer without the interpreter."""
        begun, buffers, host_arrays = clock(), self.buffers, self.buffers.host
        self.device.wait()  # this thread has spoken to the GPU
        share = rollout_in_graphs(
            self.vecenv.ranges[buffer], self.vecenv.addresses(buffer), self.handles[buffer],
            (host_arrays["terminals"], host_arrays["truncations"], host_arrays["resets"]), buffers.host_cut,
            buffers.host_cut_step[buffer : buffer + 1])
        self.vecenv.finish(buffer)
        return share * (clock() - begun)

    def _capture_rollout(self):
        for buffer, worker in self.actor.worker_of.items():  # not every environment truncates
            with self.device.worker(worker):
                self.actor.write_final_values(worker, buffer)
        self.actor.capture()
        if self.buffers.batched:
            return
        for buffer, worker in self.actor.worker_of.items():
            # Launched by handle and not by CUDAGraph.replay(): that also advances torch's random
            # generator, which this network does not use.
            self.handles[buffer] = self.device.handles(worker, self.actor.calls(worker, buffer))
