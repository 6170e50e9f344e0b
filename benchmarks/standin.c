/* A libcuda whose calls succeed and do nothing, so that a launch takes only its host time. */

#define SUCCEEDS(name) int name(void) { return 0; }
#define GIVES(name, type, value) int name(type *out) { *out = (type)value; return 0; }

/* The last launch, for a test to read: grid, block, shared memory, function and arguments. The test sets `sizes`, the
   arguments' sizes in bytes, before the launch. */
unsigned last_shape[7];
unsigned long long last_function, last_arguments[256];
int sizes[256];

int cuLaunchKernelEx(const unsigned *config, void *function, void **arguments) {
  for (int i = 0; i < 7; ++i) last_shape[i] = config[i];
  last_function = (unsigned long long)function;
  for (int i = 0; i < 256 && sizes[i]; ++i) {
    last_arguments[i] = 0;
    __builtin_memcpy(last_arguments + i, arguments[i], sizes[i]);
  }
  return 0;
}

GIVES(cuCtxGetDevice, int, 0)
int capturing;  /* set by a test */
int cuStreamIsCapturing(void *stream, int *status) { *status = capturing; return 0; }
int aoti_torch_get_current_cuda_stream(int device, void **stream) { *stream = 0; return 0; }
GIVES(cuCtxGetCurrent, void *, 1) GIVES(cuModuleLoadData, void *, 1) GIVES(cuModuleGetFunction, void *, 1)
GIVES(cuFuncGetAttribute, int, 1024) GIVES(cuDeviceGetAttribute, int, 1 << 18)
int cuPointerGetAttribute(void **out, int attribute, void *pointer) { *out = pointer; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "unknown"; return 0; }
SUCCEEDS(cuDeviceGet) SUCCEEDS(cuDevicePrimaryCtxRetain_v2) SUCCEEDS(cuDevicePrimaryCtxRetain) SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuFuncSetAttribute) SUCCEEDS(cuFuncSetCacheConfig) SUCCEEDS(cuCtxGetLimit) SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuDriverGetVersion) SUCCEEDS(cuOccupancyMaxActiveClusters) SUCCEEDS(cuTensorMapEncodeTiled)
SUCCEEDS(cuTensorMapEncodeIm2col)
