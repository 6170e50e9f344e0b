// Python's entrances to prepared launches are rows of the module's method table.
#pragma once

#include <Python.h>

extern PyMethodDef safeops_launch_methods[];  // ends in an empty row
