"""One record per op, in its family's file or folder, holds all that the tests know of the op. Tests loop over them.

    RECORDS        {the op's name: its record}
    definitions    the ops' definitions by name: `definitions.safe_div`

No file here imports pytest: the test of the installed wheel runs these records with torch alone.
"""

import importlib
import pkgutil
from types import SimpleNamespace

from tests.ops.record import RECORDS

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

definitions = SimpleNamespace(**{name: record.definition for name, record in RECORDS.items()})
