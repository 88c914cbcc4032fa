#include "cerberus/tree_mask.h"

#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "tree_mask";

void tree_mask(TensorView parents, Optional<TensorView> num_nodes, TensorView mask) {
  const bool one = parents.ndim() == 1;  // tree for itself, without a batch
  if (!one) check_ndim(kOp, "parents", parents, 2);
  check_last_contiguous(kOp, "parents", parents);
  TreeMaskArgs args{};
  args.parents = data<int32_t>(kOp, "parents", parents);
  args.num_nodes = optional_data<int32_t>(kOp, "num_nodes", num_nodes);
  args.mask = reinterpret_cast<uint32_t*>(data<int32_t>(kOp, "mask", mask));
  args.batch = one ? 1 : parents.size(0);
  args.nodes = parents.size(parents.ndim() - 1);
  args.parents_stride = one ? 0 : parents.stride(0);
  check_ndim(kOp, "mask", mask, parents.ndim() + 1);
  check_contiguous(kOp, "mask", mask);
  if (!one) check_size(kOp, "mask", mask, 0, args.batch);
  check_size(kOp, "mask", mask, parents.ndim() - 1, args.nodes);
  check_size(kOp, "mask", mask, parents.ndim(), mask_words(args.nodes));
  if (num_nodes.has_value()) {
    check_ndim(kOp, "num_nodes", num_nodes.value(), 1);
    check_contiguous(kOp, "num_nodes", num_nodes.value());
    check_size(kOp, "num_nodes", num_nodes.value(), 0, args.batch);
  }
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
