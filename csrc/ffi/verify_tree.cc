#include "cerberus/verify_tree.h"

#include <limits>
#include <memory>
#include <vector>

#include "cerberus/philox.h"
#include "parallel.h"
#include "tensors.h"

namespace cerberus::ffi {
namespace {

using tvm::ffi::AnyView;

constexpr const char* kOp = "verify_tree";
// Bytes a thread may keep between calls. A sanitizer would not see the end of a kept piece of memory.
#ifdef CERBERUS_SANITIZE
constexpr size_t kKeptWorkspace = 0;
#else
constexpr size_t kKeptWorkspace = 4 << 20;
#endif

// A parameter is one number for all requests or a tensor with one per request. Values are checked by the
// Python layer's rules too, which has the words; here, that none may mislead the kernel.
IntegerColumn integers(const char* name, const AnyView& value, int64_t batch, int64_t least, int64_t most,
                       int least_bits) {
  IntegerColumn column{nullptr, 0, 0, 0};
  if (const auto number = value.try_cast<int64_t>()) {
    column.value = *number;
    batch = 1;
  } else {
    const TensorView tensor = value.cast<TensorView>();
    check_cpu(kOp, name, tensor);
    check_ndim(kOp, name, tensor, 1);
    check_size(kOp, name, tensor, 0, batch);
    const bool fits = (is_dtype(tensor, kDLUInt, 8) && least_bits <= 8) ||
                      (is_dtype(tensor, kDLInt, 32) && least_bits <= 32) || is_dtype(tensor, kDLInt, 64);
    if (!fits)
      TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must be an integer of " << least_bits
                                << " bits or more";
    column = {tensor.data_ptr(), tensor.stride(0), 0, tensor.dtype().bits / 8};
  }
  for (int64_t b = 0; b < batch; ++b) {
    if (column[b] < least || column[b] > most) {
      TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must be in [" << least << ", " << most
                                << "], got " << column[b] << " in row " << b;
    }
  }
  return column;
}

FloatColumn floats(const char* name, const AnyView& value, int64_t batch, float least, float most) {
  FloatColumn column{nullptr, 0, 0.0f};
  if (const auto number = value.try_cast<double>()) {
    column.value = static_cast<float>(*number);
    batch = 1;
  } else {
    const TensorView tensor = value.cast<TensorView>();
    check_ndim(kOp, name, tensor, 1);
    check_size(kOp, name, tensor, 0, batch);
    column = {data<float>(kOp, name, tensor), tensor.stride(0), 0.0f};
  }
  for (int64_t b = 0; b < batch; ++b) {
    if (!(column[b] >= least && column[b] <= most)) {
      TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must be in [" << least << ", " << most
                                << "], got " << column[b] << " in row " << b;
    }
  }
  return column;
}

template <typename T>
T* output(const char* name, const TensorView& tensor, int64_t batch, int64_t width) {
  check_ndim(kOp, name, tensor, width > 0 ? 2 : 1);
  check_size(kOp, name, tensor, 0, batch);
  if (width > 0) check_size(kOp, name, tensor, 1, width);
  check_contiguous(kOp, name, tensor);
  return data<T>(kOp, name, tensor);
}

void read_shapes(VerifyTreeArgs& args, const TensorView& logits, const TensorView& draft_tokens,
                 const TensorView& parents, const Optional<TensorView>& num_nodes,
                 const Optional<TensorView>& cu_nodes) {
  const bool ragged = cu_nodes.has_value();
  const int node_dim = ragged ? 0 : 1;
  check_ndim(kOp, "logits", logits, node_dim + 2);
  check_last_contiguous(kOp, "logits", logits);
  args.dtype = float_dtype(kOp, "logits", logits);
  args.logits = logits.data_ptr();
  args.logits_batch_stride = ragged ? 0 : logits.stride(0);
  args.logits_row_stride = logits.stride(node_dim);
  args.nodes = logits.size(node_dim);
  if (args.vocab_size < 1 || args.vocab_size > logits.size(node_dim + 1) || args.vocab_size > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << kOp << ": vocab_size must be in [1, " << logits.size(node_dim + 1)
                              << "], got " << args.vocab_size;
  }
  args.cu_nodes = optional_data<int32_t>(kOp, "cu_nodes", cu_nodes);
  args.num_nodes = optional_data<int32_t>(kOp, "num_nodes", num_nodes);
  if (ragged) check_ndim(kOp, "cu_nodes", cu_nodes.value(), 1);
  args.batch = ragged ? cu_nodes.value().size(0) - 1 : logits.size(0);
  if (args.batch < 0) TVM_FFI_THROW(ValueError) << kOp << ": cu_nodes must be of shape [B + 1]";
  if (num_nodes.has_value()) {
    if (ragged) TVM_FFI_THROW(ValueError) << kOp << ": num_nodes must be None with cu_nodes";
    check_ndim(kOp, "num_nodes", num_nodes.value(), 1);
    check_last_contiguous(kOp, "num_nodes", num_nodes.value());
    check_size(kOp, "num_nodes", num_nodes.value(), 0, args.batch);
  }
  if (ragged) {
    check_last_contiguous(kOp, "cu_nodes", cu_nodes.value());
  } else if (args.nodes < 1) {
    TVM_FFI_THROW(ValueError) << kOp << ": logits must have a row for the root";
  }
  check_ndim(kOp, "draft_tokens", draft_tokens, node_dim + 1);
  check_last_contiguous(kOp, "draft_tokens", draft_tokens);
  check_size(kOp, "draft_tokens", draft_tokens, node_dim, args.nodes);
  args.wide_tokens = is_dtype(draft_tokens, kDLInt, 64);
  args.draft_tokens = args.wide_tokens
                          ? static_cast<const void*>(data<int64_t>(kOp, "draft_tokens", draft_tokens))
                          : static_cast<const void*>(data<int32_t>(kOp, "draft_tokens", draft_tokens));
  args.tokens_stride = draft_tokens.stride(0);
  args.parents = data<int32_t>(kOp, "parents", parents);
  check_last_contiguous(kOp, "parents", parents);
  check_size(kOp, "parents", parents, parents.ndim() - 1, args.nodes);
  const bool own_trees = parents.ndim() == 2;
  if (!own_trees || ragged) check_ndim(kOp, "parents", parents, 1);
  args.parents_stride = own_trees ? parents.stride(0) : 0;
  if (!ragged) check_size(kOp, "draft_tokens", draft_tokens, 0, args.batch);
  if (own_trees) check_size(kOp, "parents", parents, 0, args.batch);
}

void read_drafts(VerifyTreeArgs& args, const Optional<TensorView>& draft_probs, int64_t drafting) {
  if (drafting < 0 || drafting > 2) {
    TVM_FFI_THROW(ValueError) << kOp << ": drafting must be 0, 1 or 2, got " << drafting;
  }
  args.drafting = static_cast<Drafting>(drafting);
  args.draft_probs = nullptr;
  if (!draft_probs.has_value()) return;
  const TensorView rows = draft_probs.value();
  const int node_dim = args.cu_nodes ? 0 : 1;
  check_ndim(kOp, "draft_probs", rows, node_dim + 2);
  check_last_contiguous(kOp, "draft_probs", rows);
  check_size(kOp, "draft_probs", rows, node_dim, args.nodes);
  if (!args.cu_nodes) check_size(kOp, "draft_probs", rows, 0, args.batch);
  if (rows.size(node_dim + 1) < args.vocab_size) {
    TVM_FFI_THROW(ValueError) << kOp << ": draft_probs must be at least vocab_size = " << args.vocab_size
                              << " wide, got " << rows.size(node_dim + 1);
  }
  args.draft_dtype = float_dtype(kOp, "draft_probs", rows);
  args.draft_probs = rows.data_ptr();
  args.draft_batch_stride = args.cu_nodes ? 0 : rows.stride(0);
  args.draft_row_stride = rows.stride(node_dim);
}

void check_borders(const VerifyTreeArgs& args) {
  bool rising = args.cu_nodes[0] == 0 && args.cu_nodes[args.batch] <= args.nodes;
  for (int64_t b = 0; b < args.batch; ++b) rising &= args.cu_nodes[b] < args.cu_nodes[b + 1];
  if (rising) return;
  std::string got;
  for (int64_t b = 0; b <= args.batch; ++b) got += (b ? ", " : "") + std::to_string(args.cu_nodes[b]);
  TVM_FFI_THROW(ValueError) << kOp << ": cu_nodes must be rising from 0 to at most " << args.nodes
                            << ", got [" << got << "]";
}

void check_trees(const VerifyTreeArgs& args) {
  if (args.cu_nodes) check_borders(args);
  for (int64_t b = 0; b < args.batch; ++b) {
    if (args.num_nodes && (args.num_nodes[b] < 1 || args.num_nodes[b] > args.nodes)) {
      TVM_FFI_THROW(ValueError) << kOp << ": num_nodes must be in [1, " << args.nodes << "], got "
                                << args.num_nodes[b] << " in row " << b;
    }
  }
  for (int64_t b = 0; b < args.batch; ++b) {
    const DraftTree tree = draft_tree(args, b);
    const int32_t bad = first_malformed_node(tree.parents, tree.num_nodes);
    if (bad >= 0) {
      TVM_FFI_THROW(ValueError)
          << kOp << ": parents must be -1 for the root and lie in [0, node) for every other node, got "
          << tree.parents[bad] << " for node " << bad << " in row " << b;
    }
    if (args.mode[b] != static_cast<int64_t>(VerifyMode::rejection)) continue;
    if (args.drafting == Drafting::deterministic || !args.draft_probs) {
      TVM_FFI_THROW(ValueError) << kOp << ": drafting and draft_probs must be given in rejection mode";
    }
  }
}

// Small workspaces stay with the thread, so that a decoding loop allocates nothing.
void run(VerifyTreeArgs& args) {
  const int64_t threads = cpu::num_threads();
  args.slots = args.batch >= threads ? (args.batch < threads ? args.batch : threads) : 1;
  const size_t bytes = static_cast<size_t>(verify_tree_workspace(args)) + 64;
  static thread_local std::vector<char> kept;
  std::unique_ptr<char[]> large;
  if (bytes > kKeptWorkspace) {
    large.reset(new char[bytes]);
  } else if (kept.size() < bytes) {
    kept.resize(bytes);
  }
  char* memory = large ? large.get() : kept.data();
  args.workspace = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64);
  cpu::verify_tree(args);
}

void verify_tree(TensorView logits, TensorView draft_tokens, TensorView parents,
                 Optional<TensorView> num_nodes, Optional<TensorView> cu_nodes,
                 Optional<TensorView> draft_probs, int64_t vocab_size, int64_t max_depth, int64_t drafting,
                 AnyView mode, AnyView temperature, AnyView top_k, AnyView top_p, AnyView min_p,
                 AnyView epsilon, AnyView delta, AnyView seed, AnyView position, TensorView tokens,
                 TensorView num_accepted, TensorView path, TensorView entropy, TensorView status) {
  constexpr float kGreatest = std::numeric_limits<float>::max();
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  VerifyTreeArgs args{};
  args.vocab_size = vocab_size;
  args.max_depth = max_depth;
  read_shapes(args, logits, draft_tokens, parents, num_nodes, cu_nodes);
  read_drafts(args, draft_probs, drafting);
  args.mode = integers("mode", mode, args.batch, 0, 3, 8);
  args.temperature = floats("temperature", temperature, args.batch, 0.0f, kGreatest);
  args.top_k = integers("top_k", top_k, args.batch, 0, INT64_MAX, 32);
  args.top_p = floats("top_p", top_p, args.batch, kLeast, 1.0f);
  args.min_p = floats("min_p", min_p, args.batch, 0.0f, 1.0f);
  args.epsilon = floats("epsilon", epsilon, args.batch, 0.0f, 1.0f);
  args.delta = floats("delta", delta, args.batch, 0.0f, kGreatest);
  args.seed = integers("seed", seed, args.batch, INT64_MIN, INT64_MAX, 64);
  args.position = integers("position", position, args.batch, 0, INT64_MAX, 32);
  if (max_depth < 0) TVM_FFI_THROW(ValueError) << kOp << ": max_depth must be >= 0, got " << max_depth;
  args.tokens = output<int32_t>("tokens", tokens, args.batch, max_depth + 1);
  args.num_accepted = output<int32_t>("num_accepted", num_accepted, args.batch, 0);
  args.path = output<int32_t>("path", path, args.batch, max_depth + 1);
  args.entropy = output<float>("entropy", entropy, args.batch, 0);
  args.status = output<uint8_t>("status", status, args.batch, 0);
  check_trees(args);
  run(args);
}

// The generator by itself, for tests: counters [n, 4] and results [n, 4] as the bits of int32.
void philox4x32_words(TensorView counters, int64_t key0, int64_t key1, TensorView words) {
  check_ndim("philox4x32", "counters", counters, 2);
  check_size("philox4x32", "counters", counters, 1, 4);
  check_contiguous("philox4x32", "counters", counters);
  check_contiguous("philox4x32", "words", words);
  check_ndim("philox4x32", "words", words, 2);
  check_size("philox4x32", "words", words, 0, counters.size(0));
  check_size("philox4x32", "words", words, 1, 4);
  const int32_t* from = data<int32_t>("philox4x32", "counters", counters);
  int32_t* to = data<int32_t>("philox4x32", "words", words);
  for (int64_t i = 0; i < counters.size(0); ++i) {
    PhiloxWords block;
    memcpy(block.word, from + 4 * i, sizeof(block.word));
    block = philox4x32(block, static_cast<uint32_t>(key0), static_cast<uint32_t>(key1));
    memcpy(to + 4 * i, block.word, sizeof(block.word));
  }
}

// The noise by itself, for tests: words [n] as the bits of int32, noise float [n].
void gumbel_noise(TensorView words, TensorView noise) {
  check_contiguous("gumbel_noise", "words", words);
  check_contiguous("gumbel_noise", "noise", noise);
  check_ndim("gumbel_noise", "words", words, 1);
  check_ndim("gumbel_noise", "noise", noise, 1);
  check_size("gumbel_noise", "noise", noise, 0, words.size(0));
  const int32_t* from = data<int32_t>("gumbel_noise", "words", words);
  float* to = data<float>("gumbel_noise", "noise", noise);
  for (int64_t i = 0; i < words.size(0); ++i) to[i] = gumbel(static_cast<uint32_t>(from[i]));
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify_tree, verify_tree);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(philox4x32, philox4x32_words);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gumbel_noise, gumbel_noise);
}  // namespace cerberus::ffi
