// safeops._C: importing it registers the C++ kernels (static initialisers). Its functions serve `safeops doctor` and
// the prepared launches of Triton's kernels.
#include <Python.h>

#include <exception>

#include "cpu/engine/simd.h"
#include "launch/python.h"

static PyObject* cpu_isa(PyObject*, PyObject*) {
  try {
    return PyLong_FromLong(static_cast<long>(safeops::cpu::isa()));
  } catch (const std::exception& error) {  // a name that SAFEOPS_CPU_ISA does not have
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
}

static PyMethodDef methods[] = {
    {"cpu_isa", cpu_isa, METH_NOARGS, "Instruction set of the CPU kernels: 0 baseline, 1 AVX2, 2 AVX-512."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  PyObject* result = PyModule_Create(&module);
  if (result != nullptr && PyModule_AddFunctions(result, safeops_launch_methods) != 0) return nullptr;
  return result;
}
