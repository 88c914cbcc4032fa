// grow_tree on the CPU: one tree per work item.
#include "cerberus/grow_tree.h"

#include "parallel.h"

namespace cerberus::CERBERUS_ISA {

void grow_tree(const GrowTreeArgs& args) {
  cpu::parallel_for(args.batch, 1 + 512 / (1 + args.nodes), [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) grow_one_tree(args, b);
  });
}

}  // namespace cerberus::CERBERUS_ISA
