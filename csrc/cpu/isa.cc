// Choice of the instruction-set level; compiled for the baseline only.
#include "cerberus/isa.h"

#ifdef CERBERUS_AMX_LEVEL
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace cerberus::cpu {
namespace {

constexpr const char* kNames[kIsaLevels] = {"baseline", "avx2", "avx512", "amx"};
std::atomic<int32_t> chosen{-1};

#ifdef CERBERUS_AMX_LEVEL
// The processor must have tiles, and the kernel must let this process hold them.
bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Isa parse(const char* name, const char* origin) {
  for (int32_t level = 0; level < kIsaLevels; ++level) {
    if (std::strcmp(name, kNames[level]) != 0) continue;
    if (level <= static_cast<int32_t>(best_isa())) return static_cast<Isa>(level);
    throw std::invalid_argument(std::string(origin) + " must be a level this processor runs (best: " +
                                isa_name(best_isa()) + "), got " + name);
  }
  throw std::invalid_argument(std::string(origin) + " must be baseline, avx2, avx512 or amx, got " + name);
}

}  // namespace

const char* isa_name(Isa level) { return kNames[static_cast<int32_t>(level)]; }

Isa best_isa() {
#ifdef CERBERUS_X86_LEVELS
  static const Isa best = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
#ifdef CERBERUS_AVX512_LEVEL
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    const bool avx512 = false;
#endif
#ifdef CERBERUS_AMX_LEVEL
    if (avx512 && has_tiles()) return Isa::amx;
#endif
#ifdef CERBERUS_EMULATE_TILES
#ifdef CERBERUS_AVX512_LEVEL
    if (avx512) return Isa::amx;  // the levels below it must run too
#else
    if (avx2) return Isa::amx;
#endif
#endif
    return avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::baseline;
  }();
  return best;
#else
  return Isa::baseline;
#endif
}

Isa active_isa() {
  int32_t level = chosen.load(std::memory_order_relaxed);
  if (level < 0) {
    const char* forced = std::getenv("CERBERUS_CPU_ISA");
    level = static_cast<int32_t>(forced && *forced ? parse(forced, "CERBERUS_CPU_ISA") : best_isa());
    chosen.store(level, std::memory_order_relaxed);
  }
  return static_cast<Isa>(level);
}

void set_isa(const char* name) {
  chosen.store(static_cast<int32_t>(parse(name, "isa")), std::memory_order_relaxed);
}

}  // namespace cerberus::cpu
