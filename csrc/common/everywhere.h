// SAFEOPS_EVERYWHERE marks functions that compile for both the host and a GPU.
#pragma once

#ifdef __CUDACC__
#define SAFEOPS_EVERYWHERE __host__ __device__
#else
#define SAFEOPS_EVERYWHERE
#endif
