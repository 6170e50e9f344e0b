"""Every CUDA source is built for each architecture of the wheel, without spills and with the expected accesses.

The tests read the code in the built library. cuobjdump's resource report gives registers and stack (spills are in the
stack), the disassembly gives the width of every access. Nothing runs on a GPU. Planted kernels show that the checks
find faults.
"""

import os
import re
import shutil
import struct
import subprocess
import tempfile
from bisect import bisect
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = ("UNARY", "BINARY")
SOURCES = {  # path -> key of FLAT (the kernels' functors), for the sources that use the elementwise loop
    path: next((kind for kind in FUNCTIONS if f"SAFEOPS_{kind}(" in path.read_text()), None)
    for path in sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))
    if re.search(r'#include "(loop|floating|unary|binary).cuh"', path.read_text())
}
SELECTION = [p for p in sorted((ROOT / "csrc" / "cuda").rglob("*.cu")) if '#include "selection.cuh"' in p.read_text()]
SCANS = [p for p in sorted((ROOT / "csrc" / "cuda").rglob("*.cu")) if '#include "scan.cuh"' in p.read_text()]
IMAGES = [p for p in sorted((ROOT / "csrc" / "cuda").rglob("*.cu")) if '#include "moments.cuh"' in p.read_text()]
VOLUMES = [p for p in sorted((ROOT / "csrc" / "cuda").rglob("*.cu")) if '#include "volumes.cuh"' in p.read_text()]
VARIATION = [p for p in sorted((ROOT / "csrc" / "cuda").rglob("*.cu")) if '#include "neighbours.cuh"' in p.read_text()]
# Sources that safe_gather and safe_index_select share: look-up and CUB's sort; sums of lines; sums of sorted runs.
INDEXED, LINES, SUMS = (ROOT / f"csrc/cuda/selection/{name}.cu" for name in ("indexed", "line_sums", "run_sums"))
ARCHS = ("80", "90", "100", "120")
LIBRARY = next((ROOT / "safeops").glob("_cuda.*so"), None)
pytestmark = [
    pytest.mark.xdist_group("cuda_build"),  # the library is disassembled once, by one worker
    pytest.mark.slow,  # a development build has only this machine's architecture
]
# `make test-kernels` tests one architecture, `make test-exhaustive` all.
each_arch = pytest.mark.parametrize(
    "arch", [arch if arch == "90" else pytest.param(arch, marks=pytest.mark.exhaustive) for arch in ARCHS]
)


def find(tool):
    """Returns the path of a tool: from PATH, the CUDA toolkit, or Triton's package (which has cuobjdump)."""
    folders = [Path("/usr/local/cuda/bin"), *(Path(os.environ[k]) / "bin" for k in ("CUDA_HOME",) if k in os.environ)]
    try:
        import triton

        folders.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    except ImportError:
        pass
    result = shutil.which(tool)
    return result or next((str(f / tool) for f in folders if (f / tool).exists()), None)


NVCC, CUOBJDUMP, NVDISASM = find("nvcc"), find("cuobjdump"), find("nvdisasm")
needs_nvcc = pytest.mark.skipif(
    not (NVCC and CUOBJDUMP and NVDISASM), reason="no nvcc, cuobjdump or nvdisasm: nothing to compile or read"
)
needs_library = pytest.mark.skipif(
    not (LIBRARY and CUOBJDUMP and NVDISASM), reason="built without nvcc, or nothing to read it with"
)


def compile_cubin(source, target):
    """Compile one source's device code for sm_90 to the file `target`."""
    result = subprocess.run([NVCC, "-O3", "-arch=sm_90", "-cubin", str(source), "-o", str(target)], capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    return target


def cuobjdump(*arguments, cwd=None):
    command = [CUOBJDUMP, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def resources(cubin):
    """Returns {kernel: {"registers": per thread, "stack": bytes of spills and local arrays}} of compiled device
    code."""
    row = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
    results = row.findall(cuobjdump("--dump-resource-usage", cubin))
    return {name: {"registers": int(reg), "stack": int(stack) + int(local)} for name, reg, stack, local in results}


def texts(cubin):
    """Returns [(kernel, machine code)] of an ELF file: its sections .text.<kernel>."""
    data = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        at = headers[names][4] + name
        section = data[at : data.index(b"\0", at)].decode()
        if section.startswith(".text."):
            yield section.removeprefix(".text."), data[offset : offset + length]


def accesses(arch, cubins):
    """Returns {cubin: {kernel: {instruction: count}}} of the memory instructions, e.g. LDG.128, STG.U16, LDL.32. One
    process disassembles all cubins of an architecture, since its start takes most of the time."""
    results, begins, rows, raw = {}, [], [], b""
    for cubin in cubins:
        for kernel, code in texts(cubin):
            begins.append(len(raw))
            rows.append(results.setdefault(cubin, {}).setdefault(kernel, {}))
            raw += code
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        command = [NVDISASM, "--binary", f"SM{arch}", "--no-dataflow", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    memory = re.compile(r"/\*([0-9a-f]{4,})\*/.*?\b(LDG|LDGSTS|STG|LDL|STL|LD|ST)(\.\S+)?\s")
    for offset, name, modifiers in memory.findall(listing):
        width = re.search(r"\.(128|64|U16|S16|U8|S8)\b", modifiers)
        row, key = rows[bisect(begins, int(offset, 16)) - 1], f"{name}.{width.group(1) if width else 32}"
        row[key] = row.get(key, 0) + 1
    return results


def not_resident(table):
    """Returns the kernels that use local memory, for spills or arrays."""
    return {kernel: row for kernel, row in table.items() if row["stack"]}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns {(name of the source, architecture): (accesses, resources)} of the library. A mangled
    kernel name contains its source's name, since the kernel stands in an unnamed namespace."""
    folder = tmp_path_factory.mktemp("cubin")
    cuobjdump("-xelf", "all", LIBRARY.resolve(), cwd=folder)
    results = {}
    cubins = {arch: list(folder.glob(f"*.sm_{arch}.cubin")) for arch in ARCHS}
    done = {cubin: row for arch, some in cubins.items() if some for cubin, row in accesses(arch, some).items()}
    for cubin in done:
        table = resources(cubin)
        names = {name for kernel in table for name in re.findall(r"_GLOBAL__N__\w{8}_\d+_(\w+?)_cu_", kernel)}
        (source,) = names
        results[source, re.search(r"sm_(\d+)", cubin.name).group(1)] = done[cubin], table
    return results


@needs_library
@each_arch
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_compiles_without_spills_or_stack(built, source, arch):
    _, table = built[source.stem, arch]
    assert len(table) >= 6, f"{source.name}: only {list(table)}"
    assert not not_resident(table)
    # More than 64 registers leave fewer than 1024 threads on an SM, which keep 48 KiB of loads in flight (loop.cuh).
    assert max(r["registers"] for r in table.values()) <= 64


@needs_library
@each_arch
@pytest.mark.parametrize("source", SELECTION, ids=lambda s: s.stem)
def test_selection_compiles_without_spills_or_stack(built, source, arch):
    _, table = built[source.stem, arch]
    assert len(table) >= 8, f"{source.name}: only {list(table)}"
    assert not not_resident(table)
    # 80 registers: an SM holds three blocks with tiles of 32 KiB. 128: two, where elements of 1 or 2 bytes go to both
    # gradients.
    two = r"part_kernelI[ht]E"
    assert all(r["registers"] <= (128 if re.search(two, name) else 80) for name, r in table.items())


@needs_library
@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt: kernel names cannot be read here")
@each_arch
@pytest.mark.parametrize("source", SELECTION, ids=lambda s: s.stem)
def test_selection_moves_packets(built, source, arch):
    """A block loads its tile's mask and elements, and stores elements, in 16-byte packets. Elements are copied to
    shared memory asynchronously, so later loads need not wait. No access is a slower generic one."""
    table = demangled(built[source.stem, arch][0])
    wrong = {name: row for name, row in table.items() if any(not key.startswith(("LDG", "STG")) for key in row)}
    assert not wrong, "local memory, or accesses not known to be global"
    widths = {"unsigned char": 1, "unsigned short": 2, "unsigned int": 4, "unsigned long long": 8, "uint4": 16}
    for name, row in table.items():
        kernel, kind = re.search(r"(\w+)_kernel<([\w ]+?) ?>", name).groups()
        width = widths[kind]
        tile = 32768 // max(width, 2)
        masks, held = -(-tile // 16 // 256), tile * width // 16 // 256
        reads = {"pack": 0, "take": 4 * (width == 16), "put": 2 * (width == 16)}
        writes = {"count": 0, "number": 1, "pack": 1, "merge": held, "part": held + 1, "put": 1}
        assert row.get("LDG.128", 0) >= reads.get(kernel, masks), (name, row)
        assert row.get("LDGSTS.128", 0) >= held * (kernel in ("number", "pack", "merge", "part")), (name, row)
        assert row.get("STG.128", 0) >= writes.get(kernel, 4 * (width == 16)), (name, row)


@needs_library
@each_arch
def test_indexed_compiles_without_spills_or_stack(built, arch):
    # counts: 5 widths of look_up and 2 that prepare the sort; 3 dtypes in 3 layouts; 6 ways to hold the summands
    for source, count, most in ((INDEXED, 7, 64), (LINES, 9, 80), (SUMS, 6, 80)):
        _, table = built[source.stem, arch]
        kernels = {name: row for name, row in table.items() if "cub" not in name}
        assert len(kernels) == count, f"{source.name}: {list(kernels)}"
        assert not not_resident(table)
        assert max(row["registers"] for row in kernels.values()) <= most  # more would leave too few loads in flight


@needs_library
@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt: kernel names cannot be read here")
@each_arch
def test_indexed_moves_packets(built, arch):
    """Rows are read and written in 16-byte packets, and no access is a slower generic one."""
    table, report = ({k: v for s in (INDEXED, LINES, SUMS) for k, v in built[s.stem, arch][i].items()} for i in (0, 1))
    table, report = ({n: row for n, row in demangled(t).items() if "cub::" not in n} for t in (table, report))
    wrong = {name: row for name, row in table.items() if any(not key.startswith(("LDG", "STG")) for key in row)}
    assert not wrong, "local memory, or accesses not known to be global"
    (row,) = [row for name, row in table.items() if "look_up_kernel<uint4>" in name]
    assert row["LDG.128"] == 2 and row["STG.128"] == 2, row
    flat = {name: row for name, row in table.items() if re.search("line_kernel<.*, [48]>", name)}
    assert len(flat) == 6
    for name, row in flat.items():  # a thread reads 8 gradients and 8 indices at once
        assert sum(n for key, n in row.items() if key.startswith("LDG")) == 16, (name, row)
    packets = {name: row for name, row in table.items() if "sum_kernel<Fixed" in name}
    assert len(packets) == 4
    for name, row in packets.items():
        assert row["LDG.128"] >= 4 and row["STG.128"] >= 1, (name, row)
        (registers,) = [r["registers"] for other, r in report.items() if other == name]
        assert in_flight(registers, 4) >= 48 * 1024, name


@needs_library
@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt: kernel names cannot be read here")
@each_arch
@pytest.mark.parametrize("source", SCANS, ids=lambda s: s.stem)
def test_scans_move_packets_without_spills(built, source, arch):
    """In the code for each of four dtypes, a thread loads four packets at once, and then single packets of the tail
    (csrc/cuda/lists/scan.cuh)."""
    table, report = built[source.stem, arch]
    assert not not_resident(report)
    table, report = demangled(table), demangled(report)
    wrong = {name: row for name, row in table.items() if any(not key.startswith(("LDG", "STG")) for key in row)}
    assert not wrong, "local memory, or accesses not known to be global"
    dense = {name: row for name, row in table.items() if re.search(r"scan_kernel<.*, true, \d+>", name)}
    assert len(dense) == 2 * (3 if source.stem == "grad_norm" else 1)  # tables of few tensors and of many
    for name, row in dense.items():
        assert row["LDG.128"] >= 4 * (4 + 1), (name, row)
        assert row.get("STG.128", 0) == (row["LDG.128"] if source.stem == "clip_grad_norm_" else 0), (name, row)
        (registers,) = [r["registers"] for other, r in report.items() if other == name]
        assert in_flight(registers, 4) >= 48 * 1024, name


@needs_library
@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt: kernel names cannot be read here")
@each_arch
@pytest.mark.parametrize("source", IMAGES, ids=lambda s: s.stem)
def test_tiles_of_images_share_a_multiprocessor_without_spills(built, source, arch):
    """A multiprocessor's 64 Ki registers hold three blocks of 256 threads if the window size is a constant (11), else
    two (csrc/cuda/images/README.md)."""
    table, report = (demangled(t) for t in built[source.stem, arch])
    assert not not_resident(report)
    wrong = {name: row for name, row in table.items() if any(not key.startswith(("LDG", "STG")) for key in row)}
    assert not wrong, "local memory, or accesses not known to be global"
    tiles = {name: row["registers"] for name, row in report.items() if "ssim" in name}
    assert len(tiles) == 12, list(tiles)
    for name, registers in tiles.items():
        fixed_width = "<float, 11," in name
        assert (3 if fixed_width else 2) * 256 * -(-registers // 8) * 8 <= 65536, (name, registers)
        if fixed_width:  # a thread loads 13 pixels of either image at once; fp32 and 16 bits have own code
            assert table[name]["LDG.32"] >= 26 and table[name]["LDG.U16"] >= 26, table[name]


@needs_library
@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt: kernel names cannot be read here")
@each_arch
@pytest.mark.parametrize("source", VOLUMES, ids=lambda s: s.stem)
def test_tiles_of_volumes_have_their_sums_in_registers(built, source, arch):
    """A window's sums stay in registers: a multiprocessor holds two blocks of 256 threads in fp32, one in fp64."""
    table, report = (demangled(t) for t in built[source.stem, arch])
    assert not not_resident(report)
    wrong = {name: row for name, row in table.items() if any(not key.startswith(("LDG", "STG")) for key in row)}
    assert not wrong, "local memory, or accesses not known to be global"
    tiles = {
        name: row["registers"] for name, row in report.items() if re.search("(ssim_volume|slope|blur)_kernel", name)
    }
    assert len(tiles) == (9 if "backward" in source.stem else 6), list(tiles)
    assert all(registers <= (128 if "<float" in name else 255) for name, registers in tiles.items()), tiles


@needs_library
@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt: kernel names cannot be read here")
@each_arch
@pytest.mark.parametrize("source", VARIATION, ids=lambda s: s.stem)
def test_total_variation_moves_packets_without_spills(built, source, arch):
    """Where rows are contiguous, a thread's pixels and neighbors are in five packets forward and six backward, each
    loaded by one instruction."""
    table, report = (demangled(t) for t in built[source.stem, arch])
    assert not not_resident(report)
    wrong = {name: row for name, row in table.items() if any(not key.startswith(("LDG", "STG")) for key in row)}
    assert not wrong, "local memory, or accesses not known to be global"
    packed = {name: row for name, row in table.items() if "<Packed" in name}
    assert len(packed) == 8
    backward = "backward" in source.stem
    for name, row in packed.items():
        assert row["LDG.128"] >= 5 + backward and row.get("STG.128", 0) == 4 * backward, (name, row)
        (registers,) = [r["registers"] for other, r in report.items() if other == name]
        blocks = 65536 // (-(-registers // 8) * 8 * 256)
        assert blocks * 256 * (5 + backward) * 16 >= 40 * 1024, (name, registers)


@needs_library
@each_arch
def test_the_sort_compiles_without_spills_or_stack(built, arch):
    """CUB's kernels of the one instantiated sort neither spill nor use stack."""
    _, table = built[INDEXED.stem, arch]
    kernels = [name for name in table if "cub" in name]
    assert 4 <= len(kernels) <= 6, kernels
    assert not not_resident(table)


def test_one_source_includes_cub():
    including = [
        p.name for p in (ROOT / "csrc").rglob("*.*") if re.search(r"#include [<\"](cub|thrust)/", p.read_text())
    ]
    assert including == [INDEXED.name]


# Functor of the flat kernel -> (packets that a thread reads, packets that it writes), from the bytes that the op must
# move. The machine code has each read twice: the path for unaligned operands also reads the next packet.
CODECS = ("F16", "BF16", "F32", "F64")
BINARY = {"Binary": (4, 2), "BinaryBackward": (3, 2), "ByNumber": (2, 2), "ByNumberBackward": (4, 2)}
FLAT = {
    None: {"Copy<unsigned short>": (3, 2), "Copy<unsigned int>": (5, 4), "Copy<unsigned long long>": (9, 8)},
    "UNARY": {f"{op}, {codec}": n for op, n in {"Unary": (2, 2), "UnaryBackward": (4, 2)}.items() for codec in CODECS},
    "BINARY": {f"{op}, {codec}": n for op, n in BINARY.items() for codec in CODECS},
}
# A power by a number has its own functors: for halves, and for small exponents in fp32 and fp64.
POWERS = {"PowerOfHalf": ("F16", "BF16"), "SmallPower": ("F32", "F64")}
POWERS = {
    f"{op}{way}, {codec}": n
    for op, codecs in POWERS.items()
    for way, n in {"": (2, 2), "Backward": (4, 2)}.items()
    for codec in codecs
}
# ROLLED: fp32 and fp64 functions so long that a thread reads one packet of each operand at a time (kRolled).
# ARITHMETIC: these ops are bound by arithmetic, so they need no 48 KiB in flight.
ROLLED = {
    "safe_pow": {"Binary": (2, 1), "BinaryBackward": (3, 2), "ByNumber": (1, 1), "ByNumberBackward": (2, 1)},
}
ARITHMETIC = {("safe_pow", op) for op in ("Binary", "ByNumber", "ByNumberBackward")}
ARITHMETIC |= {("safe_exp", "Unary, F64"), ("safe_asin", "Unary, F64"), ("safe_div", "ByNumber, F64")}


def in_flight(registers, packets):
    """Returns the bytes that one SM of an H200 loads at once, if a thread has `packets` of 16 bytes in flight. The SM
    has 64 Ki registers, given out by 8 per thread; blocks have 128 threads."""
    blocks = min(65536 // (-(-registers // 8) * 8 * 128), 2048 // 128)
    return blocks * 128 * packets * 16


def demangled(table):
    names = subprocess.run(["c++filt", *table], capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        re.sub(r"safeops::cuda::|\(anonymous namespace\)::", "", name): row for name, row in zip(names, table.values())
    }


@needs_library
@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt: kernel names cannot be read here")
@each_arch
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_flat_and_rows_kernels_move_16_byte_packets(built, source, arch):
    table, report = built[source.stem, arch]
    table, report = demangled(table), demangled(report)
    wrong = {name: row for name, row in table.items() if any(not key.startswith(("LDG", "STG")) for key in row)}
    assert not wrong, "local memory, or accesses not known to be global"
    flat = {name: row for name, row in table.items() if "flat_kernel" in name}
    expected = FLAT[SOURCES[source]]
    if source.stem == "safe_pow":
        expected = {key: n for key, n in expected.items() if not re.match("ByNumber.*F16", key)} | POWERS
    functors = 2 if source.stem == "safe_div" else 1  # one for a divisor with a floor, one for a divisor without
    assert len(flat) == functors * len(expected)
    for key, (reads, writes) in expected.items():
        op, _, codec = key.rpartition(", ")
        of = rf"{op}(<\w+(, (Half|Range<\w+> ))?>)?" if op else r"\w+<[\w ]+>"
        pattern = rf"flat_kernel<{of}, {re.escape(codec)} ?>"
        names = [name for name in flat if re.search(pattern, name)]
        assert len(names) == functors, key
        if codec not in ("F16", "BF16"):
            reads, writes = ROLLED.get(source.stem, {}).get(op, (reads, writes))
        for name in names:
            row = flat[name]
            twice = 1 if "MaskedFill<unsigned long" in name else 2  # (MaskedFill's operands must be aligned)
            # For Blackwell the compiler also duplicates the loads after a branch on values.
            exact = arch in ("80", "90")
            assert row.get("LDG.128", 0) == twice * reads or (not exact and row["LDG.128"] > twice * reads), (key, row)
            assert row.get("STG.128", 0) >= writes, (key, row)
            if arch == "90" and not {(source.stem, op), (source.stem, key)} & ARITHMETIC:
                assert in_flight(report[name]["registers"], reads) >= 48 * 1024, name
    for name, row in table.items():
        if "rows_kernel" in name:
            assert row.get("LDG.128", 0) >= 2 and row.get("STG.128", 0) >= 2, (name, row)
            assert not {"STG.32", "STG.U16", "STG.64"} & set(row), (name, row)


SPILLING = """
__global__ void __launch_bounds__(1024, 2) planted(const float* x, float* y, int n) {
  float keep[64];
  for (int i = 0; i < 64; ++i) keep[i] = x[threadIdx.x * 64 + i];
  for (int k = 0; k < n; ++k)
    for (int i = 0; i < 64; ++i) keep[i] = keep[i] * keep[(i + 7) % 64] + keep[(i + k) % 64];
  for (int i = 0; i < 64; ++i) y[threadIdx.x * 64 + i] = keep[i];
}
"""
SCALAR = """
__global__ void planted(const unsigned short* x, unsigned short* y) {
  int first = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  for (int i = 0; i < 8; ++i) y[first + i] = x[first + i] + 1;
}
"""


@needs_nvcc
def test_a_spilling_kernel_is_caught(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(SPILLING)
    cubin = compile_cubin(source, tmp_path / "planted.cubin")
    (row,) = not_resident(resources(cubin)).values()
    assert row["stack"] > 0
    (row,) = accesses("90", [cubin])[cubin].values()
    assert any(name.startswith(("LDL", "STL")) for name in row), row


@needs_nvcc
def test_a_scalar_kernel_is_caught(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(SCALAR)
    cubin = compile_cubin(source, tmp_path / "planted.cubin")
    (row,) = accesses("90", [cubin])[cubin].values()
    assert "LDG.128" not in row and "STG.128" not in row and row["LDG.U16"] == 8


def test_the_library_registers_cuda_kernels_beside_any_torch():
    """A build with nvcc can import safeops._cuda also beside a CPU-only torch, and its ops have CUDA kernels."""
    import torch

    import safeops  # noqa: F401
    from safeops.core import library

    if library.cuda_extension is None:
        pytest.skip("built without nvcc: there is no safeops._cuda")
    functions = [path.stem for path, kind in SOURCES.items() if kind]
    assert len(functions) >= 11
    backward = {"masked_select": ""}  # masked_select has no backward kernel: it calls masked_scatter
    functions += [path.stem for path in SELECTION] + ["safe_gather", "safe_index_select"]
    names = [f"_{f}{side}" for f in functions for side in ("", backward.get(f, "_backward"))]
    for name in ("_masked_fill", "_health_", "_pick_", "_grad_norm", "_scale_", "_ssim", "_ssim_backward",
                 "_ms_ssim", "_ms_ssim_backward", "_total_variation", "_total_variation_backward", *names):  # fmt: skip
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"safeops::{name}", "CUDA"), name
