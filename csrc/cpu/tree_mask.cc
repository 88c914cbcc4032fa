// tree_mask on the CPU: one tree per work item, a row of bits copied from the parent's row.
#include "cerberus/tree_mask.h"

#include "parallel.h"

namespace cerberus::CERBERUS_ISA {

void tree_mask(const TreeMaskArgs& args) {
  const int64_t row_words = args.nodes * mask_words(args.nodes);
  cpu::parallel_for(args.batch, 1 + 4096 / (1 + args.nodes), [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int32_t nodes = static_cast<int32_t>(args.nodes);
      write_tree_mask(args.parents + b * args.parents_stride, args.num_nodes ? args.num_nodes[b] : nodes,
                      nodes, args.mask + b * row_words);
    }
  });
}

}  // namespace cerberus::CERBERUS_ISA
