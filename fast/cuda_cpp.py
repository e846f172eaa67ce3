"""Translate cells to CUDA C++, compile a .cu file with them, launch its kernels.

    module = Module("kernels.cu", globals())           # the file, and the globals that it names
    module.launch("write_back", 512, 128, T, M, ...)   # blocks, threads a block, arguments

A formula is written once, in Python (kernels.py). The .cu file names a cell or a constant, and gets
its definition before its first line: `translate` writes a cell as C, scalars in assignments,
conditions and loops. Anything else raises an error. CuPy compiles the text by NVRTC; it is imported
when the first kernel is launched.
"""

import ast
import functools
import inspect
import re
import string
import textwrap

import numpy as np
import torch

from arena import FOLDER, compiling

# -default-device: NVRTC before 13.5 takes a lambda for a function of the host without it.
OPTIONS = ("-std=c++17", "-default-device")

# What a translated cell may call, for any type.
PRELUDE = """
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
#define CELLS __device__ __forceinline__
#define CELL static CELLS
template <class T, class S> CELL T bits_as(S x) {
    static_assert(sizeof(T) == sizeof(S), "a view of another size");
    T y;
    memcpy(&y, &x, sizeof y);
    return y;
}
template <class T> struct Row {
    T *data;
    i64 length;
    CELLS T &operator[](i64 i) const { return data[i]; }
};
template <class T> CELL i64 length(const Row<T> &row) { return row.length; }
CELL float absolute(float x) { return fabsf(x); }
CELL double absolute(double x) { return fabs(x); }
template <class T, class S> CELL auto divide(T x, S y) { return x / y; }
template <class T, class S, class R> CELL auto multiply_add(T x, S y, R z) { return x * y + z; }
template <class T, class S, class R> CELL auto multiply_subtract(T x, S y, R z) {
    return x * y - z;
}
template <class T, class S, class R> CELL auto subtract_product(T x, S y, R z) {
    return z - x * y;
}
#ifdef __CUDA_ARCH__
CELL float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
CELL float multiply_subtract(float x, float y, float z) { return fmaf(x, y, -z); }
CELL float subtract_product(float x, float y, float z) { return fmaf(-x, y, z); }
CELL float divide(float x, float y) {  // within 2 units in the last place
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
    return quotient;
}
#endif
#ifndef SHARED_MEMORY  // as many bytes as the launch says
#define SHARED_MEMORY(Type, name) extern __shared__ __align__(16) char shared_memory[]; \
    Type *name = (Type *)shared_memory
// Begin to copy 4, 8 or 16 bytes to shared memory; end_copies waits for them.
template <int BYTES> CELL void begin_copy(void *to, const void *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES) : "memory");
#else
    struct alignas(BYTES) Bytes { char at[BYTES]; };
    *(Bytes *)to = *(const Bytes *)from;
#endif
}
CELL void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#if __CUDA_ARCH__ >= 800
// c += a · b by a warp: a (16, 8), b (8, 8), tf32. Where a thread's numbers are: PTX ISA, "Matrix
// Fragments for mma.m16n8k8".
CELL void multiply_tile(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
#endif
"""
# What a .cu file may use besides: numbers of memory as float32, several at once.
HELPERS = """
CELL float widen(float x) { return x; }
CELL float widen(u16 bits) { return float_of_bfloat(bits); }
template <class To> CELL To rounded_to(float x);
template <> CELLS float rounded_to<float>(float x) { return x; }
template <> CELLS u16 rounded_to<u16>(float x) { return bfloat_of_float(x); }

CELL i64 global_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// V neighbours in memory, read and written at once.
template <class Type, int V> struct alignas(sizeof(Type) * V) Pack { Type at[V]; };
template <int V, class Type> CELL Pack<Type, V> read(const Type *from) {
    return *(const Pack<Type, V> *)from;
}
template <int V, class Type> CELL void write(Type *to, const float (&values)[V]) {
    Pack<Type, V> pack;
    for (int v = 0; v < V; v++) pack.at[v] = rounded_to<Type>(values[v]);
    *(Pack<Type, V> *)to = pack;
}
"""
CALLS = {"abs": "absolute", "len": "length", "math.log": "logf", "math.sqrt": "sqrtf"}
# The struct of a tuple that a cell returns, by its length, and the deduction of its fields' types.
STRUCTS = ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")
for _number, _name in enumerate(STRUCTS, 1):
    _types = string.ascii_uppercase[:_number]
    _classes = ", ".join(f"class {t}" for t in _types)
    _fields = " ".join(f"{t} {t.lower()};" for t in _types)
    _list = ", ".join(_types)
    PRELUDE += (f"template <{_classes}> struct {_name} {{ {_fields} }};\n"
                f"template <{_classes}> {_name}({_list}) -> {_name}<{_list}>;\n")
TYPES = {np.float32: "float", np.float64: "double", np.int32: "int", np.int64: "i64",
         np.uint8: "u8", np.uint16: "u16", np.uint32: "u32", np.uint64: "u64", np.bool_: "bool"}
DTYPES = {name: np.dtype(kind) for kind, name in TYPES.items()} | {"void": None}  # None: any
# `//` is `/` in C, as cells divide no negative number
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "/",
             ast.LShift: "<<",
             ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.And: "&&",
             ast.Or: "||", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
             ast.GtE: ">=", ast.USub: "-", ast.Not: "!", ast.Invert: "~"}


def literal(number):
    """Write a number of Python or numpy in C, exactly."""
    if isinstance(number, bool | np.bool_):
        return str(bool(number)).lower()
    if isinstance(number, np.float32 | np.float64):
        suffix = "f" if isinstance(number, np.float32) else ""
        if np.isinf(number):
            kind, bits, word = (("float", 0x7F800000, "u32") if suffix
                                else ("double", 0x7FF0000000000000, "u64"))
            return f"({'-' if number < 0 else ''}bits_as<{kind}>(({word}){bits}))"
        return f"({float(number).hex()}{suffix})"
    if isinstance(number, np.integer):
        return f"({TYPES[type(number)]}){int(number)}"
    if isinstance(number, int) and -(2**31) <= number < 2**31:
        return str(number)
    raise TypeError(f"{number!r} has no float32 or integer type and would make the loop double. "
                    "Write np.float32(...).")


class _Cell:
    """Translate one cell to a C function, a template over its arguments' types."""

    def __init__(self, function):
        function = getattr(function, "py_func", function)
        self.names = dict(inspect.getclosurevars(function).globals)
        self.callees = []  # the cells that it calls
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        self.name = tree.name
        arguments = [argument.arg for argument in tree.args.args]
        self.scopes = [set(arguments)]
        types = ", ".join(f"class T{i}" for i in range(len(arguments)))
        values = ", ".join(f"T{i} {name}" for i, name in enumerate(arguments))
        body = self.block(tree.body)
        self.text = f"template <{types}> CELL auto {tree.name}({values}) {{\n{body}}}\n"

    def make_error(self, node, reason=""):
        """Return the error for a node that this class does not translate."""
        return NotImplementedError(
            f"{self.name}: `{ast.unparse(node)}` cannot be written in C by cuda_cpp.py{reason}. "
            "Use assignments, conditions and loops of scalars, or extend it.")

    # -- statements

    def block(self, statements, names=()):
        self.scopes.append(set(names))
        text = "".join(f"{self.statement(statement)}\n" for statement in statements)
        self.scopes.pop()
        return text

    def statement(self, node):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return ""  # the docstring
        if isinstance(node, ast.Return):
            return f"return {self.value(node.value)};"
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            return self.assign(node.targets[0], node.value)
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            operator = OPERATORS[type(node.op)]
            return f"{self.value(node.target)} {operator}= {self.value(node.value)};"
        if isinstance(node, ast.If):
            text = f"if ({self.value(node.test)}) {{\n{self.block(node.body)}}}"
            return text + (f" else {{\n{self.block(node.orelse)}}}" if node.orelse else "")
        if isinstance(node, ast.While) and not node.orelse:
            return f"while ({self.value(node.test)}) {{\n{self.block(node.body)}}}"
        is_range = isinstance(node, ast.For) and ast.unparse(node.iter).startswith("range(")
        if is_range and len(node.iter.args) < 3 and not node.orelse:
            first, last = ["0", *map(self.value, node.iter.args)][-2:]
            i = node.target.id
            body = self.block(node.body, [i])
            return f"for (i64 {i} = {first}; {i} < {last}; {i}++) {{\n{body}}}"
        if isinstance(node, ast.Break | ast.Continue | ast.Pass):
            return {ast.Break: "break;", ast.Continue: "continue;", ast.Pass: ";"}[type(node)]
        raise self.make_error(node)

    def is_known(self, name):
        return any(name in scope for scope in self.scopes)

    def assign(self, target, value):
        if isinstance(target, ast.Name):
            declared = "" if self.is_known(target.id) else "auto "
            text = f"{declared}{target.id} = {self.value(value)};"
            self.scopes[-1] |= {target.id} if declared else set()
            return text
        if isinstance(target, ast.Subscript):
            return f"{self.value(target)} = {self.value(value)};"
        if isinstance(target, ast.Tuple) and all(
                isinstance(name, ast.Name) for name in target.elts):
            names = [name.id for name in target.elts]
            new = [f"new_{name}" if self.is_known(name) else name for name in names]
            if isinstance(value, ast.Tuple):  # all values are read before a name is assigned
                values = [self.value(element) for element in value.elts]
                text = " ".join(f"auto {name} = {text};"
                                for name, text in zip(new, values, strict=True))
            else:
                text = f"auto [{', '.join(new)}] = {self.value(value)};"
            replaced = [(name, other) for name, other in zip(names, new, strict=True)
                        if name != other]
            text += "".join(f" {name} = {other};" for name, other in replaced)
            if replaced and set(new) & set(names):
                raise self.make_error(target, ": some of these names are new and some are not")
            if new != names:
                return f"{{ {text} }}"
            self.scopes[-1] |= set(names)
            return text
        raise self.make_error(target)

    # -- expressions

    def value(self, node):
        operators = [OPERATORS.get(type(operator))
                     for operator in (getattr(node, "op", None), *getattr(node, "ops", ()))]
        operator = operators[-1]  # None without one, or for one that C lacks
        if isinstance(node, ast.Constant):
            return literal(node.value)
        if isinstance(node, ast.Name):
            return self.name_of(node)
        if isinstance(node, ast.Tuple) and len(node.elts) <= len(STRUCTS):
            return f"{STRUCTS[len(node.elts) - 1]}{{{', '.join(map(self.value, node.elts))}}}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return f"divide({self.value(node.left)}, {self.value(node.right)})"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            is_sum = isinstance(node.op, ast.Add)
            for product, other, name in (
                    (node.left, node.right, "multiply_add" if is_sum else "multiply_subtract"),
                    (node.right, node.left, "multiply_add" if is_sum else "subtract_product")):
                if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
                    factors = f"{self.value(product.left)}, {self.value(product.right)}"
                    return f"{name}({factors}, {self.value(other)})"
        if isinstance(node, ast.BinOp) and operator:
            return f"({self.value(node.left)} {operator} {self.value(node.right)})"
        if isinstance(node, ast.UnaryOp) and operator:
            return f"({operator}{self.value(node.operand)})"
        if isinstance(node, ast.BoolOp):
            return f"({f' {operator} '.join(map(self.value, node.values))})"
        if isinstance(node, ast.Compare) and operator and len(node.ops) == 1:
            return f"({self.value(node.left)} {operator} {self.value(node.comparators[0])})"
        if isinstance(node, ast.IfExp):
            test, body, orelse = map(self.value, (node.test, node.body, node.orelse))
            return f"({test} ? {body} : {orelse})"
        if isinstance(node, ast.Subscript):
            return f"{self.value(node.value)}[{self.value(node.slice)}]"
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "np.inf":
            return literal(np.float64(np.inf))
        if isinstance(node, ast.Call) and not node.keywords:
            return self.call(node)
        raise self.make_error(node)

    def name_of(self, node):
        if self.is_known(node.id):
            return node.id
        if node.id in self.names and isinstance(self.names[node.id], int | np.generic):
            return literal(self.names[node.id])
        raise self.make_error(node, " (it is set in an inner block, or is no number)")

    def call(self, node):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "view":
            return f"bits_as<{TYPES[self.names[node.args[0].id]]}>({self.value(function.value)})"
        name = function.id if isinstance(function, ast.Name) else ast.unparse(function)
        if name in CALLS:
            return f"{CALLS[name]}({self.value(node.args[0])})"
        target = self.names.get(name)
        if isinstance(target, type) and target in TYPES:
            try:
                return literal(target(ast.literal_eval(node.args[0])))
            except ValueError:  # no literal
                return f"(({TYPES[target]})({self.value(node.args[0])}))"
        if not hasattr(target, "py_func") and not inspect.isfunction(target):
            raise self.make_error(node)
        self.callees.append(target)
        return f"{name}({', '.join(map(self.value, node.args))})"


def translate(functions):
    """Return C of these cells and of their callees, each defined before it is called."""
    texts = {}

    def add(function):
        cell = _Cell(function)
        for callee in cell.callees:
            if getattr(callee, "py_func", callee).__name__ not in texts:
                add(callee)
        texts[cell.name] = cell.text

    for function in functions:
        add(function)
    return "\n".join(texts.values())


class Module:
    """Compile and launch the kernels of one .cu file.

    names: globals of the Python file whose cells and numbers the .cu file uses by name. options: of
    NVRTC. include: a file whose text comes before. defines: {macro: its text}.
    """

    def __init__(self, path, names, options=OPTIONS, include=None, defines=None):
        self.path = FOLDER / path
        self.names = names
        self.options = options
        self.paths = [FOLDER / include, self.path] if include else [self.path]
        self.defines = defines or {}
        self._kernels = {}

    @functools.cached_property
    def source(self):
        """Return the cells and numbers that the files name, and their text."""
        texts = [HELPERS, *(f'#line 1 "{path.name}"\n{path.read_text("utf-8")}'
                            for path in self.paths)]
        code = re.sub(r"//.*", "", "".join(texts))
        definitions = set(re.findall(r"(\w+)\([^()]*\)\s*\{", code))
        calls = dict.fromkeys(re.findall(r"\b([A-Za-z]\w+)\(", code))
        cells = [self.names[name] for name in calls
                 if inspect.isroutine(self.names.get(name)) and name not in definitions]
        words = dict.fromkeys(re.findall(r"\b[A-Z]\w+\b", code))
        numbers = {word: self.names[word] for word in words
                   if isinstance(self.names.get(word), int | np.generic)}
        macros = {word: literal(value) for word, value in numbers.items()} | self.defines
        constants = "".join(f"#define {name} {text}\n" for name, text in macros.items())
        return "".join([PRELUDE, translate(cells), constants, *texts])

    @functools.cached_property
    def signatures(self):
        """Return {kernel: [(dtype, whether it is an array, parameter), ...]}."""
        kernels = re.findall(
            r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*'
            r"\((.*?)\)\s*\{", self.source, flags=re.DOTALL)
        return {name: [self._parameter(text) for text in parameters.split(",")]
                for name, parameters in kernels}

    @staticmethod
    def _parameter(text):
        words = text.replace("*", " * ").replace("const", "").replace("__restrict__", "").split()
        return DTYPES[words[0]], "*" in words, words[-1]

    def arguments(self, name, values):
        """Return a kernel's arguments for CuPy: numbers cast, arrays by their address.

        Raises TypeError for another number of them, or an array of another dtype.
        """
        signature = self.signatures[name]
        if len(values) != len(signature):
            raise TypeError(f"{self.path.name}: {name} takes {len(signature)} arguments, not "
                            f"{len(values)}.")
        result = []
        for value, (dtype, is_array, parameter) in zip(values, signature, strict=True):
            result.append(_address(name, parameter, value, dtype) if is_array
                          else dtype.type(value))
        return tuple(result)

    def launch(self, name, blocks, threads, *values, shared=0, cooperative=False):
        """Launch a kernel on torch's current stream, without a wait or an allocation.

        values: numbers, and arrays of numpy or numba. shared: bytes of dynamic shared memory a
        block. cooperative: all blocks run at once, so they may wait for each other; CuPy takes
        fewer if the GPU cannot hold so many, and the driver refuses more than it can run.
        """
        if blocks == 0:
            return
        if name not in self._kernels:
            with compiling():
                self._kernels[name] = self._load(name)
        kernel = self._kernels[name]
        if shared > kernel.max_dynamic_shared_size_bytes:  # 48 KB, unless a kernel asks for more
            kernel.max_dynamic_shared_size_bytes = shared
        with on_stream(torch.cuda.current_stream().cuda_stream):
            kernel.kernel((blocks,), (threads,), self.arguments(name, values), shared,
                          enable_cooperative_groups=cooperative)

    @functools.cached_property
    def _module(self):
        import cupy

        return cupy.RawModule(code=self.source, options=self.options)

    def _load(self, name):
        return self._module.get_function(name)


def _address(kernel, parameter, array, dtype):
    if array is None:  # an array that this launch does not read
        return np.uint64(0)
    if dtype is not None and getattr(array, "dtype", None) != dtype:
        actual = getattr(array, "dtype", type(array))
        raise TypeError(f"{kernel}: {parameter} is {actual}, expected {dtype}.")
    if isinstance(array, np.ndarray):
        return np.uint64(array.ctypes.data)
    return np.uint64(array.__cuda_array_interface__["data"][0])


@functools.cache
def on_stream(handle):
    """Return the context in which CuPy launches on the stream of this handle."""
    import cupy

    return cupy.cuda.ExternalStream(handle)
