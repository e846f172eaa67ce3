"""Check that a hand-written engine computes what the policy computes.

fast/compiled.py and fast/fused.py reimplement some methods of models.py and engines.py, for the
classes in `NETWORKS`. Three checks let them run:

    digest      when a run starts: the syntax trees of these methods have the digest `DIGEST`
    compare     then, and when weights are loaded: both give the same on a few samples
    find_edit   in each epoch: no module has a hook, a parametrization or a replaced method

tests/test_engines.py compares them on many more. After an edit of a method in `REIMPLEMENTED`, make
it in both engines too, run the tests, and write the digest that they print. The edited network then
keeps its fast engine.
"""

import torch
from torch import nn

import emulation
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
    engines.Buffers: ("begin_rollout", "sample_actions", "sample_arguments", "copy_state", "loss"),
    engines.StepByStep: ("run", "act_on_row", "bootstrap"),
    engines.TorchPolicy: ("act", "state_of", "add_gradients"),
    engines.Autograd: ("rollout", "backward", "_backward_share")}
DIGEST = "0d60f9bca57f6d08"
TOLERANCE = 0.1  # relative error; float32 rounding, multiplied by large weights, stays below it


def digest():
    """Return the digest of REIMPLEMENTED, or None without its source."""
    return emulation.digest(*(getattr(owner, name) for owner, names in REIMPLEMENTED.items()
                              for name in names))


def find_edit(policy, engine, modules=None):
    """Return what in a policy's objects an engine does not implement; None if nothing.

    It sees classes, hooks and replaced methods; `digest` sees edited source. engine: "compiled" or
    "fused". modules: list(policy.named_modules()) of the engine.
    """
    is_wrapped = type(policy) is models.Normalized
    kind = type(policy.policy if is_wrapped else policy)
    if kind not in NETWORKS[engine] or (is_wrapped and kind is models.MinGRUPolicy):
        return (f"{'models.Normalized around ' if is_wrapped else ''}{kind.__name__} is not "
                + " or ".join(f"models.{known.__name__}" for known in NETWORKS[engine]))
    if modules is not None and modules != list(policy.named_modules()):
        return "a part of the network is replaced"
    if engines.is_hooked(nn.modules.module, "_global"):
        return "torch has hooks for every module"
    for path, module in policy.named_modules():
        name, kind = path or "the network", type(module)
        if kind not in FUNCTIONS:
            return f"{name} is a {kind.__name__}"
        edits = engines.replaced_methods(module) + [
            method for method, function in FUNCTIONS[kind].items()
            if getattr(kind, method, None) is not function]
        if edits:
            return f"{edits[0]} of {name} is replaced"
        if engines.is_hooked(module) or any(
                parameter._backward_hooks for parameter in module.parameters(recurse=False)):
            return f"{name} has hooks"
    return None


def compare(policy, vecenv, sample, device="cpu"):
    """Run both on a few samples; return how they differ, or None.

    sample(policy, arena, steps, rows): the engine's network, compiled.Sample or fused.Sample.
    Compared are engines.STEPS steps of engines.AGENTS agents, with resets and inactive agents: the
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
        return _compare(policy, sample, device, *engines.sample_inputs(vecenv, device))
    except Exception as error:
        return f"it does not run as a network of models.py does: {type(error).__name__}: {error}"
    finally:
        matmul.fp32_precision = precision
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


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
    state = policy.initial_state(N) if hasattr(policy, "initial_state") else {}
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
        error = engines.relative_error(result, expected)
        if not error < TOLERANCE:
            return f"{name} would differ by {100 * error:.2g}%"
    return None
