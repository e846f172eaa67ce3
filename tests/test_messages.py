"""The sentences that users read. Each is asserted here alone; other tests name an error's type and
the setting.

A row is (subject, type, sentence, cause). The cause is a command line of squared, which is read
and not run, or a function that fails; it may take a folder (`path`). The type None stands for a
message that is printed. The sentence is a part of the message that contains no path.
"""

import inspect
import shlex
import types

import pytest

import configuration

CONFIGURATION = [
    ("train.horizon", configuration.ConfigError, "train.horizon", "--train.horizon 0"),
]

RUNS = []  # run folders, checkpoints, loggers, names from PufferLib

TRAINER = []  # trainer, engines, models, diagnostics, processes of one run

ENVIRONMENTS = []  # emulation, vector, workers, tensors, environments

OCEAN = []

def kernel_rows():  # kernels, arena, fast/, devices
    import cuda_on_a_cpu
    import kernel_cases
    import test_devices
    import test_ocean_device
    import torch

    import kernels
    import optim
    import vector
    from fast import fused, pictures, products
    from ocean import device

    def change(call, **arguments):
        return lambda: kernel_cases.SMALL[call]().run(**arguments)

    def register(*names, allocate=False):
        def cause():
            arena = kernels.Arena()
            arena.register(names[0], (2,))
            if allocate:
                arena.allocate()
            arena.register(names[-1], (2,))
        return cause

    def capture():
        def refuse():
            raise ValueError("operation not permitted")

        fused.Graphs._capture(types.SimpleNamespace(_capture_rollout=refuse, _drop=lambda: None))

    def build(path):
        with pytest.MonkeyPatch.context() as patch:
            cuda_on_a_cpu.install(patch)
            device.Kernels(test_ocean_device.broken(path))

    zeros, refused = torch.zeros, configuration.ConfigError
    return [
        ("bootstraps", ValueError, "has shape (3, 4), expected (3, 5)", change("advantage", bootstraps=zeros(3, 4))),
        ("rewards", TypeError, "kernels.advantage: rewards is float64, expected float32",
         change("advantage", rewards=zeros(3, 5).double())),
        ("values", ValueError, "is not contiguous; pass values.contiguous()",
         change("advantage", values=zeros(5, 4).t())),
        ("outputs", ValueError, "expected 2 dimensions", change("sample", outputs=zeros(5))),
        ("valid", ValueError, "has 2 rows, expected 3 or more", change("priorities", valid=zeros(2, 5))),
        ("hgp", TypeError, "expected float32 or bfloat16", change("mingru_step", hgp=zeros(4, 18).double())),
        ("index", ValueError, "segments 1 to 5 of an index of 4", change("mingru_scan", start=1)),
        ("minibatch", ValueError, "segments 2 to 6 of a minibatch of 4",
         change("ppo_loss", start=2, index=torch.arange(4).repeat(2))),
        ("heads", ValueError, "heads [2, 2] do not add up to 5 logits", change("sample", heads=torch.tensor([2, 2]))),
        ("source", TypeError, "expected integers, bool, float32 or float64",
         change("gather", source=zeros(4, 5, 2).half())),
        ("out", ValueError, "cannot fill out", change("gather", out=zeros(9, 4, 2))),
        ("flat", ValueError, "flat is on meta; expected a CPU or a CUDA tensor",
         lambda: kernels.gradient_norm(zeros(3, device="meta"))),
        ("twice", ValueError, "that name is taken", register("twice", "twice")),
        ("late", ValueError, "after arena.allocate(): register everything first", register("a", "late", allocate=True)),
        ("weight", TypeError, "master weights are float32",
         lambda: kernels.Arena().adopt(torch.nn.Linear(2, 2).double())),
        ("optim.Muon", ValueError, "call arena.adopt(policy) first", lambda: optim.Muon(kernels.Arena())),
        ("stride", ValueError, "a kernel of 5 is not a multiple of the stride 2",
         lambda: pictures.BytesConvolution(3, 8, 5, 2)),
        ("kernel", ValueError, "pictures of 5 × 84 are smaller than the kernel, 8 × 8",
         lambda: pictures.BytesConvolution(4, 8, 8, 4)(zeros(1, 4, 5, 84, dtype=torch.uint8))),
        ("bias", RuntimeError, "4 inputs and a bias of 3 are expected",
         lambda: products.multiply(torch.ones(4, 8), torch.ones(4, 3))),
        ("train.device", refused, "finds no GPU here", lambda: test_devices.find_gpu(available=False)),
        ("train.device", refused, "is numba's own here", lambda: test_devices.find_gpu(implementation="Built-in")),
        ("train.device", refused, "pip install 'numpy<2.5'", lambda: test_devices.find_gpu(knows_numpy=False)),
        ("train.device", refused, "needs CuPy", lambda: test_devices.find_gpu(has_cupy=False)),
        ("train.device", None, "ulimit -l unlimited", test_devices.pin_where_no_memory_is_locked),
        ("train.cudagraphs", None, "cannot be captured and runs without, which is slower: operation", capture),
        ("vec.device", refused, "squared cannot step on a GPU", lambda: test_ocean_device.choose("squared", "cuda")),
        ("snake", ValueError, "its struct points to memory of its own", lambda: vector.make("snake", device="cpu")),
        ("broken.h", device.NotCompiled, "does not compile for a GPU", build),
    ]


KERNELS = kernel_rows()

TOOLS = []  # eval, export, sweep, history, watch, speed

TABLE = CONFIGURATION + RUNS + TRAINER + ENVIRONMENTS + OCEAN + KERNELS + TOOLS


@pytest.mark.parametrize(("subject", "kind", "sentence", "cause"), TABLE,
                         ids=[f"{row[0]}-{index}" for index, row in enumerate(TABLE)])
def test_a_message_says(subject, kind, sentence, cause, tmp_path, capsys):
    def fail():
        if isinstance(cause, str):
            return configuration.load_config("squared", shlex.split(cause))
        return cause(tmp_path) if inspect.signature(cause).parameters else cause()

    if kind is None:
        fail()
        output = capsys.readouterr()
        said = output.out + output.err
    else:
        with pytest.raises(kind) as error:
            fail()
        said = str(error.value)
    assert sentence in " ".join(said.split()) and subject in said
