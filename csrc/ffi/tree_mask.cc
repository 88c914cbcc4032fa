#include "cerberus/tree_mask.h"

#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "tree_mask";

void tree_mask(TensorView parents, Optional<TensorView> num_nodes, TensorView mask) {
  check_ndim(kOp, "parents", parents, 2);
  check_last_contiguous(kOp, "parents", parents);
  TreeMaskArgs args{};
  args.parents = data<int32_t>(kOp, "parents", parents);
  args.num_nodes = optional_data<int32_t>(kOp, "num_nodes", num_nodes);
  args.mask = reinterpret_cast<uint32_t*>(data<int32_t>(kOp, "mask", mask));
  args.batch = parents.size(0);
  args.nodes = parents.size(1);
  args.parents_stride = parents.stride(0);
  check_ndim(kOp, "mask", mask, 3);
  check_contiguous(kOp, "mask", mask);
  check_size(kOp, "mask", mask, 0, args.batch);
  check_size(kOp, "mask", mask, 1, args.nodes);
  check_size(kOp, "mask", mask, 2, mask_words(args.nodes));
  for (int64_t b = 0; b < args.batch; ++b) {
    const int32_t count = args.num_nodes ? args.num_nodes[b] : static_cast<int32_t>(args.nodes);
    if (count < 1 || count > args.nodes) {
      TVM_FFI_THROW(ValueError) << kOp << ": num_nodes must lie in [1, " << args.nodes << "], got " << count
                                << " in row " << b;
    }
    const int32_t* row = args.parents + b * args.parents_stride;
    const int32_t bad = first_malformed_node(row, count);
    if (bad >= 0) {
      TVM_FFI_THROW(ValueError)
          << kOp << ": parents must be -1 for the root and lie in [0, node) for every other node, got "
          << row[bad] << " for node " << bad << " in row " << b;
    }
  }
  cpu::tree_mask(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_mask, tree_mask);
}  // namespace cerberus::ffi
