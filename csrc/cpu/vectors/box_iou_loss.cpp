// 1 - IoU of each pair of boxes (x1, y1, x2, y2), with the additional terms of GIoU, DIoU and CIoU, and its gradients.
// Each of the eight edges of a pair is an operand of the loop, strided over the rows.
// I/O: forward reads both boxes, backward reads them again and writes their gradients.
#include <atomic>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/math.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

namespace {

enum Kind { kIou, kGiou, kDiou, kCiou };
constexpr int kEdges = 8;  // first the input's edges, then the target's

template <class C>
struct BoxChunk {
  int64_t n;
  const C* edge[kEdges];
  const uint8_t* mask;
  const C* grad;               // backward only
  C* out[kEdges];              // the loss, or the gradients of the edges
  uint8_t *keep, *refused;     // forward only
};

// Returns y as a divisor: inf if y is 0, so that x / y is 0.
template <class C>
SAFEOPS_INLINE C divisor(C y) { return select(y == 0, std::numeric_limits<C>::infinity(), y); }

// Returns d min(x, y)/dx, which equals d max(x, y)/dy: 1 if x < y, 1/2 if x = y, else 0.
template <class C>
SAFEOPS_INLINE C share_of_lesser(C x, C y) { return select(x == y, C(0.5), select_or_zero(x < y, C(1))); }

// Returns the power of two that brings the largest edge near 1, so that no area overflows or underflows.
template <class C>
SAFEOPS_INLINE C scale_of(C most) {
  using Bits = BitsOf<C>;
  constexpr int kShift = math::Traits<C>::kExponentBits;
  constexpr Bits kOne = Bits(1) << kShift, kMost = Bits(2 * math::Traits<C>::kBias - 1) << kShift;
  Bits power = bit_cast<Bits>(most) & ~(kOne - 1);
  power = select(power < kOne, kOne, select(power > kMost, kMost, power));
  return bit_cast<C>(static_cast<Bits>(kMost + kOne - power));
}

// The edges of two boxes, a and b, along x or y. These structs are passed by value: a reference keeps gcc from
// vectorising the loop.
template <class C>
struct Edges {
  C a1, a2, b1, b2;
};

template <class C>
SAFEOPS_INLINE C largest(Edges<C> e) {
  return math::at_least(math::at_least(std::fabs(e.a1), std::fabs(e.a2)),
                        math::at_least(std::fabs(e.b1), std::fabs(e.b2)));
}

template <class C>
SAFEOPS_INLINE Edges<C> times(Edges<C> e, C scale) {
  return {e.a1 * scale, e.a2 * scale, e.b1 * scale, e.b2 * scale};
}

// Along x or y: the lengths of a, of b, of their intersection (both) and of the box around them (hull), and the
// distance of their centres (apart). Or: the derivatives of the loss with respect to each of these.
template <class C>
struct Axis {
  C a, b, both, hull, apart;
};

template <class C>
SAFEOPS_INLINE Axis<C> axis_of(Edges<C> e) {
  const C a = e.a2 - e.a1, b = e.b2 - e.b1;
  const C both = select(e.a2 < e.b2, e.a2, e.b2) - select(e.a1 > e.b1, e.a1, e.b1);
  const C hull = select(e.a2 > e.b2, e.a2, e.b2) - select(e.a1 < e.b1, e.a1, e.b1);
  return {a, b, select_or_zero(both > 0, both) + (a - a) + (b - b), hull, ((e.a1 - e.b1) + (e.a2 - e.b2)) / 2};
}

template <class C>
struct LossAndSlopes {
  C loss;
  Axis<C> x, y;
};

template <int kKind, class C>
SAFEOPS_INLINE LossAndSlopes<C> loss_and_slopes(Axis<C> x, Axis<C> y) {
  // both: the area of the intersection. rest: the area of the union without the intersection, as a sum in which nothing
  // cancels.
  const C both = x.both * y.both;
  const C rest = ((x.a - x.both) * y.a + x.both * (y.a - y.both)) + ((x.b - x.both) * y.b + x.both * (y.b - y.both));
  const C area = both + rest, by = divisor(area), iou = both / by;  // area of the union
  C loss = select(area == 0, C(1), rest / by);
  // dx, dy: derivatives of 1 - iou, from d(iou) = ((1 + iou) d(both) - iou d(area a + area b)) / union. Terms that may
  // cancel are quotients, which the compiler cannot fuse into a multiply-add.
  Axis<C> dx{iou * y.a / by, iou * y.b / by, (0 - (1 + iou)) * y.both / by, 0, 0};
  Axis<C> dy{iou * x.a / by, iou * x.b / by, (0 - (1 + iou)) * x.both / by, 0, 0};
  if constexpr (kKind == kGiou) {  // adds 1 - union / hull
    const C hull = x.hull * y.hull, of = divisor(hull), part = area / of;
    loss += select_or_zero(!(hull == 0), 1 - part);
    dx = {dx.a - y.a / of, dx.b - y.b / of, dx.both + y.both / of, part * y.hull / of, 0};
    dy = {dy.a - x.a / of, dy.b - x.b / of, dy.both + x.both / of, part * x.hull / of, 0};
  }
  if constexpr (kKind >= kDiou) {  // adds (distance of the centres)^2 / (diagonal of the hull)^2
    const C c = divisor(x.hull * x.hull + y.hull * y.hull), distance = (x.apart * x.apart + y.apart * y.apart) / c;
    dx.apart = 2 * x.apart / c, dx.hull = -2 * distance * x.hull / c;
    dy.apart = 2 * y.apart / c, dy.hull = -2 * distance * y.hull / c;
    if constexpr (kKind == kCiou) {  // adds alpha v, v = (2 / pi (angle of b - angle of a))^2; alpha has no slope
      const bool lesser = x.a + y.a <= x.b + y.b;  // across = x.b y.a - x.a y.b, from the smaller box's sides
      const C w = select(lesser, x.a, x.b), h = select(lesser, y.a, y.b);
      const C across = (x.b - x.a) * h - w * (y.b - y.a), along = y.a * y.b + x.a * x.b;
      constexpr C kTurn = C(0x1.45f306dc9c883p-1);  // 2 / pi
      const bool point = ((x.a == 0) & (y.a == 0)) | ((x.b == 0) & (y.b == 0));  // a point has no angle
      const C angle = select_or_zero(!point, math::atan2(across, along)) * kTurn, v = angle * angle;
      const C alpha = v / divisor(loss + v), slope = 2 * alpha * angle * kTurn;
      const C of_a = slope / divisor(x.a * x.a + y.a * y.a), of_b = slope / divisor(x.b * x.b + y.b * y.b);
      dx.a -= of_a * y.a, dy.a += of_a * x.a;
      dx.b += of_b * y.b, dy.b -= of_b * x.b;
      loss += alpha * v;
    }
    loss += distance;
  }
  dx.both = select_or_zero(x.both != 0, dx.both), dy.both = select_or_zero(y.both != 0, dy.both);
  return {loss, dx, dy};
}

// Turns derivatives with respect to the lengths into derivatives with respect to the edges.
template <class C>
SAFEOPS_INLINE Edges<C> edge_slopes(Axis<C> d, Edges<C> e) {
  const C low = share_of_lesser(e.b1, e.a1), high = share_of_lesser(e.a2, e.b2), half = d.apart / 2;
  return {0 - d.a - low * d.both - (1 - low) * d.hull + half, d.a + high * d.both + (1 - high) * d.hull + half,
          0 - d.b - (1 - low) * d.both - low * d.hull - half, d.b + (1 - high) * d.both + high * d.hull - half};
}

// True if the width or the height is negative and the other one is not NaN.
template <class C>
SAFEOPS_INLINE bool is_upside_down(C width, C height) {
  return ((width < 0) & (height == height)) | ((height < 0) & (width == width));
}

// The body of box_loop. It is a function of its own, because gcc keeps structs that a loop declares in memory, and then
// does not vectorise the loop.
template <class C, int kKind, bool kBackward>
SAFEOPS_INLINE void pair_at(const BoxChunk<C>& chunk, int64_t i) {
  const C* const* e = chunk.edge;
  const Edges<C> h{e[0][i], e[2][i], e[4][i], e[6][i]}, v{e[1][i], e[3][i], e[5][i], e[7][i]};
  const bool upside_down = is_upside_down(h.a2 - h.a1, v.a2 - v.a1) | is_upside_down(h.b2 - h.b1, v.b2 - v.b1);
  const bool masked = chunk.mask[i] == 0, kept = !masked & !upside_down;
  const C scale = scale_of(math::at_least(largest(h), largest(v)));
  const Edges<C> x = times(h, scale), y = times(v, scale);
  const LossAndSlopes<C> result = loss_and_slopes<kKind>(axis_of(x), axis_of(y));
  if constexpr (kBackward) {
    const Edges<C> dx = edge_slopes(result.x, x), dy = edge_slopes(result.y, y);
    const C g = chunk.grad[i];
    chunk.out[0][i] = select_or_zero(kept, dx.a1 * g * scale);
    chunk.out[1][i] = select_or_zero(kept, dy.a1 * g * scale);
    chunk.out[2][i] = select_or_zero(kept, dx.a2 * g * scale);
    chunk.out[3][i] = select_or_zero(kept, dy.a2 * g * scale);
    chunk.out[4][i] = select_or_zero(kept, dx.b1 * g * scale);
    chunk.out[5][i] = select_or_zero(kept, dy.b1 * g * scale);
    chunk.out[6][i] = select_or_zero(kept, dx.b2 * g * scale);
    chunk.out[7][i] = select_or_zero(kept, dy.b2 * g * scale);
  } else {
    chunk.out[0][i] = select_or_zero(kept, result.loss);
    chunk.keep[i] = kept;
    chunk.refused[i] = !masked & upside_down;
  }
}

template <class C, int kKind, bool kBackward>
void box_loop(const BoxChunk<C>& chunk_) {
  const BoxChunk<C> chunk = chunk_;  // a copy, so that its pointers stay in registers
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) pair_at<C, kKind, kBackward>(chunk, i);
}

template <class C, bool kBackward>
auto pick_loop(int64_t kind) {
  switch (kind) {
    case kIou: return pick<&box_loop<C, kIou, kBackward>>();
    case kGiou: return pick<&box_loop<C, kGiou, kBackward>>();
    case kDiou: return pick<&box_loop<C, kDiou, kBackward>>();
    default: return pick<&box_loop<C, kCiou, kBackward>>();
  }
}

// Returns edge i of all boxes in a tensor (..., 4).
View edge_of(const View& boxes, int i) {
  View edge = boxes;
  edge.ndim = boxes.ndim - 1;
  edge.data = boxes.data + i * boxes.strides[edge.ndim] * size_of(boxes.dtype);
  return edge;
}

struct Pairs {
  View input, target;
  Shape rows;
  DType type;

  Pairs(const char* op, const Tensor& a, const Tensor& b, int64_t kind)
      : input(a), target(b), rows(std::max(input.ndim - 1, 0), input.sizes), type(wide(input.dtype, target.dtype)) {
    STD_TORCH_CHECK(input.is_floating() && target.is_floating() && input.ndim > 0 && input.sizes[input.ndim - 1] == 4 &&
                        input.shape().is(target.ndim, target.sizes) && kind >= 0 && kind <= kCiou,
                    op, ": boxes must be floating, of one shape (..., 4), and kind a number from 0 to 3");
  }
};

// Runs a loop over all rows. Backward: `slopes` has the two tensors to write; one of them may be null. Forward:
// `slopes` is null; writes `loss` and `keep`, and returns true if a box of a row that is not masked is upside down.
template <class C>
bool run(const Pairs& pairs, const std::optional<Tensor>& mask, int64_t kind, const View* grad,
         const Tensor* const* slopes, const Tensor* loss, uint8_t* keep) {
  const Order order = Order::contiguous(pairs.rows);
  Source<C> edges[kEdges], upstream;
  Source<uint8_t> kept;
  Sink<C> sinks[kEdges];
  uint8_t all = 1;
  bool wanted[kEdges];
  for (int i = 0; i < kEdges; ++i) edges[i].bind(edge_of(i < 4 ? pairs.input : pairs.target, i % 4), pairs.rows, order);
  kept.bind(mask ? View(*mask) : View(&all, DType::kBool), pairs.rows, order);
  if (grad) upstream.bind(*grad, pairs.rows, order);
  for (int i = 0; i < kEdges; ++i) {
    wanted[i] = loss ? i == 0 : slopes[i / 4] != nullptr;
    if (wanted[i]) sinks[i].bind(loss ? View(*loss) : edge_of(View(*slopes[i / 4]), i % 4), pairs.rows, order);
  }
  const auto loop = grad ? pick_loop<C, true>(kind) : pick_loop<C, false>(kind);
  const int64_t count = pairs.rows.numel();
  constexpr int64_t kStep = kChunk / 4;  // elements per chunk: the buffers then fit the L1 cache together
  std::atomic<bool> refused{false};
  parallel((count + kStep - 1) / kStep, 8 * kStep, [&](int64_t begin, int64_t end) {
    alignas(64) C read[kEdges + 1][kBuffer], written[kEdges][kBuffer];
    alignas(64) uint8_t flags[2][kBuffer];
    BoxChunk<C> chunk;
    for (int i = 0; i < kEdges; ++i) edges[i].prime(read[i]);
    kept.prime(flags[0]);
    if (grad) upstream.prime(read[kEdges]);
    for (int64_t at = begin * kStep; at < std::min(end * kStep, count); at += kStep) {
      chunk.n = std::min(kStep, count - at);
      for (int i = 0; i < kEdges; ++i) chunk.edge[i] = edges[i].fetch(at, chunk.n, kNever, read[i]);
      for (int i = 0; i < kEdges; ++i) chunk.out[i] = wanted[i] ? sinks[i].target(at, written[i]) : written[i];
      chunk.mask = kept.fetch(at, chunk.n, kNever, flags[0]);
      chunk.grad = grad ? upstream.fetch(at, chunk.n, kNever, read[kEdges]) : nullptr;
      chunk.keep = keep ? keep + at : nullptr;
      chunk.refused = flags[1];
      loop(chunk);
      for (int i = 0; i < kEdges; ++i)
        if (wanted[i]) sinks[i].commit(at, chunk.n, written[i], kNever);
      if (keep && std::memchr(flags[1], 1, chunk.n)) refused = true;
    }
  });
  return refused;
}

std::tuple<Tensor, Tensor> box_iou_loss(const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                                        int64_t kind) {
  const Pairs pairs("_box_iou_loss", input, target, kind);
  const Tensor loss = new_output(pairs.rows, pairs.type, input), keep = empty(pairs.rows, DType::kBool, input);
  const auto compute = pairs.type == DType::kDouble ? run<double> : run<float>;
  const bool refused =
      compute(pairs, mask, kind, nullptr, nullptr, &loss, reinterpret_cast<uint8_t*>(View(keep).data));
  STD_TORCH_CHECK(!refused, "box_iou_loss: a box has x2 < x1 or y2 < y1");
  return {loss, keep};
}

std::tuple<Tensor, Tensor> box_iou_loss_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                 const std::optional<Tensor>& mask, int64_t kind, bool need_input,
                                                 bool need_target) {
  const Pairs pairs("_box_iou_loss_backward", input, target, kind);
  const View g(grad);
  STD_TORCH_CHECK(g.is_floating() && pairs.rows.is(g.ndim, g.sizes),
                  "_box_iou_loss_backward: grad must be floating, one for each row");
  const auto gradient = [](bool needed, const Tensor& x, const View& view) {
    return needed ? output_like(view.shape(), view.dtype, x, view) : empty_vector(view.dtype, x);
  };
  const Tensor a = gradient(need_input, input, pairs.input), b = gradient(need_target, target, pairs.target);
  const Tensor* const slopes[] = {need_input ? &a : nullptr, need_target ? &b : nullptr};
  const auto compute = wide(pairs.type, g.dtype) == DType::kDouble ? run<double> : run<float>;
  if (need_input || need_target) compute(pairs, mask, kind, &g, slopes, nullptr, nullptr);
  return {a, b};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_box_iou_loss", TORCH_BOX(&box_iou_loss));
  m.impl("_box_iou_loss_backward", TORCH_BOX(&box_iou_loss_backward));
}

}  // namespace safeops::cpu
