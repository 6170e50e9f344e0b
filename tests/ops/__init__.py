"""One record per op, in the file or folder of its family: all that the tests know of it. Every driver loops over them.

    RECORDS        the records by the op's name
    definitions    the ops' definitions by name: `definitions.safe_div`

Nothing here needs pytest: the installed wheel is tried where there is torch alone.
"""

import importlib
import pkgutil
from types import SimpleNamespace

from tests.ops.record import RECORDS

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

definitions = SimpleNamespace(**{name: record.definition for name, record in RECORDS.items()})
