// Small limits in place of those of csrc/cuda, so that small tensors exceed them: how many elements one launch of the
// general kernel takes (cudart.cpp may raise it), and into how many parts masked_select's count is divided.
#pragma once
#include <cstdint>

extern "C" int64_t executed_index_limit;
#define SAFEOPS_INDEX_LIMIT executed_index_limit
#ifndef SAFEOPS_PARTS
#define SAFEOPS_PARTS 20
#endif
