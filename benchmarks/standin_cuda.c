/* A CUDA runtime whose calls succeed and do nothing, to be linked with our objects from nvcc. Two functions of libtorch
   are replaced as well, so that the objects take CPU tensors for CUDA tensors: aoti_torch_device_type_cuda returns the
   CPU's number, and aoti_torch_library_init_impl registers kernels under the key CPU. */
#define _GNU_SOURCE
#include <dlfcn.h>

#define SUCCEEDS(name) int name(void) { return 0; }
#define GIVES(name, value) int name(int *out) { *out = value; return 0; }

static int code;
void *__cudaRegisterFatBinary(void *binary) { return &code; }
SUCCEEDS(__cudaRegisterFatBinaryEnd) SUCCEEDS(__cudaUnregisterFatBinary) SUCCEEDS(__cudaRegisterFunction)
SUCCEEDS(__cudaRegisterVar) SUCCEEDS(__cudaPushCallConfiguration) SUCCEEDS(__cudaPopCallConfiguration)
SUCCEEDS(__cudaGetKernel) SUCCEEDS(__cudaLaunchKernel) SUCCEEDS(cudaLaunchKernelExC) SUCCEEDS(cudaFuncGetAttributes)
SUCCEEDS(cudaFuncSetAttribute) SUCCEEDS(cudaGetLastError) SUCCEEDS(cudaPeekAtLastError) SUCCEEDS(cudaMemcpyAsync)
SUCCEEDS(cudaMemsetAsync) SUCCEEDS(cudaSetDevice) SUCCEEDS(cudaStreamSynchronize)
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
GIVES(cudaGetDevice, 0) GIVES(cudaGetDeviceCount, 1) GIVES(cudaDriverGetVersion, 13000)
GIVES(cudaDeviceGetAttribute, 100) GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 1)
const char *cudaGetErrorString(int error) { return "unknown"; }

SUCCEEDS(aoti_torch_device_type_cuda) /* 0 is the CPU's number */
int aoti_torch_get_current_cuda_stream(int device, void **stream) { *stream = 0; return 0; }
int aoti_torch_create_device_guard(int device, void **guard) { *guard = 0; return 0; }
SUCCEEDS(aoti_torch_delete_device_guard)

int aoti_torch_library_init_impl(const char *name, const char *key, const char *file, unsigned line, void **library) {
  int (*init)(const char *, const char *, const char *, unsigned, void **) =
      dlsym(RTLD_NEXT, "aoti_torch_library_init_impl");
  return init(name, "CPU", file, line, library);
}
