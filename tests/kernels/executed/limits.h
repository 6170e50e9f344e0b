// Limits of csrc/cuda that small tensors pass: elements of a launch of the general kernel, as long as cudart.cpp does
// not say otherwise, and the parts that masked_select counts.
#pragma once
#include <cstdint>

extern "C" int64_t executed_index_limit;
#define SAFEOPS_INDEX_LIMIT executed_index_limit
#ifndef SAFEOPS_PARTS
#define SAFEOPS_PARTS 20
#endif
