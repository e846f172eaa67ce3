"""Ocean: environments in C, compiled on first use.

    import ocean
    library = ocean.load("breakout")                # compiles ocean/breakout/breakout.h, once
    envs = library.create(num_envs=4096, seed=0, settings={"frameskip": 4})
    rows = ocean.rows(observations, actions, rewards, terminals, truncations, final_observations)
    envs.reset(rows)
    envs.step(rows)                                 # reads actions, writes all the others

`names()` lists all environments. `load` also takes the path of a header (.h). `env.h` explains how
to write one; begin with a copy of `squared` (one agent) or `target` (several).

`Library.step_address` is the address of a C function `void (char* envs, int64 start, int64 end,
const int64* rows)`. Any thread may call it, without the GIL; two calls at the same time must have
disjoint ranges of environments.
"""

import contextlib
import ctypes
import difflib
import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete  # `gymnasium` here is the file beside it

import absolute_imports  # noqa: F401  first
import processes
from errors import ConfigError

FOLDER = Path(__file__).resolve().parent
# No -ffast-math: a NaN must stay one, and all builds of one machine give the same trajectories.
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno"]
DEBUG_FLAGS = ["-std=gnu11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
SHARED_FLAGS = ["-shared", "-fPIC", "-Wall", "-Wextra", "-DRAYLIB_POINTERS",
                "-Werror=implicit-function-declaration"]  # else a misspelt name fails at loading
FLOAT_MAX = float(np.finfo(np.float32).max)  # the largest value of a float setting

POINTER, INT = ctypes.c_void_p, ctypes.c_int64
SIGNATURES = {
    "ocean_step": (None, [POINTER, INT, INT, POINTER]),
    "ocean_rows": (None, [POINTER, POINTER, POINTER]),
    "ocean_reset": (None, [POINTER, INT, INT, POINTER]),
    "ocean_init": (ctypes.c_char_p, [POINTER, INT, INT, ctypes.c_uint64, POINTER, INT, POINTER]),
    "ocean_place": (INT, [POINTER, INT, INT]),
    "ocean_log": (None, [POINTER, INT, INT, POINTER]),
    "ocean_every_final": (None, [POINTER, INT]),
    "ocean_render": (None, [POINTER, INT]),
    "ocean_raylib": (ctypes.c_char_p, [POINTER]),
    "ocean_describe": (ctypes.c_char_p, []),
    "ocean_spaces": (ctypes.c_char_p, [POINTER, INT]),
    "ocean_keys": (ctypes.c_char_p, [POINTER, INT]),
}


def names():
    """List the environments that `load` knows, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/*.h")
                  if path.stem == path.parent.name)


def load(name, debug=False):
    """Return the `Library` of one of `names()`, or of the path of a header.

    Compiles it if it or the compiler changed. `debug` builds with the address and the
    undefined-behaviour sanitizers, with which Python must have been started:
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)".
    """
    is_path = str(name).endswith(".h")
    header = Path(name).resolve() if is_path else FOLDER / name / f"{name}.h"
    if is_path and not header.exists():
        raise ConfigError(f"there is no file {header}.")
    if not header.exists():
        other = (f"Gymnasium's is gym/{name}" if re.search(r"-v\d+$", str(name)) else
                 "Gymnasium's are gym/ID, custom ones FILE.py:NAME or FILE.h")
        raise ConfigError(f"there is no environment {name!r} in {FOLDER.name}/: "
                          f"{nearest(name, names())}. {other} (docs/environments.md).")
    return _load(header, build(header, debug))


def rows(observations, actions, rewards, terminals, truncations, final_observations=None,
         valid=None, action_masks=None):
    """Return the eight addresses that `step` and `reset` take, (8,) int64.

    The arrays' first axis goes over all agents; an array that is None has address 0. The first five
    are required, and `valid` if the environment has_valid. Keep the arrays alive, because only
    their addresses are kept. Raises ValueError if one is not contiguous.
    """
    arrays = (observations, actions, rewards, terminals, truncations, final_observations, valid,
              action_masks)
    for array in arrays:
        if array is not None and not array.flags.c_contiguous:
            raise ValueError(f"rows must be contiguous, got strides {array.strides} for "
                             f"shape {array.shape}")
    return np.array([0 if array is None else array.ctypes.data for array in arrays], dtype=np.int64)


class Key(NamedTuple):
    """A key of a player: while it is down, the action's `head` is `value`.

    head: a dimension, if actions are continuous. The key REST, code 0, is for no key down.
    """

    head: int
    code: int  # raylib's number
    name: str
    value: float


class Library:
    """One compiled environment, of a header and its shared library at `path`.

    Attributes: name, header, path; step_address; and what ocean_describe of binding.c
    writes: settings {name: default}; settings_help {name: text}; log_fields; fps, the natural
    number of steps a second; by_turns, whether the game waits for a player's key; has_valid,
    has_action_masks; observation_dtype; struct_size, plain_start, log_offset and
    rows_size, in bytes.
    """

    def __init__(self, header, path):
        self.name, self.header, self.path = header.stem, header, path
        self.functions = ctypes.CDLL(str(self.path))
        for function, (result, arguments) in SIGNATURES.items():
            getattr(self.functions, function).restype = result
            getattr(self.functions, function).argtypes = arguments
        # a help text may have line breaks
        self.__dict__.update(json.loads(self.functions.ocean_describe(), strict=False))
        self.observation_dtype = np.dtype(self.observation_dtype)
        self.step_address = ctypes.cast(self.functions.ocean_step, POINTER).value

    def __repr__(self):
        return f"<ocean environment {self.name}>"

    def create(self, num_envs, seed=0, settings=None, first_env=0):
        """Make an `Envs` of `num_envs` environments.

        The random numbers of environment i depend on `seed` and `first_env + i`. settings: one dict
        for all, or a list with one for each. Raises ConfigError for a wrong setting.
        """
        return Envs(self, num_envs, seed, settings, first_env)

    def parse_settings(self, settings):
        """Return all settings as float64 in the header's order.

        settings: those that differ from the defaults, a dict or None.
        """
        for name in settings or ():
            if name not in self.settings:
                raise ConfigError(f"{self.name} has no setting {name!r}: "
                                  f"{nearest(name, self.settings)}")
        values = self.settings | (settings or {})
        return np.array([self._parse(name, value) for name, value in values.items()], np.float64)

    def _parse(self, name, value):
        kind = type(self.settings[name])
        description, types, low, high = {
            float: ("a finite number of 32 bits", (int, float, np.integer, np.floating),
                    -FLOAT_MAX, FLOAT_MAX),
            int: ("an integer of 32 bits", (int, np.integer), -(2**31), 2**31 - 1),
            bool: ("true or false", (bool, np.bool_, int, np.integer), 0, 1)}[kind]
        if not isinstance(value, types) or not low <= value <= high:
            raise ConfigError(f"{self.name}: setting {name} must be {description}, got {value!r} "
                              f"({type(value).__name__})")
        return kind(value)


class Envs:
    """Environments of one kind in one block of memory.

    Attributes: num_envs; num_agents, of all environments; agent_offsets (num_envs + 1,) int64, each
    environment's first agent; memory (uint8), the structs, and its address; heap (uint8), their
    arrays of HEAP, None once closed; observation_shape, observation_dtype; action_heads, the
    choices of each discrete action, None if actions are continuous; action_dims, the numbers in an
    action; action_dtype; single_observation_space, single_action_space; has_valid,
    has_action_masks; logs (num_envs, log fields) float32, a view of the sums that `log` reads and
    clears. Arrays of a step have one row for each agent: observations
    (agents, *shape), actions (agents, action_dims), masks (agents, sum of heads), others (agents,).
    """

    def __init__(self, library, num_envs, seed, settings, first_env):
        several = isinstance(settings, (list, tuple))
        if num_envs < 1 or (several and len(settings) != num_envs):
            raise ConfigError(f"num_envs = {num_envs}: must be 1 or more, and the length of "
                              "settings if that is a list.")
        self.library, self.functions = library, library.functions
        self.num_envs = num_envs
        self.has_valid, self.has_action_masks = library.has_valid, library.has_action_masks
        self.memory = _zeros(num_envs * library.struct_size)
        self._address = self.memory.ctypes.data
        shape, strides = (num_envs, len(library.log_fields)), (library.struct_size, 4)
        self.logs = np.ndarray(shape, np.float32, self.memory, library.log_offset, strides)
        self.agent_offsets = np.zeros(num_envs + 1, dtype=np.int64)

        parsed = np.array([*map(library.parse_settings, settings if several else [settings])])
        problem = self.functions.ocean_init(
            self._address, num_envs, first_env, int(seed) % 2**64, parsed.ctypes.data, several,
            self.agent_offsets.ctypes.data)
        if problem:
            where = f" (environment {np.count_nonzero(self.agent_offsets)})" if several else ""
            raise ConfigError(f"{library.name}{where}: {problem.decode()}")
        self.heap = _zeros(self.place_heap(0))
        self.place_heap(self.heap.ctypes.data)
        self.num_agents = int(self.agent_offsets[-1])
        # Saved bytes fit only environments with the same source and the same settings.
        identity = repr((library.path.stem, num_envs, parsed.tolist()))
        self._identity = np.frombuffer(hashlib.sha256(identity.encode()).digest(), dtype=np.uint8)

        texts = {self.functions.ocean_spaces(self.address, i)
                 for i in range(num_envs if several else 1)}
        if len(texts) > 1:
            raise ConfigError(f"{library.name}: all environments of a vector must have the same "
                              f"spaces, got {b' and '.join(texts).decode()}.")
        spaces = json.loads(texts.pop())
        self.observation_shape = tuple(spaces["observation_shape"])
        self.observation_dtype = library.observation_dtype
        low, high = (float(spaces[f"observation_{end}"]) for end in ("low", "high"))
        floats = self.observation_dtype.kind == "f"
        limits = (np.finfo if floats else np.iinfo)(self.observation_dtype)
        if not low < high or not (floats or limits.min <= low <= high <= limits.max):
            raise ConfigError(f"{library.name}: c_spaces gives .observation_low = {low:g} and "
                              f".observation_high = {high:g}: must be a lower and a higher number "
                              f"of {self.observation_dtype}.")
        self.action_heads = spaces["action_heads"] or None
        self.action_dims = len(self.action_heads) if self.action_heads else spaces["action_dims"]
        self.action_dtype = np.dtype(np.int32 if self.action_heads else np.float32)
        self.single_observation_space = Box(
            self.observation_dtype.type(low),
            self.observation_dtype.type(high),
            self.observation_shape,
            self.observation_dtype.type,
        )
        if not self.action_heads:
            self.single_action_space = Box(-1.0, 1.0, (self.action_dims,), np.float32)
        elif len(self.action_heads) == 1:
            self.single_action_space = Discrete(self.action_heads[0])
        else:
            self.single_action_space = MultiDiscrete(self.action_heads)

    @property
    def address(self):
        """Return the address of the environments; raise RuntimeError if they are closed."""
        self._check_open()
        return self._address

    def _check_open(self):
        if self.heap is None:
            raise RuntimeError(f"{self.library.name}: these environments are closed.")

    def reset(self, rows, start=0, end=None):
        """Begin an episode in environments [start, end).

        Writes observations, and 0 to rewards, terminals and truncations.
        """
        self._call(self.functions.ocean_reset, rows, start, end)

    def step(self, rows, start=0, end=None):
        """Step environments [start, end) without the GIL.

        Actions must lie within their space, because C does not check them. rows: the array of
        `rows()`, or its address, which saves a microsecond a call.
        """
        self._call(self.functions.ocean_step, rows, start, end)

    def log(self, start=0, end=None, sums=None):
        """Return {field: mean} over the episodes that ended since the last call.

        Of environments [start, end); "n" is the number of episodes. {} if there are none. sums: of
        the log fields, if they were added up elsewhere.
        """
        if sums is None:
            totals = np.zeros(len(self.library.log_fields))
            envs = range(self.num_envs)[start:end]
            self.functions.ocean_log(self.address, envs.start, envs.stop, totals.ctypes.data)
            sums = totals.tolist()
        fields = dict(zip(self.library.log_fields, sums, strict=True))
        n = fields.pop("n")
        return {**{name: value / n for name, value in fields.items()}, "n": n} if n else {}

    def rows_for_a_gpu(self, addresses):
        """Return the table of a step's arrays that device.py's kernels read (uint8).

        addresses: the eight arrays' addresses on the GPU, in the order of `rows`.
        """
        rows = np.empty(self.library.rows_size, np.uint8)
        self.functions.ocean_rows(self.address, addresses.ctypes.data, rows.ctypes.data)
        return rows

    def every_final(self):
        """Write final observations of terminated agents too, not only of truncated ones."""
        self.functions.ocean_every_final(self.address, self.num_envs)

    def keys(self):
        """Return how a person plays: ([`Key`], columns of a board for clicks, or 0)."""
        described = json.loads(self.functions.ocean_keys(self.address, 0))
        return [Key(*entry) for entry in described["keys"]], described["click_columns"]

    def place_heap(self, address):
        """Point HEAP's arrays into memory at `address`; return its size in bytes."""
        return self.functions.ocean_place(self._address, self.num_envs, address)

    @property
    def state(self):
        """Return uint8 views of what is saved: (structs, heap).

        structs: from rng on, (num_envs, bytes). Raises RuntimeError if the environments are closed.
        """
        self._check_open()
        structs = self.memory.reshape(self.num_envs, -1)
        return structs[:, self.library.plain_start:], self.heap

    def save(self):
        """Return the state of all environments as a uint8 array, which `load` restores."""
        structs, heap = self.state
        return np.concatenate([self._identity, structs.ravel(), heap])

    def load(self, saved):
        """Restore a state of as many environments with the same settings and source."""
        (structs, heap), saved = self.state, np.frombuffer(saved, np.uint8)
        ends = np.cumsum([len(self._identity), structs.size, heap.size])
        identity, of_structs, of_heap, _ = np.split(saved, ends)
        if not np.array_equal(identity, self._identity) or len(saved) != ends[-1]:
            raise ValueError(f"this state was not saved from {self.num_envs} environments of "
                             f"{self.library.name} with these settings and this build.")
        structs[:] = of_structs.reshape(structs.shape)
        heap[:] = of_heap

    def render(self, index=0):
        """Draw environment `index`; return the picture, (height, width, 3) uint8, RGB.

        It needs no display, but the package raylib_software.
        """
        address, index = self.address, range(self.num_envs)[index]
        raylib = _raylib()
        missing = self.functions.ocean_raylib(raylib._handle)
        if missing:
            raise RuntimeError(f"raylib has no function {missing.decode()}. Correct its "
                               "declaration in ocean/draw.h.")
        with contextlib.nullcontext() if raylib.IsWindowReady() else _without_greeting():
            self.functions.ocean_render(address, index)
        return _read_screen(raylib)

    def close(self):
        """Free the arrays of HEAP. The environments cannot be used afterwards."""
        self.heap = None

    def _call(self, function, rows, start, end):
        end = self.num_envs if end is None else end
        if not 0 <= start <= end <= self.num_envs:
            raise IndexError(f"environments {start} to {end} of {self.num_envs}.")
        function(self.address, start, end, rows if isinstance(rows, int) else rows.ctypes.data)


def _zeros(size):
    """Return zeros that begin at a multiple of 64 bytes, (size,) uint8."""
    block = np.zeros(size + 64, np.uint8)
    shift = -block.ctypes.data % 64
    return block[shift : shift + size]


def find_compiler():
    """Return the path of $CC, or of the first that exists of gcc, clang and cc."""
    name = os.environ.get("CC")
    candidates = [name] if name else ["gcc", "clang", "cc"]
    compiler = next(filter(None, map(shutil.which, candidates)), None)
    if compiler is None:
        raise ConfigError(f"CC = {name!r}: no such program. Name a C compiler, or unset CC." if name
                          else "no C compiler found. Install gcc or clang, or set CC.")
    return compiler


def header_flags(header):
    """Return the compiler's flags that let binding.c and main.c include a header."""
    return ["-I", str(FOLDER), f'-DENV_HEADER="{header}"']


def build(header, debug=False, extra_flags=()):
    """Compile a header to a shared library, unless it exists; return its path."""
    flags = [*(DEBUG_FLAGS if debug else FLAGS), *SHARED_FLAGS, *extra_flags,
             *header_flags(header)]
    name = f"{header.stem}-{'debug-' if debug else ''}"
    return compile_library(FOLDER / "binding.c", name, flags, header)


def compile_library(source, name, flags, header):
    """Return the path of the shared library that `source` compiles to.

    Its name is `name` and a hash of all included files, the flags, the compiler and the processor.
    It is written under another name and renamed, so that processes that start together never read
    half of it. Prints the compiler's warnings. Raises ConfigError with its errors, about `header`.
    """
    compiler = find_compiler()
    contents = b"\0".join([compiler.encode(), repr(flags).encode(), _macros(compiler, *flags),
                           *(file.read_bytes() for file in included_files(source, flags))])
    path = _cache_folder() / f"{name}{hashlib.sha256(contents).hexdigest()[:16]}.so"
    if not path.exists():
        handle, temporary = tempfile.mkstemp(".so", "building-", path.parent)
        os.close(handle)
        command = [compiler, *flags, str(source), "-o", temporary, "-lm", "-ldl"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            os.remove(temporary)
            raise ConfigError(f"{header} does not compile:\n{' '.join(command)}\n{result.stderr}")
        places = {Path(line.partition(":")[0]).parent for line in result.stderr.splitlines()
                  if "warning:" in line}
        if places - {source.parent}:  # those of binding.c and env.h are not the user's
            processes.say(result.stderr.rstrip(), sys.stderr)
        os.chmod(temporary, 0o755)  # mkstemp gives others no right to read
        os.replace(temporary, path)
    return path


def included_files(source, flags):
    """List a C file and all that it includes, without the system's headers."""
    command = [find_compiler(), *flags, "-MM", str(source)]
    rule = subprocess.run(command, capture_output=True, text=True).stdout.replace("\\\n", " ")
    words = re.split(r"(?<!\\)\s+", rule.partition(": ")[2].strip())
    # Nothing is printed if a file is missing; the compilation reports that.
    return [Path(re.sub(r"\\([ #])", r"\1", word).replace("$$", "$")) for word in words if word]


@functools.cache
def _macros(compiler, *flags):
    """Return a compiler's macros: its version and the processor's features."""
    command = [compiler, *flags, "-dM", "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=True).stdout


_load = functools.cache(Library)  # a changed source has another path


@functools.cache
def _cache_folder():
    """Return ocean/.build, or the user's cache or a temporary folder."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ocean"
    for folder in (FOLDER / ".build", user):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return processes.spare_folder("compiled environments are")


def nearest(name, known, listed=None):
    """Write the end of an error about an unknown name: the nearest ones, and all.

    listed: the names to list instead of `known`; () for none.
    """
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    if listed == ():
        return hint
    return f"{hint} There are: {', '.join(known if listed is None else listed) or 'none'}".strip()


class _Image(ctypes.Structure):
    _fields_ = (("data", POINTER), ("width", ctypes.c_int), ("height", ctypes.c_int),
                ("mipmaps", ctypes.c_int), ("format", ctypes.c_int))


class _Color(ctypes.Structure):
    _fields_ = tuple((channel, ctypes.c_uint8) for channel in "rgba")


def has_display():
    """Tell whether there is a display for a window."""
    return (bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
            or sys.platform in ("darwin", "win32"))


@functools.cache
def _raylib():
    """Load the C functions of raylib_software.

    With RTLD_LOCAL, because it contains an SDL, which pygame's modules would use in place of
    theirs. Pictures of version 6.2 are upside down and BGR: a red mark, drawn and read once, gives
    the order of this version, `raylib.order`.
    """
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # else SDL catches SIGTERM and Ctrl-C
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # "RAYLIB STATIC 6.2.0.0 LOADED"
            from raylib import _raylib_cffi
    except ImportError as error:
        raise ConfigError("drawing needs raylib: pip install raylib_software") from error
    raylib = ctypes.CDLL(_raylib_cffi.__file__, mode=ctypes.RTLD_LOCAL)
    flags = "IsWindowReady", "WindowShouldClose", "IsKeyPressed", "IsKeyDown", "IsMouseButtonPressed"
    for name, result, arguments in (
            ("LoadImageFromScreen", _Image, []), ("UnloadImage", None, [_Image]),
            ("DrawRectangle", None, [ctypes.c_int] * 4 + [_Color]),
            ("ClearBackground", None, [_Color]), *((flag, ctypes.c_bool, None) for flag in flags)):
        getattr(raylib, name).restype = result
        getattr(raylib, name).argtypes = arguments

    raylib.order = (slice(None), slice(0, 3))
    raylib.SetTraceLogLevel(4)  # warnings and worse
    with _without_greeting():
        raylib.InitWindow(64, 64, b"")
    for _ in range(2):  # the first frame of a window shows nothing
        raylib.BeginDrawing()
        raylib.ClearBackground(_Color(0, 0, 0, 255))
        raylib.DrawRectangle(0, 0, 64, 8, _Color(255, 0, 0, 255))
        raylib.EndDrawing()
    mark = _read_screen(raylib)
    raylib.CloseWindow()
    upright, rgb = mark[0].any(), mark[..., 0].any()
    raylib.order = (slice(None, None, 1 if upright else -1),
                    slice(0, 3) if rgb else slice(2, None, -1))
    return raylib


@contextlib.contextmanager
def _without_greeting():
    """Drop what C prints meanwhile: raylib prints a line when it begins."""
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    output = os.dup(1)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(output, 1)
        os.close(output)


def _read_screen(raylib):
    image = raylib.LoadImageFromScreen()
    pixels = ctypes.cast(image.data, ctypes.POINTER(ctypes.c_uint8))
    rows, channels = raylib.order
    screen = np.ctypeslib.as_array(pixels, (image.height, image.width, 4))[rows, :, channels].copy()
    raylib.UnloadImage(image)
    return screen
