"""The house rules that a syntax tree can show: who imports whom, and sizes.

Reads the sources and never imports them. It is no linter. Prints `file:line: message`, and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT_PACKAGE = "paceline"
ROOT_FOLDER = "orchestrator"

# The import table: folder -> the parts of the package it may import.
PARTS: dict[str, frozenset[str]] = {
    "core": frozenset({"core"}),
    "decoder": frozenset({"core", "decoder"}),
    "neuron": frozenset({"core", "decoder", "neuron"}),
    "draft": frozenset({"core", "decoder", "draft", "heads"}),
    "target": frozenset({"core", "decoder", "target"}),
    "heads": frozenset({"core", "decoder", "heads"}),
    "medusa": frozenset({"core", "decoder", "draft.heads", "heads", "medusa"}),
    "eagle": frozenset({"core", "decoder", "draft.heads", "draft.table_head", "heads", "eagle"}),
    "placement": frozenset({"core", "decoder", "placement", "config"}),
    "orchestrator": frozenset(
        {"core", "decoder", "draft", "target", "heads", "medusa", "eagle", "placement", "orchestrator", "neuron"}
    ),
}
SIZED_FOLDERS = (*PARTS, "tests", "benchmarks", "scripts", "examples")

# Subfolders (and files) that see less than their folder, or more; the longest name counts.
_COUNTS = {"core", "decoder", "neuron", "placement.planning.instances"}
SUBFOLDERS: dict[str, frozenset[str]] = {
    "draft/dflash": frozenset({"core", "decoder", "draft", "heads"}),
    "neuron/chips.py": frozenset({"core"}),
    "neuron/round_graphs.py": frozenset({"core", "decoder", "draft", "target", "eagle", "neuron"}),
    "neuron/round_cost.py": frozenset({*_COUNTS, "target"}),
    "neuron/graph_export.py": frozenset(_COUNTS),
    "neuron/machine.py": frozenset(_COUNTS),
    "neuron/hardware_speed.py": frozenset({*_COUNTS, "experiments.questions"}),
    "placement/planning": frozenset(
        {"core", "decoder", "config", "placement.planning", "placement.host.environment", "neuron.chips"}
    ),
    "placement/host": frozenset({"core", "placement.host", "placement.planning"}),
    "placement/__init__.py": frozenset({"placement", "serving.deployment"}),  # launch, under its public name
    "placement/lookahead.py": frozenset({"core", "placement.lookahead"}),
    "orchestrator/engine": frozenset({"core", "engine", "text", "outputs"}),
    "orchestrator/warmup.py": frozenset({"core", "decoder", "target", "engine", "outputs"}),
    "orchestrator/text": frozenset(
        {"core", "decoder.gguf", "decoder.json_fields", "decoder.weights", "text", "outputs", "engine.request"}
    ),
}
# Parts of the package that nobody else imports.
NOT_IMPORTED = {"cli": "orchestrator/cli/"}
# Parts that only these import, inside functions; the others reach them by a row that names a path.
LATE = {"neuron": ("orchestrator/cli/", "orchestrator/checks/")}
# Tables, which import no more than core and may be read by everybody who names them.
TABLES = frozenset({"neuron.chips"})
# Tables whose rows name modules of parts that their file may not import.
ROWS: dict[str, tuple[str, ...]] = {
    "decoder/backends/registry.py": ("neuron",),
    "placement/cluster/roles.py": ("workers",),
}
# A family's row builds its network in a function, so that reading a configuration loads no PyTorch.
MAY_CLOSE_A_CIRCLE = frozenset({"decoder/models/family.py", "decoder/models/families_gemma.py"})

# Other people's packages at the top of a module. In a function anything goes, but for core and for what FENCED names.
EAGER: dict[str, frozenset[str]] = {
    "core": frozenset({"torch"}),
    "placement": frozenset({"torch", "numpy", "safetensors", "pydantic", "msgspec"}),
    "orchestrator": frozenset({"torch", "numpy", "safetensors", "transformers", "pydantic", "typer", "rich", "regex"}),
}
EAGER_ELSEWHERE = frozenset({"torch", "numpy", "safetensors", "filelock"})
FENCED: dict[str, tuple[str, ...]] = {
    "ray": ("placement/cluster/", "orchestrator/serving/"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn"), ("orchestrator/serving/", "orchestrator/cli/")),
}

# Environment variables are read and written in one file per role of a process.
ENVIRONMENT_FILES = frozenset({"decoder/environment.py", "neuron/environment.py", "placement/host/environment.py"})

# A little above the size a file or function should have: splitting what belongs together is worse.
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 66
MAX_PARAMETERS = 8
MAX_POSITIONAL = 3
MAX_STATE = 8  # attributes that a class assigns after its constructor

MODULE = re.compile(rf"{ROOT_PACKAGE}(\.[a-z_]\w*)+(:\w+)?")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One broken rule, at one line of one file (relative to the root)."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported dotted name.

    lazy    it is imported inside a function or for the type checker only
    typing  for the type checker only
    """

    name: str
    line: int
    lazy: bool
    typing: bool = False


def sources(root: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, str, ast.Module]]:
    """(file, text, tree) of every Python file in the folders, in order."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield path.relative_to(root).as_posix(), text, ast.parse(text, filename=str(path))


# ---- imports


def imports_of(node: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    """Every import below node. `from a import b` counts as `a.b`; relative ones keep their dots."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = "." * child.level + (child.module or "")
            yield from (Import(f"{base}.{alias.name}", child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.Call) and (name := dynamic_import(child)):
            yield Import(name, child.lineno, lazy)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for item in imports_of(ast.Module(body=child.body, type_ignores=[]), lazy=True):
                yield replace(item, typing=True)
            yield from imports_of(ast.Module(body=child.orelse, type_ignores=[]), lazy=lazy)
            continue
        yield from imports_of(child, lazy=lazy or isinstance(child, Function | ast.Lambda))


def dynamic_import(call: ast.Call) -> str | None:
    """The name in `importlib.import_module("name")`, if it is written out."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in {"import_module", "__import__"} or not call.args:
        return None
    value = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
    return value if isinstance(value, str) else None


def named_modules(tree: ast.Module) -> Iterator[Import]:
    """Modules that strings name, as rows of tables do: "paceline.a.b" and "paceline.a.b:name"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            yield Import(node.value.replace(":", "."), node.lineno, lazy=True)


def part_of(name: str) -> str:
    """The folder a name lives in: paceline.core.types -> core, paceline.engine.engine -> orchestrator."""
    second = name.split(".")[1] if "." in name else ""
    return second if second in PARTS else ROOT_FOLDER


def check_imports(root: Path) -> list[Violation]:
    """The import table, for the package's own folders; absolute imports, and no part by its folder, everywhere."""
    found = []
    for file, _, tree in sources(root, SIZED_FOLDERS):
        for item in imports_of(tree):
            if item.name.startswith("."):
                message: str | None = "relative import; write it out from `paceline`"
            elif file.split("/")[0] not in PARTS:
                message = folder_import(root, file, item)
            elif item.name.split(".")[0] == ROOT_PACKAGE:
                message = own_import(file, item)
            else:
                message = foreign_import(file, item)
            if message:
                found.append(Violation(file, item.line, message))
        if file.split("/")[0] in PARTS:
            rows = tuple(f"{ROOT_PACKAGE}.{part}" for part in ROWS.get(file, ()))
            for item in named_modules(tree):
                if not any(is_within(item.name, row) for row in rows) and (message := own_import(file, item)):
                    found.append(Violation(file, item.line, message))
    return list(dict.fromkeys(found))


def check_circles(root: Path) -> list[Violation]:
    """Modules that import each other, at their top or in functions."""
    files = {module_of(file): file for file, _, _ in sources(root, tuple(PARTS))}
    graph: dict[str, dict[str, int]] = {}
    for file, _, tree in sources(root, tuple(PARTS)):
        graph[file] = {}
        for item in imports_of(tree):
            name = item.name
            while name not in files and "." in name:
                name = name.rpartition(".")[0]
            late = item.typing or (item.lazy and file in MAY_CLOSE_A_CIRCLE)
            if name in files and files[name] != file and name != ROOT_PACKAGE and not late:
                graph[file].setdefault(files[name], item.line)
    reached = {file: reachable(graph, file) for file in graph}
    return [
        Violation(file, line, f"a circle of imports: {other} comes back to this file")
        for file, imported in graph.items()
        for other, line in imported.items()
        if file in reached[other]
    ]


def reachable(graph: dict[str, dict[str, int]], start: str) -> set[str]:
    """The file and every file that it imports, itself or through others."""
    seen, open_ = {start}, [start]
    while open_:
        for other in graph[open_.pop()]:
            if other not in seen:
                seen.add(other)
                open_.append(other)
    return seen


def module_of(file: str) -> str:
    """The module's name: draft/ngram.py -> paceline.draft.ngram, orchestrator/auto.py -> paceline.auto."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join([ROOT_PACKAGE, *(parts[1:] if parts[0] == ROOT_FOLDER else parts)])


def own_import(file: str, item: Import) -> str | None:
    """Message about a wrong import of the package itself, or None."""
    for part, home in NOT_IMPORTED.items():
        if is_within(item.name, f"{ROOT_PACKAGE}.{part}") and not file.startswith(home):
            return f"{item.name} is imported by {home} only"
    for part, homes in LATE.items():
        known = file.startswith(f"{part}/") or (item.lazy and file.startswith(homes))
        table = any(is_within(item.name, f"{ROOT_PACKAGE}.{one}") for one in TABLES)
        if is_within(item.name, f"{ROOT_PACKAGE}.{part}") and not known and not table:
            return f"{item.name} is imported by {' and '.join(homes)} only, inside functions"
    place = max((name for name in (*PARTS, *SUBFOLDERS) if is_below(file, name)), key=len)
    allowed = SUBFOLDERS.get(place) or PARTS[place]
    part = part_of(item.name)
    if (place in PARTS and part in allowed) or any(is_within(item.name, f"{ROOT_PACKAGE}.{one}") for one in allowed):
        return None
    where = place if place.endswith(".py") else f"{place}/"
    return f"{where} may not import {item.name} ({part}/); it may import {', '.join(sorted(allowed))}"


def is_below(file: str, place: str) -> bool:
    return file == place or file.startswith(f"{place}/")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def folder_import(root: Path, file: str, item: Import) -> str | None:
    """Message about a wrong import outside the package, where pytest finds every folder, or None."""
    top = item.name.split(".")[0]
    if top not in PARTS or top == ROOT_FOLDER or (root / file).with_name(f"{top}.py").is_file():
        return None
    return f"a second copy of {top}/; import it as `{ROOT_PACKAGE}.{top}`"


def foreign_import(file: str, item: Import) -> str | None:
    """Message about a wrong import of another package, or None."""
    folder, top = file.split("/")[0], item.name.split(".")[0]
    if top in PARTS:
        return f"`{top}` is the folder's name; import it as `{ROOT_PACKAGE}`"
    if top in sys.stdlib_module_names or top == "__future__":
        return None
    if top in FENCED:
        allowed = file.startswith(FENCED[top])
        return None if allowed else f"`{top}` may be imported only in {' and '.join(FENCED[top])}"
    if top in EAGER.get(folder, EAGER_ELSEWHERE):
        return None
    if folder == "core":
        return f"core/ may import torch and the standard library only, not {top}"
    return None if item.lazy else f"{folder}/ may import {top} only inside a function"


# ---- environment


def check_environment(root: Path) -> list[Violation]:
    """Environment variables outside of the files that are for them."""
    found = []
    for file, _, tree in sources(root, tuple(PARTS)):
        if file in ENVIRONMENT_FILES:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
                found.append(Violation(file, node.lineno, f"variables are for {', '.join(sorted(ENVIRONMENT_FILES))}"))
    return found


# ---- sizes


def check_sizes(root: Path) -> list[Violation]:
    """Length of files and functions, number of parameters, a docstring in every module."""
    found = []
    for file, text, tree in sources(root, SIZED_FOLDERS):
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(Violation(file, lines, f"{lines} lines; a file has at most {MAX_FILE_LINES}"))
        if not ast.get_docstring(tree):
            found.append(Violation(file, 1, "a module says in a docstring what it is and what it is not"))
        for function, in_class in functions_of(tree):
            messages = function_messages(file, function, in_class=in_class)
            found.extend(Violation(file, function.lineno, message) for message in messages)
        if file.split("/")[0] in PARTS:
            found.extend(state_violations(file, tree))
    return found


def state_violations(file: str, tree: ast.Module) -> Iterator[Violation]:
    """Classes that keep too much mutable state: attributes that their methods assign after the constructor."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [child for child in node.body if isinstance(child, Function) and child.name != "__init__"]
        stores = (x for method in methods for x in ast.walk(method) if isinstance(x, ast.Attribute))
        assigned = {x.attr for x in stores if isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self"}
        if len(assigned) > MAX_STATE:
            message = f"{node.name} assigns {len(assigned)} attributes after its constructor; at most {MAX_STATE}"
            yield Violation(file, node.lineno, message)


def functions_of(node: ast.AST, *, in_class: bool = False) -> Iterator[tuple[Function, bool]]:
    """Every function below node, with whether it is a method."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child, in_class
            yield from functions_of(child)
        else:
            yield from functions_of(child, in_class=isinstance(child, ast.ClassDef) or in_class)


def function_messages(file: str, function: Function, *, in_class: bool) -> Iterator[str]:
    """Messages about the size of one function."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        yield f"{function.name} has {lines} lines; a function has at most {MAX_FUNCTION_LINES}"
    if keeps_its_parameters(file, function):
        return
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args) - (in_class and not is_static(function))
    total = positional + len(arguments.kwonlyargs) + bool(arguments.vararg) + bool(arguments.kwarg)
    if total > MAX_PARAMETERS:
        yield f"{function.name} has {total} parameters; at most {MAX_PARAMETERS}"
    part_of_package = file.split("/")[0] in PARTS
    if part_of_package and positional > MAX_POSITIONAL and not has_fixed_signature(function.name):
        yield f"{function.name} takes {positional} by position; keyword-only after {MAX_POSITIONAL}"


def is_static(function: Function) -> bool:
    """Whether a method has no self or cls."""
    return any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list)


def has_fixed_signature(name: str) -> bool:
    """Whether a protocol fixes the signature: `__call__` (but not `__init__`), and a module's `forward`."""
    dunder = name.startswith("__") and name.endswith("__")
    return name == "forward" or (dunder and name not in {"__init__", "__new__"})


def keeps_its_parameters(file: str, function: Function) -> bool:
    """Whether it is a test (called by keyword)."""
    return file.startswith("tests/") and function.name.startswith("test_")


def check(root: Path) -> list[Violation]:
    return sorted({*check_imports(root), *check_circles(root), *check_environment(root), *check_sizes(root)})


def main() -> int:
    violations = check(Path(__file__).resolve().parents[1])
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
