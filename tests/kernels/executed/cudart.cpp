// Replaces the CUDA runtime and torch's C shim for ops on CPU tensors: defines the functions that csrc/cuda's host code
// and CUB call. A launch calls Python, which executes the PTX (cuda.py).
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Launch = int (*)(const char* kernel, const unsigned* grid, const unsigned* threads, int64_t shared, void**);

constexpr unsigned char UNWRITTEN = 0xA5;  // fills new memory
Launch launch = nullptr;
cudaError_t error = cudaSuccess;
int64_t memory_operations = 0;
int driver = CUDART_VERSION;
bool planning = false;  // launches are recorded and not executed, and no memory is touched
int64_t kept_count = 0;  // while planning, what a copy from the device gives
const void* in_host = nullptr;  // data of the tensor that counts as a CPU tensor
struct Configuration {
    dim3 grid, threads;
    size_t shared;
};
std::vector<Configuration> configurations;
std::unordered_map<const void*, std::string>& kernels() {  // {host function: its kernel's name in the PTX}
    static auto& all = *new std::unordered_map<const void*, std::string>;
    return all;
}

// An op's allocations are freed when the op ends, but not memory that torch zeroed: an op keeps its zeroed counter for
// later calls.
struct Allocation {
    void* data;
    int64_t bytes, element;
    AtenTensorHandle tensor;
    bool kept = false;
};
std::vector<Allocation> allocations;

template <class F>
F* torchs(F*, const char* name) {
    static void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    return reinterpret_cast<F*>(dlsym(library, name));
}
#define TORCHS(function) torchs(&function, #function)

void note(AtenTensorHandle tensor) {
    Allocation a{};
    int32_t dtype;
    aoti_torch_get_data_ptr(tensor, &a.data), aoti_torch_get_storage_size(tensor, &a.bytes);
    aoti_torch_get_dtype(tensor, &dtype);
    a.element = int64_t(aoti_torch_dtype_element_size(dtype));
    aoti_torch_new_tensor_handle(tensor, &a.tensor);
    if (!planning) std::memset(a.data, UNWRITTEN, a.bytes);
    allocations.push_back(a);
}

cudaError_t start(const void* function, dim3 grid, dim3 threads, void** arguments, size_t shared) {
    const auto kernel = kernels().find(function);
    if (kernel == kernels().end()) return error = cudaErrorInvalidDeviceFunction;
    if (launch(kernel->second.c_str(), &grid.x, &threads.x, int64_t(shared), arguments))
        error = cudaErrorLaunchFailure;
    return error;
}

}  // namespace

extern "C" {

// ---- for Python

#pragma GCC visibility push(default)

int64_t executed_index_limit = 3000;

void executed_launches_go_to(Launch function) { launch = function; }
void executed_plans(int64_t kept) { planning = kept >= 0, kept_count = kept; }
void executed_driver(int version) { driver = version; }
void executed_in_host(const void* data) { in_host = data; }
int64_t executed_memory_operations() { return std::exchange(memory_operations, 0); }

// Fills rows of (address, bytes, bytes of an element, 1 if unwritten since the allocation); returns the count.
int64_t executed_allocations(int64_t (*rows)[4], int64_t most) {
    for (int64_t k = 0; k < int64_t(allocations.size()) && k < most; ++k) {
        const auto* bytes = static_cast<const unsigned char*>(allocations[k].data);
        const int64_t size = allocations[k].bytes;
        rows[k][0] = reinterpret_cast<int64_t>(bytes), rows[k][1] = size, rows[k][2] = allocations[k].element;
        rows[k][3] = size && bytes[0] == UNWRITTEN && !std::memcmp(bytes, bytes + 1, size - 1);
    }
    return int64_t(allocations.size());
}

void executed_end() {
    std::vector<Allocation> kept;
    for (Allocation& a : allocations)
        if (a.kept) kept.push_back(a);
        else aoti_torch_delete_tensor_object(a.tensor);
    allocations = kept;
    error = cudaSuccess;
}

#pragma GCC visibility pop

// ---- torch

AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char* file, uint32_t line,
                                            TorchLibraryHandle* library) {
    Dl_info here;
    dladdr(reinterpret_cast<void*>(&executed_end), &here);
    std::string name = here.dli_fname;  // the file's name is the namespace
    name = name.substr(name.rfind('/') + 1);
    name = name.substr(0, name.find('.'));
    return TORCHS(aoti_torch_library_init_impl)((new std::string(name))->c_str(), "CPU", file, line, library);
}

AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t, int32_t, AtenTensorHandle* tensor) {
    if (TORCHS(aoti_torch_empty_strided)(ndim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, tensor))
        return 1;
    note(*tensor);
    return 0;
}

AOTITorchError torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack, uint64_t version) {
    void* data = nullptr;
    const bool zeroes = !std::strcmp(op, "aten::zero_");
    if (zeroes) aoti_torch_get_data_ptr(reinterpret_cast<AtenTensorHandle>(stack[0]), &data);
    if (TORCHS(torch_call_dispatcher)(op, overload, stack, version)) return 1;
    for (Allocation& a : allocations) a.kept |= zeroes && a.data == data;
    if (!std::strcmp(op, "aten::empty_like")) note(reinterpret_cast<AtenTensorHandle>(stack[0]));
    return 0;
}

AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type) {
    void* data;
    aoti_torch_get_data_ptr(tensor, &data);
    *type = data && data == in_host ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
    return 0;
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
    *stream = nullptr;
    return 0;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
    *guard = nullptr;
    return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }

// ---- the runtime

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
    kernels()[function] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 threads, size_t shared, void*) {
    configurations.push_back({grid, threads, shared});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* threads, size_t* shared, void* stream) {
    const Configuration c = configurations.back();
    configurations.pop_back();
    *grid = c.grid, *threads = c.threads, *shared = c.shared, *static_cast<void**>(stream) = nullptr;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments, size_t shared,
                               cudaStream_t) {
    return start(kernel, grid, threads, arguments, shared);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 threads, void** arguments, size_t shared,
                             cudaStream_t) {
    return start(function, grid, threads, arguments, shared);
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    ++memory_operations;
    const unsigned none[3] = {};
    if (!planning) std::memset(to, value, bytes);
    else launch("", none, none, int64_t(bytes), nullptr);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    ++memory_operations;
    if (planning) std::memset(to, 0, bytes), from = &kept_count, bytes = sizeof kept_count;
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = driver;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return error; }
const char* cudaGetErrorString(cudaError_t) { return "the executor has found a fault"; }

// ---- further calls by CUB

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMultiProcessorCount: *value = 4; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        default: return error = cudaErrorInvalidValue;
    }
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->ptxVersion = attributes->binaryVersion = 90, attributes->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
}
