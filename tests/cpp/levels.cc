// Runs every CPU operator at every instruction-set level that this processor has, on the same seeded inputs,
// and compares each level with the baseline. The first difference is reported and ends the program with 1.
#include "levels.h"

#include <algorithm>
#include <exception>
#include <limits>

#include "cerberus/commit_kv.h"
#include "cerberus/decoder_layer.h"
#include "cerberus/gate.h"
#include "cerberus/grow_tree.h"
#include "cerberus/head_loss.h"
#include "cerberus/head_states.h"
#include "cerberus/head_topk.h"
#include "cerberus/packed_linear.h"
#include "cerberus/tree_attention.h"
#include "cerberus/tree_mask.h"
#include "cerberus/verify_tree.h"

using namespace cerberus;
using levels::Agree;
using levels::Case;
using levels::label;
using levels::Random;

namespace {

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Sizes around the lanes of every level (4, 8, 16), two vectors, and a panel's 48 outputs.
constexpr int64_t kSizes[] = {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97};

std::string typed(DType dtype, const std::string& rest) {
  return std::string(levels::name_of(dtype)) + " " + rest;
}

std::vector<int32_t> random_tree(Random& random, int64_t nodes) {
  std::vector<int32_t> parents(static_cast<size_t>(nodes), -1);
  for (int64_t node = 1; node < nodes; ++node) {
    // Half of the nodes hang on a recent one, so that some paths are long.
    const int64_t reach = random.below(2) == 0 ? node : std::min<int64_t>(node, 3);
    parents[static_cast<size_t>(node)] = static_cast<int32_t>(node - 1 - random.below(reach));
  }
  return parents;
}

std::vector<uint32_t> mask_of(const std::vector<int32_t>& parents) {
  const int32_t nodes = static_cast<int32_t>(parents.size());
  std::vector<uint32_t> mask(static_cast<size_t>(nodes) * static_cast<size_t>(mask_words(nodes)));
  write_tree_mask(parents.data(), nodes, nodes, mask.data());
  return mask;
}

// Rows of `columns` elements that lie `stride` apart: one longer than a row, so that no row's start is
// aligned.
int64_t odd_stride(int64_t columns) { return columns + 1; }
int64_t span(int64_t rows, int64_t columns) {
  return rows == 0 ? 0 : (rows - 1) * odd_stride(columns) + columns;
}

void tree_mask_cases() {
  Random random(1);
  for (const int64_t nodes : {1, 2, 31, 32, 33, 63, 64, 65, 129}) {
    for (const int64_t batch : {0, 1, 3}) {
      Case at("tree_mask", label("nodes", nodes, "batch", batch));
      std::vector<int32_t> parents, counts;
      for (int64_t b = 0; b < batch; ++b) {
        const std::vector<int32_t> tree = random_tree(random, nodes);
        parents.insert(parents.end(), tree.begin(), tree.end());
        counts.push_back(static_cast<int32_t>(random.below(nodes + 1)));
      }
      TreeMaskArgs args{};
      args.parents = at.input(parents);
      args.num_nodes = batch == 3 ? at.input(counts) : nullptr;
      args.mask = at.output<uint32_t>("mask", batch * nodes * mask_words(nodes));
      args.batch = batch;
      args.nodes = args.parents_stride = nodes;
      at.run([&] { cpu::tree_mask(args); });
    }
  }
}

void grow_tree_cases() {
  Random random(2);
  for (const int64_t nodes : {1, 2, 31, 33, 64, 129}) {
    for (const int64_t batch : {0, 1, 3}) {
      Case at("grow_tree", label("nodes", nodes, "batch", batch));
      constexpr int64_t kHeads = 4, kRanks = 7;
      std::vector<float> log_probs;
      std::vector<int32_t> tokens, roots;
      for (int64_t row = 0; row < batch * kHeads; ++row) {
        float value = 0.0f;
        for (int64_t rank = 0; rank < kRanks; ++rank) {
          value -= static_cast<float>(random.below(3));  // ties too
          log_probs.push_back(value);
          tokens.push_back(static_cast<int32_t>(random.below(1000)));
        }
      }
      for (int64_t b = 0; b < batch; ++b) roots.push_back(static_cast<int32_t>(random.below(1000)));
      std::vector<float> costs;
      for (int64_t node = 0; node < nodes; ++node) costs.push_back(1.0f + 0.01f * static_cast<float>(node));
      GrowTreeArgs args{};
      args.log_probs = at.input(log_probs);
      args.tokens = at.input(tokens);
      args.log_probs_batch_stride = args.tokens_batch_stride = kHeads * kRanks;
      args.log_probs_head_stride = args.tokens_head_stride = kRanks;
      args.roots = at.input(roots);
      args.costs = batch == 3 ? at.input(costs) : nullptr;
      args.batch = batch;
      args.heads = kHeads;
      args.ranks = kRanks;
      args.nodes = nodes;
      args.parents = at.output<int32_t>("parents", batch * nodes);
      args.slots = at.output<int32_t>("slots", batch * nodes * 2);
      args.score = at.output<float>("score", batch * nodes, Agree::f32_bits);
      args.num_nodes = at.output<int32_t>("num_nodes", batch);
      args.draft_tokens = at.output<int32_t>("draft_tokens", batch * nodes);
      args.scratch = reinterpret_cast<GrowCandidate*>(
          at.scratch(batch * (nodes + 1) * static_cast<int64_t>(sizeof(GrowCandidate))));
      at.run([&] { cpu::grow_tree(args); });
    }
  }
}

void commit_kv_cases() {
  Random random(2);
  for (const bool paged : {false, true}) {
    for (const int64_t row_bytes : {2, 8, 16, 30, 64, 130, 512}) {
      constexpr int64_t kBatch = 3, kDepth = 5, kNodes = 12, kHeads = 2, kLayers = 2;
      const int64_t block_size = paged ? 4 : 40, max_blocks = paged ? 10 : 1, blocks = kBatch * max_blocks;
      Case at("commit_kv", label("paged", paged, "row_bytes", row_bytes));
      CommitKvArgs args{};
      std::vector<int32_t> path, accepted, prefix, table;
      for (int64_t b = 0; b < kBatch; ++b) {
        accepted.push_back(static_cast<int32_t>(b == 0 ? kDepth : random.below(kDepth + 1)));
        prefix.push_back(static_cast<int32_t>(random.below(40 - kNodes)));
        for (int64_t step = 0, node = 0; step <= kDepth; ++step) {
          path.push_back(step <= accepted.back() ? static_cast<int32_t>(node) : -1);
          node += 1 + random.below(2);
        }
        for (int64_t i = 0; i < max_blocks; ++i) table.push_back(static_cast<int32_t>(b + kBatch * i));
      }
      std::vector<KvPlane> planes;
      for (int64_t i = 0; i < 2 * kLayers; ++i) {
        KvPlane plane{};
        plane.head_stride = row_bytes;
        plane.slot_stride = kHeads * row_bytes;
        plane.block_stride = block_size * plane.slot_stride;
        plane.heads = kHeads;
        plane.row_bytes = row_bytes;
        std::vector<char> content(static_cast<size_t>(blocks * plane.block_stride));
        for (char& byte : content) byte = static_cast<char>(random.word());
        const int64_t bytes = static_cast<int64_t>(content.size());
        plane.data = reinterpret_cast<unsigned char*>(
            at.output(i < kLayers ? "keys" : "values", bytes, 1, Agree::bits, std::move(content)));
        planes.push_back(plane);
      }
      args.planes = at.input(planes);
      args.path = at.input(path);
      args.num_accepted = at.input(accepted);
      args.prefix_lens = at.input(prefix);
      args.block_table = paged ? at.input(table) : nullptr;
      args.new_lens = at.output<int32_t>("new_lens", kBatch);
      args.num_planes = 2 * kLayers;
      args.batch = kBatch;
      args.block_size = block_size;
      args.path_stride = kDepth + 1;
      args.block_table_stride = max_blocks;
      at.run([&] { cpu::commit_kv(args); });
    }
  }
}

void run_gate(Case& at, GateArgs& args) {
  args.score = at.output<float>("score", args.batch, Agree::f32);
  args.open = at.output<uint8_t>("open", args.batch);
  args.scratch = reinterpret_cast<float*>(at.scratch(4 * gate_scratch_floats(args)));
  at.run([&] { cpu::gate(args); });
}

void gate_cases() {
  Random random(3);
  {
    Case at("gate", "given");
    GateArgs args{};
    args.batch = 5;
    args.entropy = at.input<float>({0.0f, 1.0f, 2.0f, kNan, kInfinity});
    args.thresholds = at.input<float>({0.5f, 1.0f, 2.5f, 1.0f, kInfinity});
    run_gate(at, args);
  }
  std::vector<int64_t> widths(std::begin(kSizes), std::end(kSizes));
  widths.insert(widths.end(), {1000, kGateBlockColumns, kGateBlockColumns + 1, 2 * kGateBlockColumns + 33});
  for (const DType dtype : kTypes) {
    for (const int64_t columns : widths) {
      const int64_t batch = columns == 5 ? 0 : columns > 100 ? 2 : 5;
      Case at("gate", typed(dtype, label("entropy of columns", columns)));
      GateArgs args{};
      args.kind = GateScore::entropy;
      args.batch = batch;
      args.columns = columns;
      args.values_stride = odd_stride(columns);
      std::vector<float> values = random.normals(span(batch, columns), 4.0f);
      if (batch == 5) {
        for (int64_t i = 0; i < columns; ++i)
          values[static_cast<size_t>(args.values_stride + i)] = -kInfinity;
        values[static_cast<size_t>(2 * args.values_stride + columns - 1)] = kNan;
        values[static_cast<size_t>(3 * args.values_stride)] = -kInfinity;
        values[static_cast<size_t>(4 * args.values_stride + columns / 2)] = kInfinity;
      }
      args.values = at.floats(values, dtype);
      args.values_dtype = dtype;
      args.threshold = 1.2345f;
      run_gate(at, args);
    }
    for (const int64_t columns : kSizes) {
      const int64_t inner = kSizes[random.below(21)], batch = 3;
      const DType values_dtype = kTypes[random.below(3)];
      Case at("gate", typed(dtype, label("learned columns", columns, "inner", inner)));
      GateArgs args{};
      args.kind = GateScore::learned;
      args.batch = batch;
      args.columns = columns;
      args.values_stride = odd_stride(columns);
      args.values = at.floats(random.normals(span(batch, columns)), values_dtype);
      args.values_dtype = values_dtype;
      args.inner = inner;
      args.w1_stride = odd_stride(columns);
      args.w1 = at.floats(random.normals(span(inner, columns), 0.5f), dtype);
      args.b1 = at.floats(random.normals(inner), dtype);
      args.w2 = at.floats(random.normals(inner, 0.3f), dtype);
      args.b2 = at.floats({0.25f}, dtype);
      args.weights_dtype = dtype;
      args.eps = 1e-6f;
      args.threshold = 0.54321f;
      run_gate(at, args);
    }
  }
}

void head_states_cases() {
  Random random(4);
  for (const DType dtype : kTypes) {
    for (const int64_t width : kSizes) {
      for (const bool linked : {false, true}) {
        HeadStatesArgs args{};
        args.batch = width == 2 ? 0 : 1 + random.below(3);
        args.blocks = 1 + random.below(2);
        args.heads = 1 + random.below(5);
        args.width = width;
        args.linked = linked;
        Case at("head_states", typed(dtype, label("width", width, "linked", linked, "heads", args.heads,
                                                  "blocks", args.blocks, "batch", args.batch)));
        const int64_t columns = linked ? 2 * width : width;
        const int64_t rows = args.blocks * args.heads * width;
        args.hidden_stride = args.root_stride = odd_stride(width);
        args.hidden_dtype = kTypes[random.below(3)];
        args.root_dtype = kTypes[random.below(3)];
        args.bias_dtype = kTypes[random.below(3)];
        args.weight_dtype = dtype;
        args.hidden = at.floats(random.normals(span(args.batch, width)), args.hidden_dtype);
        if (random.below(2) == 0)
          args.root = at.floats(random.normals(span(args.batch, width)), args.root_dtype);
        args.weight = at.floats(random.normals(span(rows, columns), 1.0f / std::sqrt(float(columns))), dtype);
        args.bias = at.floats(random.normals(rows), args.bias_dtype);
        args.weight_strides[2] = odd_stride(columns);
        args.weight_strides[1] = width * args.weight_strides[2];
        args.weight_strides[0] = args.heads * args.weight_strides[1];
        args.bias_strides[1] = width;
        args.bias_strides[0] = args.heads * width;
        args.scratch = reinterpret_cast<float*>(at.scratch(4 * 2 * args.batch * (args.heads + 1) * width));
        args.out = at.floats_out("out", args.batch * args.heads * width, args.hidden_dtype);
        at.run([&] { cpu::head_states(args); });
      }
    }
  }
}

// Exact sums tie often, and then every token is compared; sums that round are compared by their values.
void head_topk_case(Random& random, DType dtype, bool exact, int64_t width, int64_t vocab, int64_t rows) {
  HeadTopkArgs args{};
  args.k = std::min<int64_t>(vocab, 1 + random.below(9));
  Case at("head_topk",
          typed(dtype, label("exact", exact, "width", width, "vocab", vocab, "k", args.k, "rows", rows)));
  args.dtype = dtype;
  args.rows = rows;
  args.width = width;
  args.vocab = vocab;
  args.states_stride = args.weight_stride = odd_stride(width);
  std::vector<float> states = exact ? random.whole(span(rows, width), 3) : random.normals(span(rows, width));
  if (rows > 3) states[static_cast<size_t>(2 * args.states_stride + width / 2)] = kNan;
  args.states = at.floats(states, dtype);
  args.weight = at.floats(exact ? random.whole(span(vocab, width), 1)
                                : random.normals(span(vocab, width), 3.0f / std::sqrt(float(width))),
                          dtype);
  if (random.below(2) == 0) {
    std::vector<int32_t> map;
    for (int64_t i = 0; i < vocab; ++i) map.push_back(static_cast<int32_t>(7 * i + 3));
    args.token_map = at.input(map);
  }
  HeadTopkArgs whole = args, shared = args;
  whole.shares = 1;
  shared.shares = std::min<int64_t>(3, head_topk_blocks(args));
  std::vector<int32_t> lost(static_cast<size_t>(rows * args.k));
  for (HeadTopkArgs* call : {&whole, &shared}) {
    call->tokens = exact ? at.output<int32_t>("tokens", rows * args.k) : lost.data();
    call->log_probs = at.output<float>("log_probs", rows * args.k, Agree::f32);
    call->lse = at.output<float>("lse", rows, Agree::f32);
    call->scratch = at.scratch(head_topk_scratch_bytes(*call));
  }
  at.twins(whole.lse, shared.lse, 4 * rows, "lse in several shares, byte");
  at.twins(whole.log_probs, shared.log_probs, 4 * rows * args.k, "log_probs in several shares, byte");
  if (exact) at.twins(whole.tokens, shared.tokens, 4 * rows * args.k, "tokens in several shares, byte");
  at.run([&] {
    cpu::head_topk(whole);
    cpu::head_topk(shared);
  });
}

void head_topk_cases() {
  Random random(5);
  for (const DType dtype : kTypes) {
    for (const bool exact : {true, false}) {
      for (const int64_t width : kSizes)
        head_topk_case(random, dtype, exact, width, kSizes[random.below(21)], 3);
      for (const int64_t vocab : kSizes) head_topk_case(random, dtype, exact, 24, vocab, 1 + random.below(6));
      for (const int64_t rows : {1, 2, 4, 5, 8, 9}) head_topk_case(random, dtype, exact, 33, 200, rows);
      head_topk_case(random, dtype, exact, 1032, 65, 2);
      head_topk_case(random, dtype, exact, 2051, 35, 5);
    }
  }
}

void head_loss_cases() {
  Random random(6);
  for (const bool taught : {false, true}) {
    for (const bool gradient : {false, true}) {
      std::vector<int64_t> sizes(std::begin(kSizes), std::end(kSizes));
      sizes.insert(sizes.end(), {1000, 1025});
      for (const int64_t vocab : sizes) {
        HeadLossArgs args{};
        args.rows = vocab == 3 ? 0 : 4;
        args.vocab = vocab;
        Case at("head_loss", label("taught", taught, "gradient", gradient, "vocab", vocab));
        std::vector<float> logits = random.normals(args.rows * vocab, 3.0f), teacher,
                           scale = random.normals(args.rows);
        if (args.rows > 0) logits[static_cast<size_t>(vocab + vocab / 2)] = kNan;
        if (args.rows > 0) logits[static_cast<size_t>(2 * vocab + vocab / 3)] = -kInfinity;
        std::vector<int64_t> targets, teacher_rows;
        for (int64_t row = 0; row < args.rows; ++row) {
          targets.push_back(row == 0
                                ? std::max_element(logits.begin(), logits.begin() + vocab) - logits.begin()
                                : random.below(vocab));
          teacher_rows.push_back(random.below(2));
          double total = 0.0;
          for (int64_t i = 0; i < vocab; ++i) total += teacher.emplace_back(random.uniform() + 0.01f);
          for (int64_t i = 0; i < vocab; ++i) teacher[static_cast<size_t>(row * vocab + i)] /= float(total);
        }
        args.logits = reinterpret_cast<float*>(
            at.output("logits", args.rows * vocab, 4, Agree::f32, Case::encode(logits, DType::f32)));
        args.targets = at.input(targets);
        args.scale = at.input(scale);
        args.teacher = taught ? at.input(teacher) : nullptr;
        args.teacher_row = taught ? at.input(teacher_rows) : nullptr;
        args.loss = at.output<float>("loss", args.rows, Agree::f32);
        args.correct = at.output<bool>("correct", args.rows);
        args.soft_weight = taught ? 0.3f : 0.0f;
        args.needs_gradient = gradient;
        at.run([&] { cpu::head_loss(args); });
      }
    }
  }
}

// The layout of packed_linear.h, from a weight [out, in].
std::vector<float> pack(const std::vector<float>& weight, int64_t out, int64_t in, DType dtype) {
  std::vector<float> panels(static_cast<size_t>(num_panels(out) * num_steps(in) * kStepDepth * kPanelWidth));
  for (int64_t o = 0; o < out; ++o) {
    for (int64_t i = 0; i < in; ++i) {
      const int64_t step = (o / kPanelWidth * num_steps(in) + i / kStepDepth) * kStepDepth * kPanelWidth;
      const int64_t column = o % kPanelWidth, phase = i % kStepDepth;
      const int64_t place = dtype == DType::bf16 ? column * kStepDepth + phase : phase * kPanelWidth + column;
      panels[static_cast<size_t>(step + place)] = weight[static_cast<size_t>(o * in + i)];
    }
  }
  return panels;
}

void packed_linear_case(Random& random, DType dtype, int64_t rows, int64_t in, int64_t out) {
  PackedLinearArgs args{};
  args.gated = random.below(3) == 0;
  const bool norm = !args.gated && random.below(2) == 0, bias = random.below(2) == 0;
  args.out_dtype = random.below(3) == 0 ? DType::f32 : dtype;
  const bool residual = args.out_dtype == dtype && random.below(2) == 0;
  Case at("packed_linear", typed(dtype, label("rows", rows, "in", in, "out", out, "gated", args.gated, "norm",
                                              norm, "bias", bias, "residual", residual)));
  const int64_t columns = args.gated ? 2 * in : in;
  args.dtype = dtype;
  args.rows = rows;
  args.in_features = in;
  args.out_features = out;
  args.x_stride = odd_stride(columns);
  args.eps = 1e-6f;
  args.x = at.floats(random.normals(span(rows, columns)), dtype);
  args.panels = at.floats(pack(random.normals(out * in, 1.0f / std::sqrt(float(in))), out, in, dtype), dtype);
  if (bias) args.bias = at.floats(random.normals(out), dtype);
  if (norm) args.norm_weight = at.floats(random.normals(in), dtype);
  if (residual) args.residual = at.floats(random.normals(rows * out), dtype);
  // A norm's and a gate's steps round in the type of x, one step apart at two levels.
  args.out = at.floats_out("out", rows * out, args.out_dtype);
  args.scratch = reinterpret_cast<float*>(at.scratch(4 * packed_linear_scratch(rows, in)));

  // Every row by itself must be the same bits.
  const int64_t x_size = levels::size_of(dtype), out_size = levels::size_of(args.out_dtype);
  char* alone = at.floats_out("out, row by row", rows * out, args.out_dtype);
  at.twins(args.out, alone, rows * out * out_size, "rows together against rows alone, byte");
  at.run([&] {
    cpu::packed_linear(args);
    for (int64_t row = 0; row < rows; ++row) {
      PackedLinearArgs one = args;
      one.rows = 1;
      one.x = static_cast<const char*>(args.x) + row * args.x_stride * x_size;
      if (residual) one.residual = static_cast<const char*>(args.residual) + row * out * x_size;
      one.out = alone + row * out * out_size;
      cpu::packed_linear(one);
    }
  });
}

void packed_linear_cases() {
  Random random(7);
  for (const DType dtype : kTypes) {
    for (const int64_t in : kSizes) packed_linear_case(random, dtype, 1 + random.below(9), in, 50);
    for (const int64_t out : kSizes) packed_linear_case(random, dtype, 1 + random.below(9), 34, out);
    for (int64_t rows = 0; rows <= 18; ++rows) packed_linear_case(random, dtype, rows, 21, 97);
    packed_linear_case(random, dtype, 70, 16, 49);
    for (const int64_t rows : {1, 7, 9}) packed_linear_case(random, dtype, rows, 401, 96);
  }
}

struct Attention {
  int64_t nodes, heads, group, head_dim, longest_prefix;
};

void tree_attention_case(Random& random, DType dtype, const Attention& size) {
  const bool paged = random.below(2) == 0, counted = random.below(2) == 0, one_tree = random.below(2) == 0;
  TreeAttentionArgs args{};
  args.batch = size.nodes == 2 ? 0 : 1 + random.below(2);
  args.nodes = size.nodes;
  args.kv_heads = size.heads;
  args.q_heads = size.heads * size.group;
  args.head_dim = size.head_dim;
  args.window = random.below(3) == 0 ? 1 + random.below(size.longest_prefix + 4) : 0;
  args.softcap = random.below(3) == 0 ? 5.0f : 0.0f;
  args.scale = 1.0f / std::sqrt(float(size.head_dim));
  args.dtype = dtype;
  Case at("tree_attention",
          typed(dtype, label("nodes", size.nodes, "batch", args.batch, "heads", args.q_heads, "group",
                             size.group, "head_dim", size.head_dim, "prefix", size.longest_prefix, "window",
                             args.window, "softcap", args.softcap > 0, "paged", paged)));
  const int64_t slots = size.longest_prefix + size.nodes + 3;
  args.block_size = paged ? 16 : slots;
  const int64_t per_request = paged ? (slots + 15) / 16 : 1, blocks = args.batch * per_request;
  args.block_table_stride = per_request;

  std::vector<int32_t> prefix, counts, table;
  std::vector<uint32_t> mask;
  for (int64_t b = 0; b < args.batch; ++b) {
    prefix.push_back(
        static_cast<int32_t>(b == 0 ? size.longest_prefix : random.below(size.longest_prefix + 1)));
    counts.push_back(static_cast<int32_t>(b == 0 ? size.nodes : random.below(size.nodes + 1)));
    const std::vector<uint32_t> one = mask_of(random_tree(random, size.nodes));
    if (b == 0 || !one_tree) mask.insert(mask.end(), one.begin(), one.end());
    for (int64_t i = 0; i < per_request; ++i) table.push_back(static_cast<int32_t>(b + args.batch * i));
  }
  // Slots that no node may see hold NaN.
  const int64_t slot_width = size.heads * size.head_dim;
  std::vector<float> keys(static_cast<size_t>(blocks * args.block_size * slot_width), kNan), values = keys;
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t used =
        prefix[static_cast<size_t>(b)] + (counted ? counts[static_cast<size_t>(b)] : size.nodes);
    for (int64_t slot = 0; slot < used; ++slot) {
      const int64_t block = paged ? table[static_cast<size_t>(b * per_request + slot / args.block_size)] : b;
      const int64_t from = (block * args.block_size + slot % args.block_size) * slot_width;
      for (int64_t i = from; i < from + slot_width; ++i) {
        keys[static_cast<size_t>(i)] = random.normal();
        values[static_cast<size_t>(i)] = random.normal();
      }
    }
  }
  const auto strides = [](int64_t* stride, int64_t middle, int64_t heads, int64_t width) {
    stride[2] = width;
    stride[1] = heads * width;
    stride[0] = middle * heads * width;
  };
  strides(args.q_stride, size.nodes, args.q_heads, size.head_dim);
  strides(args.out_stride, size.nodes, args.q_heads, size.head_dim);
  strides(args.k_stride, args.block_size, size.heads, size.head_dim);
  strides(args.v_stride, args.block_size, size.heads, size.head_dim);
  args.lse_stride[1] = args.q_heads;
  args.lse_stride[0] = size.nodes * args.q_heads;
  args.mask_stride[1] = mask_words(size.nodes);
  args.mask_stride[0] = one_tree ? 0 : size.nodes * args.mask_stride[1];
  const int64_t count = args.batch * size.nodes * args.q_heads;
  args.q = at.floats(random.normals(count * size.head_dim), dtype);
  args.k_cache = at.floats(keys, dtype);
  args.v_cache = at.floats(values, dtype);
  args.mask = at.input(mask);
  args.prefix_lens = at.input(prefix);
  args.block_table = paged ? at.input(table) : nullptr;
  args.num_nodes = counted ? at.input(counts) : nullptr;
  args.out = at.floats_out("out", count * size.head_dim, dtype);
  args.lse = at.output<float>("lse", count, Agree::f32);
  at.run([&] { cpu::tree_attention(args); });
}

void tree_attention_cases() {
  Random random(8);
  for (const DType dtype : kTypes) {
    for (int64_t head_dim = 8; head_dim <= 136; head_dim += 8) {
      tree_attention_case(random, dtype,
                          {1 + random.below(9), 1 + random.below(2), 1 + random.below(3), head_dim, 19});
    }
    tree_attention_case(random, dtype, {3, 1, 2, 256, 9});
    for (const int64_t nodes : {1, 2, 4, 8, 15, 16, 17, 31, 32, 33, 65}) {
      for (const int64_t group : {1, 3, 5}) tree_attention_case(random, dtype, {nodes, 1, group, 16, 21});
    }
    for (const int64_t prefix : {0, 1, 15, 16, 63, 64, 65, 255, 257, 700}) {
      tree_attention_case(random, dtype, {1, 1, 1, 24, prefix});
      tree_attention_case(random, dtype, {5, 1, 3, 24, prefix});
    }
  }
}

struct Verify {
  DType dtype;
  VerifyMode mode;
  Drafting drafting;
  int64_t vocab, nodes;
};

// A tree whose drafts the model often agrees with. `probs`, if asked for, hold what each node was drawn from.
struct Drafts {
  std::vector<int32_t> parents, tokens;
  std::vector<float> logits, probs;
};

Drafts make_drafts(Random& random, const Verify& size, int64_t stride) {
  Drafts drafts{random_tree(random, size.nodes), {}, random.normals(size.nodes * stride, 2.0f), {}};
  drafts.tokens.assign(static_cast<size_t>(size.nodes), static_cast<int32_t>(random.below(size.vocab)));
  std::vector<float> rows(static_cast<size_t>(size.nodes * stride));
  for (int64_t node = 0; node < size.nodes; ++node) {
    double total = 0.0;
    for (int64_t i = 0; i < size.vocab; ++i)
      total += rows[static_cast<size_t>(node * stride + i)] = random.uniform();
    for (int64_t i = 0; i < size.vocab; ++i) rows[static_cast<size_t>(node * stride + i)] /= float(total);
  }
  drafts.probs.assign(rows.size(), 0.0f);
  for (int64_t node = 1; node < size.nodes; ++node) {
    const int64_t parent = drafts.parents[static_cast<size_t>(node)];
    const int64_t token = random.below(8) == 0 ? -1 : random.below(size.vocab);
    drafts.tokens[static_cast<size_t>(node)] = static_cast<int32_t>(token);
    if (token >= 0 && random.below(2) == 0)
      drafts.logits[static_cast<size_t>(parent * stride + token)] += 8.0f;
    std::copy_n(rows.begin() + parent * stride, stride, drafts.probs.begin() + node * stride);
  }
  if (random.below(6) == 0) drafts.logits[static_cast<size_t>(random.below(size.nodes) * stride)] = kNan;
  if (random.below(4) == 0) std::fill_n(drafts.logits.end() - stride, size.vocab / 2, -kInfinity);
  if (random.below(12) == 0) std::fill_n(drafts.logits.end() - stride, stride, -kInfinity);
  return drafts;
}

void verify_tree_case(Random& random, const Verify& size, int64_t filters) {
  constexpr int64_t kBatch = 2;
  const char* names[] = {"greedy", "typical", "sample", "rejection"};
  VerifyTreeArgs args;
  Case at("verify_tree",
          typed(size.dtype, names[static_cast<int>(size.mode)] +
                                label(" drafting", static_cast<int64_t>(size.drafting), "vocab", size.vocab,
                                      "nodes", size.nodes, "filters", filters)));
  const int64_t stride = odd_stride(size.vocab);
  std::vector<int32_t> parents, counts;
  std::vector<int64_t> tokens;
  std::vector<float> logits, probs;
  for (int64_t b = 0; b < kBatch; ++b) {
    const Drafts drafts = make_drafts(random, size, stride);
    parents.insert(parents.end(), drafts.parents.begin(), drafts.parents.end());
    tokens.insert(tokens.end(), drafts.tokens.begin(), drafts.tokens.end());
    logits.insert(logits.end(), drafts.logits.begin(), drafts.logits.end());
    probs.insert(probs.end(), drafts.probs.begin(), drafts.probs.end());
    counts.push_back(static_cast<int32_t>(b == 0 ? size.nodes : 1 + random.below(size.nodes)));
  }
  args.dtype = size.dtype;
  args.logits = at.floats(logits, size.dtype);
  args.logits_row_stride = args.draft_row_stride = stride;
  args.logits_batch_stride = args.draft_batch_stride = size.nodes * stride;
  args.wide_tokens = random.below(2) == 0;
  args.draft_tokens =
      args.wide_tokens
          ? static_cast<const void*>(at.input(tokens))
          : static_cast<const void*>(at.input(std::vector<int32_t>(tokens.begin(), tokens.end())));
  args.tokens_stride = args.parents_stride = size.nodes;
  args.parents = at.input(parents);
  if (random.below(2) == 0) args.num_nodes = at.input(counts);
  if (random.below(3) == 0) {
    args.num_nodes = nullptr;
    args.cu_nodes =
        at.input<int32_t>({0, static_cast<int32_t>(size.nodes), static_cast<int32_t>(2 * size.nodes)});
  }
  if (size.mode == VerifyMode::rejection) {
    args.draft_dtype = size.dtype == DType::f16 ? DType::f32 : size.dtype;
    args.draft_probs = at.floats(probs, args.draft_dtype);
    args.drafting = size.drafting;
  }
  args.batch = kBatch;
  args.nodes = args.cu_nodes ? kBatch * size.nodes : size.nodes;
  args.vocab_size = size.vocab;
  args.max_depth = random.below(3) == 0 ? std::min<int64_t>(2, size.nodes - 1) : size.nodes - 1;
  args.mode.value = static_cast<int64_t>(size.mode);
  args.seed.value = static_cast<int64_t>(random.word() >> 1);
  args.position.value = random.below(100000);
  args.temperature.value = random.below(6) == 0 ? 0.0f : 0.5f + random.uniform();
  if (filters & 1) args.top_k.value = 1 + random.below(size.vocab + 2);
  if (filters & 2) args.top_p.value = 0.05f + 0.9f * random.uniform();
  if (filters & 4) args.min_p.value = 0.3f * random.uniform();
  args.tokens = at.output<int32_t>("tokens", kBatch * (args.max_depth + 1));
  args.num_accepted = at.output<int32_t>("num_accepted", kBatch);
  args.path = at.output<int32_t>("path", kBatch * (args.max_depth + 1));
  args.entropy = at.output<float>("entropy", kBatch, Agree::f32_bits);
  args.status = at.output<uint8_t>("status", kBatch);
  args.slots = 1 + random.below(2);
  args.workspace = at.scratch(verify_tree_workspace(args));
  at.run([&] { cpu::verify_tree(args); });
}

void verify_tree_cases() {
  Random random(9);
  const struct {
    VerifyMode mode;
    Drafting drafting;
  } rules[] = {{VerifyMode::greedy, Drafting::deterministic},
               {VerifyMode::typical, Drafting::deterministic},
               {VerifyMode::sample, Drafting::deterministic},
               {VerifyMode::rejection, Drafting::iid},
               {VerifyMode::rejection, Drafting::without_replacement}};
  int64_t turn = 0;
  for (const auto& rule : rules) {
    for (const DType dtype : kTypes) {
      for (const int64_t vocab : kSizes) {
        verify_tree_case(random, {dtype, rule.mode, rule.drafting, vocab, 1 + random.below(12)}, turn++ % 8);
      }
      for (const int64_t vocab : {255, 256, 257, 1023, 1024, 1025, 2500}) {
        for (const int64_t filters : {0, 1, 2, 7}) {
          verify_tree_case(random, {dtype, rule.mode, rule.drafting, vocab, 1 + random.below(6)}, filters);
        }
      }
      verify_tree_case(random, {dtype, rule.mode, rule.drafting, 60, 65}, 0);
    }
  }
}

PackedLinearArgs layer_linear(Case& at, Random& random, DType dtype, int64_t rows, int64_t in, int64_t out) {
  PackedLinearArgs args{};
  args.dtype = args.out_dtype = dtype;
  args.rows = rows;
  args.in_features = args.x_stride = in;
  args.out_features = out;
  args.eps = 1e-6f;
  // Small, so that a difference of one rounding does not grow from step to step.
  args.panels = at.floats(pack(random.normals(out * in, 0.3f / std::sqrt(float(in))), out, in, dtype), dtype);
  args.bias = random.below(2) == 0 ? at.floats(random.normals(out, 0.1f), dtype) : nullptr;
  args.scratch = reinterpret_cast<float*>(at.scratch(4 * packed_linear_scratch(rows, in)));
  return args;
}

void decoder_layer_case(Random& random, DType dtype, int64_t nodes, int64_t group, int64_t head_dim) {
  constexpr int64_t kBatch = 2, kSlots = 90, kHeads = 2, kWidth = 50, kInner = 33;
  Case at("decoder_layer", typed(dtype, label("nodes", nodes, "group", group, "head_dim", head_dim)));
  const int64_t rows = kBatch * nodes, q_heads = kHeads * group, heads = q_heads + 2 * kHeads;
  DecoderLayerArgs args{};
  args.qkv = layer_linear(at, random, dtype, rows, kWidth, heads * head_dim);
  args.output = layer_linear(at, random, dtype, rows, q_heads * head_dim, kWidth);
  args.gate_up = layer_linear(at, random, dtype, rows, kWidth, 2 * kInner);
  args.down = layer_linear(at, random, dtype, rows, kInner, kWidth);
  args.qkv.norm_weight = at.floats(random.normals(kWidth), dtype);
  args.gate_up.norm_weight = at.floats(random.normals(kWidth), dtype);
  args.qkv.x = args.output.residual = at.floats(random.normals(rows * kWidth), dtype);
  args.down.gated = true;
  args.down.x_stride = 2 * kInner;
  std::vector<float> cos, sin;
  for (int64_t i = 0; i < rows * head_dim; ++i) {
    const float angle = random.uniform() * 6.28f;
    cos.push_back(std::cos(angle));
    sin.push_back(std::sin(angle));
  }
  args.cos = at.floats(cos, dtype);
  args.sin = at.floats(sin, dtype);

  TreeAttentionArgs& attention = args.attention;
  attention.dtype = dtype;
  attention.batch = kBatch;
  attention.nodes = nodes;
  attention.q_heads = q_heads;
  attention.kv_heads = kHeads;
  attention.head_dim = head_dim;
  attention.block_size = kSlots;
  attention.scale = 1.0f / std::sqrt(float(head_dim));
  attention.mask = at.input(mask_of(random_tree(random, nodes)));
  attention.mask_stride[1] = mask_words(nodes);
  const std::vector<int32_t> prefix{static_cast<int32_t>(random.below(kSlots - nodes)), 0};
  attention.prefix_lens = at.input(prefix);
  const int64_t strides[3] = {kSlots * kHeads * head_dim, kHeads * head_dim, head_dim};
  const int64_t row_sizes[2] = {heads * head_dim, q_heads * head_dim};
  for (int i = 0; i < 3; ++i) attention.k_stride[i] = attention.v_stride[i] = strides[i];
  const auto cache = [&](const char* name) {
    return at.output(name, kBatch * strides[0], levels::size_of(dtype), levels::agree_as(dtype),
                     Case::encode(random.normals(kBatch * strides[0]), dtype));
  };
  attention.k_cache = cache("k_cache");
  attention.v_cache = cache("v_cache");
  const int64_t size = levels::size_of(dtype);
  attention.q = args.qkv.out = at.scratch(rows * row_sizes[0] * size);
  attention.out = at.scratch(rows * row_sizes[1] * size);
  args.output.x = attention.out;
  for (int i = 0; i < 2; ++i) {
    int64_t* stride = i == 0 ? attention.q_stride : attention.out_stride;
    stride[0] = nodes * row_sizes[i];
    stride[1] = row_sizes[i];
    stride[2] = head_dim;
  }
  args.gate_up.x = args.down.residual = args.output.out = at.scratch(rows * kWidth * size);
  args.down.x = args.gate_up.out = at.scratch(rows * 2 * kInner * size);
  args.down.out = at.floats_out("out", rows * kWidth, dtype);
  at.run([&] { cpu::decoder_layer(args); });
}

void decoder_layer_cases() {
  Random random(11);
  for (const DType dtype : kTypes) {
    for (const int64_t head_dim : {8, 24, 48, 64}) {
      for (const int64_t nodes : {1, 3, 33})
        decoder_layer_case(random, dtype, nodes, 1 + random.below(3), head_dim);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Isa level : levels::levels_here()) printf("%s ", cpu::isa_name(level));
  printf("\n");
  if (argc > 1 && strcmp(argv[1], "--list-levels") == 0) return 0;
  fflush(stdout);
  for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) signal(fault, levels::report_fault);
  const struct {
    const char* name;
    void (*cases)();
  } operators[] = {{"tree_mask", tree_mask_cases},
                   {"commit_kv", commit_kv_cases},
                   {"gate", gate_cases},
                   {"grow_tree", grow_tree_cases},
                   {"head_states", head_states_cases},
                   {"head_topk", head_topk_cases},
                   {"head_loss", head_loss_cases},
                   {"packed_linear", packed_linear_cases},
                   {"tree_attention", tree_attention_cases},
                   {"decoder_layer", decoder_layer_cases},
                   {"verify_tree", verify_tree_cases}};
  bool known = argc < 2;
  for (const auto& op : operators) {
    if (argc > 1 && strcmp(argv[1], op.name) != 0) continue;
    known = true;
    const int64_t before = Case::count();
    try {
      op.cases();
    } catch (const std::exception& error) {
      fprintf(stderr, "%s: %s\n", op.name, error.what());
      return 1;
    }
    printf("%s: %lld cases agree\n", op.name, static_cast<long long>(Case::count() - before));
    fflush(stdout);
  }
  if (!known) fprintf(stderr, "no operator %s\n", argv[1]);
  return known ? 0 : 1;
}
