// safeops._cuda: importing it registers the CUDA kernels, by static initialisers. It has three attributes:
// archs, the GPU architectures of its code, such as "80 90" (setup.py defines SAFEOPS_ARCHS); runtime, the version of
// CUDA that built it; driver(), the newest version that the machine's driver supports. 13000 is version 13.0.
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
