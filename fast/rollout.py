"""Run the default network's rollout on a GPU: a step, or all steps with environments in C.

    step = PolicyStep(layers)                              # layers: a bound fused.Layers
    step(observations, state, resets, valid, outputs, drawn=...)      # one step, as one kernel
    rollout = Rollout(step, buffers)                       # buffers: a bound fused.GpuBuffers
    rollout()                                              # a rollout of them all, as one kernel

A block has all weights in its shared memory (network.cu). The rollout is compiled with the text of
an environment (ocean/device.py): its block keeps some agents for all steps, and no block waits for
another. It leaves what `PolicyStep` and device_step leave that are called in turn, bit for bit.
"""

import functools

import numpy as np
import torch

import kernels
import ocean.device
from arena import check_arrays, compiling, f32, i32, i64, optional_squash, u8
from fast import cuda_cpp

# Numbers of the dtypes of observations, as with_kind of network.cu has them.
DTYPES = {"float32": 0, "uint8": 1, "bool": 1, "int8": 2, "int16": 3, "uint16": 4, "int32": 5,
          "uint32": 6, "int64": 7, "float64": 8}
TILES = 8, 16, 32  # agents that a block takes at once
KERNEL = """
extern "C" __global__ void __launch_bounds__(policy::THREADS, 1)
    device_rollout(const policy::Rollout *all) {
    policy::rollout(*all, [=](int64_t i, int64_t t) {
        uint8_t *resets = all->resets + (t + 1) * all->n;
        step_one((Env *)all->environments, i, (const Rows *)all->rows + t, resets);
    });
}
"""


@functools.cache
def module(name, precision, tile):
    """Return the Module of policy_step.cu or rollout.cu for a precision and agents of a tile."""
    defines = {"REAL": "float" if precision == torch.float32 else "u16",
               "SIXTEENS": 2 if tile > 16 else 1}
    return cuda_cpp.Module(f"fast/{name}.cu", vars(kernels), ocean.device.OPTIONS,
                           "fast/network.cu", defines)


def shared_memory(device):
    """Return the bytes of shared memory that a block can have."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin",
                   48 << 10)


class PolicyStep:
    """Run a step of the rollout as one kernel.

    It is encoder, layers, decoder and the sampling of actions, with all weights in the shared
    memory of each block. A network that does not fit has its products by cuBLAS
    (`Layers.step`).

        step = PolicyStep(layers)                                      # when these are bound
        step(observations, state, resets, valid, outputs, drawn=...)   # commit=False: state stays

    layers: the Layers that hold the weights. Call their `refresh` when weights change.
    """

    def __init__(self, layers):
        policy = self.policy = layers.policy
        self.precision = layers.precision
        names = ["encoder", *(f"rnn.layers.{i}" for i in range(policy.num_layers))]
        weights = [layers.weights[f"{name}.{kind}"]
                   for name in names for kind in ("weight", "bias")]
        weights += [layers.masters[f"decoder.{kind}"] for kind in ("weight", "bias")]
        addresses = torch.tensor([weight.data_ptr() for weight in weights])
        self.addresses = addresses.to(weights[0].device)

    @staticmethod
    def size(policy, precision, rows=TILES[-1]):
        """Return the bytes of shared memory of a block for tiles of `rows` agents.

        policy_step has the same layout.
        """
        inputs, width = policy.encoder.in_features, policy.decoder.out_features
        H, L, pitch = policy.hidden_size, policy.num_layers, max(rows, 16) + 8
        longest, eights, hidden = (-(-n // 8) * 8 for n in (max(inputs, H), inputs, H))
        small = rows * width + (3 * L + 1) * H + width
        floats = (longest + hidden) * pitch + width * (hidden + 4) + -(-small // 4) * 4
        return 4 * floats + precision.itemsize * H * (eights + 4 + 3 * L * (hidden + 4))

    @classmethod
    def is_supported(cls, policy, precision, device):
        """Return whether this GPU has tensor cores for tf32, and the network fits a block.

        The shift of its normalizer, if it has one, must be float32.
        """
        if policy.normalizer is not None and policy.normalizer.shift.dtype != torch.float32:
            return False
        return (torch.cuda.get_device_properties(device).major >= 8
                and cls.size(policy, precision, TILES[0]) <= shared_memory(device))

    def grid(self, n, device, tiles=None):
        """Return (agents of a tile, blocks, bytes of shared memory a block) for n agents.

        A tile is the smallest of `tiles`, by default TILES, with a block for each multiprocessor.
        """
        properties = torch.cuda.get_device_properties(device)
        tiles = [rows for rows in tiles or TILES
                 if self.size(self.policy, self.precision, rows) <= shared_memory(device)]
        processors = properties.multi_processor_count
        rows = next((rows for rows in tiles if -(-n // rows) <= processors), tiles[-1])
        shared = self.size(self.policy, self.precision, rows)
        per_processor = properties.shared_memory_per_multiprocessor
        at_once = max(1, per_processor // (shared + 1024))  # blocks on a multiprocessor
        return rows, min(-(-n // rows), processors * at_once), shared

    def __call__(self, observations, state, resets, valid, outputs, *, commit=True, final=None,
                 drawn=None):
        """Write and return outputs (n, A + 1): logits or means, then the value.

        observations (n, ...) of a dtype in DTYPES; state (layers, n, H), each layer contiguous,
        updated in place if `commit`; resets, valid (n,) uint8. final: (truncations, terminals,
        values), (n,) uint8 and float32: V of the agents that are cut off is written to `values`, 0
        for the others, whose outputs are undefined. drawn: the keyword arguments of
        `kernels.sample`; None samples nothing. Raises ValueError or TypeError for a wrong shape or
        dtype.
        """
        policy, norm, like = self.policy, self.policy.normalizer, outputs
        n, width = outputs.shape
        inputs, H, L = policy.encoder.in_features, policy.hidden_size, policy.num_layers
        dtype = DTYPES.get(str(observations.dtype).removeprefix("torch."))
        if dtype is None:
            raise TypeError(f"rollout.PolicyStep: observations are {observations.dtype}, expected "
                            f"{', '.join(DTYPES)}.")
        shift, scale = (None, None) if norm is None else (norm.shift, norm.scale)
        truncations, terminals, final_values = (None, None, None) if final is None else final
        weights, inputs_array, shift, scale, first, resets, valid, *ends, outputs = check_arrays(
            "policy_step", weights=(self.addresses, (2 * L + 4,), i64),
            observations=(observations.view(n, -1), (n, inputs), None),
            shift=(shift, (inputs,), f32), scale=(scale, (inputs,), f32),
            state=(state[0], (n, H), f32), resets=(resets, (n,), u8), valid=(valid, (n,), u8),
            truncations=(truncations, (n,), u8), terminals=(terminals, (n,), u8),
            values=(final_values, (n,), f32), outputs=(outputs, (n, width), f32))
        sampling = 0, 0, None, 0, None, False, None, None, 0, *[None] * 4, ends.pop()
        if drawn is not None:
            sampling = self._sampling_arguments(n, width - 1, like, **drawn)
        rows, blocks, shared = self.grid(n, like.device)
        module("policy_step", self.precision, rows).launch(
            "policy_step", blocks, kernels.CREW, n, inputs, H, L, width, rows, weights, dtype,
            inputs_array, norm is not None, shift, scale, state.stride(0), commit, first, resets,
            valid, final is not None, *ends, outputs, drawn is not None, *sampling, shared=shared)
        return like

    @staticmethod
    def _sampling_arguments(n, choices, like, actions, logprobs, values, *, seed, step,
                            first_agent=0, heads=None, log_std=None, masks=None, squash=None,
                            samples=None):
        """Return the kernel's arguments from the seed on, as `kernels.sample` takes them."""
        is_discrete, is_squashed = heads is not None, squash is not None
        count = len(heads) if is_discrete else choices
        squash, counter, heads, masks, log_std, *written = check_arrays(
            "policy_step",
            squash=(optional_squash(squash, like), (3, choices if is_squashed else 1), f32),
            step=(step, (1,), i64), heads=(heads, (count,), i64), masks=(masks, (n, choices), u8),
            log_std=(log_std, (choices,), f32),
            actions=(actions, (n, count), i32 if is_discrete else f32),
            samples=(samples if is_squashed else None if is_discrete else actions, (n, choices),
                     f32), logprobs=(logprobs, (n,), f32), values=(values, (n,), f32))
        return (seed, first_agent, counter, count if is_discrete else 0, heads, masks is not None,
                masks, log_std, squash.shape[1], squash, *written)


class Rollout:
    """Run a rollout of environments in C as one kernel, on torch's current stream.

    step: a PolicyStep. buffers: fused.GpuBuffers of vector.GpuEnvs, whose memory must stay. Raises
    an exception of CuPy's if the environment's text does not compile with the policy's.
    """

    def __init__(self, step, buffers):
        import cupy

        n, policy, vecenv = buffers.num_agents, step.policy, buffers.vecenv
        agents_each = n // vecenv.num_envs
        tiles = [tile for tile in TILES if tile % agents_each == 0]
        tile, self.blocks, self.shared = step.grid(n, buffers.torch_device, tiles)
        numbers = self._fields(step, policy, vecenv, buffers, n, agents_each, tile)
        fields = np.array([number % 2**64 for number in numbers], np.uint64).view(np.int64)
        self.fields = torch.from_numpy(fields).to(buffers.torch_device)
        with compiling():
            text = source(vecenv.library, step.precision, tile)
            module = cupy.RawModule(code=text, options=ocean.device.OPTIONS)
            self.kernel = module.get_function("device_rollout")
            self.kernel.max_dynamic_shared_size_bytes = self.shared

    @staticmethod
    def is_supported(vecenv):
        """Return whether a tile can hold all agents of an environment, for each of them."""
        agents = np.unique(np.diff(vecenv.envs.agent_offsets))
        return len(agents) == 1 and any(tile % agents[0] == 0 for tile in TILES)

    @staticmethod
    def _fields(step, policy, vecenv, buffers, n, agents_each, tile):
        """Return the numbers and addresses of `struct Rollout` in rollout.cu, in its order."""

        def address(tensor):
            return 0 if tensor is None else tensor.data_ptr()

        storage, norm, state = buffers.storage, policy.normalizer, buffers.state["mingru"]
        observations = storage["observations"]
        is_discrete, squash = buffers.heads is not None, buffers.squash
        samples = buffers.samples if squash is not None or not is_discrete else None
        choices = policy.decoder.out_features - 1
        squash_array = optional_squash(squash, state)
        return [
            n, policy.encoder.in_features, policy.hidden_size, policy.num_layers, choices + 1, tile,
            address(step.addresses),
            DTYPES[str(observations.dtype).removeprefix("torch.")], observations.itemsize,
            address(observations), address(storage["final_observations"]),
            norm is not None, *(address(getattr(norm, name, None)) for name in ("shift", "scale")),
            address(state), state.stride(0), address(storage["resets"]), address(storage["valid"]),
            buffers.horizon, agents_each, vecenv.truncates, address(storage["truncations"]),
            address(storage["terminals"]), address(buffers.bootstraps),
            *vecenv.device_addresses, buffers.config["seed"], buffers.first_agent,
            address(buffers.steps), len(buffers.heads) if is_discrete else 0,
            address(buffers.heads), storage["action_masks"] is not None,
            address(storage["action_masks"]), address(policy.decoder.log_std),
            squash_array.shape[1], address(squash_array), vecenv.action_dims,
            address(storage["actions"]), address(samples), address(buffers.logprobs),
            address(buffers.values)]

    def __call__(self):
        """Launch the kernel; it reads the steps' numbers and the weights when it runs."""
        with cuda_cpp.on_stream(torch.cuda.current_stream().cuda_stream):
            self.kernel((self.blocks,), (kernels.CREW,), (np.int64(self.fields.data_ptr()),),
                        shared_mem=self.shared)


def source(library, precision=torch.float32, tile=TILES[-1]):
    """Return the text of device_rollout for an environment, a precision and agents of a tile."""
    return ocean.device.source(library, module("rollout", precision, tile).source) + KERNEL
