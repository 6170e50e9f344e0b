// safeops._C: importing it registers the C++ kernels (static initialisers); it exports what `safeops doctor` asks.
#include <Python.h>

#include "cpu/simd.h"

static PyObject* cpu_isa(PyObject*, PyObject*) {
  return PyLong_FromLong(static_cast<long>(safeops::cpu::isa()));
}

static PyMethodDef methods[] = {
    {"cpu_isa", cpu_isa, METH_NOARGS, "Instruction set of the CPU kernels: 0 baseline, 1 AVX2, 2 AVX-512."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() { return PyModule_Create(&module); }
