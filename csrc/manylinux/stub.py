"""Writes a stub of a system library to link with: its symbols without code, each in the newest version that the
manylinux_2_28 policy knows. What is linked with the stubs runs beside glibc 2.28 and the libstdc++ of GCC 8, and later.

    stub.py COMPILER... LIBRARY OUTPUT

Versions of a symbol stay in glibc and libstdc++ for ever: this machine's libraries list those of the old ones too. In
glibc 2.34 libc took in libpthread, libdl and librt; where a symbol was before, the loader looks in any case.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# size, type, name, version; of what is defined, and no thread's own
ROW = re.compile(r" (\d+) I?(FUNC|OBJECT) .*(?<!UND) (\w+)@@?([A-Z]+)_([\d.]+)$", re.MULTILINE)

*compiler, library, output = sys.argv[1:]
path = subprocess.check_output([*compiler, f"-print-file-name={library}"], text=True).strip()
symbols = {}
for size, kind, symbol, group, version in ROW.findall(
    subprocess.check_output(["readelf", "--dyn-syms", "--wide", path], text=True)
):
    version = tuple(map(int, version.split(".")))
    if version <= NEWEST.get(group, ()):
        symbols[symbol] = max(symbols.get(symbol, ()), (group, version, kind, size))
versions, code = defaultdict(list), ""
for symbol, (group, version, kind, size) in symbols.items():
    versions[f"{group}_{'.'.join(map(str, version))}"].append(symbol)
    code += f".globl {symbol}\n.type {symbol}, STT_{kind}\n.size {symbol}, {size}\n{symbol}:\n"
with open(f"{output}.s", "w") as file:
    file.write(code)
with open(f"{output}.map", "w") as file:
    file.writelines(f"{version} {{ {'; '.join(names)}; }};\n" for version, names in versions.items())
call = ["-shared", "-nostdlib", f"{output}.s", f"-Wl,--version-script={output}.map", f"-Wl,-soname={library}"]
subprocess.check_call([*compiler, *call, "-o", output])
os.remove(f"{output}.s")
os.remove(f"{output}.map")
