// health: writes a row of integers for each tensor of a list: its counts of NaN, infinite, zero and small values, its
// largest magnitude, and the position of its first value that is not finite. Counts are added by integer atomics, whose
// order changes no bit of the result. A second op, _pick_, reads operands at the position that such a row holds.
// Magnitudes are compared as integers: the bits of a float without its sign are ordered as its magnitude.
// I/O: read each tensor once.
#include "common/health.h"
#include "common/real.h"
#include "scan.cuh"

namespace safeops::cuda {
namespace {

template <class Codec>
struct Limits {
  using Word = std::conditional_t<sizeof(typename Codec::Raw) == 8, uint64, uint32_t>;
  static constexpr HealthLimits kLimits = health_limits(DType(Codec::kType));
  static constexpr Word kInfinity = kLimits.infinity, kNormal = kLimits.normal, kTiny = kLimits.tiny;
};

struct Health {
  static constexpr bool kWrites = false;
  static constexpr int kShared = 0;
  template <class Codec>
  static constexpr bool kPairs = sizeof(typename Codec::Raw) == 2;
  uint64* rows;

  template <class Codec>
  using Word = typename Limits<Codec>::Word;

  template <class Codec>
  struct State {
    unsigned nan, inf, minus_inf, zero, normal, tiny;  // counts; normal: below 2^-14, tiny: at most 2^-25, with zeros
    Word<Codec> largest;
    int64_t first;
  };

  template <class Codec, class Raw>
  static __device__ Word<Codec> magnitude(Raw raw) {
    return raw & Raw(Raw(~Raw(0)) >> 1);
  }

  __device__ bool begin() const { return true; }

  template <class Codec>
  __device__ bool read(State<Codec>& s, typename Codec::Raw raw) const {
    using L = Limits<Codec>;
    const Word<Codec> size = magnitude<Codec>(raw);
    const bool finite = size < L::kInfinity;
    s.zero += size == 0;
    s.tiny += size <= L::kTiny;
    s.normal += size < L::kNormal;
    if (finite && size > s.largest) s.largest = size;
    return !finite;
  }

  // Reads the two 16-bit elements of a word at once. Adding 0x8000 - limit to a magnitude sets its highest bit unless
  // the magnitude is below the limit. Two words have four such bits, in four bytes, which __dp4a adds up.
  template <class Codec, int U>
  __device__ bool read_pairs(State<Codec>& s, const uint4 (&packet)[U]) const {
    using L = Limits<Codec>;
    constexpr unsigned kLimit[] = {1, L::kTiny + 1, L::kNormal};
    // below_limit: 128 for each element below limit k. high, low: the largest upper half of a word, and lower half.
    unsigned below_limit[3] = {}, high = 0, low = 0;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint32_t word[] = {packet[u].x, packet[u].y, packet[u].z, packet[u].w};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const uint32_t a = word[w] & 0x7fff7fff, b = word[w + 1] & 0x7fff7fff;
        for (const uint32_t size : {a, b}) {
          high = size > high ? size : high;
          low = size << 16 > low ? size << 16 : low;
        }
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          const uint32_t lift = (0x8000 - kLimit[k]) * 0x10001u;
          below_limit[k] = __dp4a(~__byte_perm(a + lift, b + lift, 0x7531) & 0x80808080u, 0x01010101u, below_limit[k]);
        }
      }
    }
    s.zero += below_limit[0] >> 7, s.tiny += below_limit[1] >> 7, s.normal += below_limit[2] >> 7;
    const Word<Codec> largest = (high > low ? high : low) >> 16;
    if (largest >= L::kInfinity) return true;
    s.largest = largest > s.largest ? largest : s.largest;
    return false;
  }

  template <class Codec>
  __device__ void special(State<Codec>& s, typename Codec::Raw raw, int64_t left) const {
    using L = Limits<Codec>;
    const Word<Codec> size = magnitude<Codec>(raw);
    if (size < L::kInfinity) {
      s.largest = size > s.largest ? size : s.largest;
      return;
    }
    s.nan += size > L::kInfinity;
    s.inf += raw == L::kInfinity;
    s.minus_inf += size == L::kInfinity && raw != L::kInfinity;
    s.first = left > s.first ? left : s.first;
  }

  template <class Codec>
  __device__ void finish(const State<Codec>& s, int member) const {
    uint64* row = rows + int64_t(member) * kHealthColumns;
    const auto add = [row](HealthColumn column, unsigned lane) {  // most sums are 0: no atomic
      const unsigned sum = warp_reduce(lane, [](unsigned a, unsigned b) { return a + b; });
      if (sum && threadIdx.x % 32 == 0) atomicAdd(row + column, uint64(sum));
    };
    const auto raise = [row](HealthColumn column, uint64 lane) {
      const uint64 most = warp_reduce(lane, [](uint64 a, uint64 b) { return a > b ? a : b; });
      if (most && threadIdx.x % 32 == 0) atomicMax(row + column, most);
    };
    add(kNan, s.nan);
    add(kInf, s.inf);
    add(kMinusInf, s.minus_inf);
    add(kZero, s.zero);
    add(kSmall, s.normal - s.zero);
    add(kTiny, s.tiny - s.zero);
    raise(kLargest, uint64(__double_as_longlong(double(Codec::decode(typename Codec::Raw(s.largest))))));
    raise(kFirst, uint64(s.first));
  }
};

// ---- _pick_: the values of operands at the index that a row of health holds

constexpr int kPicked = 4;

struct Picked {
  Type floating;
  int bytes;  // size of an integer; 0: a floating type
  bool is_signed;
};

struct Pick {
  Plan<kPicked + 1> plan;  // operands: order (plan_in_order), inputs
  const char* first;
  char* out;
  int count;
  Picked input[kPicked];
};

__device__ inline double read_real(const char* p, const Picked& x) {
  switch (x.bytes) {
    case 0: return Dynamic<double>::decode(load_raw<uint64>(p, x.floating), x.floating);
    case 1: return x.is_signed ? double(int8_t(load<uint8_t>(p))) : double(load<uint8_t>(p));
    case 2: return x.is_signed ? double(int16_t(load<uint16_t>(p))) : double(load<uint16_t>(p));
    case 4: return x.is_signed ? double(int32_t(load<uint32_t>(p))) : double(load<uint32_t>(p));
    default: return x.is_signed ? double(int64_t(load<uint64>(p))) : double(load<uint64>(p));
  }
}

__global__ void pick_kernel(const __grid_constant__ Pick pick) {
  if (threadIdx.x >= unsigned(pick.count)) return;
  const int64_t first = int64_t(load<uint64>(pick.first)), numel = pick.plan.numel;
  if (first <= 0 || first > numel) return;
  const int input = int(threadIdx.x);
  store(pick.out + input * sizeof(double), read_real(at(pick.plan, 1 + input, numel - first), pick.input[input]));
}

// ---- host

// Returns a pointer to row `row` of a contiguous matrix. It must have `count` rows from that row on.
char* rows_of(const Tensor& matrix, DType dtype, int64_t columns, int64_t row, int64_t count, const char* op) {
  const safeops::View view(matrix);
  STD_TORCH_CHECK(view.dtype == dtype && view.ndim == 2 && view.sizes[1] == columns && view.contiguous(), op,
                  ": needs contiguous rows of ", columns, dtype == DType::kLong ? " int64" : " float64");
  STD_TORCH_CHECK(row >= 0 && row <= view.sizes[0] - count, op, ": rows ", row, " to ", row + count, " of ",
                  view.sizes[0]);
  return view.data + row * columns * 8;
}

void health(const Tensor& out, int64_t row, const std::vector<Tensor>& inputs) {
  constexpr const char* kOp = "safeops::_health_";
  char* rows = rows_of(out, DType::kLong, kHealthColumns, row, int64_t(inputs.size()), kOp);
  if (inputs.empty()) return;
  check_device(out, inputs[0], kOp, "out");
  const Launches launches(inputs, kOp, true);
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  launches.run(Health{reinterpret_cast<uint64*>(rows)}, current_stream(out));
  check_launch(kOp);
}

void pick_at(const Tensor& out, int64_t row, const Tensor& health, int64_t health_row,
             const std::vector<Tensor>& inputs, const std::vector<int64_t>& size) {
  constexpr const char* kOp = "safeops::_pick_";
  const Shape shape(static_cast<int>(size.size()), size.data());
  check_device(health, out, kOp, "health");
  Pick pick{};
  pick.out = rows_of(out, DType::kDouble, kPicked, row, 1, kOp);
  pick.first = rows_of(health, DType::kLong, kHealthColumns, health_row, 1, kOp) + kFirst * 8;
  std::array<Operand, kPicked> operands{};
  int64_t strides[kPicked][safeops::kMaxDims];  // in bytes
  for (; pick.count < kPicked && pick.count < int(inputs.size()); ++pick.count) {
    const int i = pick.count;
    check_device(inputs[i], out, kOp, "an input");
    const safeops::View view(inputs[i]);
    const Real real = real_of(inputs[i], kOp);
    const bool floating = real.floating != DType::kOther;
    pick.input[i] = {Type(real.floating), floating ? 0 : int(real.bytes), real.is_signed};
    for (int d = 0; d < view.ndim; ++d) strides[i][d] = view.strides[d] * real.bytes;
    operands[i] = {view.data, kBool, view.ndim, view.sizes, strides[i]};
  }
  pick.plan = plan_in_order<kPicked>(shape, operands);
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  start(pick_kernel, 1, current_stream(out), pick);
  check_launch(kOp);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_health_", TORCH_BOX(&health));
  m.impl("_pick_", TORCH_BOX(&pick_at));
}

}  // namespace safeops::cuda
