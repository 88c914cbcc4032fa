// cpu::<op>(args) runs the build of <op> for the level in use.
#include "cerberus/isa.h"
#include "ops.h"

namespace cerberus {

#define CERBERUS_DECLARE(op, Args) void op(const Args& args);
namespace isa_baseline {
CERBERUS_CPU_OPERATORS(CERBERUS_DECLARE)
}
#ifdef CERBERUS_X86_LEVELS
namespace isa_avx2 {
CERBERUS_CPU_OPERATORS(CERBERUS_DECLARE)
}
#ifdef CERBERUS_AVX512_LEVEL
namespace isa_avx512 {
CERBERUS_CPU_OPERATORS(CERBERUS_DECLARE)
}
#else
namespace isa_avx512 = isa_avx2;  // best_isa() never names it
#endif
// What is declared here hides the avx512 build of the same name.
namespace isa_amx {
using namespace isa_avx512;
#if defined(CERBERUS_AMX_LEVEL) || defined(CERBERUS_EMULATE_TILES)
CERBERUS_TILE_OPERATORS(CERBERUS_DECLARE)
#endif
}  // namespace isa_amx
#define CERBERUS_DEFINE(op, Args)      \
  void op(const Args& args) {          \
    switch (active_isa()) {            \
      case Isa::amx:                   \
        return isa_amx::op(args);      \
      case Isa::avx512:                \
        return isa_avx512::op(args);   \
      case Isa::avx2:                  \
        return isa_avx2::op(args);     \
      default:                         \
        return isa_baseline::op(args); \
    }                                  \
  }
#else
#define CERBERUS_DEFINE(op, Args) \
  void op(const Args& args) { isa_baseline::op(args); }
#endif

namespace cpu {
CERBERUS_CPU_OPERATORS(CERBERUS_DEFINE)
}

}  // namespace cerberus
