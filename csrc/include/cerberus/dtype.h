// Element types of the operators' floating inputs, and their exact conversions to and from float.
#pragma once

#include <cstdint>
#include <cstring>

#include "cerberus/platform.h"

namespace cerberus {

enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

CERBERUS_HD float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

CERBERUS_HD uint32_t bits_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

CERBERUS_HD float to_float(float value) { return value; }

CERBERUS_HD float to_float(BFloat16 value) {
  return float_from_bits(static_cast<uint32_t>(value.bits) << 16);
}

CERBERUS_HD float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: an integer multiple of 2^-24, exact in float.
  const float scaled = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return float_from_bits(sign | bits_from_float(scaled));
}

template <typename T>
CERBERUS_HD T from_float(float value);

template <>
CERBERUS_HD float from_float<float>(float value) {
  return value;
}

// Round to nearest, ties to even; a NaN stays a quiet NaN.
template <>
CERBERUS_HD BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
CERBERUS_HD Half from_float<Half>(float value) {
  const uint32_t bits = bits_from_float(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // Below the smallest normal: adding 0.5 aligns the mantissa so that the hardware rounds at 2^-24.
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_from_float(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
}

}  // namespace cerberus
