// How verify_tree reads one request's rows: in chunks of 1024 entries with 16 running sums each, combined in
// order. With contraction off (see CMakeLists.txt) results are the same bits at every level and for every
// number of threads.
#pragma once

#include <math.h>

#include <type_traits>

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

// e^score for scores in [kLeastScore, 0], within 1e-7 but for the rounding of the score; exactly 1 for 0. 2^n
// times a series for 2^f, |f| <= 1/2, fitted for the least relative error. Several vectors go through it step
// by step together: one alone waits for its own results.
template <int kCount>
CERBERUS_SIMD void weights_of(const Floats (&score)[kCount], Floats (&weight)[kCount]) {
  Floats shifted[kCount], f[kCount], square[kCount], high[kCount], middle[kCount], low[kCount];
  const Floats shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int u = 0; u < kCount; ++u) f[u] = score[u] * 1.44269504088896341f;
  for (int u = 0; u < kCount; ++u) shifted[u] = f[u] + shifter;
  for (int u = 0; u < kCount; ++u) f[u] = f[u] - (shifted[u] - shifter);
  for (int u = 0; u < kCount; ++u) square[u] = f[u] * f[u];
  for (int u = 0; u < kCount; ++u) high[u] = f[u] * 1.32647273e-3f + 9.67151299e-3f;
  for (int u = 0; u < kCount; ++u) middle[u] = f[u] * 5.55073358e-2f + 2.40222424e-1f;
  for (int u = 0; u < kCount; ++u) low[u] = f[u] * 6.93147004e-1f + 1.0f;
  for (int u = 0; u < kCount; ++u) middle[u] = high[u] * square[u] + middle[u];
  for (int u = 0; u < kCount; ++u) low[u] = middle[u] * square[u] + low[u];
  // The exponent's bits are the integer's lowest; those of the shifter itself leave at the top.
  for (int u = 0; u < kCount; ++u)
    weight[u] = bit_cast<Floats>(bit_cast<Ints>(low[u]) + (bit_cast<Ints>(shifted[u]) << 23));
}

// (entry - greatest) / temperature, 0 where they are equal (also at +inf).
CERBERUS_SIMD Floats score_of(Floats entry, float greatest, float temperature) {
  Floats score = entry - greatest;
  if (temperature != 1.0f) score = score / temperature;
  if (greatest == INFINITY) score = select(entry == splat(greatest), Floats{}, splat(-INFINITY));
  return score;
}

CERBERUS_SIMD float score_of_one(float entry, float greatest, float temperature) {
  if (entry == greatest) return 0.0f;
  return temperature != 1.0f ? (entry - greatest) / temperature : entry - greatest;
}

// Weights of scores. Below kLeastScore the weight is 0, and the score means nothing more.
template <int kCount>
CERBERUS_SIMD void weigh(Floats (&score)[kCount], Floats (&weight)[kCount]) {
  Ints alive[kCount];
  for (int u = 0; u < kCount; ++u) {
    alive[u] = score[u] >= splat(kLeastScore);
    score[u] = maximum(score[u], splat(kLeastScore));
  }
  weights_of(score, weight);
  for (int u = 0; u < kCount; ++u) weight[u] = select(alive[u], weight[u], Floats{});
}

CERBERUS_SIMD Floats score_of(Floats entry, float greatest, float temperature, Floats* weight) {
  Floats score[1] = {score_of(entry, greatest, temperature)}, weights[1];
  weigh(score, weights);
  *weight = weights[0];
  return score[0];
}

// The tokens that filters keep.
struct Cut {
  float score;
  int32_t token;
  float weight;

  bool filters() const { return score > -INFINITY || weight > 0.0f; }
};

// base, base + 1, ..
CERBERUS_SIMD Words ascending(uint32_t base) {
  constexpr uint32_t kSteps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Words steps;
  memcpy(&steps, kSteps, sizeof(steps));
  return steps + base;
}

CERBERUS_SIMD Floats keep(const Cut& cut, Floats score, Floats weight, int64_t first) {
  const Ints before = bit_cast<Ints>(ascending(static_cast<uint32_t>(first))) <= splat_int(cut.token);
  const Ints kept = (score > splat(cut.score)) | ((score == splat(cut.score)) & before);
  return select(kept & (weight >= splat(cut.weight)), weight, Floats{});
}

// The greatest entry, NaN passed over; true if there is one.
template <typename T>
CERBERUS_SIMD bool scan_entries(const T* row, int64_t first, int64_t end, float* greatest_entry) {
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
  for (int u = 1; u < kUnroll; ++u) greatest[0] = maximum(greatest[u], greatest[0]), nan[0] |= nan[u];
  float best = horizontal_maximum(greatest[0]);
  bool has_nan = any(nan[0]);
  for (; i < end; ++i) {
    const float entry = to_float(row[i]);
    has_nan |= entry != entry;
    best = entry > best ? entry : best;
  }
  *greatest_entry = best;
  return has_nan;
}

CERBERUS_SIMD bool scan_tile(const float* row, int64_t first, int64_t end, float* greatest_entry) {
  return scan_entries(row, first, end, greatest_entry);
}

typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

// 16-bit floats compare like integers once the magnitude bits of negative ones are turned round.
template <typename Bits>
CERBERUS_SIMD Bits in_order(Bits bits) {
  return bits ^ (bits >> 15 & 0x7fff);
}

template <typename T>
CERBERUS_SIMD bool scan_tile(const T* row, int64_t first, int64_t end, float* greatest_entry) {
  constexpr int16_t kInfinity = std::is_same<T, Half>::value ? 0x7c00 : 0x7f80;
  constexpr int16_t kMinusInfinity = -kInfinity - 1;
  constexpr int kStep = 2 * kLanes;
  if (end - first != kTokensPerTile) return scan_entries(row, first, end, greatest_entry);
  Shorts greatest[2] = {Shorts{} - 0x7fff, Shorts{} - 0x7fff};
  Shorts least[2] = {Shorts{} + 0x7fff, Shorts{} + 0x7fff};
  for (int64_t i = 0; i < kTokensPerTile; i += 2 * kStep) {
    for (int u = 0; u < 2; ++u) {
      Shorts bits;
      memcpy(&bits, row + first + i + u * kStep, sizeof(bits));
      bits = in_order(bits);
      greatest[u] = bits > greatest[u] ? bits : greatest[u];
      least[u] = bits < least[u] ? bits : least[u];
    }
  }
  greatest[0] = greatest[1] > greatest[0] ? greatest[1] : greatest[0];
  least[0] = least[1] < least[0] ? least[1] : least[0];
  const Shorts nan = (greatest[0] > kInfinity) | (least[0] < kMinusInfinity);
  if (any(bit_cast<Ints>(nan) != 0)) return scan_entries(row, first, end, greatest_entry);
  // Back to floats, in which the reduction is one of a vector's.
  const Shorts bits = in_order(greatest[0]);
  T lanes[kStep];
  memcpy(lanes, &bits, sizeof(lanes));
  *greatest_entry = horizontal_maximum(maximum(load(lanes), load(lanes + kLanes)));
  return false;
}

// The greatest entry of a chunk and of each of its tiles.
template <typename T>
CERBERUS_SIMD void scan_chunk(const T* row, int64_t first, int64_t end, float* peaks, ChunkResult* result) {
  result->greatest = -INFINITY;
  result->flaw = 0;
  for (int64_t tile = first; tile < end; tile += kTokensPerTile) {
    float peak;
    const int64_t tile_end = tile + kTokensPerTile < end ? tile + kTokensPerTile : end;
    result->flaw |= scan_tile(row, tile, tile_end, &peak);
    result->greatest = peak > result->greatest ? peak : result->greatest;
    peaks[tile / kTokensPerTile] = peak;
  }
}

// `kPlain`: temperature 1 and a finite greatest entry.
template <bool kFiltered, bool kPlain, typename T>
CERBERUS_SIMD void sum_weights(const T* row, int64_t first, int64_t end, float greatest, float temperature,
                               const Cut& cut, ChunkResult* result) {
  constexpr int kTogether = kParts > 1 ? kParts : 2;
  Group total{}, weighted{};
  const auto add = [&](Floats(&score)[kTogether], int64_t at) __attribute__((always_inline)) {
    Floats weight[kTogether];
#pragma GCC unroll 4
    for (int u = 0; u < kTogether; ++u) {
      score[u] = kPlain ? score[u] - greatest : score_of(score[u], greatest, temperature);
    }
    weigh(score, weight);
#pragma GCC unroll 4
    for (int u = 0; u < kTogether; ++u) {
      if (kFiltered) weight[u] = keep(cut, score[u], weight[u], at + u * kLanes);
      total.part[u % kParts] += weight[u];
      weighted.part[u % kParts] += weight[u] * score[u];
    }
  };
  int64_t i = first;
  for (; i + kTogether * kLanes <= end; i += kTogether * kLanes) {
    Floats entries[kTogether];
#pragma GCC unroll 4
    for (int u = 0; u < kTogether; ++u) entries[u] = load(row + i + u * kLanes);
    add(entries, i);
  }
  if (i < end) {
    Floats entries[kTogether];
    for (int u = 0; u < kTogether; ++u) entries[u] = load_entries(row, i + u * kLanes, end);
    add(entries, i);
  }
  result->total = sum_in_order(total);
  result->weighted = sum_in_order(weighted);
}

typedef uint64_t Longs __attribute__((vector_size(kLanes * 4)));

// The products of every lane's lower half and a factor.
CERBERUS_SIMD Longs multiply_lower(Longs a, uint32_t factor) {
#if defined(CERBERUS_LEVEL_avx512)
  return bit_cast<Longs>(
      _mm512_maskz_mul_epu32(0xff, bit_cast<__m512i>(a), bit_cast<__m512i>(Longs{} + uint64_t{factor})));
#elif defined(CERBERUS_LEVEL_avx2)
  return bit_cast<Longs>(
      _mm256_mul_epu32(bit_cast<__m256i>(a), bit_cast<__m256i>(Longs{} + uint64_t{factor})));
#elif defined(__SSE2__)
  return bit_cast<Longs>(_mm_mul_epu32(bit_cast<__m128i>(a), bit_cast<__m128i>(Longs{} + uint64_t{factor})));
#else
  return (a & 0xffffffffu) * uint64_t{factor};
#endif
}

// random_block of kLanes indices, a block a lane. Even and odd lanes go separately, a word in the lower half
// of a lane of 64 bits; the upper halves hold what is left of products and are never read.
CERBERUS_SIMD void random_blocks(uint64_t seed, uint64_t position, Draws kind, Words index, Words words[4]) {
  Longs state[2][4];
  for (int odd = 0; odd < 2; ++odd) {
    state[odd][0] = odd ? bit_cast<Longs>(index) >> 32 : bit_cast<Longs>(index);
    state[odd][1] = Longs{} + static_cast<uint64_t>(kind);
    state[odd][2] = Longs{} + (position & 0xffffffffu);
    state[odd][3] = Longs{} + (position >> 32);
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int odd = 0; odd < 2; ++odd) {
      const Longs product0 = multiply_lower(state[odd][0], kPhiloxFactor0);
      const Longs product1 = multiply_lower(state[odd][2], kPhiloxFactor1);
      state[odd][0] = product1 >> 32 ^ (state[odd][1] ^ uint64_t{key0});
      state[odd][2] = product0 >> 32 ^ (state[odd][3] ^ uint64_t{key1});
      state[odd][1] = product1;
      state[odd][3] = product0;
    }
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  for (int w = 0; w < 4; ++w) words[w] = bit_cast<Words>((state[0][w] & 0xffffffffu) | state[1][w] << 32);
}

// Bounds of noise: gumbel(u) <= -ln(u), and a float's bits are nearly linear in its logarithm, low by up to
// 0.0861 in log2. The slack covers rounding.
constexpr float kGreatestNoise = 22.8740f;  // 33 ln 2

CERBERUS_SIMD float greatest_log(float x) {
  return (static_cast<float>(bits_from_float(x)) * 0x1p-23f - 126.9138f) * kLn2;
}

CERBERUS_SIMD float greatest_noise(uint32_t word) {
  return (159.0f - static_cast<float>(bits_from_float(static_cast<float>(word) + 0.5f)) * 0x1p-23f) * kLn2 +
         1e-4f;
}

// The greatest upper byte of a word whose noise may reach `needed`, -1 if none may.
CERBERUS_SIMD int32_t greatest_byte(float needed) {
  if (!(needed > 0.0f)) return 255;
  if (needed > kGreatestNoise) return -1;
  const float bound = float_from_bits(static_cast<uint32_t>((135.001f - needed * 1.44269504f) * 0x1p23f));
  return bound < 255.0f ? static_cast<int32_t>(bound) : 255;
}

typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));

// Tokens of one chunk that may win a draw by the upper bytes of their noise.
struct Hopefuls {
  int32_t token[kVerifyChunk + kLanes];  // ends in a vector of zeros
  uint8_t byte[kVerifyChunk];
  int64_t count;
};

// Lists them. `peaks` holds the greatest value of each tile, by which tokens are drawn, and `bound(value)` is
// no less than its score and does not fall as values rise.
template <typename Bound>
CERBERUS_SIMD void find_hopefuls(int64_t first, int64_t end, uint64_t seed, uint64_t position, float best,
                                 const float* peaks, Hopefuls* found, Bound&& bound) {
  found->count = 0;
  for (int64_t tile = first; tile < end; tile += kTokensPerTile) {
    const int32_t limit = greatest_byte(best - bound(peaks[tile / kTokensPerTile]));
    if (limit < 0) continue;
    for (int part = 0; part < kBlocksPerTile; part += kLanes) {
      const int64_t block = tile / kTokensPerTile * kBlocksPerTile + part;
      Words words[4];
      random_blocks(seed, position, Draws::upper_bytes, ascending(static_cast<uint32_t>(block)), words);
      const Bytes most = Bytes{} + static_cast<uint8_t>(limit);
      Bytes hits[4];
      for (int w = 0; w < 4; ++w) hits[w] = bit_cast<Bytes>(bit_cast<Bytes>(words[w]) <= most);
      if (!any(bit_cast<Ints>(hits[0] | hits[1] | hits[2] | hits[3]) != 0)) continue;
      for (int w = 0; w < 4; ++w) {
        uint64_t eights[kLanes / 2];
        memcpy(eights, &hits[w], sizeof(eights));
        for (int e = 0; e < kLanes / 2; ++e) {
          while (eights[e] != 0) {
            const int place = __builtin_ctzll(eights[e]) / 8 + 8 * e;
            eights[e] &= ~(0xffull << (place % 8 * 8));
            const int64_t token = tile + (4 * w + place % 4) * kBlocksPerTile + part + place / 4;
            if (token >= end) continue;
            found->token[found->count] = static_cast<int32_t>(token);
            found->byte[found->count++] = bit_cast<Bytes>(words[w])[place];
          }
        }
      }
    }
  }
  memset(found->token + found->count, 0, kLanes * sizeof(int32_t));
}

// The greatest of a chunk's perturbed scores that exceeds what `result` holds, or equals it with a lower id;
// `exact(token, &score)` gives a token's score, or false if it must not come, and `rough(token)` a bound.
template <typename Rough, typename Exact>
CERBERUS_SIMD void perturb(const Hopefuls& found, uint64_t seed, uint64_t position, ChunkResult* result,
                           Rough&& rough, Exact&& exact) {
  for (int64_t i = 0; i < found.count; i += kLanes) {
    const int64_t count = found.count - i < kLanes ? found.count - i : kLanes;
    Words index, words[4];
    memcpy(&index, found.token + i, sizeof(index));
    random_blocks(seed, position, Draws::lower_bits, index >> 2, words);
    uint32_t lanes[4][kLanes];
    memcpy(lanes, words, sizeof(lanes));
    for (int64_t n = 0; n < count; ++n) {
      const int32_t token = found.token[i + n];
      const uint32_t word = static_cast<uint32_t>(found.byte[i + n]) << 24 | lanes[token % 4][n] >> 8;
      if (rough(token) + greatest_noise(word) < result->perturbed) continue;
      float score;
      if (!exact(token, &score)) continue;
      const float perturbed = score + gumbel(word);
      if (perturbed > result->perturbed || (perturbed == result->perturbed && token < result->token)) {
        result->perturbed = perturbed;
        result->token = token;
      }
    }
  }
}

// Scores are never positive: the bits of their magnitude order tokens from the likeliest on.
CERBERUS_SIMD uint32_t select_key(float score) { return bits_from_float(score) & 0x7fffffffu; }

// The smallest set of the likeliest of `count` listed tokens (the lowest id of equals first) whose masses
// reach `target`, as a cut. A radix selection over the keys' bits; tokens are listed in id order.
template <typename Mass>
CERBERUS_SIMD void select_tokens(const VerifySlot& slot, int64_t count, double target, Mass&& mass_of,
                                 Cut* cut) {
  constexpr int kShifts[] = {20, 10, 0};
  double before = 0.0;
  for (int64_t i = 0; i < count; ++i) slot.candidates[i] = static_cast<int32_t>(i);
  for (const int shift : kShifts) {
    for (int64_t bucket = 0; bucket < kSelectBuckets; ++bucket) slot.mass[bucket] = 0.0;
    const uint32_t mask = shift == 20 ? 0x7ffu : 0x3ffu;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t listed = slot.candidates[i];
      slot.mass[select_key(slot.scores[listed]) >> shift & mask] += mass_of(listed);
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
      const int32_t listed = slot.candidates[i];
      if ((select_key(slot.scores[listed]) >> shift & mask) == crossing) slot.candidates[kept++] = listed;
    }
    count = kept;
  }
  for (int64_t i = 0; i < count && before < target; ++i) {
    cut->score = slot.scores[slot.candidates[i]];
    cut->token = slot.tokens[slot.candidates[i]];
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
