"""Check that a hand-written engine computes what the policy computes.

fast/compiled.py and fast/fused.py reimplement some methods of models.py and engines.py, for the
classes in `NETWORKS`. Three checks let them run:

    find_edit   no module has a hook, a parametrization or a replaced method
    digest      the hash of the syntax trees of the methods in `REIMPLEMENTED` is `DIGEST`
    compare     engine and policy give the same on a few samples; also when weights are loaded

`pufferl.choose_engine` calls them when a run starts. In each epoch `PuffeRL._check_engine` compares
`engines.inspect_modules` with that of the start, and calls `find_edit` after a difference.

tests/test_engines.py has many more samples. To keep the fast engines after an edit of a method in
`REIMPLEMENTED`, make the same edit in fast/compiled.py and fast/fused.py, run the tests, and set
`DIGEST` to the digest that tests/test_verify.py prints.
"""

import ast
import contextlib
import functools
import hashlib
import inspect
import re
import textwrap

import numpy as np
import torch
from torch import nn

import engines
import models
from arena import Arena

NETWORKS = {"compiled": (models.MinGRUPolicy, models.FeedForward, models.Separate),
            "fused": (models.MinGRUPolicy,)}
METHODS = ("forward", "forward_eval", "split", "flags", "encode_observations", "decode_actions",
           "_normalised")
MODELS = {kind: tuple(name for name in METHODS if hasattr(kind, name)) for kind in (
    models.MinGRUPolicy, models.MinGRU, models.FeedForward, models.Separate, models.Normalized,
    models.Decoder, models.Normalizer)}
TORCH = {kind: ("forward",) for kind in (nn.Linear, nn.ReLU, nn.Tanh, nn.Sequential, nn.ModuleList)}
FUNCTIONS = {kind: {name: getattr(kind, name) for name in names}
             for kind, names in (MODELS | TORCH).items()}
REIMPLEMENTED = MODELS | {
    engines.Buffers: ("begin_rollout", "sample_arguments", "copy_state", "loss"),
    engines.StepByStep: ("run", "act_on_row", "bootstrap"),
    engines.TorchPolicy: ("act", "state_of", "add_gradients"),
    engines.Engine: ("backward",),
    engines.Autograd: ("rollout", "_backward_share")}
DIGEST = "ec35054748a6ec8f"
STEPS, AGENTS = 16, 5  # of a sample
TOLERANCE = 0.1  # relative error; float32 rounding, multiplied by large weights, stays below it


def digest():
    """Return the digest of REIMPLEMENTED, or None without its source.

    Docstrings and comments do not count.
    """
    texts = [text_of(getattr(owner, name)) for owner, names in REIMPLEMENTED.items()
             for name in names]
    return None if None in texts else hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


@functools.cache
def text_of(function):
    """Return a function's syntax tree as text, or None without its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError):
        return None
    if isinstance(tree, ast.FunctionDef) and ast.get_docstring(tree) is not None:
        del tree.body[0]
    # some versions of Python write fields that are empty
    return re.sub(r"(, )?\b\w+=(\[\]|None)", "", ast.dump(tree)).replace("(, ", "(")


def find_edit(policy, engine):
    """Return the first edit of a policy that an engine would not follow, or None.

    It sees classes, hooks and replaced methods; `digest` sees edited source. engine: "compiled" or
    "fused".
    """
    is_wrapped = type(policy) is models.Normalized
    kind = type(policy.policy if is_wrapped else policy)
    if kind not in NETWORKS[engine] or (is_wrapped and kind is models.MinGRUPolicy):
        return (f"{'models.Normalized around ' if is_wrapped else ''}{kind.__name__} is not "
                + " or ".join(f"models.{known.__name__}" for known in NETWORKS[engine]))
    for path, module, functions, hooks, _ in engines.inspect_modules(policy):
        name, kind = path or "the network", type(module)
        if kind not in FUNCTIONS:
            return f"{name} is a {kind.__name__}"
        edits = [*functions, *(method for method, function in FUNCTIONS[kind].items()
                              if getattr(kind, method, None) is not function)]
        if edits:
            return f"{edits[0]} of {name} is replaced"
        if hooks:
            return f"{name} has hooks"
    return None


def compare(policy, vecenv, sample, device="cpu"):
    """Run both on a few samples; return how they differ, or None.

    sample(policy, arena, steps, rows): the engine's network, compiled.Sample or fused.Sample.
    Compared are STEPS steps of AGENTS agents, with resets and inactive agents: the
    outputs over time and of single steps, the state after them, and all gradients, in float32
    without TF32. Weights, gradients and torch's settings do not change.
    """
    matmul = torch.backends.cuda.matmul
    precision, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    gradients = {parameter: parameter.grad for parameter in policy.parameters()}
    try:
        numbers = 1 + sum(vecenv.action_heads or [vecenv.action_dims])
        if (policy.decoder.out_features, policy.decoder.log_std is None) != (
                numbers, bool(vecenv.action_heads)):
            return "its decoder is for other actions"  # Autograd raises the error
        return _compare(policy, sample, device, *sample_inputs(vecenv, device))
    except Exception as error:
        return f"it does not run as a network of models.py does: {type(error).__name__}: {error}"
    finally:
        matmul.fp32_precision = precision
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def sample_inputs(vecenv, device):
    """Return random observations, resets and valid, all (STEPS, AGENTS, ...)."""
    random = np.random.default_rng(0)
    shape, dtype = (STEPS, AGENTS, *vecenv.observation_shape), vecenv.single_observation_space.dtype
    observations = random.normal(size=shape) if dtype.kind == "f" else random.integers(0, 2, shape)
    flags = [(random.random((STEPS, AGENTS)) < p).astype(np.uint8) for p in (0.2, 0.8)]
    arrays = observations.astype(dtype), *flags
    return [torch.from_numpy(array).to(device) for array in arrays]


def _compare(policy, sample, device, observations, resets, valid):
    T, N = resets.shape
    arena = Arena()
    for name, parameter in policy.named_parameters():
        arena.register(f"gradients/policy.{name}", parameter.shape, group="gradients")
        parameter.grad = None
    fast = sample(policy, arena, T, N)
    arena.allocate(device)
    fast.bind()
    fast.refresh()
    state = models.initial_state(policy, N)
    state = {name: torch.linspace(-1, 1, tensor.numel(), device=device).view(tensor.shape)
             for name, tensor in state.items()}
    memory = state["mingru"].clone() if state else None
    whole = fast.forward(observations.view(T, N, -1), memory, resets, valid).clone()
    with torch.enable_grad():
        logits, value = models.over_time(policy, observations,
                                         {**state, "resets": resets, "valid": valid})
        outputs, log_std = models.join_outputs(logits, value)
        slope = torch.cos(torch.arange(outputs.numel(), device=device)).view(outputs.shape)
        total = (outputs * slope).sum() + (0.0 if log_std is None else log_std.sum())
        if total.requires_grad:  # False if all weights are frozen
            total.backward()
    reference = []
    with torch.no_grad():
        for t in range(T):
            state |= {"resets": resets[t], "valid": valid[t]}
            results = models.one_step(policy, observations[t], state)
            reference.append(models.join_outputs(*results)[0])
    arena.flat("gradients").zero_()
    fast.backward(slope, None if log_std is None else torch.ones_like(log_std))
    steps = [fast.step(observations[t], memory, resets[t], valid[t]).clone() for t in range(T)]
    pairs = {"its outputs": (whole, outputs.detach()),
             "a step's outputs": (torch.stack(steps), torch.stack(reference))}
    if memory is not None:
        pairs["the state after some steps"] = memory, state["mingru"]
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pairs[f"the gradient of {name}"] = arena[f"gradients/policy.{name}"], gradient
    for name, (result, expected) in pairs.items():
        error = relative_error(result, expected)
        if not error < TOLERANCE:
            return f"{name} would differ by {100 * error:.2g}%"
    return None


def check_recurrent_contract(policy, vecenv):
    """Return which part of the recurrent contract a network violates, or None.

    Checked are two faults that raise no error: a step adds tensors to the state that
    `initial_state` lacks, which are lost; forward takes agents for time.
    """
    if type(policy).__module__ == models.__name__ or models.is_plain(policy):
        return None
    device = next(policy.parameters(), torch.zeros(())).device
    observations, *_ = sample_inputs(vecenv, device)

    def make_state(*shape):
        """Return the first state of (T, N) steps or (N,) agents."""
        state = models.initial_state(policy, shape[-1])
        flags = torch.zeros(shape, dtype=torch.uint8, device=device)
        return {**{name: tensor.to(device) for name, tensor in state.items()},
                "resets": flags, "valid": flags + 1}

    def run_over_time(observations):
        return models.join_outputs(*policy(observations, make_state(*observations.shape[:2])))[0]

    def run_steps(keeps_all):
        """Return the outputs, and the names that a step adds to the state."""
        torch.manual_seed(0)  # a network may draw noise; `evaluation_mode` restores the generator
        state, outputs = make_state(AGENTS), []
        names = set(state)
        for row in observations:
            outputs.append(models.join_outputs(*models.one_step(policy, row, state))[0])
            added = state.keys() - names - {"fields"}
            state = state if keeps_all else {name: state[name] for name in names}
        return torch.stack(outputs), added

    name = type(policy).__name__
    step = "forward_eval" if hasattr(policy, "forward_eval") else "forward"
    # the run itself reports an error
    with contextlib.suppress(Exception), models.evaluation_mode(policy):
        outputs, added = run_steps(keeps_all=False)
        if added and relative_error(run_steps(keeps_all=True)[0], outputs) > 1e-3:
            return (f"{name}.{step} leaves {', '.join(sorted(added))} in the state, which "
                    "would be lost. Return it from initial_state(num_agents), zeros of "
                    "(layers, num_agents, size), or take --rnn.name lstm or gru.")
        if not hasattr(policy, "forward_eval") or getattr(policy, "takes_batches", False):
            return None
        swapped = run_over_time(observations.transpose(0, 1)).transpose(0, 1)
        error = relative_error(run_over_time(observations), outputs)
        if error > 1e-3 > relative_error(swapped, outputs):
            return (f"{name}.forward takes agents first, but gets time first, (T, N, "
                    "*observation). Remove batch_first=True from its layers.")
    return None


def relative_error(result, expected):
    """Return the norm of the difference, relative to that of `expected`."""
    return float((result - expected).norm() / (expected.norm() + 1e-6))
