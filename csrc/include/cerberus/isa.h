// Instruction-set levels: each operator's source is compiled once per level into its own namespace, and the
// level is chosen once, at run time. The level amx is avx512 with other builds of the operators that use
// tiles. CERBERUS_ISA names the namespace of the level being compiled.
#pragma once

#include <cstdint>

#include "cerberus/platform.h"

namespace cerberus {

enum class Isa : int32_t { baseline = 0, avx2 = 1, avx512 = 2, amx = 3 };
inline constexpr int32_t kIsaLevels = 4;

namespace cpu {

CERBERUS_EXPORT const char* isa_name(Isa level);
// Best level that this processor runs and this library holds.
CERBERUS_EXPORT Isa best_isa();
// The level in use: set_isa's, else CERBERUS_CPU_ISA's, else the best. Throws std::invalid_argument on a
// level that is unknown or that this processor lacks.
CERBERUS_EXPORT Isa active_isa();
CERBERUS_EXPORT void set_isa(const char* name);

}  // namespace cpu
}  // namespace cerberus
