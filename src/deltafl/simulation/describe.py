"""A digest of a function, a class or any object: the same in every process, and another one once it
may do something else.

Of code it takes what Python compiled, so comments, docstrings and layout do not count, and what
runs is what is described, also in a notebook or after its file was edited. With a function count
its defaults, its closure and the globals that it reads, wherever they are defined; an object counts
by its class and its state. What an installed package defines counts by its name.
"""

import copyreg
import dis
import hashlib
import inspect
import sys
import sysconfig
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePath
from types import (
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy as np

from ..errors import OWN_ERRORS

#: They are what they are written as.
_LITERALS = {bool, int, float, complex, str, bytes, NoneType, EllipsisType}
#: Instructions that differ with the layout, or not at all.
_IDLE = {"NOP", "CACHE", "EXTENDED_ARG", "RESUME"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"}
_KINDS_OF_CODE = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
#: Python's own; what it installs beside it is below a folder of the other two names.
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_THIS_PACKAGE = __name__.partition(".")[0]


class UnknownError(Exception):
    """A value that nothing tells from others of its kind, such as a lock or an open file."""


def describe(value: object) -> str:
    """The digest of a value, in hexadecimal; ``UnknownError`` names the type of what has none."""
    return _Description().of(value).hex()


class _Description:
    def __init__(self) -> None:
        self._open: dict[int, int] = {}  #: values that are being described, by their depth
        self._done: dict[int, bytes] = {}
        self._kept: list[object] = []  #: or the ids of values made on the way would be given again

    def of(self, value: object) -> bytes:
        if type(value) in _LITERALS:
            return _digest(type(value).__name__, repr(value))
        key = id(value)
        if key in self._open:
            return _digest("outer", str(self._open[key]))
        if key not in self._done:
            self._kept.append(value)
            self._open[key] = len(self._open)
            self._done[key] = self._made(value)
            del self._open[key]
        return self._done[key]

    def _made(self, value: object) -> bytes:
        try:
            kind, *parts = _parts(value)
            digests = [self.of(part) for part in parts]
        except UnknownError:
            raise
        except OWN_ERRORS:
            raise UnknownError(type(value).__name__) from None
        if isinstance(value, set | frozenset):
            # Each process goes through a set in another order.
            digests.sort()
        return _digest(kind, *digests)


def _digest(*parts: str | bytes) -> bytes:
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        # With their lengths, or ("ab", "c") would be ("a", "bc").
        total.update(b"%d:" % len(content) + content)
    return total.digest()


def _parts(value: Any) -> tuple[Any, ...]:
    """What sort of thing a value is, and the values that it consists of."""
    match value:
        case list() | tuple() | set() | frozenset() if type(value).__module__ == "builtins":
            return type(value).__name__, *value
        case dict() | MappingProxyType() if type(value).__module__ == "builtins":
            return "dict", *(part for item in value.items() for part in item)
        case np.ma.MaskedArray():
            return "masked", value.data, np.ma.getmaskarray(value), value.fill_value
        case np.ndarray():
            return "array", str(value.dtype), value.shape, _content_of(value)
        case FunctionType():
            return _of_function(value)
        case MethodType():
            # Of one that was given to an object, pickle would write the name.
            return "method", value.__func__, value.__self__
        case CodeType():
            return "code", *_of_code(value)
        case type():
            return _of_class(value)
        case CellType():
            return "cell", *_held(value)
        case ModuleType():
            return "module", value.__name__
        case staticmethod() | classmethod() | property() | cached_property():
            return type(value).__name__, *_functions_of(value)
        case PurePath():
            return "path", value.name  # a folder of runs may be moved with its project
    return _of_tensor(value) or _of_object(value)


def _content_of(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype == object:
        return array.ravel().tolist()
    held = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(held.data).hexdigest()


def _functions_of(descriptor: Any) -> tuple[Any, ...]:
    match descriptor:
        case property():
            return descriptor.fget, descriptor.fset, descriptor.fdel
        case cached_property():
            return (descriptor.func,)
    return (descriptor.__func__,)


def _of_tensor(value: Any) -> tuple[Any, ...] | None:
    """PyTorch's tensors and modules; None for anything else."""
    # Not imported: before somebody has loaded torch, nothing is a tensor.
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.nn.Module):
        # Hooks are numbered by a counter of the process.
        state = {
            name: [*part.values()] if "_hooks" in name else part
            for name, part in vars(value).items()
            if name != "training"
        }
        return "module", type(value), state
    if not isinstance(value, torch.Tensor):
        return None
    held = value.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous().reshape(-1)
    held = held.view(torch.uint8).numpy()
    return "tensor", str(value.dtype), tuple(value.shape), value.requires_grad, held


def _of_object(value: Any) -> tuple[Any, ...]:
    """Of any other object what pickle would write: how it is made, and its state."""
    reduce = copyreg.dispatch_table.get(type(value))
    made: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(made, str):
        wrapped = inspect.unwrap(value) if callable(value) else value
        if wrapped is not value:
            return "wrapped", type(value).__name__, wrapped
        return "name", type(value).__name__, made
    # Of pickle's parts all but the first two may be missing.
    function, arguments, state, items, pairs = (*made, None, None, None)[:5]
    return "object", function, arguments, state, [*(items or ())], [*(pairs or ())]


def _of_function(function: FunctionType) -> tuple[Any, ...]:
    closure = [*(function.__closure__ or ())]
    if _is_installed(function.__module__):
        return "installed", function.__module__, function.__qualname__, closure
    return (
        "function",
        function.__code__,
        function.__defaults__,
        function.__kwdefaults__,
        closure,
        vars(function),
        [*_used(function)],
    )


def _of_code(code: CodeType) -> Iterator[Any]:
    """The instructions, whose jumps lead to the number of one of them."""
    yield (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    yield code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield (code.co_flags & _KINDS_OF_CODE, code.co_exceptiontable)
    steps = [step for step in dis.get_instructions(code) if step.opname not in _IDLE]
    offsets = [step.offset for step in steps]
    for step in steps:
        yield step.opname
        yield bisect_left(offsets, step.argval) if step.opcode in _JUMPS else step.argval


def _used(function: FunctionType) -> Iterator[Any]:
    """The names that a function reads outside itself, with their values."""
    steps = [*_steps(function.__code__)]
    # What a function sets itself, such as a counter, tells nothing of what it will do.
    changed = {step.argval for step in steps if step.opname == "STORE_GLOBAL"}
    attributes = {step.argval for step in steps if step.opname in _ATTRIBUTE}
    names = {step.argval for step in steps if step.opname in _GLOBAL} - changed
    known = function.__globals__
    for name in sorted(names & known.keys()):
        if not name.startswith("__"):
            yield from (name, known[name], *_of_module(known[name], attributes))
    for cell in function.__closure__ or ():
        yield from (part for held in _held(cell) for part in _of_module(held, attributes))
    for name in sorted({step.argval for step in steps if step.opname == "IMPORT_NAME"}):
        for module in (name, f"{known.get('__package__')}.{name}".rstrip(".")):
            yield from _of_module(sys.modules.get(module), attributes)


def _of_module(module: object, names: set[str]) -> Iterator[Any]:
    """What a function uses of a module of the user's own."""
    if not isinstance(module, ModuleType) or _is_installed(module.__name__):
        return
    for name in sorted(names & vars(module).keys()):
        yield from (name, vars(module)[name], *_of_module(vars(module)[name], names - {name}))


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of code and of the functions inside it."""
    for step in dis.get_instructions(code):
        yield step
        if isinstance(step.argval, CodeType):
            yield from _steps(step.argval)


def _held(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a variable that is not set yet
        return ()


def _of_class(kind: type) -> tuple[Any, ...]:
    if _is_installed(kind.__module__):
        return "installed", kind.__module__, kind.__qualname__
    own = {name: part for name, part in sorted(vars(kind).items()) if _counts(name, part)}
    return "class", type(kind), kind.__bases__, own


def _counts(name: str, part: object) -> bool:
    """Whether an entry of a class says what it does; Python's own notes do not."""
    if name == "_abc_impl" or inspect.isgetsetdescriptor(part):
        return False
    is_note = name.startswith("__") and name.endswith("__")
    return not is_note or isinstance(part, FunctionType | staticmethod | classmethod | property)


def _is_installed(module: str | None) -> bool:
    """Whether a module is of Python, of a package that was installed, or of this one."""
    if module is None or module in ("__main__", "__mp_main__"):
        return False
    top = module.partition(".")[0]
    if top == _THIS_PACKAGE:
        return True
    found = (vars(sys.modules[name]) for name in (module, top) if name in sys.modules)
    file = next((known["__file__"] for known in found if known.get("__file__")), None)
    if file is None:
        return top in sys.stdlib_module_names
    place = Path(file)
    return _LIBRARY in place.parents or not _INSTALLED.isdisjoint(place.parts)
