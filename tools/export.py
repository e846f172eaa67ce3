"""Export a policy: an ONNX model, a flat file for C, a C program, a web page.

    python pufferl.py export breakout --load-model-path latest --export.onnx breakout.onnx
    python pufferl.py export breakout --baseline --export.flat breakout.bin    # the one that ships
    python pufferl.py export breakout --baseline --export.c breakout_c && make -C breakout_c run
    python pufferl.py export breakout --baseline --export.web breakout_web

ONNX is for any network. The others are for the default network (models.MinGRUPolicy), which
ocean/policy.h runs without a library; c and web also compile the environment, so they are for those
in C. docs/export.md has the details.
"""

import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import configuration
import emulation
import environments
import flat_spaces
import models
import ocean
import pufferl
import vector
from errors import ConfigError, exit_on_error, require
from fast import verify
from tools.options import read_command, with_envs


@dataclass
class Export:
    onnx: str | None = None
    """Write the network to this .onnx file, with its recurrent state as inputs and outputs."""
    flat: str | None = None
    """Write the default network to this file as one row of float32, for ocean/policy.h."""
    c: str | None = None
    """Write environment, policy and a main as a C program into this folder, with a Makefile."""
    web: str | None = None
    """Build a page into this folder, on which the policy plays; needs emscripten."""


# --------------------------------------------------------------------------------------------------
# One flat file for policy.h

# the numbers of the observation's types in policy.h
TYPES = ("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32",
         "int64", "uint64")
MAX_HEADS, MAX_SIZE = 64, 2**20  # as in policy.h


def flat_policy(policy, env):
    """Return the default network as a row of float32, in the form of ocean/policy.h.

    env: anything with `single_observation_space`. Raises ConfigError for what policy.h cannot read.
    """
    action, dtype = env_action(env), np.dtype(env.single_observation_space.dtype).name
    problem = f"the network is {type(policy).__name__}, not the default one over plain numbers"
    if type(policy) is models.MinGRUPolicy:
        edit = verify.find_edit(policy, "compiled")
        heads, inputs = policy.decoder.heads or [], policy.encoder.in_features
        norm = policy.normalizer
        means = 0 if norm is None else norm.shift.abs()
        checks = {
            "a method of models.py or engines.py was edited, which ocean/policy.h implements":
                verify.digest() not in (verify.DIGEST, None),
            f"{edit}, which ocean/policy.h implements": edit is not None,
            f"observations are {dtype}; policy.h reads {', '.join(TYPES)}": dtype not in TYPES,
            f"there are {len(heads)} choices and {inputs} inputs; policy.h reads at most "
            f"{MAX_HEADS} and {MAX_SIZE}":
                len(heads) > MAX_HEADS or max(inputs, *heads, 0) > MAX_SIZE,
            f"an action of {action.space} is not a float32":
                (action.starts.astype(np.float32) != action.starts).any(),
            "the observations' mean is so far from 0 that their deviations are lost in float32":
                norm is not None and ((means > 2**24) & (means * norm.scale > 2**14)).any()}
        problem = next((text for text, is_wrong in checks.items() if is_wrong), None)
    require(problem is None, f"--export.flat, c, web: {problem}. Use --export.onnx.")
    decoder = policy.decoder
    dims = 0 if decoder.log_std is None else len(decoder.log_std)
    low, high = (bound.astype(np.float32) for bound in (action.low, action.high))
    # rounded to float32 a bound of float64 may lie outside
    low = np.where(low < action.low, np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(high > action.high, np.nextafter(high, np.float32(-np.inf)), high)
    limits = np.float32([*action.starts, *low, *high])
    is_bounded = bool(action.starts.any() or np.isfinite([*low, *high]).any())
    magic = np.frombuffer(b"PUFR", "<f4")[0]
    sizes = [TYPES.index(dtype), inputs, policy.hidden_size, policy.num_layers, len(heads), dims]
    linears = [policy.encoder, *policy.rnn.layers, decoder]
    weights = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
    weights += [] if decoder.log_std is None else [decoder.log_std]
    squash = models.squash_of(policy)
    weights = weights if norm is None else [norm.shift, norm.scale, *weights]
    weights += [] if squash is None else [squash[:2]]
    form = 1 + (norm is not None) + 2 * (squash is not None) + 4 * is_bounded
    header = np.array([magic, form, *sizes, *heads], "<f4")
    return np.concatenate([header, *(tensor.detach().cpu().numpy().ravel() for tensor in weights),
                           limits[: len(limits) * is_bounded]]).astype("<f4")


def env_action(env):
    """Return an environment's FlatAction. One in C clips by itself."""
    space = getattr(env, "env_single_action_space", env.single_action_space)
    action = flat_spaces.FlatAction(space)
    if isinstance(env, ocean.Envs | vector.Native):
        action.low, action.high = action.low - np.inf, action.high + np.inf
    return action


# --------------------------------------------------------------------------------------------------
# ONNX


class Step(torch.nn.Module):
    """One step of a policy for N agents with tensors in and tensors out.

    In: the fields of the observation, (N, *shape) each; action masks (N, A) uint8 if there are any;
    recurrent state (layers, N, size), .... Out: logits (N, A), or mean and log_std (N, A); the most
    likely action, (N, *shape) for each part of its space; value (N, 1); the new state, .... Their
    names are in `inputs` and `outputs`.
    """

    def __init__(self, policy, env):
        super().__init__()
        self.policy = policy
        self.action = env_action(env)
        self.masked = getattr(env, "has_action_masks", False)
        self.flat = flat_spaces.FlatObservation(emulation.declared_space(env))
        self.state = models.initial_state(policy, 2)
        joined = {"action": [names for _, names, _ in self.action.leaves],
                  "observation": [names for _, names, _ in self.flat.leaves]}
        self.outputs = [*(["logits"] if self.action.heads else ["mean", "log_std"]),
                        *("/".join(("action", *names)) for names in joined["action"]), "value",
                        *(f"new_{name}" for name in self.state)]
        others = [*self.outputs, *self.state, "action_mask"]
        names = ["/".join(names) or "observation" for names in joined["observation"]]
        self.inputs = [*(f"observation/{name}" if name in others else name for name in names),
                       *["action_mask"] * self.masked, *self.state]

    def forward(self, *inputs):
        count = len(self.flat.leaves)
        fields, rest = inputs[:count], inputs[count:]
        masks, state = (rest[0], rest[1:]) if self.masked else (None, rest)
        observation = self._join(fields)
        # no episode begins, and all agents are active; len(observation) would fix their number
        flags = observation.new_zeros(observation.shape[0], dtype=torch.uint8)
        carried = {**dict(zip(self.state, state, strict=True)), "resets": flags, "valid": flags + 1}
        outputs, log_std = models.join_outputs(*models.one_step(self.policy, observation, carried))
        logits = outputs[..., :-1]
        return (logits, *([] if log_std is None else [log_std]), *self._actions(logits, masks),
                outputs[..., -1:], *(carried[name] for name in self.state))

    def _join(self, fields):
        """Return the flat observation; for nativize_tensor in an export the numbers."""
        if not self.flat.structured:
            return fields[0].reshape(-1, *self.flat.shape)
        if torch.onnx.is_in_onnx_export():
            dtype = fields[0].dtype if len({f.dtype for f in fields}) == 1 else torch.float64
            return torch.cat([f.reshape(f.shape[0], -1).to(dtype) for f in fields], dim=1)
        flat = np.zeros((len(fields[0]), *self.flat.shape), self.flat.flat_dtype)
        for view, field in zip(self.flat.fields(flat), fields, strict=True):
            view[...] = field.numpy()
        return torch.from_numpy(flat)

    def _actions(self, logits, masks):
        """Return the most likely action, in the form of FlatAction.unflatten."""
        action, squash = self.action, models.squash_of(self.policy)
        if action.heads:
            allowed = logits if masks is None else logits.masked_fill(masks == 0, -torch.inf)
            modes = [head.argmax(-1) for head in allowed.split(action.heads, dim=-1)]
            row = torch.stack(modes, dim=-1) + torch.from_numpy(action.starts)
        else:
            row = logits if squash is None else models.squashed(squash, logits)
            low, high = torch.from_numpy(action.low), torch.from_numpy(action.high)
            row = torch.minimum(torch.maximum(row.to(low.dtype), low), high)
        return [row[:, first : first + count].to(torch.from_numpy(np.zeros(0, leaf.dtype)).dtype)
                .reshape(-1, *leaf.shape) for leaf, first, count in action.parts]


def write_onnx(policy, env, path, name=""):
    """Write a policy to `path` as ONNX, for any number N of agents.

    Inputs and outputs are those of `Step`; docs/export.md has their names. The metadata describes
    the actions. Returns check_onnx's result. Raises ConfigError if the export fails, ImportError
    without onnxscript.
    """
    step = Step(policy, env).eval()
    heads, squash = step.action.heads, models.squash_of(policy)
    agents = torch.export.Dim("agents", min=1)
    # without torch's notes; check_onnx says whether the export is right
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    distribution = torch.distributions.Distribution
    validates = distribution._validate_args
    distribution.set_default_validate_args(False)  # its checks branch on values
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                step, random_inputs(step, 2), dynamo=True, verbose=False,
                input_names=step.inputs, output_names=step.outputs,
                dynamic_shapes=(tuple({1 if name in step.state else 0: agents}
                                      for name in step.inputs),))
    except torch.onnx.errors.OnnxExporterError as error:
        hint = (" It must read the fields of a Dict or Tuple through emulation.nativize_tensor, as "
                "policy.name auto does." if step.flat.structured else "")
        network = type(models.inner_policy(policy)).__name__
        raise ConfigError(f"torch cannot export {network}.{hint}\n{error}") from error
    finally:
        distribution.set_default_validate_args(validates)
    actions = ({"action_heads": " ".join(map(str, heads))} if heads
               else {"action_dims": str(step.action.columns)})
    if squash is not None:
        actions |= {f"action_{key}": " ".join(f"{x:.9g}" for x in row.tolist())
                    for key, row in zip(("middle", "half"), squash, strict=False)}
    program.model.metadata_props.update({"environment": name, **actions})
    program.save(path, external_data=False)
    return check_onnx(step, path)


def random_inputs(step, n):
    """Draw inputs of a Step for n agents.

    Observations are within 1,000, because sums of a float's largest numbers are infinite.
    """
    flat = np.stack([step.flat.flatten(step.flat.space.sample()) for _ in range(n)])
    fields = [np.ascontiguousarray(field) for field in step.flat.fields(flat)]
    inputs = [torch.from_numpy(field.clip(-1e3, 1e3) if field.dtype.kind == "f" else field)
              for field in fields]
    if step.masked:
        masks = torch.randint(2, (n, sum(step.action.heads)), dtype=torch.uint8)
        masks[:, step.action.firsts] = 1
        inputs.append(masks)
    return *inputs, *(torch.randn(tensor.shape[0], n, *tensor.shape[2:])
                      for tensor in step.state.values())


def check_onnx(step, path, tolerance=1e-4):
    """Return the largest relative difference between the file and the network.

    On random observations and states of 1, 2 and 5 agents; None without onnxruntime. Raises
    ConfigError if it is beyond `tolerance`.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    largest = 0.0
    for n in (1, 2, 5):
        inputs = random_inputs(step, n)
        with torch.no_grad():
            expected = step(*inputs)
        feed = {name: tensor.numpy() for name, tensor in zip(step.inputs, inputs, strict=True)}
        for name, ours, theirs in zip(step.outputs, expected, session.run(None, feed), strict=True):
            if name.startswith("action") and not ours.is_floating_point():
                continue  # two logits may be equal but for rounding
            ours = ours.double()
            scale = max(1.0, float(ours.abs().max()))
            # a NaN stays one
            largest = float(np.maximum(largest, np.abs(ours.numpy() - theirs).max() / scale))
    require(largest <= tolerance, f"{path} differs from the network by {largest:.2g} of the "
            "largest output. It does something that torch.onnx cannot follow.")
    return largest


# --------------------------------------------------------------------------------------------------
# Environment and policy as a program: in C, and in a browser


def settings_arguments(library, settings):
    """Return the settings that differ from the header's: ["frameskip=2", ...]."""
    parsed = dict(zip(library.settings, library.parse_settings(settings), strict=True))
    return [f"{name}={float(value):.10g}" for name, value in parsed.items()
            if value != float(library.settings[name])]


MAKEFILE = """# {name} with its policy as a C program; needs no Python. Written by tools/export.py.
CFLAGS ?= -O3 -march=native
ENVIRONMENT = '-DENV_HEADER="{header}"'{trained}

run: {name}
	./{name} policy.bin

# With raylib installed: make window && ./{name}_window policy.bin
{name}: $(wildcard *.h *.c)
	$(CC) -std=gnu11 $(CFLAGS) $(ENVIRONMENT) main.c -o $@ -lm
window: $(wildcard *.h *.c)
	$(CC) -std=gnu11 $(CFLAGS) -DDRAW $(ENVIRONMENT) main.c -o {name}_window -lraylib -lm
.PHONY: run window
"""


def write_c(library, settings, flat, folder):
    """Write a folder with the sources, the policy and a Makefile."""
    folder, beside = Path(folder), library.header.parent
    shared = ("main.c", "binding.c", "policy.h", "env.h", "draw.h")  # main.c includes the others
    copies = {name: ocean.FOLDER / name for name in shared}
    flags = ocean.header_flags(library.header)
    for path in ocean.included_files(ocean.FOLDER / "binding.c", flags):
        name = os.path.relpath(path, beside)
        if path.parent != ocean.FOLDER:
            require(not name.startswith("..") and name not in shared,
                    f"--export.c: {library.header} includes {path}. Rename it or move it into "
                    f"{beside}, so that one folder holds all sources.")
            copies[name] = path
    for name, path in copies.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
    flat.tofile(folder / "policy.bin")
    arguments = ",".join(f'"{argument}"' for argument in settings_arguments(library, settings))
    (folder / "Makefile").write_text(MAKEFILE.format(
        name=library.name, header=library.header.name,
        trained=f" '-DTRAINED={arguments}'" if arguments else ""))


EXPORTED = ("main", "demo_frame", "demo_fps", "demo_steps", "demo_episodes", "demo_score",
            "demo_return", "demo_by_player", "demo_give_back", "demo_restart")


def write_web(library, settings, flat, folder, trained=True):
    """Write a web page (index.html, NAME.js, NAME.wasm) on which the policy plays.

    Returns its files. Raises ConfigError without emscripten.
    """
    emcc = shutil.which("emcc")
    require(emcc, "--export.web needs emscripten, whose compiler emcc is not in the PATH: apt-get "
            "install emscripten node-acorn, or https://emscripten.org")
    folder, name = Path(folder), library.name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        flat.tofile(Path(temporary) / "policy.bin")
        command = [emcc, "-std=gnu11", "-O2", "-Wno-int-to-void-pointer-cast", "-DDRAW",
                   *ocean.header_flags(library.header), str(ocean.FOLDER / "main.c"),
                   "--js-library", str(ocean.FOLDER / "web" / "canvas.js"),
                   "--embed-file", f"{temporary}/policy.bin@policy.bin", "-sALLOW_MEMORY_GROWTH=1",
                   "-sEXPORTED_FUNCTIONS=" + ",".join(f"_{function}" for function in EXPORTED),
                   "-o", str(folder / f"{name}.js")]
        # Debian's emscripten finds its acorn by itself only with Debian's node
        node_path = f"{os.environ.get('NODE_PATH', '')}{os.pathsep}/usr/share/nodejs"
        result = subprocess.run(command, capture_output=True, text=True,
                                env={**os.environ, "NODE_PATH": node_path})
    require(result.returncode == 0,
            f"emcc failed:\n{shlex.join(command)}\n{result.stdout}{result.stderr}")
    page = (ocean.FOLDER / "web" / "index.html").read_text("utf-8")
    values = {"NAME": name, "WHO": "the policy plays" if trained else "an untrained policy plays",
              "KEYS": keys_help(library, settings),
              "ARGUMENTS": str(["policy.bin", *settings_arguments(library, settings)])}
    for key, value in values.items():
        page = page.replace(f"@{key}@", value)
    (folder / "index.html").write_text(page, "utf-8")
    return sorted(path.name for path in folder.iterdir())


def keys_help(library, settings):
    """Return a line for the page that says how to take over the first agent."""
    envs = library.create(1, settings=settings)
    keys, columns = envs.keys()
    envs.close()
    names = list(dict.fromkeys(key.name for key in keys if key.name != "REST"))
    names = [{"UP": "↑", "DOWN": "↓", "LEFT": "←", "RIGHT": "→"}.get(name, name.lower())
             for name in names]
    clicks = ["a click on a cell"] if columns else []
    if not names and not clicks:
        return "this environment has no keys: watch"
    return f"{', '.join(clicks + names)}: you play instead of the policy; enter: it plays again"


# --------------------------------------------------------------------------------------------------
# Command line


def export(env_name, args):
    """Write what the export section names; by default the flat file ENV.bin."""
    chosen = dict(args["export"])
    if not any(chosen.values()):
        chosen["flat"] = f"{Path(args['env_name']).stem}.bin"
    maker = environments.find_maker(args["env_name"])
    library = maker if isinstance(maker, ocean.Library) else None
    for kind in ("c", "web"):
        require(library or not chosen[kind],
                f"--export.{kind} compiles the environment, but {env_name} is not one in C.")
    settings = {key: value for key, value in args["env"].items() if key != "num_envs"}
    with pufferl.load_env(env_name, with_envs(args)) as vecenv:
        env, policy = vecenv.driver_env, pufferl.load_policy(args, vecenv, env_name)
    trained = bool(args["load_model_path"] or args["baseline"])
    if not trained:
        print("neither --load-model-path nor --baseline: this is an untrained policy")
    flat = flat_policy(policy, env) if any(chosen[kind] for kind in ("flat", "c", "web")) else None
    for path in filter(None, (chosen["onnx"], chosen["flat"])):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if chosen["onnx"]:
        difference = write_onnx(policy, env, chosen["onnx"], args["env_name"])
        checked = ("not checked: pip install onnxruntime" if difference is None
                   else f"within {difference:.1g} of torch")
        print(f"wrote {chosen['onnx']} ({checked})")
    if chosen["flat"]:
        flat.tofile(chosen["flat"])
        print(f"wrote {chosen['flat']}: {len(flat):,} float32 for ocean/policy.h")
    if chosen["c"]:
        write_c(library, settings, flat, chosen["c"])
        print(f"wrote {chosen['c']}: make -C {chosen['c']} run")
    if chosen["web"]:
        files = write_web(library, settings, flat, chosen["web"], trained)
        print(f"wrote {chosen['web']}: {', '.join(files)}\n"
              f"to see it: python -m http.server --bind 127.0.0.1 -d {chosen['web']} 8000, then "
              "http://127.0.0.1:8000")


def main(argv, program="pufferl.py export"):
    """Run `export`; `program` is what errors begin with."""
    configuration.SECTIONS["export"] = Export
    with exit_on_error(program, ImportError):
        export(*read_command(argv, program, __doc__))
