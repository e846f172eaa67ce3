"""Where the trainer's tensors live: on the CPU beside the environments, or on a GPU with streams, pins and graphs.

    device = Gpu(torch.device("cuda"), workers=4)       # or Cpu(), where all of this costs nothing
    device.pin(array)                                   # so that copies from and to it overlap with everything else
    with device.worker(0):                              # on that worker's stream, in whatever thread
        device.play("step", function, argument)         # runs function(argument), until it has been captured
        device.wait()                                   # what this stream was given is done
    device.capture(0, [("step", function, (argument,))])    # from now on `play` replays it
    device.handles(0, [("step", function, (argument,))])    # for those who replay it without the interpreter

Each worker of the rollout has a stream of its own, on which its copies, its forward passes and its graphs follow one
another; learning has the main stream. Whatever is captured must read and write memory that stays in its place (the
arena), take its changing numbers from there, and never wait for the GPU.
"""

import contextlib
import ctypes
import sys
import weakref

import numpy as np
import torch


class Cpu:
    """The rollout's arrays are what the policy reads; nothing is copied, captured or waited for.

    separate: whether the tensors are in other memory than the arrays that the environments write.
    """

    separate = False
    torch_device = torch.device("cpu")

    @staticmethod
    def main():
        return contextlib.nullcontext()

    @staticmethod
    def worker(number):
        return contextlib.nullcontext()

    @staticmethod
    def play(key, function, *arguments):
        function(*arguments)

    @staticmethod
    def wait():
        pass

    @staticmethod
    def usage():
        return {}

    release = wait


class Gpu:
    """Streams, pinned memory and graphs of one device.

    device: a torch.device of type cuda. workers: how many streams besides the main one.
    """

    separate = True

    def __init__(self, device, workers):
        self.torch_device = device
        # One stream a worker: its buffers share its activations, so they must not overlap with one another.
        self.streams = [torch.cuda.Stream(device) for _ in range(workers)]
        self.main_stream = torch.cuda.Stream(device)
        self._pinned, self._graphs = [], {}
        weakref.finalize(self, _unlock, device, self._pinned).atexit = False  # dropped without release()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def pin(self, array):
        """Lock a numpy array's pages in memory until `release`; they must be its own. Raises RuntimeError where the
        system's limit of locked memory (ulimit -l) is too low."""
        if array.nbytes:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0))
            self._pinned.append(array)

    @contextlib.contextmanager
    def main(self):
        """Within it, work goes to the main stream, after what the caller's stream was given and before what follows."""
        before = torch.cuda.current_stream(self.torch_device)
        self.main_stream.wait_stream(before)
        try:
            with torch.cuda.stream(self.main_stream):
                yield
        finally:  # after an interrupt, too, what is queued comes before what the caller does next
            before.wait_stream(self.main_stream)

    @contextlib.contextmanager
    def worker(self, number):
        """Within it, this thread's work goes to that worker's stream."""
        with (torch.cuda.device(self.torch_device), torch.cuda.stream(self.streams[number]),
              torch.cuda.nvtx.range(f"worker {number}")):  # fmt: skip
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
        """Unlock the pinned arrays."""
        _unlock(self.torch_device, self._pinned)
        self.forget()


def _unlock(device, arrays):
    """Unlock pinned arrays when all work is done, which must come before their memory is given back."""
    if arrays:
        torch.cuda.synchronize(device)
    while arrays:
        torch.cuda.cudart().cudaHostUnregister(arrays.pop().ctypes.data)
