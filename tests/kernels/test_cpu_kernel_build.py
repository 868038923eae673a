"""How the C sources of the CPU kernels become libraries: for whom, when again, and what is said if they do not."""

import ctypes
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway_executor.backend import BackendConfigError
from headway_executor.host import host_report
from headway_executor.models.compiled import checked_library
from headway_kernels.cpu import library as library_module
from headway_kernels.cpu.library import StaleKernelsError, installed_variants, load_library, runs_here

BUILD_FILE = Path(__file__).resolve().parents[2] / "kernels" / "headway_kernels" / "cpu" / "build.py"
SOURCE = """
#include "answer.h"
__attribute__((visibility("default"))) int headway_answer(void);
int headway_answer(void) { return ANSWER; }
"""


@pytest.fixture(scope="module")
def build():
    """The module by its path, as a build loads it that has nothing of Headway installed."""
    spec = importlib.util.spec_from_file_location("cpu_kernel_build_by_path", BUILD_FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(tmp_path):
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "answer.c").write_text(SOURCE)
    (directory / "answer.h").write_text("#define ANSWER 42\n")
    (directory / "notes.txt").write_text("no source\n")
    return directory


@pytest.fixture
def on_an_arm_host(build, monkeypatch):
    """A platform with one variant, whatever runs the test."""
    variants = build.variants_of("Linux", "aarch64", "glibc")
    monkeypatch.setattr(build, "variants_here", lambda: variants)
    return variants[0]


@pytest.fixture
def compilations(build, monkeypatch):
    """Which libraries were compiled, by a compiler that only writes the stamp."""
    compiled = []

    def pretend(sources, variant, stamp, destination, workplace):
        compiled.append(variant.library)
        (destination / variant.library).write_bytes(b"code" + stamp.encode() + b"more code")

    monkeypatch.setattr(build, "compile_library", pretend)
    monkeypatch.setattr(build, "compiler_version", lambda: "1.0")
    return compiled


@pytest.mark.parametrize(
    ("system", "machine", "libc", "libraries"),
    [
        ("Linux", "x86_64", "glibc", ["libheadway_cpu.avx2.so", "libheadway_cpu.avx512.so", "libheadway_cpu.amx.so"]),
        ("Linux", "aarch64", "glibc", ["libheadway_cpu.neon.so"]),
        ("Darwin", "arm64", "", ["libheadway_cpu.neon.dylib"]),
        ("Linux", "x86_64", "", []),
        ("Linux", "riscv64", "glibc", []),
        ("Windows", "AMD64", "", []),
    ],
)
def test_a_platform_has_its_variants(build, system, machine, libc, libraries):
    assert [variant.library for variant in build.variants_of(system, machine, libc)] == libraries


@pytest.mark.parametrize(
    ("machine", "features", "running"),
    [
        ("aarch64", ["neon"], ["neon"]),
        ("arm64", ["neon"], ["neon"]),
        ("x86_64", ["avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"], ["avx2"]),
        ("AMD64", ["avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"], ["avx2"]),
        ("x86_64", ["avx2"], []),
        ("riscv64", ["avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"], []),
    ],
)
def test_a_processor_runs_the_variants_of_its_architecture(monkeypatch, machine, features, running):
    """Systems and libraries have several names for an architecture: torch calls an ``aarch64`` an ``arm64``."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True))
    variants = ["avx512", "avx2", "neon"]
    assert [variant for variant in variants if runs_here(Path(f"libheadway_cpu.{variant}.so"))] == running


def test_a_platform_without_variants_builds_nothing_and_says_so(build, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "variants_here", tuple)
    lines = []
    assert build.build_libraries(sources, tmp_path, report=lines.append) == ()
    assert len(lines) == 1
    assert "plain PyTorch" in lines[0]


def test_a_library_is_compiled_again_when_what_it_is_made_of_changes(
    build, sources, tmp_path, on_an_arm_host, compilations, monkeypatch
):
    def compiles() -> bool:
        before = len(compilations)
        assert build.build_libraries(sources, tmp_path, report=lambda _line: None) == (
            tmp_path / on_an_arm_host.library,
        )
        return len(compilations) > before

    assert compiles()
    assert not compiles()
    (sources / "answer.c").touch()
    (sources / "notes.txt").write_text("still none\n")
    assert not compiles()
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    assert compiles()
    (sources / "answer.h").rename(sources / "reply.h")
    assert compiles()
    monkeypatch.setattr(build, "compiler_version", lambda: "1.1")
    assert compiles()
    (tmp_path / on_an_arm_host.library).unlink()
    assert compiles()
    assert not compiles()


def test_a_missing_compiler_is_told_in_one_line(build, sources, tmp_path, on_an_arm_host, monkeypatch):
    def nothing_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing_installed)
    with pytest.raises(build.CompilerMissingError) as error:
        build.build_libraries(sources, tmp_path)
    assert str(error.value) == "no compiler for the CPU kernels; pip install ziglang brings one"


def test_a_refused_source_is_told_in_one_line_and_the_old_library_stays(
    build, sources, tmp_path, on_an_arm_host, monkeypatch
):
    refusal = "answer.c:3:5: error: no such thing\n   3 | thing\n1 error generated.\n"
    monkeypatch.setattr(build, "compiler_version", lambda: "1.0")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", refusal))
    (tmp_path / on_an_arm_host.library).write_bytes(b"old")
    with pytest.raises(build.CompilationError) as error:
        build.build_libraries(sources, tmp_path, report=lambda _line: None)
    assert str(error.value) == "libheadway_cpu.neon.so: answer.c:3:5: error: no such thing"
    assert error.value.output == refusal
    assert (tmp_path / on_an_arm_host.library).read_bytes() == b"old"


def test_a_directory_that_is_not_there_is_told_in_one_line(build, tmp_path, on_an_arm_host):
    with pytest.raises(build.KernelBuildError, match=r"cannot build the CPU kernels: .*no-such-place"):
        build.build_libraries(tmp_path / "no-such-place", tmp_path)


def test_the_compiler_makes_a_library_that_loads(build, sources, tmp_path, monkeypatch):
    variants = build.variants_here()[:1]
    if not variants:
        pytest.skip("no kernels for this platform")
    monkeypatch.setattr(build, "variants_here", lambda: variants)
    (library,) = build.build_libraries(sources, tmp_path, report=lambda _line: None)
    assert ctypes.CDLL(str(library)).headway_answer() == 42
    lines = []
    build.build_libraries(sources, tmp_path, report=lines.append)
    assert lines == [f"{library.name}: up to date"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [library.name, "sources"]


def test_a_library_of_other_sources_is_not_used(sources, monkeypatch):
    """Its structs may have other fields than Python fills: a process would end without a word."""
    usable = [path for path in installed_variants() if runs_here(path)]
    if not usable:
        pytest.skip("the CPU kernels are not installed")
    load_library.cache_clear()
    assert load_library().variant == library_module.variant_of(usable[0])
    load_library.cache_clear()
    monkeypatch.setattr(library_module, "SOURCES", sources)
    message = f"{usable[0].name} was compiled of other sources than are here; run: make kernels"
    with pytest.raises(StaleKernelsError, match=f"^{message}$"):
        load_library()
    with pytest.raises(BackendConfigError, match=f"^{message}$"):
        checked_library()
    report = host_report._kernel_variants()
    assert (report.used, report.problem) == ("", f"{message}; no model starts on the CPU before")
    monkeypatch.setattr(library_module, "SOURCES", sources / "none")
    assert load_library() is not None, "a wheel has no sources"
