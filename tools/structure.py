"""The shape of the code, read from its syntax trees: sizes, parameters, import circles, docstrings.

Owns: how these are counted. The limits that the project keeps are in tests/contract/test_structure.py.

    python tools/structure.py            # one table, and the largest of each kind
    python tools/structure.py --root DIR # the same of another checkout
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("proto", "kernels", "services/*", "lab", "tests/conformance")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A class or a function: ``size`` is lines, methods or parameters."""

    where: str
    size: int


class Module(NamedTuple):
    """One source file of the product."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]


def modules_of(root: Path = ROOT) -> list[Module]:
    """The product's modules by name, without generated ones."""
    found = []
    for pattern in SOURCE_ROOTS:
        for source_root in sorted(root.glob(pattern)):
            for path in sorted(source_root.glob("headway*/**/*.py")):
                if not path.name.endswith(GENERATED):
                    parts = path.relative_to(source_root).with_suffix("").parts
                    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                    text = path.read_text()
                    found.append(Module(name, path, ast.parse(text), text.count("\n")))
    return found


def classes_of(module: Module) -> Iterator[ast.ClassDef]:
    """Every class of a module."""
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def functions_of(module: Module) -> Iterator[Function]:
    """Every function and method of a module."""
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def num_lines_of(node: ast.ClassDef | Function) -> int:
    """Lines from ``class`` or ``def`` to the end, docstring included."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def num_parameters_of(node: Function) -> int:
    """Parameters other than ``self`` and ``cls``."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    num_stars = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len([one for one in named if one.arg not in {"self", "cls"}]) + num_stars


def class_sizes(modules: list[Module]) -> list[Definition]:
    """Lines of each class."""
    return [Definition(f"{m.name}:{node.name}", num_lines_of(node)) for m in modules for node in classes_of(m)]


def method_counts(modules: list[Module]) -> list[Definition]:
    """Methods of each class."""
    return [
        Definition(f"{m.name}:{node.name}", sum(isinstance(entry, Function) for entry in node.body))
        for m in modules
        for node in classes_of(m)
    ]


def function_sizes(modules: list[Module]) -> list[Definition]:
    """Lines of each function."""
    return [Definition(f"{m.name}:{node.name}", num_lines_of(node)) for m in modules for node in functions_of(m)]


def parameter_counts(modules: list[Module]) -> list[Definition]:
    """Parameters of each function."""
    return [Definition(f"{m.name}:{node.name}", num_parameters_of(node)) for m in modules for node in functions_of(m)]


def percentile(found: list[Definition], percent: float) -> int:
    """The smallest size that at least ``percent`` of all do not exceed."""
    ordered = sorted(entry.size for entry in found)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def num_docstring_lines(modules: list[Module]) -> int:
    """Lines of strings that stand alone: docstrings of modules, classes and functions, and those below attributes."""
    total = 0
    for module in modules:
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                total += (node.end_lineno or node.lineno) - node.lineno + 1
    return total


def imports_of(modules: list[Module]) -> dict[str, set[str]]:
    """For each module those of ours that it imports, at the top or inside a function, for types or to run."""
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                graph[module.name] |= {alias.name for alias in node.names} & names
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    graph[module.name] |= {submodule if submodule in names else node.module} & names
        graph[module.name].discard(module.name)
    return graph


def circles_in(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, each sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10 * len(graph)))
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def package_circles(modules: list[Module]) -> list[list[str]]:
    """The groups of top-level packages that import each other."""
    graph: dict[str, set[str]] = {module.package: set() for module in modules}
    for name, imported in imports_of(modules).items():
        package = name.partition(".")[0]
        graph[package] |= {other.partition(".")[0] for other in imported} - {package}
    return circles_in(graph)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Print the shape of the code.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to look at (default: this one)")
    modules = modules_of(parser.parse_args().root.resolve())
    # Kernels take the pointers, strides and sizes of all their tensors.
    no_kernels = [module for module in modules if module.package != "headway_kernels"]
    kinds = {
        "lines of a class": class_sizes(modules),
        "methods of a class": method_counts(modules),
        "lines of a function": function_sizes(no_kernels),
        "parameters of a function": parameter_counts(no_kernels),
        "lines of a module": [Definition(module.name, module.num_lines) for module in modules],
    }
    sys.stdout.write(
        f"{len(modules)} modules, {sum(m.num_lines for m in modules)} lines, {num_docstring_lines(modules)} of docstrings\n"
    )
    for kind, found in kinds.items():
        largest = sorted(found, key=lambda entry: (-entry.size, entry.where))[:3]
        shown = ", ".join(f"{entry.where} {entry.size}" for entry in largest)
        sys.stdout.write(f"{kind}: median {percentile(found, 50)}, p99 {percentile(found, 99)}, largest {shown}\n")
    for what, circles in (("modules", circles_in(imports_of(modules))), ("packages", package_circles(modules))):
        sys.stdout.write(f"{len(circles)} import circles of {what}\n")
        for circle in circles:
            sys.stdout.write(f"  {' '.join(circle)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
