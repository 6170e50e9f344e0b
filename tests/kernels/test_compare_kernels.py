"""scripts/compare_kernels.py: a kernel equals itself at any address of its code and arguments, and no other kernel."""

import importlib.util
import json
import lzma

import pytest

from tests.kernels import compiled

spec = importlib.util.spec_from_file_location("compare_kernels", compiled.ROOT / "scripts" / "compare_kernels.py")
compare_kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare_kernels)


def listing(rows, start=0):
    return "\n".join(f"/*{start + 16 * i:04x}*/ {row} ;" for i, row in enumerate(rows))


def test_addresses_and_places_of_arguments_are_no_difference():
    def kernel(start, first, second):
        rows = "LDC R1, c[0x0][0x28]", f"LDC R2, c[0x0][0x{first:x}]", f"@!P0 IADD R2, R2, c[0x0][0x{second:x}]"
        return compiled.instructions(listing([*rows, f"@P1 BRA 0x{start + 16:x}", "MOV R3, 0x10"], start))

    result = kernel(0, 0x210, 0x218)
    assert result == kernel(0x4560, 0x230, 0x210)
    assert result == [
        "LDC R1, c[0x0][0x28]",
        "LDC R2, argument 0",
        "@!P0 IADD R2, R2, argument 1",
        "@P1 BRA 0x10",
        "MOV R3, 0x10",
    ]
    assert result != kernel(0, 0x210, 0x210)  # reads one argument twice; the kernel reads two


CODE = ["40 registers", "LDG R1, [R2]", "@P0 FADD R1, R1, R3", "STG [R2], R1"]


@pytest.mark.parametrize(
    "other, said",
    [
        (CODE, None),
        (["48 registers", *CODE[1:]], "48 registers, the same 3"),
        ([CODE[0], CODE[2], CODE[1], CODE[3]], "the same 3 instructions in another order"),
        ([*CODE, "EXIT"], "3 -> 4 instructions"),
        ([*CODE[:2], "@P0 FMUL R1, R1, R3", CODE[3]], "3 -> 3 instructions"),
        ([*CODE, "ULDC UR4, argument 0", "NOP "], "the same 3 instructions but for loads of arguments"),
        (None, "in one file alone"),
    ],
)
def test_what_differs_is_said(other, said, tmp_path, capsys):
    files = tmp_path / "before", tmp_path / "after"
    for file, code in zip(files, (CODE, other)):
        with lzma.open(file, "wt") as out:
            json.dump({"3.7.1": {"same": CODE} | ({"mean": code} if code else {})}, out)
    assert compare_kernels.main(["compare", *map(str, files)]) == (said is not None)
    out = capsys.readouterr().out
    assert f"2 kernels, {int(said is not None)} differ" in out
    assert said is None or said in out and "same:" not in out


@pytest.mark.slow
def test_kernels_are_recorded(tmp_path, capsys):
    pytest.importorskip("triton")
    from tests.kernels.test_triton_compiled import FOLDERS, planned

    for version, folder in FOLDERS.items():
        if folder and not folder.exists():
            pytest.skip(f"there is no {folder} with Triton {version}: make test-kernels installs it")
    apart, together = tmp_path / "apart", tmp_path / "together"
    few = len(planned()) // 3
    compare_kernels.main(["record", str(together), "--part", str(few)])
    compare_kernels.CHUNK = 1
    compare_kernels.main(["record", str(apart), "--part", str(few)])
    capsys.readouterr()
    assert compare_kernels.main(["compare", str(apart), str(together)]) == 0
    result = json.loads(lzma.open(apart).read())
    assert result.keys() == FOLDERS.keys() and all(3 <= len(kernels) <= 4 for kernels in result.values())
    assert all(len(code) > 100 and "registers" in code[0] for kernels in result.values() for code in kernels.values())
    codes = list(map(json.dumps, result[min(result)].values()))
    assert len({*codes}) == len(codes)
