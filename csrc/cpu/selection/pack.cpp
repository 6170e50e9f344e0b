#include "cpu/selection/pack.h"

#include "cpu/selection/pack_loops.h"

namespace safeops::cpu {

namespace {

template <class T, bool kValues, bool kIndex>
Pack<T> best_pack() {
#ifdef SAFEOPS_X86
  if (isa() >= Isa::kAvx2) return &pack_avx2<T, kValues, kIndex>;
#endif
  return &pack_plain<T, kValues, kIndex>;
}

}  // namespace

Count find_count() {
#ifdef SAFEOPS_X86
  if (isa() >= Isa::kAvx2) return &count_avx2;
#endif
  return &count_loop;
}

template <class T>
Pack<T> find_pack(bool values, bool index) {
  if (!values) return best_pack<T, false, true>();
  return index ? best_pack<T, true, true>() : best_pack<T, true, false>();
}

template <class T>
Merge<T> find_merge() {
#ifdef SAFEOPS_X86
  if (isa() >= Isa::kAvx2) return &merge_avx2<T>;
#endif
  return &merge_plain<T>;
}

template Merge<uint8_t> find_merge<uint8_t>();
template Merge<uint16_t> find_merge<uint16_t>();
template Merge<uint32_t> find_merge<uint32_t>();
template Merge<uint64_t> find_merge<uint64_t>();
template Pack<uint8_t> find_pack<uint8_t>(bool, bool);
template Pack<uint16_t> find_pack<uint16_t>(bool, bool);
template Pack<uint32_t> find_pack<uint32_t>(bool, bool);
template Pack<uint64_t> find_pack<uint64_t>(bool, bool);

// Slices are long: pack_last packs the end of each slice element by element, which must be a small part of the work.
Slices::Slices(const Source<uint8_t>& mask, int64_t numel_, bool total) : numel(numel_), length(kGrain), count(1) {
  const bool single = numel <= length || torch::stable::get_num_threads() == 1;
  if (single && !total) return;
  if (single)
    length = std::max<int64_t>(1, numel);
  else
    count = (numel + length - 1) / length;
  first.resize(count + 1);
  const Count count_kept = find_count();
  parallel(count, length / 16, [&](int64_t begin, int64_t end) {
    alignas(64) uint8_t buffer[kBuffer];
    mask.prime(buffer);
    for (int64_t s = begin; s < end; ++s) {
      int64_t total = 0;
      for (int64_t at = s * length, stop = std::min(at + length, numel); at < stop; at += kChunk) {
        const int64_t n = std::min(kChunk, stop - at);
        total += count_kept(mask.fetch(at, n, at + kAhead, buffer), n);
      }
      first[s + 1] = total;
    }
  });
  for (int64_t s = 0; s < count; ++s) first[s + 1] += first[s];
}

}  // namespace safeops::cpu
