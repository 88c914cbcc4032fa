// Vectors of floats in the width of the instruction-set level being compiled: one source for every level,
// written with the compiler's vector extensions. Everything is always inlined and lives in the level's
// namespace.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(CERBERUS_LEVEL_avx2) || defined(CERBERUS_LEVEL_avx512)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cerberus/dtype.h"

namespace cerberus::CERBERUS_ISA {

#define CERBERUS_SIMD static inline __attribute__((always_inline))

#if defined(CERBERUS_LEVEL_avx512)
constexpr int kLanes = 16;
#elif defined(CERBERUS_LEVEL_avx2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints
    __attribute__((vector_size(kLanes * 4)));  // a comparison of Floats gives -1 or 0 in each lane
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t ShortWords __attribute__((vector_size(kLanes * 2)));

CERBERUS_SIMD Floats splat(float value) { return value - Floats{}; }
CERBERUS_SIMD Ints splat_int(int32_t value) { return value - Ints{}; }

CERBERUS_SIMD int64_t round_up_to_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <typename To, typename From>
CERBERUS_SIMD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Loads of kLanes elements from any address, converted to float exactly.
CERBERUS_SIMD Floats load(const float* from) {
  Floats value;
  memcpy(&value, from, sizeof(value));
  return value;
}

CERBERUS_SIMD Ints load_ints(const int32_t* from) {
  Ints value;
  memcpy(&value, from, sizeof(value));
  return value;
}

CERBERUS_SIMD Floats load(const BFloat16* from) {
#if defined(CERBERUS_LEVEL_avx512)
  // The zero-masked form: the plain one warns of an undefined register under GCC 12. All lanes are taken.
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return bit_cast<Floats>(bit_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, bits)) << 16);
#elif defined(CERBERUS_LEVEL_avx2)  // GCC 12 widens in two halves when left to __builtin_convertvector
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return bit_cast<Floats>(bit_cast<Words>(_mm256_cvtepu16_epi32(bits)) << 16);
#else
  ShortWords bits;
  memcpy(&bits, from, sizeof(bits));
  return bit_cast<Floats>(__builtin_convertvector(bits, Words) << 16);
#endif
}

CERBERUS_SIMD Floats load(const Half* from) {
#if defined(CERBERUS_LEVEL_avx512)
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + 1));
  Floats value;
  memcpy(&value, &low, sizeof(low));
  memcpy(reinterpret_cast<char*>(&value) + sizeof(low), &high, sizeof(high));
  return value;
#elif defined(CERBERUS_LEVEL_avx2)
  return bit_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  ShortWords bits;
  memcpy(&bits, from, sizeof(bits));
  const Words wide = __builtin_convertvector(bits, Words);
  const Words magnitude = (wide & 0x7fffu) << 13;
  // The exponents differ by 112; multiplying keeps subnormals exact. Infinity and NaN keep the greatest
  // exponent.
  const Words scaled = bit_cast<Words>(bit_cast<Floats>(magnitude) * 0x1p112f);
  const Words special = bit_cast<Words>(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  return bit_cast<Floats>(scaled | special | (wide & 0x8000u) << 16);
#endif
}

// 2 * kLanes elements in the order that is cheapest for the type: as they lie for fp32 and fp16, the even
// elements and then the odd ones for bf16. For sums in which only the partners of a product must agree.
template <typename T>
CERBERUS_SIMD void load_pair(const T* from, Floats& a, Floats& b) {
  a = load(from);
  b = load(from + kLanes);
}

CERBERUS_SIMD void load_pair(const BFloat16* from, Floats& a, Floats& b) {
  Words pairs;
  memcpy(&pairs, from, sizeof(pairs));
  a = bit_cast<Floats>(pairs << 16);
  b = bit_cast<Floats>(pairs & 0xffff0000u);
}

// The first `count` <= kLanes elements; the other lanes are zero and their memory is not touched.
template <typename T>
CERBERUS_SIMD Floats load_first(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return load(lanes);
}

CERBERUS_SIMD void store(float* to, Floats value) { memcpy(to, &value, sizeof(value)); }

// Rounds to nearest, ties to even; NaN stays NaN.
CERBERUS_SIMD void store(BFloat16* to, Floats value) {
  const Words bits = bit_cast<Words>(value);
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const Words quiet = bits >> 16 | 0x40u;
  const Words is_nan = bit_cast<Words>(value != value);
  const ShortWords narrow = __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), ShortWords);
  memcpy(to, &narrow, sizeof(narrow));
}

CERBERUS_SIMD void store(Half* to, Floats value) {
  for (int i = 0; i < kLanes; ++i) to[i] = from_float<Half>(value[i]);
}

template <typename T>
CERBERUS_SIMD void store_first(T* to, Floats value, int64_t count) {
  if (count >= kLanes) return store(to, value);
  T lanes[kLanes];
  store(lanes, value);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

// A value as the element type holds it.
template <typename T>
CERBERUS_SIMD Floats rounded(Floats value) {
  if (std::is_same<T, float>::value) return value;
  T lanes[kLanes];
  store(lanes, value);
  return load(lanes);
}

// a * b + c, one rounding where the level has fused multiply-add.
CERBERUS_SIMD Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }

// sum += a * b. GCC 12 lets the instruction overwrite a factor instead of the sum and then moves sums through
// memory, so the form that adds in place is spelled out.
CERBERUS_SIMD void add_product(Floats& sum, Floats a, Floats b) {
#if defined(CERBERUS_LEVEL_avx2) || defined(CERBERUS_LEVEL_avx512)
  __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
  sum = multiply_add(a, b, sum);
#endif
}

// The upper halves of 32-bit words. In memory, for loops whose registers all hold sums or factors.
alignas(64) constexpr uint32_t kUpper[16] = {
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

// Hides from the compiler what a pointer points to.
#define CERBERUS_OPAQUE(pointer) __asm__("" : "+r"(pointer))

CERBERUS_SIMD Words upper_halves(Words words) {
  const uint32_t* upper = kUpper;
  CERBERUS_OPAQUE(upper);
  Words mask;
  memcpy(&mask, upper, sizeof(mask));
  return words & mask;
}

// Lane by lane: `yes` where the lane of `condition` is -1, `no` where it is 0.
CERBERUS_SIMD Floats select(Ints condition, Floats yes, Floats no) { return condition ? yes : no; }

// The greater; where a lane of `a` is NaN, that of `b`.
CERBERUS_SIMD Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
CERBERUS_SIMD Floats minimum(Floats a, Floats b) { return a < b ? a : b; }

typedef float Quad __attribute__((vector_size(16)));

// The four-lane parts of a vector combined, first with last: the order is fixed by the width alone.
template <typename Combine>
CERBERUS_SIMD float horizontal(Floats value, Combine&& combine) {
#if defined(CERBERUS_LEVEL_avx512)
  typedef float Octet __attribute__((vector_size(32)));
  const Octet eight = combine(__builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7),
                              __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(CERBERUS_LEVEL_avx2)
  const Floats eight = value;
#endif
#if defined(CERBERUS_LEVEL_avx512) || defined(CERBERUS_LEVEL_avx2)
  const Quad four = combine(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                            __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
  const Quad four = value;
#endif
  const Quad two = combine(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  const Quad one = combine(two, __builtin_shufflevector(two, two, 1, 1, 1, 1));
  return one[0];
}

CERBERUS_SIMD float horizontal_sum(Floats value) {
  return horizontal(value, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

// horizontal_sum() of four vectors at once, bit for bit.
CERBERUS_SIMD Quad horizontal_sums(Floats a, Floats b, Floats c, Floats d) {
  const auto quad = [](Floats value) __attribute__((always_inline)) {
#if defined(CERBERUS_LEVEL_avx512)
    typedef float Octet __attribute__((vector_size(32)));
    const Octet eight = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7) +
                        __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(CERBERUS_LEVEL_avx2)
    const Floats eight = value;
#endif
#if defined(CERBERUS_LEVEL_avx512) || defined(CERBERUS_LEVEL_avx2)
    return __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
           __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
    return value;
#endif
  };
  const auto halves = [](Quad one, Quad other) __attribute__((always_inline)) {
    return __builtin_shufflevector(one, other, 0, 4, 1, 5) + __builtin_shufflevector(one, other, 2, 6, 3, 7);
  };
  const Quad first = halves(quad(a), quad(b)), second = halves(quad(c), quad(d));
  return __builtin_shufflevector(first, second, 0, 1, 4, 5) +
         __builtin_shufflevector(first, second, 2, 3, 6, 7);
}

CERBERUS_SIMD float horizontal_maximum(Floats value) {
  return horizontal(value, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// What to subtract before the exponential: a greatest element of -inf (all of them -inf, or NaN) must not
// turn the difference of two infinities into NaN.
CERBERUS_SIMD float shift_for(float greatest) { return greatest == -INFINITY ? 0.0f : greatest; }

// e^x within two units in the last place; 0 below -87.3 (where the result would be subnormal), infinity
// above 88.7, NaN for NaN. x = n ln 2 + r, |r| <= ln(2) / 2, and the Taylor series of e^r to degree 7 (next
// term 5e-9).
CERBERUS_SIMD Floats exponential(Floats x) {
  const Floats clamped = minimum(maximum(x, splat(-88.0f)), splat(89.0f));
  const Floats shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = clamped * 1.44269504088896341f + shifter;
  const Floats n = shifted - shifter;
  Floats r = n * -0.693359375f + clamped;  // exact: few bits in the constant
  r = n * 2.12194440e-4f + r;
  Floats series = splat(1.0f / 5040);
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  // 2^n in two factors, so that n = 128 does not leave the exponent's range before the product does.
  const Ints power = bit_cast<Ints>(shifted) - 0x4b400000;
  const Ints half = power >> 1;
  const Floats low = bit_cast<Floats>((half + 127) << 23);
  const Floats high = bit_cast<Floats>((power - half + 127) << 23);
  Floats result = series * low * high;
  result = select(x < splat(-87.3f), Floats{}, result);
  result = select(x > splat(88.7228394f), splat(INFINITY), result);
  return select(x != x, x, result);
}

// exponential() for x <= 0 (or NaN), the distances below a maximum, at half the cost: no result can leave the
// exponent's range, so 2^n is one factor, and the series is summed in pairs, because a chain of multiply-adds
// would leave the processor waiting. 0 below -87.3, as there.
CERBERUS_SIMD Floats exponential_below(Floats x) {
  const Floats lowest = splat(-87.3f);
  const Floats clamped = maximum(lowest, x);  // a NaN stays
  const Floats shifter = splat(12582912.0f);
  const Floats shifted = clamped * 1.44269504088896341f + shifter;
  const Floats n = shifted - shifter;
  Floats r = n * -0.693359375f + clamped;
  r = n * 2.12194440e-4f + r;
  const Floats square = r * r;
  const Floats low = (r * (1.0f / 6) + 0.5f) * square + (r + 1.0f);
  const Floats high = (r * (1.0f / 5040) + 1.0f / 720) * square + (r * (1.0f / 120) + 1.0f / 24);
  const Floats series = high * (square * square) + low;
  // The shifter's own bits leave at the top, and n stays.
  const Floats power = bit_cast<Floats>((bit_cast<Ints>(shifted) << 23) + 0x3f800000);
  return select(x < lowest, Floats{}, series * power);
}

// tanh within a few units in the last place, NaN for NaN.
CERBERUS_SIMD Floats hyperbolic_tangent(Floats x) {
  const Floats square = x * x;
  Floats series = splat(21844.0f / 6081075);
  series = series * square - 1382.0f / 155925;
  series = series * square + 62.0f / 2835;
  series = series * square - 17.0f / 315;
  series = series * square + 2.0f / 15;
  series = series * square - 1.0f / 3;
  const Floats small = series * square * x + x;
  const Floats magnitude = select(x < Floats{}, -x, x);
  const Floats large = 1.0f - 2.0f / (exponential(magnitude + magnitude) + 1.0f);
  return select(magnitude < splat(0.5f), small, select(x < Floats{}, -large, large));
}

}  // namespace cerberus::CERBERUS_ISA
