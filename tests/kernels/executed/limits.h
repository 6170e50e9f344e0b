// Smaller limits in place of csrc/cuda's, so that small tensors exceed them: the elements of one launch of the general
// kernel (cudart.cpp may raise it), and the parts that masked_select counts.
#pragma once
#include <cstdint>

extern "C" int64_t executed_index_limit;
#define SAFEOPS_INDEX_LIMIT executed_index_limit
#ifndef SAFEOPS_PARTS
#define SAFEOPS_PARTS 20
#endif
