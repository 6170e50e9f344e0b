// Functions that the host and a GPU share.
#pragma once

#ifdef __CUDACC__
#define SAFEOPS_EVERYWHERE __host__ __device__
#else
#define SAFEOPS_EVERYWHERE
#endif
