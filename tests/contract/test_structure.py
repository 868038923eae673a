"""The shape of the house: how large a class, a module or a function may be, and that nothing imports in a circle."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("headway_structure", ROOT / "tools" / "structure.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


structure = load_tool()


@pytest.fixture(scope="module")
def modules():
    """Parsed when a test asks for them, since every worker of a run imports this file."""
    return structure.modules_of()


def above(found, limit: int) -> list[tuple[str, int]]:
    return [(entry.where, entry.size) for entry in found if entry.size > limit]


def test_the_modules_are_found(modules):
    assert {module.package for module in modules} == {
        "headway",
        "headway_conformance",
        "headway_executor",
        "headway_gateway",
        "headway_kernels",
        "headway_lab",
        "headway_process",
        "headway_proto",
        "headway_scheduler",
    }


def test_a_class_fits_on_a_few_screens(modules):
    assert above(structure.class_sizes(modules), 400) == []
    assert above(structure.method_counts(modules), 35) == []


def test_a_module_of_the_scheduler_has_at_most_500_lines(modules):
    found = [(m.name, m.num_lines) for m in modules if m.package == "headway_scheduler" and m.num_lines > 500]
    assert found == []


def test_functions_are_short_and_take_few_parameters(modules):
    # A kernel takes the pointers, strides and sizes of all its tensors.
    others = [module for module in modules if module.package != "headway_kernels"]
    sizes, parameters = structure.function_sizes(others), structure.parameter_counts(others)
    assert structure.percentile(sizes, 99) <= 45, above(sizes, 45)
    assert structure.percentile(parameters, 99) <= 8, above(parameters, 8)


def test_nothing_imports_in_a_circle_not_even_inside_a_function(modules):
    assert structure.circles_in(structure.imports_of(modules)) == []
    assert structure.package_circles(modules) == []


@pytest.mark.parametrize(
    ("graph", "circles"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_circles_are_found(graph, circles):
    assert structure.circles_in(graph) == circles


def test_an_import_inside_a_function_counts(tmp_path: Path):
    package = tmp_path / "lab" / "headway_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from headway_lab import two\n")
    (package / "two.py").write_text("def f(a, *b, c=0, **d):\n    import headway_lab.one\n")
    modules = structure.modules_of(tmp_path)
    assert structure.circles_in(structure.imports_of(modules)) == [["headway_lab.one", "headway_lab.two"]]
    assert [entry.size for entry in structure.parameter_counts(modules)] == [4]
