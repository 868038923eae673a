"""Moves of blocks: the CUDA source compiles, does on a CPU what the oracle does, and on a device too where there is one."""

import contextlib
import ctypes
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels import reference
from headway_kernels.gpu import block_moves
from headway_kernels.gpu.block_moves import KERNELS, PIECE_TYPES, SOURCE, compile_options, device_view, host_view, plan

SHIM = Path(__file__).with_name("block_moves_shim.cpp")
CANARY = 0xA5
PAGEABLE_MEMORY_ACCESS = 88
"""``cudaDevAttrPageableMemoryAccess``"""

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("piece_bytes", PIECE_TYPES)
def test_the_source_compiles(capability, piece_bytes):
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(SOURCE, "block_moves.cu", [], [])
    options = [*compile_options(piece_bytes), f"--gpu-architecture=sm_{capability}"]
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert not nvrtc.getProgramLog(program).strip("\0\n "), "a warning"
    assert all(name.encode() in nvrtc.getCUBIN(program) for name in KERNELS)
    nvrtc.destroyProgram(program)


def test_vectors_are_loaded_and_stored_whole():
    """What the widest variant is for: 16 bytes an instruction, with the hints of each direction."""
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(SOURCE, "block_moves.cu", [], [])
    nvrtc.compileProgram(program, [*compile_options(16), "--gpu-architecture=compute_80"])
    code = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    code = code.decode() if isinstance(code, bytes) else code
    kernels = {name: code.partition(f".entry {name}(")[2].partition(".entry")[0] for name in KERNELS}
    pieces = block_moves.PIECES_PER_THREAD
    assert kernels["swap_out"].count("ld.global.cs.v4.u32") == pieces
    assert kernels["swap_out"].count("st.global.cs.v4.u32") == pieces
    assert kernels["swap_in"].count("ld.global.cs.v4.u32") == pieces
    assert kernels["swap_in"].count("st.global.v4.u32") == pieces
    assert kernels["copy_blocks"].count("ld.global.v4.u32") == pieces
    assert kernels["copy_blocks"].count("st.global.v4.u32") == pieces


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The compiled source by the size of its pieces."""
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("block_moves")
    (folder / "block_moves.cu").write_text(SOURCE)
    return {width: ctypes.CDLL(str(compiled(folder, width))) for width in PIECE_TYPES}


def compiled(folder, piece_bytes):
    library = folder / f"block_moves_{piece_bytes}.so"
    command = [sys.executable, "-P", "-m", "ziglang", "c++", *compile_options(piece_bytes), '-DSOURCE="block_moves.cu"']
    command += ["-O1", "-shared", "-fPIC", "-nostdlib++", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"]
    command += ["-Wall", "-Wextra", "-Werror", "-I", str(folder), "-o", str(library), str(SHIM)]
    caches = {name: str(folder / "cache") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    done = subprocess.run(
        command, cwd=folder, env=caches | os.environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return library


def run_on_cpu(libraries, launch, pairs, thread_blocks, threads):
    library = libraries[launch.piece_bytes]
    pools = [value for view in (launch.source, launch.target) for value in view]
    library.run(
        ctypes.cast(getattr(library, launch.kernel), ctypes.c_void_p),
        ctypes.c_uint(thread_blocks),
        ctypes.c_uint(threads),
        *map(ctypes.c_int64, pools),
        ctypes.c_void_p(pairs.data_ptr()),
        *map(ctypes.c_int, (launch.num_pairs, launch.num_layers, launch.block_pieces)),
    )


def guarded(shape, *, offset, generator):
    """Random bytes of that shape, ``offset`` bytes off any alignment, between canaries; and all of that memory."""
    size = int(torch.tensor(shape).prod())
    memory = torch.full((size + 128,), CANARY, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + 16 + offset
    memory[start : start + size] = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    return memory[start : start + size].view(shape), memory


@st.composite
def moves(draw, kernel):
    """Shapes of both pools, and pairs that no two threads may fight over."""
    num_blocks, num_host_blocks = draw(st.integers(2, 12)), draw(st.integers(1, 9))
    shape = (draw(st.integers(1, 4)), num_blocks)
    block_bytes = draw(st.sampled_from([1, 16])) * draw(st.integers(1, 40)) * draw(st.sampled_from([1, 4]))
    if kernel == "copy_blocks":
        numbers = draw(st.permutations(range(num_blocks)))
        targets = numbers[: draw(st.integers(0, num_blocks - 1))]
        readable, most = numbers[len(targets) :], num_blocks
    else:
        limits = (num_blocks, num_host_blocks) if kernel == "swap_out" else (num_host_blocks, num_blocks)
        readable, most = range(limits[0]), limits[1]
        targets = draw(st.lists(st.integers(0, most - 1), unique=True))
    sources = draw(st.lists(st.sampled_from(readable), min_size=len(targets), max_size=len(targets)))
    return shape, num_host_blocks, block_bytes, torch.tensor([sources, targets], dtype=torch.int32)


def expected_of(kernel, layers, host, pairs):
    layers, host = layers.clone(), host.clone()
    if kernel == "copy_blocks":
        reference.copy_blocks(layers, pairs)
    else:
        getattr(reference, kernel)(layers, host, pairs)
    return layers, host


def planned(kernel, layers, host, num_pairs):
    device, main = device_view(layers), host_view(host, host.data_ptr())
    source, target = {"copy_blocks": (device, device), "swap_out": (device, main), "swap_in": (main, device)}[kernel]
    return plan(kernel, source, target, layers, num_pairs)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=150)
@given(
    data=st.data(),
    threads=st.sampled_from([1, 2, 5, 32, block_moves.THREADS]),
    thread_blocks=st.integers(1, 7),
    offset=st.sampled_from([0, 0, 4, 1]),
    seed=st.integers(0, 1 << 16),
)
def test_the_source_does_what_the_oracle_does(on_cpu, kernel, data, threads, thread_blocks, offset, seed):
    (num_layers, num_blocks), num_host_blocks, block_bytes, pairs = data.draw(moves(kernel))
    generator = torch.Generator().manual_seed(seed)
    layers, memory = guarded((num_layers, num_blocks, block_bytes), offset=offset, generator=generator)
    host, host_memory = guarded((num_host_blocks, num_layers, block_bytes), offset=0, generator=generator)
    expected, expected_host = expected_of(kernel, layers, host, pairs)
    around = [layers.clone(), host.clone()]
    launch = planned(kernel, layers, host, pairs.shape[1])
    run_on_cpu(on_cpu, launch, pairs, thread_blocks, threads)
    assert torch.equal(layers, expected)
    assert torch.equal(host, expected_host)
    # Put back what was there: then nothing but the canaries can differ from an untouched pool.
    for pool, before, whole in zip((layers, host), around, (memory, host_memory), strict=True):
        pool.fill_(CANARY)
        assert (whole == CANARY).all(), before.shape


@pytest.mark.parametrize(
    ("block_bytes", "offset", "piece_bytes"), [(32, 0, 16), (16, 0, 16), (24, 0, 4), (6, 0, 1), (32, 4, 4), (32, 1, 1)]
)
def test_pieces_are_as_wide_as_blocks_and_addresses_allow(block_bytes, offset, piece_bytes):
    generator = torch.Generator().manual_seed(0)
    layers, _ = guarded((2, 3, block_bytes), offset=offset, generator=generator)
    host, _ = guarded((4, 2, block_bytes), offset=0, generator=generator)
    launch = planned("swap_in", layers, host, 3)
    assert launch.piece_bytes == piece_bytes
    assert launch.block_pieces * piece_bytes == block_bytes
    assert launch.source[1:] == (2 * launch.block_pieces, launch.block_pieces)
    assert launch.target[1:] == (launch.block_pieces, 3 * launch.block_pieces)


def test_a_swap_takes_a_fraction_of_the_device_and_small_moves_no_more_than_their_work():
    layers, host = torch.empty(32, 8, 65536, dtype=torch.uint8), torch.empty(8, 32, 65536, dtype=torch.uint8)
    assert planned("swap_out", layers, host, 8).thread_blocks == 32
    assert planned("copy_blocks", layers, host, 8).thread_blocks == 1024
    assert planned("copy_blocks", layers[:2].contiguous(), host, 1).thread_blocks == 2 * 4
    assert planned("swap_in", layers, host, 0).thread_blocks == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_pool_of_any_dtype_is_planned_in_bytes(dtype):
    layers, host = torch.empty(2, 5, 4, 8, dtype=dtype), torch.empty(3, 2, 4, 8, dtype=dtype)
    launch = planned("swap_out", layers, host, 3)
    assert launch.block_pieces * launch.piece_bytes == 32 * dtype.itemsize
    assert launch.source.layer_stride * launch.piece_bytes == 5 * 32 * dtype.itemsize


def test_all_moves_of_a_pool_are_compiled_before_the_first(monkeypatch):
    """Else the first copy compiles, while a step waits."""
    compiled_here = []

    class Module:
        def __init__(self, code, options):
            assert code == SOURCE
            self.options = options

        def get_function(self, name):
            compiled_here.append((name, self.options))

    cuda = types.SimpleNamespace(Device=lambda index: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(RawModule=Module, cuda=cuda))
    monkeypatch.setattr(block_moves, "_kernel", block_moves._kernel.__wrapped__)
    monkeypatch.setattr(block_moves, "_module", block_moves._module.__wrapped__)
    layers = torch.empty(2, 3, 24, dtype=torch.uint8)
    block_moves.compile_moves(layers)
    width = planned("copy_blocks", layers, torch.empty(0, 2, 24, dtype=torch.uint8), 1).piece_bytes
    assert compiled_here == [(kernel, compile_options(width)) for kernel in KERNELS]


# On a device.

DEVICE_SHAPES = [(2, 7, 5, (3, 40)), (32, 64, 48, (16, 16, 128)), (3, 9, 9, (3, 3)), (1, 4, 2, (5,))]


@needs_device
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("num_layers", "num_blocks", "num_host_blocks", "block"), DEVICE_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_device_does_what_the_oracle_does(kernel, num_layers, num_blocks, num_host_blocks, block, dtype):
    layers = torch.randint(0, 127, (num_layers, num_blocks, *block), device="cuda").to(dtype)
    host = torch.randint(0, 127, (num_host_blocks, num_layers, *block)).to(dtype).pin_memory()
    count = min(num_blocks, num_host_blocks) // 2
    numbers, host_numbers = torch.randperm(num_blocks), torch.randperm(num_host_blocks)
    sources, targets = {
        "copy_blocks": (numbers[count : 2 * count], numbers[:count]),
        "swap_out": (numbers[:count], host_numbers[:count]),
        "swap_in": (host_numbers[:count], numbers[:count]),
    }[kernel]
    pairs = torch.stack((sources, targets)).to("cuda", torch.int32)
    expected, expected_host = expected_of(kernel, layers, host, pairs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if kernel == "copy_blocks":
        block_moves.copy_blocks(layers, pairs, stream=stream)
    else:
        getattr(block_moves, kernel)(layers, host, pairs, stream=stream)
    stream.synchronize()
    assert torch.equal(layers, expected)
    assert torch.equal(host, expected_host)


@needs_device
def test_main_memory_that_is_not_pinned_is_refused():
    import cupy

    if cupy.cuda.runtime.deviceGetAttribute(PAGEABLE_MEMORY_ACCESS, 0):
        pytest.skip("this device reaches all main memory")
    layers, host = torch.zeros(2, 3, 16, device="cuda"), torch.zeros(3, 2, 16)
    pairs = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="not pinned"):
        block_moves.swap_out(layers, host, pairs)
