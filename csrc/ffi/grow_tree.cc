#include "cerberus/grow_tree.h"

#include "scratch.h"
#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "grow_tree";

void check_sorted(const GrowTreeArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t head = 0; head < args.heads; ++head) {
      const float* row = args.log_probs + b * args.log_probs_batch_stride + head * args.log_probs_head_stride;
      for (int64_t rank = 1; rank < args.ranks; ++rank) {
        if (row[rank] > row[rank - 1]) {
          TVM_FFI_THROW(ValueError) << kOp << ": log_probs must be sorted, best first, got " << row[rank]
                                    << " behind " << row[rank - 1] << " in row " << b << ", head " << head;
        }
      }
    }
  }
}

void grow_tree(TensorView log_probs, Optional<TensorView> tokens, Optional<TensorView> roots,
               Optional<TensorView> costs, TensorView parents, TensorView slots, TensorView score,
               TensorView num_nodes, TensorView draft_tokens) {
  GrowTreeArgs args{};
  check_ndim(kOp, "log_probs", log_probs, 3);
  check_last_contiguous(kOp, "log_probs", log_probs);
  args.log_probs = data<float>(kOp, "log_probs", log_probs);
  args.batch = log_probs.size(0);
  args.heads = log_probs.size(1);
  args.ranks = log_probs.size(2);
  args.log_probs_batch_stride = log_probs.stride(0);
  args.log_probs_head_stride = log_probs.stride(1);
  check_ndim(kOp, "parents", parents, 2);
  args.nodes = parents.size(1);
  if (args.nodes < 1) TVM_FFI_THROW(ValueError) << kOp << ": budget must be at least 1, got " << args.nodes;
  if (tokens.has_value() != roots.has_value()) {
    TVM_FFI_THROW(ValueError) << kOp << ": roots must be given with tokens, and only then";
  }
  args.parents = data<int32_t>(kOp, "parents", parents);
  args.slots = data<int32_t>(kOp, "slots", slots);
  args.score = data<float>(kOp, "score", score);
  args.num_nodes = data<int32_t>(kOp, "num_nodes", num_nodes);
  check_ndim(kOp, "slots", slots, 3);
  check_size(kOp, "slots", slots, 2, 2);
  check_ndim(kOp, "num_nodes", num_nodes, 1);
  for (const auto& [name, output] :
       {std::pair{"parents", parents}, std::pair{"slots", slots}, std::pair{"score", score}}) {
    check_contiguous(kOp, name, output);
    check_size(kOp, name, output, 0, args.batch);
    check_size(kOp, name, output, 1, args.nodes);
  }
  check_size(kOp, "num_nodes", num_nodes, 0, args.batch);
  check_contiguous(kOp, "num_nodes", num_nodes);
  if (tokens.has_value()) {
    check_ndim(kOp, "tokens", tokens.value(), 3);
    check_last_contiguous(kOp, "tokens", tokens.value());
    args.tokens = data<int32_t>(kOp, "tokens", tokens.value());
    for (int dim = 0; dim < 3; ++dim) check_size(kOp, "tokens", tokens.value(), dim, log_probs.size(dim));
    args.tokens_batch_stride = tokens.value().stride(0);
    args.tokens_head_stride = tokens.value().stride(1);
    args.roots = data<int32_t>(kOp, "roots", roots.value());
    check_ndim(kOp, "roots", roots.value(), 1);
    check_size(kOp, "roots", roots.value(), 0, args.batch);
    check_contiguous(kOp, "roots", roots.value());
    args.draft_tokens = data<int32_t>(kOp, "draft_tokens", draft_tokens);
    check_ndim(kOp, "draft_tokens", draft_tokens, 2);
    check_size(kOp, "draft_tokens", draft_tokens, 0, args.batch);
    check_size(kOp, "draft_tokens", draft_tokens, 1, args.nodes);
    check_contiguous(kOp, "draft_tokens", draft_tokens);
  }
  if (costs.has_value()) {
    args.costs = data<float>(kOp, "costs", costs.value());
    check_ndim(kOp, "costs", costs.value(), 1);
    check_size(kOp, "costs", costs.value(), 0, args.nodes);
    check_contiguous(kOp, "costs", costs.value());
    for (int64_t node = 0; node < args.nodes; ++node) {
      if (!(args.costs[node] > 0)) {
        TVM_FFI_THROW(ValueError) << kOp << ": costs must be above 0, got " << args.costs[node] << " for "
                                  << node + 1 << " nodes";
      }
    }
  }
  check_sorted(args);
  const Scratch scratch(args.batch * (args.nodes + 1) * static_cast<int64_t>(sizeof(GrowCandidate)));
  args.scratch = static_cast<GrowCandidate*>(scratch.data());
  cpu::grow_tree(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grow_tree, grow_tree);
}  // namespace cerberus::ffi
