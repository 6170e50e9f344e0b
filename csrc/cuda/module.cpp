// safeops._cuda: importing it registers the CUDA kernels (static initialisers). It has `archs`, the architectures of
// its code as in "80 90" (setup.py defines them), `runtime`, the version of CUDA that built it, and `driver()`, the
// newest version of CUDA that the machine's driver supports. Versions are numbers as CUDA writes them, 13000 for 13.0.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime_api.h>

namespace {

PyObject* driver(PyObject*, PyObject*) {
  int version = 0;  // stays 0 where there is no driver
  cudaDriverGetVersion(&version);
  return PyLong_FromLong(version);
}

PyMethodDef methods[] = {
    {"driver", driver, METH_NOARGS, "The newest version of CUDA that the driver knows; 0 where there is no driver."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__cuda() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", "CUDA kernels of safeops.", -1, methods,
                               nullptr,               nullptr, nullptr,                    nullptr};
  PyObject* result = PyModule_Create(&module);
  if (result == nullptr || PyModule_AddIntConstant(result, "runtime", CUDART_VERSION) < 0 ||
      PyModule_AddStringConstant(result, "archs", SAFEOPS_ARCHS) < 0)
    return nullptr;
  return result;
}
