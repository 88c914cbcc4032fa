// head_loss on the CPU: three passes over a row of logits that stays in the cache: maximum, exponentials and
// their sum, gradient. One thread does a whole row, so sums do not depend on the thread count.
#include "cerberus/head_loss.h"

#include "parallel.h"
#include "simd.h"

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int64_t kGrainLogits = 1 << 13;
constexpr int kUnroll = 4;

// The greatest of a row, NaN if there is any: a comparison alone would keep or lose one depending on its
// lane.
inline __attribute__((always_inline)) float row_maximum(const float* logits, int64_t vocab) {
  Floats best[kUnroll], nan = Floats{};
  for (int u = 0; u < kUnroll; ++u) best[u] = splat(-__builtin_inff());
  int64_t v = 0;
  for (; v + kUnroll * kLanes <= vocab; v += kUnroll * kLanes) {
    for (int u = 0; u < kUnroll; ++u) {
      const Floats values = load(logits + v + u * kLanes);
      best[u] = maximum(best[u], values);
      nan = select(values != values, values, nan);
    }
  }
  float top = horizontal_maximum(maximum(maximum(best[0], best[1]), maximum(best[2], best[3])));
  float flaw = horizontal_sum(nan);
  for (; v < vocab; ++v) {
    top = logits[v] > top ? logits[v] : top;
    flaw = logits[v] != logits[v] ? logits[v] : flaw;
  }
  return flaw != flaw ? flaw : top;
}

// Exponentials of logits - top: their sum, and with a teacher its dot product with logits - top.
template <bool kSoft, bool kStore>
inline __attribute__((always_inline)) void exponentials(float* logits, const float* teacher, int64_t vocab,
                                                        float top, float* sum, float* dot) {
  Floats sums[2] = {Floats{}, Floats{}}, dots[2] = {Floats{}, Floats{}};
  const Floats tops = splat(top);
  int64_t v = 0;
  for (; v + 2 * kLanes <= vocab; v += 2 * kLanes) {
    for (int u = 0; u < 2; ++u) {
      const Floats below = load(logits + v + u * kLanes) - tops;
      const Floats power = exponential(below);
      sums[u] += power;
      if (kSoft) dots[u] += load(teacher + v + u * kLanes) * below;
      if (kStore) store(logits + v + u * kLanes, power);
    }
  }
  *sum = horizontal_sum(sums[0] + sums[1]);
  *dot = kSoft ? horizontal_sum(dots[0] + dots[1]) : 0.0f;
  for (; v < vocab; ++v) {
    const float below = logits[v] - top;
    const float power = __builtin_expf(below);
    *sum += power;
    if (kSoft) *dot += teacher[v] * below;
    if (kStore) logits[v] = power;
  }
}

// logits (now exponentials) -> factor · exponential - teacher_factor · teacher
inline __attribute__((always_inline)) void write_gradient(float* logits, const float* teacher, int64_t vocab,
                                                          float factor, float teacher_factor) {
  if (teacher) {
    for (int64_t v = 0; v < vocab; ++v) logits[v] = factor * logits[v] - teacher_factor * teacher[v];
  } else {
    for (int64_t v = 0; v < vocab; ++v) logits[v] *= factor;
  }
}

void run_row(const HeadLossArgs& args, int64_t row) {
  const int64_t vocab = args.vocab, target = args.targets[row];
  float* logits = args.logits + row * vocab;
  const float* teacher = args.teacher ? args.teacher + args.teacher_row[row] * vocab : nullptr;
  const float soft_weight = teacher ? args.soft_weight : 0.0f;
  const float top = row_maximum(logits, vocab), target_logit = logits[target];
  bool first = target_logit == top;
  for (int64_t v = 0; first && v < target; ++v) first = logits[v] != top;
  args.correct[row] = first;

  float sum = 0.0f, dot = 0.0f;
  if (teacher && args.needs_gradient) {
    exponentials<true, true>(logits, teacher, vocab, top, &sum, &dot);
  } else if (teacher) {
    exponentials<true, false>(logits, teacher, vocab, top, &sum, &dot);
  } else if (args.needs_gradient) {
    exponentials<false, true>(logits, teacher, vocab, top, &sum, &dot);
  } else {
    exponentials<false, false>(logits, teacher, vocab, top, &sum, &dot);
  }
  const float log_sum = __builtin_logf(sum);
  const float hard = log_sum - (target_logit - top);
  args.loss[row] = teacher ? (1.0f - soft_weight) * hard + soft_weight * (log_sum - dot) : hard;
  if (!args.needs_gradient) return;
  write_gradient(logits, teacher, vocab, args.scale[row] / sum, args.scale[row] * soft_weight);
  logits[target] -= args.scale[row] * (1.0f - soft_weight);
}

}  // namespace

void head_loss(const HeadLossArgs& args) {
  cpu::parallel_for(args.rows, 1 + kGrainLogits / (1 + args.vocab), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) run_row(args, row);
  });
}

}  // namespace cerberus::CERBERUS_ISA
