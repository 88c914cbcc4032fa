// A C++ engine's view of the installed library: find_package, a header, a call on raw pointers.
#include "cerberus/tree_mask.h"

#include <cstdio>
#include <exception>

#include "cerberus/isa.h"

int main() {
  const int32_t parents[5] = {-1, 0, 0, 1, 2};
  uint32_t mask[5] = {};
  cerberus::TreeMaskArgs args{};
  args.parents = parents;
  args.mask = mask;
  args.batch = 1;
  args.nodes = 5;
  args.parents_stride = 5;
  try {
    cerberus::cpu::tree_mask(args);
    std::printf("%s", cerberus::cpu::isa_name(cerberus::cpu::active_isa()));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  for (uint32_t row : mask) std::printf(" %u", row);
  return 0;
}
