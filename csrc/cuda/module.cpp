// safeops._cuda: importing it registers the CUDA kernels (static initialisers of the sources). It has no contents.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__cuda() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", "CUDA kernels of safeops.", -1, nullptr,
                               nullptr,               nullptr, nullptr,                    nullptr};
  return PyModule_Create(&module);
}
