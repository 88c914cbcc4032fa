// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and Gumbel noise from
// it.
#pragma once

#include <cstdint>

#include "cerberus/dtype.h"
#include "cerberus/platform.h"

namespace cerberus {

struct PhiloxWords {
  uint32_t word[4];
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

CERBERUS_HD PhiloxWords philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(counter.word[0]) * kPhiloxFactor0;
    const uint64_t product1 = static_cast<uint64_t>(counter.word[2]) * kPhiloxFactor1;
    counter = {
        {static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// What a block is for: its second counter word.
enum class Draws : uint32_t { upper_bytes = 0, lower_bits = 1, coins = 2 };

CERBERUS_HD PhiloxWords random_block(uint64_t seed, uint64_t position, Draws kind, uint32_t index) {
  const PhiloxWords counter = {{index, static_cast<uint32_t>(kind), static_cast<uint32_t>(position),
                                static_cast<uint32_t>(position >> 32)}};
  return philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// A token's word of noise. Its upper byte and its lower 24 bits come from different blocks: a token has a
// chance to win a draw only if its noise is great, which its upper byte nearly always rules out, so that
// drawing from a vocabulary takes one block per 16 tokens, and few others. Of every 256 tokens, block v % 16
// holds in its byte (v % 256) / 16 that of token v.
constexpr int kTokensPerTile = 256;
constexpr int kBlocksPerTile = 16;

CERBERUS_HD uint32_t lower_bits(uint64_t seed, uint64_t position, uint32_t token) {
  return random_block(seed, position, Draws::lower_bits, token / 4).word[token % 4] >> 8;
}

CERBERUS_HD uint32_t token_word(uint64_t seed, uint64_t position, uint32_t token) {
  const uint32_t index = token / kTokensPerTile * kBlocksPerTile + token % kBlocksPerTile;
  const uint32_t digit = token % kTokensPerTile / kBlocksPerTile;
  const uint32_t word = random_block(seed, position, Draws::upper_bytes, index).word[digit / 4];
  return (word >> (digit % 4 * 8) & 0xffu) << 24 | lower_bits(seed, position, token);
}

// A uniform number in [0, 1), a multiple of 2^-53, for one trial at one position.
CERBERUS_HD double coin(uint64_t seed, uint64_t position, uint32_t trial) {
  const PhiloxWords block = random_block(seed, position, Draws::coins, trial);
  const uint64_t bits = static_cast<uint64_t>(block.word[0]) << 32 | block.word[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// ln(1 + f) for f in [-0.3, 0.42], within two units in the last place (the polynomial of Cephes' logf).
CERBERUS_HD float log_one_plus(float f) {
  float series = 7.0376836292e-2f;
  series = series * f - 1.1514610310e-1f;
  series = series * f + 1.1676998740e-1f;
  series = series * f - 1.2420140846e-1f;
  series = series * f + 1.4249322787e-1f;
  series = series * f - 1.6668057665e-1f;
  series = series * f + 2.0000714765e-1f;
  series = series * f - 2.4999993993e-1f;
  series = series * f + 3.3333331174e-1f;
  const float square = f * f;
  return f + (series * f * square - 0.5f * square);
}

// ln(x) for a positive normal x.
CERBERUS_HD float natural_log(float x) {
  const uint32_t bits = bits_from_float(x);
  // The mantissa is brought to [sqrt(1/2), sqrt(2)), so that numbers near 1 have exponent 0.
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float mantissa = float_from_bits(bits - (static_cast<uint32_t>(exponent) << 23));
  const float scale = static_cast<float>(exponent);
  return (scale * -2.12194440e-4f + log_one_plus(mantissa - 1.0f)) + scale * 0.693359375f;
}

// Standard Gumbel noise -ln(-ln(1 - u)), u = (word + 1/2) / 2^32, within 1e-5. Both u and 1 - u are formed
// from integers: neither end loses digits, and neither logarithm ever sees 0.
CERBERUS_HD float gumbel(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  const float rest = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;
  const float exponential = word < 0x40000000u ? -log_one_plus(-u) : -natural_log(rest);
  return -natural_log(exponential);
}

}  // namespace cerberus
