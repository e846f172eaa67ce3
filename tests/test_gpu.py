"""What the trainer needs of a GPU and its libraries: `make gpu STEPS=smoke`.

Pinned copies, graphs that the driver replays, kernels of numba-cuda and of CuPy on torch's streams.
If one of these fails, so does what is built upon it (tests/test_devices.py).
"""

import ctypes

import numpy as np
import pytest
import torch

import arena
from vector import aligned_zeros

pytestmark = pytest.mark.gpu
N = 100_000


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    yield
    torch.cuda.synchronize()  # an error that comes late is this test's


def captured(function, stream):
    """A graph of function() on a stream, as fused.Gpu.capture makes it."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        function()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def test_numpy_pages_are_pinned_and_copied_on_a_stream():
    array, cudart = aligned_zeros((N,), np.float32), torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
    try:
        host, stream = torch.from_numpy(array), torch.cuda.Stream()
        assert host.is_pinned()
        array[:] = np.arange(N)
        with torch.cuda.stream(stream):
            there = torch.empty(N, device="cuda").copy_(host, non_blocking=True)
            host.copy_(there * 2, non_blocking=True)
        stream.synchronize()
        assert (array == 2 * np.arange(N)).all()
    finally:
        torch.cuda.check_error(cudart.cudaHostUnregister(array.ctypes.data))


def test_the_driver_replays_torchs_graphs():
    total, stream = torch.zeros((), device="cuda"), torch.cuda.Stream()
    graph = captured(lambda: total.add_(1), stream)
    driver = ctypes.CDLL("libcuda.so.1")
    graph_exec, stream_handle = ctypes.c_void_p(graph.raw_cuda_graph_exec()), ctypes.c_void_p(stream.cuda_stream)
    for _ in range(3):
        assert driver.cuGraphLaunch(graph_exec, stream_handle) == 0
    assert driver.cuStreamSynchronize(stream_handle) == 0
    assert total.item() == 3


@arena.driver
def multiply(begin, end, factor, numbers, flags):
    for i in range(begin, end):
        if flags[i]:
            numbers[i] = numbers[i] * factor[0]


SOURCE = r"""
extern "C" __global__ void add(float *numbers, const float *other, long long n, int times) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) numbers[i] += times * other[i];
}
"""


def test_torch_numba_and_cupy_in_one_graph():
    """All on torch's stream."""
    cupy = pytest.importorskip("cupy")
    torch.cuda.init()
    add = cupy.RawModule(code=SOURCE, options=("-std=c++17",)).get_function("add")
    numbers, other = torch.ones(2, N, device="cuda")
    factor, flags = torch.tensor([2.0]).cuda(), torch.ones(N, dtype=torch.uint8, device="cuda")
    arguments = (numbers.data_ptr(), other.data_ptr(), np.int64(N), np.int32(3))
    stream = torch.cuda.Stream()

    def step():
        arena.run(multiply, N, 1, *map(arena.as_array, (factor, numbers, flags)))
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            add((-(-N // 128),), (128,), arguments)
        torch.mul(numbers, 10.0, out=numbers)

    step()
    graph = captured(step, stream)
    numbers.fill_(1.0)
    torch.cuda.synchronize()  # torch's streams do not wait for the default one
    with torch.cuda.stream(stream):
        graph.replay()
    stream.synchronize()
    assert (numbers == 50.0).all()
