// safeops._cuda: importing it registers the CUDA kernels (static initialisers of the sources). It says for what it has
// code, and with what it was built: `archs`, "80 90 ..." (by setup.py), and `runtime`, the version of CUDA; and of the
// machine, `driver()`: the newest version of CUDA that its driver knows. Versions are as CUDA has them, 13000 for 13.0.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime_api.h>

namespace {

PyObject* driver(PyObject*, PyObject*) {
  int version = 0;  // which it stays where there is no driver
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
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr || PyModule_AddIntConstant(made, "runtime", CUDART_VERSION) < 0 ||
      PyModule_AddStringConstant(made, "archs", SAFEOPS_ARCHS) < 0)
    return nullptr;
  return made;
}
