"""What the trainer needs of a GPU and its libraries, one thing in each test: `make gpu STEPS=smoke`.

Pinned copies, streams, graphs that the driver replays, kernels of numba-cuda and of CuPy on torch's streams,
eagerly and in a graph. If one of these fails, so does what is built upon it.
"""

import ctypes
import threading

import numpy as np
import pytest
import torch

from arena import driver

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


def replay(graph, stream, times=1):
    torch.cuda.synchronize()  # torch's streams do not wait for the default one
    with torch.cuda.stream(stream):
        for _ in range(times):
            graph.replay()
    stream.synchronize()


def test_numpy_pages_are_pinned_and_copied_on_a_stream():
    from vector import aligned_zeros

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


def test_pinned_copies_are_replayed():
    host, back, there = torch.zeros(N).pin_memory(), torch.zeros(N).pin_memory(), torch.zeros(N, device="cuda")
    stream = torch.cuda.Stream()

    def step():
        there.copy_(host, non_blocking=True)
        there.add_(1)
        back.copy_(there, non_blocking=True)

    graph = captured(step, stream)
    for value in (3.0, 5.0):
        host.fill_(value)
        replay(graph, stream)
        assert (back == value + 1).all()


def test_the_driver_replays_torchs_graphs():
    total, stream = torch.zeros((), device="cuda"), torch.cuda.Stream()
    graph = captured(lambda: total.add_(1), stream)
    driver = ctypes.CDLL("libcuda.so.1")
    graph_exec, stream_handle = ctypes.c_void_p(graph.raw_cuda_graph_exec()), ctypes.c_void_p(stream.cuda_stream)
    for _ in range(3):
        assert driver.cuGraphLaunch(graph_exec, stream_handle) == 0
    assert driver.cuStreamSynchronize(stream_handle) == 0
    assert total.item() == 3


def test_threads_replay_on_streams_of_their_own():
    totals, streams = torch.zeros(16, device="cuda"), [torch.cuda.Stream() for _ in range(16)]
    graphs = [captured(lambda i=i: totals[i].add_(i), stream) for i, stream in enumerate(streams)]

    def work(i):
        with torch.cuda.stream(streams[i]):
            for _ in range(50):
                graphs[i].replay()
            streams[i].synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals.tolist() == [50 * i for i in range(16)]


def ones(dtype=torch.float32):
    return torch.ones(N, dtype=dtype, device="cuda")


def multiply(begin, end, factor, numbers, flags):
    for i in range(begin, end):
        if flags[i]:
            numbers[i] = numbers[i] * factor[0]


def numba_kernel(numbers, factor, flags):
    """multiply() by arena.run, which hands a kernel its arguments as one tuple, on torch's stream."""
    import arena
    
    if not hasattr(numba_kernel, "driver"):
        numba_kernel.driver = driver(multiply)
    arena.run(numba_kernel.driver, len(numbers), 1, *map(arena.as_array, (factor, numbers, flags)))


def test_numba_sees_the_bits_of_bfloat16():
    import arena

    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16, device="cuda")
    assert arena.as_array(tensor).dtype == np.uint16
    assert arena.as_array(tensor).copy_to_host().tolist() == [0x3F80, 0xC000]


def test_numba_runs_in_order_on_torchs_stream():
    stream, flags, numbers, factor = torch.cuda.Stream(), ones(torch.uint8), ones(), torch.tensor([2.0]).cuda()
    numba_kernel(numbers, factor, flags)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what runs on another stream would be done long before
        numbers.fill_(5.0)
        numba_kernel(numbers, factor, flags)
        numbers.add_(1.0)
    stream.synchronize()
    assert (numbers == 11.0).all()


def test_numba_is_captured_and_replayed():
    from numba import cuda

    stream, flags, numbers, factor = torch.cuda.Stream(), ones(torch.uint8), ones(), torch.tensor([2.0]).cuda()
    numba_kernel(numbers, factor, flags)  # compiles

    def step():  # in memory that is made within the graph, too
        scratch = ones()
        numba_kernel(scratch, factor, flags)
        numbers.mul_(scratch)

    with cuda.defer_cleanup():
        graph = captured(step, stream)
    assert (numbers == 2.0).all(), "a capture runs nothing"
    factor.fill_(10.0)
    replay(graph, stream, 2)
    assert (numbers == 200.0).all()


SOURCE = r"""
extern "C" __global__ void add(float *numbers, const float *other, long long n, int times) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) numbers[i] += times * other[i];
}
"""


@pytest.fixture(scope="module")
def cupy_kernel():
    """add() as CUDA C++ by CuPy's compiler, on torch's stream."""
    cupy = pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.cuda.init()
    add = cupy.RawModule(code=SOURCE, options=("-std=c++17",)).get_function("add")

    def call(numbers, other, times):
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            add((-(-N // 128),), (128,), (numbers.data_ptr(), other.data_ptr(), np.int64(N), np.int32(times)))

    return call


def test_cupy_runs_in_order_on_torchs_stream(cupy_kernel):
    numbers, other, stream = ones(), ones(), torch.cuda.Stream()
    cupy_kernel(numbers, other, 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        numbers.fill_(5.0)
        cupy_kernel(numbers, other, 3)
        numbers.mul_(2.0)
    stream.synchronize()
    assert (numbers == 16.0).all()


def test_torch_numba_and_cupy_in_one_graph(cupy_kernel):
    numbers, other, factor, flags = ones(), ones(), torch.tensor([2.0]).cuda(), ones(torch.uint8)
    stream = torch.cuda.Stream()

    def step():
        numba_kernel(numbers, factor, flags)
        cupy_kernel(numbers, other, 3)
        torch.mul(numbers, 10.0, out=numbers)

    step()
    graph = captured(step, stream)
    numbers.fill_(1.0)
    replay(graph, stream)
    assert (numbers == 50.0).all()


def test_a_product_is_the_same_in_a_graph():
    left, right = torch.randn(4096, 64, device="cuda"), torch.randn(64, 192, device="cuda")
    out, stream = torch.empty(4096, 192, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.mm(left, right, out=out)
    stream.synchronize()
    expected = out.clone()
    graph = captured(lambda: torch.mm(left, right, out=out), stream)
    out.zero_()
    replay(graph, stream)
    assert torch.equal(out, expected)
