// What Python calls of prepared launches: rows for the module's table.
#pragma once

#include <Python.h>

extern PyMethodDef safeops_launch_methods[];  // ends in an empty row
