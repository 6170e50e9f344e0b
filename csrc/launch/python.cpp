#define PY_SSIZE_T_CLEAN
#include "launch/python.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "launch/prepared.h"

namespace safeops::launch {
namespace {

PyObject* hooks[2] = {nullptr, nullptr};  // Triton's lists of hooks before and after each launch

template <class F>
PyObject* guarded(F run) {
  try {
    return run();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* py_use_driver(PyObject*, PyObject* arguments) {
  unsigned long long launch, capturing, device, stream;
  PyObject *before, *after;
  if (!PyArg_ParseTuple(arguments, "KKKKOO", &launch, &capturing, &device, &stream, &before, &after)) return nullptr;
  Driver driver;
  driver.launch = reinterpret_cast<decltype(driver.launch)>(launch);
  driver.capturing = reinterpret_cast<decltype(driver.capturing)>(capturing);
  driver.device = reinterpret_cast<decltype(driver.device)>(device);
  driver.stream = reinterpret_cast<decltype(driver.stream)>(stream);
  Py_INCREF(before);
  Py_INCREF(after);
  hooks[0] = before;
  hooks[1] = after;
  use_driver(driver);
  Py_RETURN_NONE;
}

PyObject* py_launch(PyObject*, PyObject* arguments) {
  unsigned long long function;
  long long workspace;
  Launch launch;
  const char *words, *places;
  Py_ssize_t bytes, count;
  int split;
  if (!PyArg_ParseTuple(arguments, "K(III)IIiipLy#y#", &function, &launch.grid[0], &launch.grid[1], &launch.grid[2],
                        &launch.threads, &launch.shared, &launch.device, &launch.addresses, &split, &workspace, &words,
                        &bytes, &places, &count))
    return nullptr;
  launch.places.assign(places, places + count);
  const auto outside = [count](uint8_t place) { return place >= count; };
  if (bytes != 8 * count || count > Launch::most || launch.addresses > count ||
      std::any_of(launch.places.begin(), launch.places.end(), outside))
    return PyErr_Format(PyExc_ValueError, "%zd bytes of %zd parameters", bytes, count);
  launch.function = reinterpret_cast<void*>(function);
  launch.split = split != 0;
  launch.workspace = workspace;
  launch.words.resize(static_cast<size_t>(count));
  std::memcpy(launch.words.data(), words, static_cast<size_t>(bytes));
  int error;
  Py_BEGIN_ALLOW_THREADS  // the driver waits while its queue is full
  error = start(std::move(launch));
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(error);
}

PyObject* py_keep_buffers(PyObject*, PyObject* arguments) {
  int device;
  unsigned long long stream, partial, counter;
  if (!PyArg_ParseTuple(arguments, "iKKK", &device, &stream, &partial, &counter)) return nullptr;
  keep_buffers(device, reinterpret_cast<void*>(stream), partial, counter);
  Py_RETURN_NONE;
}

PyObject* py_wants_trace(PyObject*, PyObject*) { return PyBool_FromLong(wants_trace()); }

PyObject* py_trace(PyObject*, PyObject* arguments) {
  const char *steps, *results;
  Py_ssize_t sizes, steps_bytes, results_bytes;
  if (!PyArg_ParseTuple(arguments, "ny#y#", &sizes, &steps, &steps_bytes, &results, &results_bytes)) return nullptr;
  Tape tape;
  tape.sizes = static_cast<size_t>(sizes);
  tape.steps.resize(static_cast<size_t>(steps_bytes) / sizeof(Step));
  tape.results.resize(static_cast<size_t>(results_bytes) / sizeof(int64_t));
  std::memcpy(tape.steps.data(), steps, tape.steps.size() * sizeof(Step));
  std::memcpy(tape.results.data(), results, tape.results.size() * sizeof(int64_t));
  trace(std::move(tape));
  Py_RETURN_NONE;
}

PyObject* py_fail(PyObject*, PyObject* arguments) {
  const char* message;
  if (!PyArg_ParseTuple(arguments, "s", &message)) return nullptr;
  fail(message);
  Py_RETURN_NONE;
}

PyObject* py_cache_launches(PyObject*, PyObject* arguments) {
  const char *op, *kinds, *key;
  if (!PyArg_ParseTuple(arguments, "sss", &op, &kinds, &key)) return nullptr;
  return guarded([&] {
    cache_launches(op, kinds, key);
    Py_RETURN_NONE;
  });
}

PyObject* py_forget(PyObject*, PyObject*) {
  forget();
  Py_RETURN_NONE;
}

}  // namespace

bool watched() { return PyList_Size(hooks[0]) + PyList_Size(hooks[1]) > 0; }  // reads two words: needs no GIL

}  // namespace safeops::launch

using namespace safeops::launch;

PyMethodDef safeops_launch_methods[] = {
    {"cache_launches", py_cache_launches, METH_VARARGS,
     "Put a LaunchCache before the launcher of a Triton op: (op, kinds, dispatch key)."},
    {"launch", py_launch, METH_VARARGS, "Launch a kernel on the current stream, and prepare the call that waits."},
    {"use_driver", py_use_driver, METH_VARARGS, "The addresses of the driver's functions, and the lists of hooks."},
    {"keep_buffers", py_keep_buffers, METH_VARARGS, "The addresses of what splits share on a stream."},
    {"wants_trace", py_wants_trace, METH_NOARGS, "Whether the call that waits would be traced."},
    {"trace", py_trace, METH_VARARGS, "How its launch follows from sizes: (sizes, steps, places of results)."},
    {"fail", py_fail, METH_VARARGS, "The launcher of the call that waits has failed, with this message."},
    {"forget", py_forget, METH_NOARGS, "Forget all prepared calls."},
    {nullptr, nullptr, 0, nullptr},
};
