// The functions of csrc/launch that Python calls, as rows for the module's method table.
#pragma once

#include <Python.h>

extern PyMethodDef safeops_launch_methods[];  // ends in an empty row
