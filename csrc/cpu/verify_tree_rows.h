// How verify_tree reads one request's rows: in chunks of 1024 entries with 16 running sums each, combined in
// order. With contraction off (see CMakeLists.txt) results are the same bits at every level and for every
// number of threads.
#pragma once

#include <math.h>

#include "cerberus/philox.h"
#include "cerberus/verify_tree.h"
#include "parallel.h"
#include "simd.h"

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int64_t kGroup = 16;
constexpr int kParts = kGroup / kLanes;
constexpr float kLeastScore = -87.0f;  // below it a weight would be subnormal: it counts as zero
constexpr float kLeastResidual = 1e-35f;
constexpr int32_t kNoCut = 0x7fffffff;
constexpr float kLn2 = 0.693147181f;

// Least number of chunks worth waking a thread for, where a pass only compares and where it computes.
constexpr int64_t kComparingGrain = 48;
constexpr int64_t kComputingGrain = 16;

struct Group {
  Floats part[kParts];
};

// kLanes entries as floats; those past `end` are -inf.
template <typename T>
CERBERUS_SIMD Floats load_entries(const T* row, int64_t first, int64_t end) {
  if (first + kLanes <= end) return load(row + first);
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = first + i < end ? to_float(row[first + i]) : -INFINITY;
  return load(lanes);
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

// e^score for a score in [kLeastScore, 0], within 1e-7 but for the rounding of the score; exactly 1 for 0.
// 2^n times a series for 2^f, |f| <= 1/2, fitted for the least relative error.
CERBERUS_SIMD Floats weight_of(Floats score) {
  const Floats shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats power = score * 1.44269504088896341f;
  const Floats shifted = power + shifter;
  const Floats f = power - (shifted - shifter);
  Floats series = splat(1.32647273e-3f);
  series = series * f + 9.67151299e-3f;
  series = series * f + 5.55073358e-2f;
  series = series * f + 2.40222424e-1f;
  series = series * f + 6.93147004e-1f;
  series = series * f + 1.0f;
  return series * bit_cast<Floats>((bit_cast<Ints>(shifted) - (0x4b400000 - 127)) << 23);
}

// (entry - greatest) / temperature, 0 where they are equal (also at +inf).
CERBERUS_SIMD Floats score_of(Floats entry, float greatest, float temperature) {
  Floats score = entry - greatest;
  if (temperature != 1.0f) score = score / temperature;
  return select(entry == splat(greatest), Floats{}, score);
}

// The score and its weight. Below kLeastScore the weight is 0, and the score means nothing more.
CERBERUS_SIMD Floats score_of(Floats entry, float greatest, float temperature, Floats* weight) {
  Floats score = score_of(entry, greatest, temperature);
  const Ints alive = score >= splat(kLeastScore);
  score = select(alive, score, splat(kLeastScore));
  *weight = select(alive, weight_of(score), Floats{});
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
  result->flaw = has_nan;
}

template <bool kFiltered, typename T>
CERBERUS_SIMD void sum_weights(const T* row, int64_t first, int64_t end, float greatest, float temperature,
                               const Cut& cut, ChunkResult* result) {
  Group total{}, weighted{};
  for (int64_t i = first; i < end; i += kGroup) {
    for (int p = 0; p < kParts; ++p) {
      Floats weight;
      const Floats entries = load_entries(row, i + p * kLanes, end);
      const Floats score = score_of(entries, greatest, temperature, &weight);
      if (kFiltered) weight = keep(cut, score, weight, i + p * kLanes);
      total.part[p] += weight;
      weighted.part[p] += weight * score;
    }
  }
  result->total = sum_in_order(total);
  result->weighted = sum_in_order(weighted);
}

// Lanes of `words` times a factor, as the high and low words of the products.
CERBERUS_SIMD void multiply_wide(Words words, uint32_t factor, Words* high, Words* low) {
#if defined(CERBERUS_LEVEL_avx512)
  const __m512i factors = _mm512_set1_epi32(static_cast<int32_t>(factor));
  const __m512i even = _mm512_maskz_mul_epu32(0xff, bit_cast<__m512i>(words), factors);
  const __m512i odd =
      _mm512_maskz_mul_epu32(0xff, _mm512_maskz_srli_epi64(0xff, bit_cast<__m512i>(words), 32), factors);
  *low = bit_cast<Words>(_mm512_mask_slli_epi64(even, 0xff, odd, 32)) &
         bit_cast<Words>(_mm512_set1_epi64(~0xffffffffll));
  *low |= bit_cast<Words>(even) & bit_cast<Words>(_mm512_set1_epi64(0xffffffffll));
  *high = bit_cast<Words>(odd) & bit_cast<Words>(_mm512_set1_epi64(~0xffffffffll));
  *high |= bit_cast<Words>(_mm512_maskz_srli_epi64(0xff, even, 32));
#elif defined(CERBERUS_LEVEL_avx2)
  const __m256i factors = _mm256_set1_epi32(static_cast<int32_t>(factor));
  const __m256i even = _mm256_mul_epu32(bit_cast<__m256i>(words), factors);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(bit_cast<__m256i>(words), 32), factors);
  *low = bit_cast<Words>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
  *high = bit_cast<Words>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint64_t product = static_cast<uint64_t>(words[lane]) * factor;
    (*high)[lane] = static_cast<uint32_t>(product >> 32);
    (*low)[lane] = static_cast<uint32_t>(product);
  }
#endif
}

// The upper bytes of tokens: philox4x32 of kLanes blocks from `index` on, a block a lane.
CERBERUS_SIMD void upper_bytes(uint64_t seed, uint64_t position, uint32_t index, Words words[4]) {
  uint32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = index + static_cast<uint32_t>(i);
  memcpy(&words[0], lanes, sizeof(words[0]));
  words[1] = Words{} + static_cast<uint32_t>(Draws::upper_bytes);
  words[2] = Words{} + static_cast<uint32_t>(position);
  words[3] = Words{} + static_cast<uint32_t>(position >> 32);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    Words high0, low0, high1, low1;
    multiply_wide(words[0], kPhiloxFactor0, &high0, &low0);
    multiply_wide(words[2], kPhiloxFactor1, &high1, &low1);
    words[0] = high1 ^ words[1] ^ key0;
    words[2] = high0 ^ words[3] ^ key1;
    words[1] = low1;
    words[3] = low0;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}

// log2 of positive normal floats, too small by up to 0.0861: a number's bits are nearly linear in it.
CERBERUS_SIMD Floats least_log2(Floats x) {
  return __builtin_convertvector(bit_cast<Ints>(x), Floats) * 0x1p-23f - 127.0f;
}

// No less than the noise of any word with this upper byte: gumbel(u) <= -ln(u), and u >= byte / 256.
CERBERUS_SIMD Floats greatest_noise(Words byte) {
  const Floats whole = __builtin_convertvector(bit_cast<Ints>(byte), Floats);
  return (8.0f - least_log2(maximum(whole, splat(0x1p-25f)))) * kLn2 + 1e-4f;
}

// The greatest of a chunk's perturbed scores that exceeds what `result` holds, or equals it with a lower id.
// `bound(at)` is no less than the scores of kLanes tokens, -inf for tokens that must not come; `exact(token,
// &score)` gives one score or false.
template <typename Bound, typename Exact>
CERBERUS_SIMD void perturb(int64_t first, int64_t end, uint64_t seed, uint64_t position, ChunkResult* result,
                           Bound&& bound, Exact&& exact) {
  float best = result->perturbed;
  int32_t best_token = result->token;
  for (int64_t tile = first; tile < end; tile += kTokensPerTile) {
    for (int part = 0; part < kBlocksPerTile; part += kLanes) {
      Words words[4];
      upper_bytes(seed, position, static_cast<uint32_t>(tile / kTokensPerTile * kBlocksPerTile + part),
                  words);
      for (int digit = 0; digit < kTokensPerTile / kBlocksPerTile; ++digit) {
        const int64_t at = tile + digit * kBlocksPerTile + part;
        if (at >= end) break;
        const Words byte = words[digit / 4] >> (digit % 4 * 8) & 0xffu;
        const Ints hopeful = bound(at) + greatest_noise(byte) >= splat(best);
        if (__builtin_expect(!any(hopeful), 1)) continue;
        for (int lane = 0; lane < kLanes; ++lane) {
          const int32_t token = static_cast<int32_t>(at) + lane;
          float score;
          if (!hopeful[lane] || token >= end || !exact(token, &score)) continue;
          const uint32_t word = byte[lane] << 24 | lower_bits(seed, position, static_cast<uint32_t>(token));
          const float perturbed = score + gumbel(word);
          if (perturbed > best || (perturbed == best && token < best_token)) {
            best = perturbed;
            best_token = token;
          }
        }
      }
    }
  }
  result->perturbed = best;
  result->token = best_token;
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

// A chunk of a draft row as floats, without the tokens tried before; true if an entry is no probability.
template <typename T>
CERBERUS_SIMD bool load_draft(const T* row, int64_t first, int64_t end, const int32_t* tried,
                              int64_t num_tried, float* to) {
  Ints flaw{};
  for (int64_t i = first; i < end; i += kLanes) {
    const Floats mass = load_first(row + i, end - i);
    flaw |= ~((mass >= Floats{}) & (mass < splat(INFINITY)));
    store(to + (i - first), mass);
  }
  for (int64_t i = 0; i < num_tried; ++i) {
    if (tried[i] >= first && tried[i] < end) to[tried[i] - first] = 0.0f;
  }
  return any(flaw);
}

}  // namespace
}  // namespace cerberus::CERBERUS_ISA
