"""Who may import whom: the core needs NumPy alone, nothing imports upwards or in circles,
reproduction is a user.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: What each part of the package may import beside itself; all of the rest is the core.
ABOVE = {
    "tasks": {"core"},
    "analysis": {"core"},
    "simulation": {"core", "tasks", "analysis", "federation"},
    "federation": {"core"},
    "flower": {"core", "federation"},
    "pfl": {"core", "federation"},
    "nvflare": {"core", "federation"},
    "cli": {"core", "tasks", "analysis", "simulation"},
    "__main__": {"cli"},
}
#: What reproduction may import from: packages by the names in their ``__all__``, and three modules.
PUBLIC = {
    "analysis",
    "audit",
    "cli",
    "designs",
    "estimators",
    "samplers",
    "server",
    "simulation",
    "tasks",
}
PUBLIC |= {"errors", "store", "types"}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "src" / "deltafl").rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def imports(path: Path, package: str, everywhere: bool) -> Iterator[str]:
    """What a file imports, by full names, without what is for type checkers; ``everywhere``: in
    functions too.
    """

    def of(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
                name = ".".join(filter(None, [base, node.module or ""]))
                yield from (
                    f"{name}.{a.name}" if f"{name}.{a.name}" in MODULES else name
                    for a in node.names
                )
            elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                # A try around an import at the top is that of an optional package.
                optional = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try)
                if everywhere or not optional:
                    for field in ("body", "orelse", "finalbody", "handlers"):
                        inner: list[ast.stmt] = getattr(node, field, [])
                        yield from of(inner)

    yield from of(ast.parse(path.read_text(encoding="utf-8")).body)


def package_of(name: str) -> str:
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


def part_of(name: str) -> str:
    part = name.split(".")[1] if "." in name else "core"
    return part if part in ABOVE else "core"


def test_nothing_imports_upwards() -> None:
    wrong = {
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in imports(path, package_of(name), everywhere=True)
        if other in MODULES
        and part_of(other) not in {part_of(name), *ABOVE.get(part_of(name), set())}
    }
    assert not wrong


def test_the_core_needs_numpy_alone() -> None:
    wrong = {
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in imports(path, package_of(name), everywhere=False)
        if part_of(name) == "core"
        and other.partition(".")[0] not in {"deltafl", "numpy", *sys.stdlib_module_names}
    }
    assert not wrong


def test_there_is_no_circle_of_imports() -> None:
    graph = {
        name: {
            other for other in imports(path, package_of(name), everywhere=False) if other in MODULES
        }
        - {name}
        for name, path in MODULES.items()
    }
    assert not without_ends(graph)


def without_ends(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of a graph when all that leads to no circle is taken away."""
    while free := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in free}
    return graph


def test_packages_import_in_one_direction() -> None:
    """Those of the root, and those of the simulation among themselves: modules of one run, beside
    them, use and are used by most.
    """
    for root, beside in (("deltafl", True), ("deltafl.simulation", False), ("deltafl.tasks", True)):
        graph: dict[str, set[str]] = {}
        for name, path in MODULES.items():
            if name == root or not name.startswith(f"{root}."):
                continue
            part = name.removeprefix(f"{root}.").partition(".")[0]
            others = {
                other.removeprefix(f"{root}.").partition(".")[0]
                for other in imports(path, package_of(name), everywhere=True)
                if other in MODULES and other.startswith(f"{root}.")
            }
            graph.setdefault(part, set()).update(others - {part})
        if not beside:
            graph = {part: others for part, others in graph.items() if f"{root}.{part}" in PACKAGES}
        assert len(graph) > 5
        assert not without_ends(graph)


def test_reproduction_uses_the_public_interface() -> None:
    wrong = set()
    for path in sorted((ROOT / "reproduction").rglob("*.py")):
        for name in imports(path, "reproduction", everywhere=True):
            first, *rest = name.split(".")
            if (
                first == "deltafl"
                and rest
                and not (rest[0] in PUBLIC and (len(rest) == 1 or rest[0] == "analysis"))
            ):
                wrong.add(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


#: What writes to a terminal, or reads markup, and where it may be used.
_WRITERS = {
    "echo": {"deltafl.cli.common"},
    "secho": set[str](),
    "print": {"deltafl.analysis.narrow", "deltafl.simulation.comparisons.comparison"},
    "Console": {"deltafl.analysis.narrow", "deltafl.simulation.view.progress"},
    "Text": {"deltafl.analysis.narrow", "deltafl.analysis.table"},  # the latter an empty line
    "from_markup": set[str](),
    "getLogger": {"deltafl.errors"},
}


def test_text_reaches_the_terminal_in_one_way() -> None:
    """By ``say`` and ``show``, in which names of others are neither markup nor invisible."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func
                word = getattr(called, "attr", getattr(called, "id", ""))
                assert name in _WRITERS.get(word, {name}), f"{name} calls {word}"


def test_the_root_of_the_package_has_few_modules() -> None:
    modules = {path.stem for path in (ROOT / "src" / "deltafl").glob("[a-z]*.py")}
    assert len(modules - ABOVE.keys()) <= 10


def test_seconds_are_compared_by_a_clock_that_does_not_jump() -> None:
    """The wall clock only names a folder, says when a tracker got a number, and how old a file is."""
    read = [path.stem for path in modules().values() if "time.time(" in path.read_text()]
    named = [path.stem for path in modules().values() if "datetime.now(" in path.read_text()]
    assert (read, named) == (["tracking", "seen"], ["directory"])


_WORDS = """
open read_text read_bytes write_text write_bytes savefig tofile fromfile memmap load save savez
loadtxt genfromtxt savetxt unlink rmtree mkdir makedirs rmdir touch symlink_to hardlink_to link
symlink rename copyfile copytree posix_fallocate TemporaryFile TemporaryDirectory
NamedTemporaryFile mkstemp mkdtemp ZipFile GzipFile TarFile truncate read_csv read_parquet
read_pickle read_hdf to_pickle to_parquet replace File
"""
#: What touches files, as a function or as a method of something.
TOUCHES = {*_WORDS.split()}
#: Methods of other things that are called the same: of samplers, states, parts and tensors.
ONLY_OF = {
    "open": {"tarfile", "Image", "gzip", "os", "io", "zipfile", "bz2", "lzma", "path"},
    "load": {"np", "torch", "pickle", "joblib"},
    "save": {"np", "torch", "image"},
    "link": {"os"},
    "File": {"h5py"},
}
#: Who touches files outside ``store/``, and why that is safe.
SAFE = {
    "deltafl.cli.options write_text": "the text of a help",
    "deltafl._lazy read_text": "a file of this package",
    "deltafl.analysis.report read_text": "a file of this package",
    "deltafl.analysis.plots savefig": "into memory",
    "deltafl.analysis.plots save": "into memory",
    "deltafl.simulation.export save": "into memory",
    "deltafl.tasks.data.images loadtxt": "a file of scikit-learn",
    "deltafl.tasks.data.images open": "what was opened",
    "deltafl.tasks.data.frames read_csv": "what was opened",
    "deltafl.tasks.data.frames read_parquet": "what was opened",
    "deltafl.tasks.data.leaf File": "what was opened",
    "deltafl.tasks.data.leaf open": "what was opened",
    "deltafl.tasks.data.files GzipFile": "what was opened",
    "deltafl.tasks.data.files load": "what was opened",
    "deltafl.tasks.data.files save": "into a new folder that nobody else can name",
    "deltafl.tasks.data.files TemporaryDirectory": "a new folder that nobody else can name",
    "deltafl.tasks.data.files replace": "a name is replaced, no link followed",
    "deltafl.simulation.traces read_csv": "what was opened",
    "deltafl.scale.rows memmap": "what was opened",
    "deltafl.scale.rows truncate": "what was opened",
    "deltafl.simulation.oracle TemporaryFile": "a file without a name",
    "deltafl.simulation.oracle posix_fallocate": "a file without a name",
    "deltafl.simulation.oracle memmap": "a file without a name",
    "deltafl.simulation.parallel.elsewhere replace": "a name is replaced, no link followed",
    "deltafl.simulation.parallel.elsewhere symlink_to": "in a new folder that nobody else can name",
    "deltafl.federation.saved replace": "a name is replaced, no link followed",
    "deltafl.federation.saved link": "a second name of a file of the store",
}


def touched(path: Path) -> Iterator[str]:
    """What a module calls that touches files."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        # Others of these names are functions of the store, and of what is built on it.
        if isinstance(function, ast.Name) and function.id in {"open", "memmap"}:
            yield function.id
        elif isinstance(function, ast.Attribute) and function.attr in TOUCHES:
            of = ast.unparse(function.value)
            # Of texts and dataclasses it has two arguments, or names.
            is_path = len(node.args) == 1 and not node.keywords
            if function.attr == "replace" and not (is_path and isinstance(node.args[0], ast.Name)):
                continue
            if function.attr not in ONLY_OF or of in ONLY_OF[function.attr] or "Path" in of:
                yield function.attr


def test_files_are_touched_in_the_store_alone() -> None:
    """So that what is planted in a folder is met in one place."""
    found = {
        f"{name} {call}"
        for name, path in MODULES.items()
        if not name.startswith("deltafl.store")
        for call in touched(path)
    }
    assert sorted(found - {*SAFE}) == []
    assert sorted({*SAFE} - found) == [], "what is listed is no more there"
