// safeops._cuda: importing it registers the CUDA kernels (static initialisers of the sources). It says what it is made
// of: `sources`, "op=fingerprint ...", and `archs`, "80 90 ...", both by setup.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__cuda() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", "CUDA kernels of safeops.", -1, nullptr,
                               nullptr,               nullptr, nullptr,                    nullptr};
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr || PyModule_AddStringConstant(made, "sources", SAFEOPS_SOURCES) < 0 ||
      PyModule_AddStringConstant(made, "archs", SAFEOPS_ARCHS) < 0)
    return nullptr;
  return made;
}
