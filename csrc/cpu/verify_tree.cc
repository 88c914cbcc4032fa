// verify_tree on the CPU. A row is read in chunks of 1024 entries with 16 running sums each, combined in
// order: with contraction off (see CMakeLists.txt) results are the same bits at every level and for every
// number of threads.
#include "cerberus/verify_tree.h"

#include <math.h>

#include "cerberus/philox.h"
#include "parallel.h"
#include "simd.h"

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int64_t kGroup = 16;
constexpr int kParts = kGroup / kLanes;
constexpr float kLeastScore = -87.0f;  // below it a weight would be subnormal: it counts as zero
constexpr int32_t kNoCut = 0x7fffffff;

// Least number of chunks worth waking a thread for, where a pass only compares and where it takes
// exponentials.
constexpr int64_t kComparingGrain = 128;
constexpr int64_t kSummingGrain = 64;

struct Group {
  Floats part[kParts];
};

// Sixteen entries as floats; those past `end` are -inf.
template <typename T>
CERBERUS_SIMD Group load_group(const T* row, int64_t first, int64_t end) {
  Group group;
  if (first + kGroup <= end) {
    for (int p = 0; p < kParts; ++p) group.part[p] = load(row + first + p * kLanes);
    return group;
  }
  float lanes[kGroup];
  for (int64_t i = 0; i < kGroup; ++i) lanes[i] = first + i < end ? to_float(row[first + i]) : -INFINITY;
  for (int p = 0; p < kParts; ++p) group.part[p] = load(lanes + p * kLanes);
  return group;
}

CERBERUS_SIMD double sum_in_order(const Group& group) {
  float lanes[kGroup];
  for (int p = 0; p < kParts; ++p) store(lanes + p * kLanes, group.part[p]);
  double sum = 0.0;
  for (int64_t i = 0; i < kGroup; ++i) sum += lanes[i];
  return sum;
}

CERBERUS_SIMD bool any(Ints condition) {
#if defined(CERBERUS_LEVEL_avx512)
  return _mm512_test_epi32_mask(bit_cast<__m512i>(condition), bit_cast<__m512i>(condition)) != 0;
#elif defined(CERBERUS_LEVEL_avx2)
  return _mm256_movemask_ps(bit_cast<__m256>(condition)) != 0;
#else
  int64_t halves[2];
  memcpy(halves, &condition, sizeof(halves));
  return (halves[0] | halves[1]) != 0;
#endif
}

// e^x within two units in the last place for x in [kLeastScore, 0]: what simd.h's exponential is without the
// care that other arguments need.
CERBERUS_SIMD Floats exponential_of_score(Floats x) {
  const Floats shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x * 1.44269504088896341f + shifter;
  const Floats n = shifted - shifter;
  Floats r = n * -0.693359375f + x;  // exact: few bits in the constant
  r = n * 2.12194440e-4f + r;
  Floats series = splat(1.0f / 5040);
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  return series * bit_cast<Floats>((bit_cast<Ints>(shifted) - (0x4b400000 - 127)) << 23);
}

// (entry - greatest) / temperature, 0 where they are equal (also at +inf), and its exponential. Below
// kLeastScore the weight is 0, and the score means nothing more.
CERBERUS_SIMD Floats score_of(Floats entry, float greatest, float temperature, Floats* weight) {
  Floats score = entry - greatest;
  if (temperature != 1.0f) score = score / temperature;
  score = select(entry == splat(greatest), Floats{}, score);
  const Ints alive = score >= splat(kLeastScore);
  score = select(alive, score, splat(kLeastScore));
  *weight = select(alive, exponential_of_score(score), Floats{});
  return score;
}

// The tokens that filters keep.
struct Cut {
  float score;
  int32_t token;
  float weight;

  bool filters() const { return score > -INFINITY || weight > 0.0f; }
};

CERBERUS_SIMD Floats keep(const Cut& cut, Floats score, Floats weight, int64_t first) {
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<int32_t>(first) + i;
  const Ints before = load_ints(lanes) <= splat_int(cut.token);
  const Ints kept = (score > splat(cut.score)) | ((score == splat(cut.score)) & before);
  return select(kept & (weight >= splat(cut.weight)), weight, Floats{});
}

template <typename T>
CERBERUS_SIMD void scan_greatest(const T* row, int64_t first, int64_t end, ChunkResult* result) {
  constexpr int kUnroll = 4;
  Floats greatest[kUnroll];
  Ints nan[kUnroll];
  for (int u = 0; u < kUnroll; ++u) greatest[u] = splat(-INFINITY), nan[u] = Ints{};
  int64_t i = first;
  for (; i + kUnroll * kLanes <= end; i += kUnroll * kLanes) {
    for (int u = 0; u < kUnroll; ++u) {
      const Floats entry = load(row + i + u * kLanes);
      nan[u] |= entry != entry;
      greatest[u] = maximum(entry, greatest[u]);
    }
  }
  float best = -INFINITY;
  int32_t has_nan = 0;
  for (int u = 0; u < kUnroll; ++u) {
    const float part = horizontal_maximum(greatest[u]);
    best = part > best ? part : best;
    has_nan |= any(nan[u]);
  }
  for (; i < end; ++i) {
    const float entry = to_float(row[i]);
    has_nan |= entry != entry;
    best = entry > best ? entry : best;
  }
  result->greatest = best;
  result->has_nan = has_nan;
}

template <bool kFiltered, typename T>
CERBERUS_SIMD void sum_weights(const T* row, int64_t first, int64_t end, float greatest, float temperature,
                               const Cut& cut, ChunkResult* result) {
  Group total{}, weighted{};
  for (int64_t i = first; i < end; i += kGroup) {
    const Group entries = load_group(row, i, end);
    for (int p = 0; p < kParts; ++p) {
      Floats weight;
      const Floats score = score_of(entries.part[p], greatest, temperature, &weight);
      if (kFiltered) weight = keep(cut, score, weight, i + p * kLanes);
      total.part[p] += weight;
      weighted.part[p] += weight * score;
    }
  }
  result->total = sum_in_order(total);
  result->weighted = sum_in_order(weighted);
}

// Greatest score + noise over a chunk's tokens with a weight above `bound`.
template <typename T>
CERBERUS_SIMD void perturb(const T* row, int64_t first, int64_t end, float greatest, float temperature,
                           const Cut& cut, float bound, uint64_t seed, uint64_t position,
                           ChunkResult* result) {
  result->perturbed = -INFINITY;
  result->token = -1;
  for (int64_t i = first; i < end; i += kGroup) {
    const Group entries = load_group(row, i, end);
    float scores[kGroup], weights[kGroup];
    bool passes = false;
    for (int p = 0; p < kParts; ++p) {
      Floats weight;
      const Floats score = score_of(entries.part[p], greatest, temperature, &weight);
      weight = keep(cut, score, weight, i + p * kLanes);
      store(scores + p * kLanes, score);
      store(weights + p * kLanes, weight);
      passes |= any(weight > splat(bound));
    }
    if (!passes) continue;
    PhiloxWords words{};
    for (int64_t lane = 0, quad = -1; lane < kGroup; ++lane) {
      if (!(weights[lane] > bound)) continue;
      if (quad != lane / 4) {
        quad = lane / 4;
        words = token_words(seed, position, static_cast<uint32_t>(i / 4 + quad));
      }
      const float perturbed = scores[lane] + gumbel(words.word[lane % 4]);
      if (perturbed > result->perturbed) {
        result->perturbed = perturbed;
        result->token = static_cast<int32_t>(i + lane);
      }
    }
  }
}

// Scores are never positive: the bits of their magnitude order tokens from the likeliest on.
CERBERUS_SIMD uint32_t select_key(float score) { return bits_from_float(score) & 0x7fffffffu; }

// The smallest set of the likeliest tokens (the lowest id of equals first) whose masses reach `target`, as a
// cut. A radix selection over the keys' bits; `count` candidates with positive weights in id order,
// overwritten.
template <typename Mass>
CERBERUS_SIMD void select_tokens(const VerifySlot& slot, int64_t count, double target, Mass&& mass_of,
                                 Cut* cut) {
  constexpr int kShifts[] = {20, 10, 0};
  double before = 0.0;
  for (const int shift : kShifts) {
    for (int64_t bucket = 0; bucket < kSelectBuckets; ++bucket) slot.mass[bucket] = 0.0;
    const uint32_t mask = shift == 20 ? 0x7ffu : 0x3ffu;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = slot.candidates[i];
      slot.mass[select_key(slot.scores[token]) >> shift & mask] += mass_of(token);
    }
    int64_t crossing = -1;
    double reached = before;
    for (int64_t bucket = 0; bucket <= static_cast<int64_t>(mask) && reached < target; ++bucket) {
      if (slot.mass[bucket] == 0.0) continue;
      crossing = bucket;
      before = reached;
      reached += slot.mass[bucket];
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = slot.candidates[i];
      if ((select_key(slot.scores[token]) >> shift & mask) == crossing) slot.candidates[kept++] = token;
    }
    count = kept;
  }
  for (int64_t i = 0; i < count && before < target; ++i) {
    cut->score = slot.scores[slot.candidates[i]];
    cut->token = slot.candidates[i];
    before += mass_of(slot.candidates[i]);
  }
}

struct Draw {
  float temperature, min_p, top_p;
  double epsilon, delta;
  int64_t top_k;
  uint64_t seed, position;
};

// Reads one request's rows.
template <typename T>
struct RowReader {
  const T* rows;
  int64_t row_stride;
  int64_t vocab_size;
  VerifySlot slot;

  int64_t chunks() const { return (vocab_size + kVerifyChunk - 1) / kVerifyChunk; }
  const T* row(int32_t node) const { return rows + node * row_stride; }

  // Runs `work(first, end, result)` over the chunks of a row.
  template <typename Work>
  inline __attribute__((always_inline)) void each_chunk(int64_t grain, Work&& work) const {
    cpu::parallel_for(chunks(), grain, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) {
        const int64_t end = (c + 1) * kVerifyChunk;
        work(c * kVerifyChunk, end < vocab_size ? end : vocab_size, slot.chunks + c);
      }
    });
  }

  BestEntry best_entry(int32_t node) const {
    const T* entries = row(node);
    each_chunk(kComparingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
      scan_greatest(entries, first, end, result);
    });
    BestEntry best{-INFINITY, 0, 0};
    for (int64_t c = 0; c < chunks(); ++c) {
      if (slot.chunks[c].has_nan) best.status = kNanRow;
      if (slot.chunks[c].greatest > best.value) {
        best.value = slot.chunks[c].greatest;
        best.token = static_cast<int32_t>(c * kVerifyChunk);
      }
    }
    if (best.value > -INFINITY) {
      while (to_float(entries[best.token]) != best.value) ++best.token;
    }
    bool finite = best.value > -INFINITY && best.value < INFINITY;
    for (int64_t i = 0; best.value == INFINITY && !finite && i < vocab_size; ++i) {
      finite = (bits_from_float(to_float(entries[i])) & 0x7f800000u) != 0x7f800000u;
    }
    if (!finite) best.status |= kNoFiniteEntry;
    return best;
  }

  // Sums over the kept tokens: weights in `total`, their entropy in nats as the result.
  double entropy(int32_t node, float greatest, float temperature, const Cut& cut, double* total) const {
    const T* entries = row(node);
    if (cut.filters()) {
      each_chunk(kSummingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
        sum_weights<true>(entries, first, end, greatest, temperature, cut, result);
      });
    } else {
      each_chunk(kSummingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
        sum_weights<false>(entries, first, end, greatest, temperature, cut, result);
      });
    }
    double weighted = 0.0;
    *total = 0.0;
    for (int64_t c = 0; c < chunks(); ++c) {
      *total += slot.chunks[c].total;
      weighted += slot.chunks[c].weighted;
    }
    return log(*total) - weighted / *total;
  }

  // The cut of top_k, then of top_p among what it leaves.
  void select(int32_t node, float greatest, const Draw& draw, Cut* cut) const {
    const T* entries = row(node);
    each_chunk(kSummingGrain, [&](int64_t first, int64_t end, ChunkResult*) {
      for (int64_t i = first; i < end; i += kGroup) {
        const Group group = load_group(entries, i, end);
        for (int p = 0; p < kParts; ++p) {
          const int64_t at = i + p * kLanes;
          if (at >= end) continue;
          Floats weight;
          const Floats score = score_of(group.part[p], greatest, draw.temperature, &weight);
          store_first(slot.scores + at, score, end - at);
          store_first(slot.weights + at, weight, end - at);
        }
      }
    });
    if (draw.top_k > 0) {
      // Most rows hold top_k tokens close to the greatest; only where they do not is every token a candidate.
      constexpr float kFloors[] = {6.7e-3f, 3e-7f, 0.0f};
      int64_t count = 0;
      for (int attempt = 0; attempt < 3 && count < draw.top_k; ++attempt) {
        count = find_candidates(*cut, kFloors[attempt]);
      }
      if (count >= draw.top_k) {
        select_tokens(slot, count, static_cast<double>(draw.top_k), [](int32_t) { return 1.0; }, cut);
      }
    }
    if (draw.top_p < 1.0f) {
      const double total = kept_weight(*cut);
      // All tokens at or below the floor hold less than half of the mass that may be left out.
      const double spare = 0.5 * (1.0 - static_cast<double>(draw.top_p)) * total;
      const int64_t count =
          find_candidates(*cut, static_cast<float>(spare / static_cast<double>(vocab_size)));
      const auto weight = [&](int32_t token) { return static_cast<double>(slot.weights[token]); };
      select_tokens(slot, count, static_cast<double>(draw.top_p) * total, weight, cut);
    }
  }

  // Lists the kept tokens with a weight above `floor` in id order; their number.
  int64_t find_candidates(const Cut& cut, float floor) const {
    int64_t count = 0;
    for (int64_t first = 0; first < vocab_size; first += kLanes) {
      if (!any(load_first(slot.weights + first, vocab_size - first) > splat(floor))) continue;
      const int64_t end = first + kLanes < vocab_size ? first + kLanes : vocab_size;
      for (int64_t i = first; i < end; ++i) {
        const float score = slot.scores[i];
        const bool kept = score > cut.score || (score == cut.score && i <= cut.token);
        if (kept && slot.weights[i] > floor) slot.candidates[count++] = static_cast<int32_t>(i);
      }
    }
    return count;
  }

  // Sum of the kept tokens' weights, of those that are selected from.
  double kept_weight(const Cut& selected) const {
    const Cut cut{selected.score, selected.token, 0.0f};  // min_p comes after the selection
    double total = 0.0;
    for (int64_t first = 0; first < vocab_size; first += kVerifyChunk) {
      const int64_t end = first + kVerifyChunk < vocab_size ? first + kVerifyChunk : vocab_size;
      Group sums{};
      for (int64_t i = first; i < end; i += kGroup) {
        for (int p = 0; p < kParts; ++p) {
          const int64_t at = i + p * kLanes;
          if (at >= end) continue;
          const Floats weight = load_first(slot.weights + at, end - at);
          sums.part[p] += keep(cut, load_first(slot.scores + at, end - at), weight, at);
        }
      }
      total += sum_in_order(sums);
    }
    return total;
  }

  // Typical acceptance at a row, worked out once.
  const TypicalRow& typical_row(int32_t node, const Draw& draw) const {
    TypicalRow& result = slot.rows[node];
    if (result.read) return result;
    const BestEntry best = best_entry(node);
    result.read = true;
    result.status = best.status;
    result.fallback = best.token;
    result.greatest = best.value;
    if (best.status != 0) return result;
    Cut cut{-INFINITY, kNoCut, draw.min_p};
    if (draw.top_k > 0 || draw.top_p < 1.0f) select(node, best.value, draw, &cut);
    const double nats = entropy(node, best.value, draw.temperature, cut, &result.total);
    const double scaled = draw.delta * exp(-nats);
    result.nats = draw.temperature == 1.0f && !cut.filters() ? static_cast<float>(nats) : NAN;
    result.limit = (draw.epsilon < scaled ? draw.epsilon : scaled) * result.total;
    result.cut_score = cut.score;
    result.cut_token = cut.token;
    return result;
  }

  bool passes(int32_t node, int32_t token, const Draw& draw, double* log_prob) const {
    const TypicalRow& known = typical_row(node, draw);
    if (known.status != 0) return false;
    Floats weight;
    const Floats entry = splat(to_float(row(node)[token]));
    const Floats score = score_of(entry, known.greatest, draw.temperature, &weight);
    const bool kept = score[0] > known.cut_score || (score[0] == known.cut_score && token <= known.cut_token);
    *log_prob = static_cast<double>(score[0]) - log(known.total);
    return kept && weight[0] >= draw.min_p && static_cast<double>(weight[0]) > known.limit;
  }

  int32_t draw_token(int32_t node, const Draw& draw, uint64_t position) const {
    const TypicalRow& known = slot.rows[node];
    if (known.status != 0) return known.fallback;
    float bound = static_cast<float>(known.limit);
    if (static_cast<double>(bound) > known.limit)
      bound = nextafterf(bound, -1.0f);  // weight > limit iff > bound
    const Cut cut{known.cut_score, known.cut_token, draw.min_p};
    const T* entries = row(node);
    each_chunk(kSummingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
      perturb(entries, first, end, known.greatest, draw.temperature, cut, bound, draw.seed, position, result);
    });
    float best = -INFINITY;
    int32_t token = known.fallback;
    for (int64_t c = 0; c < chunks(); ++c) {
      if (slot.chunks[c].perturbed > best) {
        best = slot.chunks[c].perturbed;
        token = slot.chunks[c].token;
      }
    }
    return token;
  }
};

template <typename T>
void verify_request(const VerifyTreeArgs& args, int64_t b, const VerifySlot& slot) {
  const DraftTree tree = draft_tree(args, b);
  const T* rows = static_cast<const T*>(args.logits) + first_row_offset(args, b);
  const RowReader<T> reader{rows, args.logits_row_stride, args.vocab_size, slot};
  int32_t* path = args.path + b * (args.max_depth + 1);
  const float temperature = args.temperature[b];
  WalkEnd end;
  BestEntry last;
  int32_t bonus;
  float nats = NAN;
  if (args.mode[b] == static_cast<int64_t>(VerifyMode::greedy) || temperature == 0.0f) {
    end = walk_greedy(tree, path, &last, [&](int32_t node) { return reader.best_entry(node); });
    bonus = last.token;
  } else {
    const Draw draw{temperature,
                    args.min_p[b],
                    args.top_p[b],
                    args.epsilon[b],
                    args.delta[b],
                    args.top_k[b],
                    static_cast<uint64_t>(args.seed[b]),
                    static_cast<uint64_t>(args.position[b])};
    for (int32_t node = 0; node < tree.num_nodes; ++node) slot.rows[node].read = false;
    end = walk_typical(tree, args.vocab_size, slot.merits, path,
                       [&](int32_t node, int32_t token, double* log_prob) {
                         return reader.passes(node, token, draw, log_prob);
                       });
    const TypicalRow& known = reader.typical_row(end.node, draw);
    last = {known.greatest, known.fallback, known.status};
    if (known.status == 0) nats = known.nats;
    for (int32_t node = 0; node < tree.num_nodes; ++node) {
      if (slot.rows[node].read) end.status |= slot.rows[node].status;
    }
    bonus = reader.draw_token(end.node, draw, draw.position + static_cast<uint64_t>(end.depth));
  }
  if (last.status == 0 && isnan(nats)) {
    double total;
    nats = static_cast<float>(reader.entropy(end.node, last.value, 1.0f, {-INFINITY, kNoCut, 0.0f}, &total));
  }
  write_verdict(args, b, tree, end, bonus, nats);
}

template <typename T>
void verify_batch(const VerifyTreeArgs& args) {
  VerifySlot unplaced;
  const int64_t slot_bytes = lay_out_slot(args, nullptr, &unplaced);
  int64_t taken = 0;
  const auto verify_range = [&](int64_t first, int64_t last) {
    VerifySlot slot;
    lay_out_slot(args, args.workspace + __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED) * slot_bytes, &slot);
    for (int64_t b = first; b < last; ++b) verify_request<T>(args, b, slot);
  };
  if (args.slots > 1) {
    cpu::parallel_for(args.batch, 1, verify_range);
  } else {
    verify_range(0, args.batch);  // threads share each row instead
  }
}

}  // namespace

void verify_tree(const VerifyTreeArgs& args) {
  switch (args.dtype) {
    case DType::f32:
      return verify_batch<float>(args);
    case DType::f16:
      return verify_batch<Half>(args);
    case DType::bf16:
      return verify_batch<BFloat16>(args);
  }
}

}  // namespace cerberus::CERBERUS_ISA
