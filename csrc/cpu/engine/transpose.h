// Transposes a block that lies in the cache, from (rows, columns) to (columns, rows), in squares of four by four.
#pragma once

#include <cstring>

#include "cpu/engine/simd.h"

namespace safeops::cpu {

template <class T>
inline void transpose_block(const T* from, int64_t from_step, T* to, int64_t to_step) {
  for (int64_t r = 0; r < 4; ++r)
    for (int64_t c = 0; c < 4; ++c) to[c * to_step + r] = from[r * from_step + c];
}

template <>
inline void transpose_block(const float* from, int64_t from_step, float* to, int64_t to_step) {
  using Four [[gnu::vector_size(16)]] = float;
  using Index [[gnu::vector_size(16)]] = int32_t;
  Four a, b, c, d;
  std::memcpy(&a, from, 16);
  std::memcpy(&b, from + from_step, 16);
  std::memcpy(&c, from + 2 * from_step, 16);
  std::memcpy(&d, from + 3 * from_step, 16);
  const Index low{0, 4, 1, 5}, high{2, 6, 3, 7}, first{0, 1, 4, 5}, second{2, 3, 6, 7};
  const Four ab0 = __builtin_shuffle(a, b, low), ab1 = __builtin_shuffle(a, b, high);
  const Four cd0 = __builtin_shuffle(c, d, low), cd1 = __builtin_shuffle(c, d, high);
  const Four out[4] = {__builtin_shuffle(ab0, cd0, first), __builtin_shuffle(ab0, cd0, second),
                       __builtin_shuffle(ab1, cd1, first), __builtin_shuffle(ab1, cd1, second)};
  for (int64_t i = 0; i < 4; ++i) std::memcpy(to + i * to_step, &out[i], 16);
}

template <>
inline void transpose_block(const uint8_t* from, int64_t from_step, uint8_t* to, int64_t to_step) {
  uint32_t a, b, c, d;
  std::memcpy(&a, from, 4);
  std::memcpy(&b, from + from_step, 4);
  std::memcpy(&c, from + 2 * from_step, 4);
  std::memcpy(&d, from + 3 * from_step, 4);
  constexpr uint32_t kEven = 0x00FF00FF, kLow = 0x0000FFFF;
  const uint32_t ab0 = (a & kEven) | (b & kEven) << 8, ab1 = (a >> 8 & kEven) | (b & ~kEven);
  const uint32_t cd0 = (c & kEven) | (d & kEven) << 8, cd1 = (c >> 8 & kEven) | (d & ~kEven);
  const uint32_t out[4] = {(ab0 & kLow) | cd0 << 16, (ab1 & kLow) | cd1 << 16, ab0 >> 16 | (cd0 & ~kLow),
                           ab1 >> 16 | (cd1 & ~kLow)};
  for (int64_t i = 0; i < 4; ++i) std::memcpy(to + i * to_step, &out[i], 4);
}

// Transposes (rows, columns). Rows are from_step elements apart in `from`, and to_step elements apart in `to`.
template <class T>
void transpose_rows(const T* from, int64_t rows, int64_t columns, int64_t from_step, T* to, int64_t to_step) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4)
      transpose_block(from + r * from_step + c, from_step, to + c * to_step + r, to_step);
    for (; c < columns; ++c)
      for (int64_t k = 0; k < 4; ++k) to[c * to_step + r + k] = from[(r + k) * from_step + c];
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_step + r] = from[r * from_step + c];
}

// Transposes (rows, columns), both dense.
template <class T>
void transpose(const T* from, int64_t rows, int64_t columns, T* to) {
  transpose_rows(from, rows, columns, columns, to, rows);
}

}  // namespace safeops::cpu
