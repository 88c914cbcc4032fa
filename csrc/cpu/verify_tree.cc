// verify_tree on the CPU: reading rows by the request's rule, and the walk of each request.
#include "cerberus/verify_tree.h"

#include "verify_tree_rows.h"

namespace cerberus::CERBERUS_ISA {
namespace {

// One request's parameters.
struct Rule {
  float temperature, min_p, top_p;
  double epsilon, delta;
  int64_t top_k;
  uint64_t seed, position;

  bool selects() const { return top_k > 0 || top_p < 1.0f; }
};

Cut cut_of(const RowSummary& row, const Rule& rule) { return {row.cut_score, row.cut_token, rule.min_p}; }

// Reads one request's rows.
template <typename T>
struct RowReader {
  const T* rows;
  int64_t row_stride;
  int64_t vocab_size;
  VerifySlot slot;
  int32_t* peaks_node;  // the node whose row slot.peaks is of, or -1

  int64_t chunks() const { return (vocab_size + kVerifyChunk - 1) / kVerifyChunk; }
  const T* row(int32_t node) const { return rows + node * row_stride; }

  // Runs `work(first, end, result)` over the chunks of a row.
  template <typename Work>
  inline __attribute__((always_inline)) void each_chunk(int64_t grain, Work&& work) const {
    cpu::parallel_for(chunks(), grain, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) {
        const int64_t end = (c + 1) * kVerifyChunk;
        work(c * kVerifyChunk, end < vocab_size ? end : vocab_size, slot.chunks + c);
      }
    });
  }

  BestEntry best_entry(int32_t node) const {
    const T* entries = row(node);
    each_chunk(kComparingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
      scan_chunk(entries, first, end, slot.peaks, result);
    });
    *peaks_node = node;
    BestEntry best{-INFINITY, 0, 0};
    for (int64_t c = 0; c < chunks(); ++c) {
      if (slot.chunks[c].flaw) best.status = kNanRow;
      if (slot.chunks[c].greatest > best.value) {
        best.value = slot.chunks[c].greatest;
        best.token = static_cast<int32_t>(c * kVerifyChunk);
      }
    }
    if (best.value > -INFINITY) {
      while (to_float(entries[best.token]) != best.value) ++best.token;
    }
    bool finite = best.value > -INFINITY && best.value < INFINITY;
    for (int64_t i = 0; best.value == INFINITY && !finite && i < vocab_size; ++i) {
      finite = (bits_from_float(to_float(entries[i])) & 0x7f800000u) != 0x7f800000u;
    }
    if (!finite) best.status |= kNoFiniteEntry;
    return best;
  }

  // Sums over the kept tokens: weights in `total`, their entropy in nats as the result.
  double entropy(int32_t node, float greatest, float temperature, const Cut& cut, double* total) const {
    const T* entries = row(node);
    if (cut.filters()) {
      each_chunk(kComputingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
        sum_weights<true, false>(entries, first, end, greatest, temperature, cut, result);
      });
    } else if (temperature == 1.0f && greatest < INFINITY) {
      each_chunk(kComputingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
        sum_weights<false, true>(entries, first, end, greatest, temperature, cut, result);
      });
    } else {
      each_chunk(kComputingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
        sum_weights<false, false>(entries, first, end, greatest, temperature, cut, result);
      });
    }
    double weighted = 0.0;
    *total = 0.0;
    for (int64_t c = 0; c < chunks(); ++c) {
      *total += slot.chunks[c].total;
      weighted += slot.chunks[c].weighted;
    }
    return log(*total) - weighted / *total;
  }

  // Lists the tokens with a score of at least `floor`, in id order: ids, scores, weights. Their number.
  int64_t list_tokens(int32_t node, float greatest, float temperature, float floor) const {
    const T* entries = row(node);
    int64_t count = 0;
    for (int64_t tile = 0; tile < vocab_size; tile += kTokensPerTile) {
      if (!(score_of_one(slot.peaks[tile / kTokensPerTile], greatest, temperature) >= floor)) continue;
      const int64_t end = tile + kTokensPerTile < vocab_size ? tile + kTokensPerTile : vocab_size;
      for (int64_t first = tile; first < end; first += kLanes) {
        const Floats score = score_of(load_entries(entries, first, end), greatest, temperature);
        if (!any(score >= splat(floor))) continue;
        for (int64_t token = first; token < first + kLanes && token < end; ++token) {
          if (!(score[token - first] >= floor)) continue;
          slot.scores[count] = score[token - first];
          slot.tokens[count++] = static_cast<int32_t>(token);
        }
      }
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      Floats score[1] = {load_first(slot.scores + i, count - i)}, weight[1];
      weigh(score, weight);
      store_first(slot.weights + i, weight[0], count - i);
    }
    return count;
  }

  // A floor that at least `top_k` tokens reach, to go by the tiles' peaks; the lowest if these do not tell.
  float floor_of(int64_t top_k, float greatest, float temperature) const {
    constexpr int kBins = 88;
    int64_t tiles[kBins] = {};
    for (int64_t tile = 0; tile * kTokensPerTile < vocab_size; ++tile) {
      const float score = score_of_one(slot.peaks[tile], greatest, temperature);
      if (score >= kLeastScore) ++tiles[static_cast<int>(-score)];
    }
    for (int bin = 0; bin < kBins; ++bin) {
      top_k -= tiles[bin];
      if (top_k <= 0 && bin + 1 < kBins) return static_cast<float>(-bin - 1);
    }
    return kLeastScore;
  }

  double sum_of_listed(int64_t count) const {
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(slot.weights[i]);
    return sum;
  }

  // The cut of top_k, then of top_p among what it leaves.
  void find_cut(int32_t node, float greatest, const Rule& rule, Cut* cut) const {
    int64_t count = 0;
    double target = 0.0;
    if (rule.top_k > 0 && rule.top_k < vocab_size) {
      const float floor = floor_of(rule.top_k, greatest, rule.temperature);
      count = list_tokens(node, greatest, rule.temperature, floor);
      if (count >= rule.top_k) {
        select_tokens(slot, count, static_cast<double>(rule.top_k), [](int32_t) { return 1.0; }, cut);
      }
      int64_t kept = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float score = slot.scores[i];
        if (score < cut->score || (score == cut->score && slot.tokens[i] > cut->token)) continue;
        slot.scores[kept] = score;
        slot.weights[kept] = slot.weights[i];
        slot.tokens[kept++] = slot.tokens[i];
      }
      count = kept;
      target = static_cast<double>(rule.top_p) * sum_of_listed(count);
    } else if (rule.top_p < 1.0f) {
      double total;
      entropy(node, greatest, rule.temperature, {-INFINITY, kNoCut, 0.0f}, &total);
      target = static_cast<double>(rule.top_p) * total;
      // Mostly a few tokens hold the mass. All below the last floor hold less than half of what may be left
      // out.
      const double spare = 0.5 * (1.0 - static_cast<double>(rule.top_p)) * total;
      const float last = static_cast<float>(log(spare / static_cast<double>(vocab_size))) - 1e-3f;
      const float floors[] = {-4.0f, -8.0f, last > kLeastScore ? last : kLeastScore};
      for (const float floor : floors) {
        count = list_tokens(node, greatest, rule.temperature, floor);
        if (sum_of_listed(count) >= target) break;
      }
    }
    if (rule.top_p < 1.0f) {
      const auto weight = [&](int32_t listed) { return static_cast<double>(slot.weights[listed]); };
      select_tokens(slot, count, target, weight, cut);
    }
  }

  // A row after temperature and filters; without `sums` its total and entropy are left out.
  RowSummary summarize(int32_t node, const Rule& rule, bool sums) const {
    const BestEntry best = best_entry(node);
    RowSummary result{0.0, 0.0, best.value, best.token, -INFINITY, kNoCut, best.status, true};
    if (best.status != 0) return result;
    Cut cut{-INFINITY, kNoCut, rule.min_p};
    if (rule.selects()) find_cut(node, best.value, rule, &cut);
    result.cut_score = cut.score;
    result.cut_token = cut.token;
    if (sums) result.nats = entropy(node, best.value, rule.temperature, cut, &result.total);
    return result;
  }

  // A token's weight, 0 if filters drop it, and its score.
  float weight_at(int32_t node, int32_t token, const RowSummary& known, const Rule& rule,
                  float* score) const {
    Floats weight;
    *score = score_of(splat(to_float(row(node)[token])), known.greatest, rule.temperature, &weight)[0];
    const bool kept = *score > known.cut_score || (*score == known.cut_score && token <= known.cut_token);
    return kept && weight[0] >= rule.min_p ? weight[0] : 0.0f;
  }

  // Gumbel-argmax over the kept tokens with a weight above `limit`, the greatest entry if there are none.
  int32_t draw_token(int32_t node, const RowSummary& known, const Rule& rule, double limit,
                     uint64_t position) const {
    if (known.status != 0 || !(1.0 > limit)) return known.best;
    if (*peaks_node != node) best_entry(node);
    const T* entries = row(node);
    // The greatest entry is where to start from, unless a division that rounded all scores to 0 left the cut
    // to ids.
    float score;
    const bool kept = weight_at(node, known.best, known, rule, &score) > 0.0f;
    const float floor =
        kept ? gumbel(token_word(rule.seed, position, static_cast<uint32_t>(known.best))) : -INFINITY;
    const auto rough = [&](float entry) __attribute__((always_inline)) {
      const float score = score_of_one(entry, known.greatest, rule.temperature);
      return score >= known.cut_score ? score : -INFINITY;
    };
    draw_from(
        {floor, known.best}, rule.seed, position,
        [&](int32_t token) __attribute__((always_inline)) { return to_float(entries[token]); }, rough,
        [&](int32_t token, float* score) __attribute__((always_inline)) {
          const float weight = weight_at(node, token, known, rule, score);
          return weight > 0.0f && static_cast<double>(weight) > limit;
        });
    return winner(floor, known.best);
  }

  struct Perturbed {
    float value;
    int32_t token;
  };

  // Leaves in every chunk the greatest perturbed score up to there, `floor` at least.
  template <typename Value, typename Bound, typename Exact>
  inline __attribute__((always_inline)) void draw_from(Perturbed floor, uint64_t seed, uint64_t position,
                                                       Value&& value, Bound&& bound, Exact&& exact) const {
    cpu::parallel_for(chunks(), kComputingGrain, [&](int64_t first, int64_t last) {
      Hopefuls found;
      ChunkResult best{};
      best.perturbed = floor.value;
      best.token = floor.token;
      for (int64_t c = first; c < last; ++c) {
        const int64_t end = (c + 1) * kVerifyChunk < vocab_size ? (c + 1) * kVerifyChunk : vocab_size;
        find_hopefuls(c * kVerifyChunk, end, seed, position, best.perturbed, slot.peaks, &found, bound);
        perturb(
            found, seed, position, &best,
            [&](int32_t token) __attribute__((always_inline)) { return bound(value(token)); }, exact);
        slot.chunks[c] = best;
      }
    });
  }

  // The greatest of the chunks' perturbed scores.
  int32_t winner(float best, int32_t token) const {
    for (int64_t c = 0; c < chunks(); ++c) {
      const ChunkResult& chunk = slot.chunks[c];
      if (chunk.perturbed > best || (chunk.perturbed == best && chunk.token < token)) {
        best = chunk.perturbed;
        token = chunk.token;
      }
    }
    return token;
  }
};

// Residual rejection at one row: what the children that were tried leave of p.
template <typename T>
struct Residual {
  const RowReader<T>& reader;
  const Rule& rule;
  const VerifyTreeArgs& args;
  const char* draft_rows;  // the request's first
  RowSummary known;
  int32_t node;
  const float* mass;  // what is left, times `total`; null while that is the row itself
  double total;
  int32_t best;       // token of the greatest mass
  int64_t num_tried;  // tokens taken out of later draft rows, in slot.candidates
  float scale;        // of the draft row in hand, so that neither its sum nor one over it leaves fp32

  uint8_t read(int32_t at) {
    node = at;
    known = reader.summarize(at, rule, true);
    mass = nullptr;
    total = known.total;
    num_tried = 0;
    return known.status;
  }

  const char* draft_row(int32_t child) const {
    const int64_t size = args.draft_dtype == DType::f32 ? 4 : 2;
    return draft_rows + child * args.draft_row_stride * size;
  }

  // A chunk of a draft row times `scale`; true if an entry is no probability.
  bool load(const char* draft, int64_t first, int64_t end, float* to) const {
    const bool flaw = load_as_it_is(draft, first, end, to);
    if (scale != 1.0f) {
      for (int64_t i = 0; i < end - first; ++i) to[i] *= scale;
    }
    return flaw;
  }

  bool load_as_it_is(const char* draft, int64_t first, int64_t end, float* to) const {
    const int32_t* tried = reader.slot.candidates;
    switch (args.draft_dtype) {
      case DType::f32:
        return load_draft(reinterpret_cast<const float*>(draft), first, end, tried, num_tried, to);
      case DType::f16:
        return load_draft(reinterpret_cast<const Half*>(draft), first, end, tried, num_tried, to);
      default:
        return load_draft(reinterpret_cast<const BFloat16*>(draft), first, end, tried, num_tried, to);
    }
  }

  // Sum of a draft row times the scale that it needs, 0 if it is no distribution.
  double draft_total(const char* draft) {
    scale = 1.0f;
    const double sum = scaled_total(draft);
    if (sum == 0.0 || (sum > 0x1p-64 && sum < 0x1p96)) return sum;
    scale = sum < 1.0 ? 0x1p64f : 0x1p-64f;
    return scaled_total(draft);
  }

  double scaled_total(const char* draft) const {
    reader.each_chunk(kComputingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
      float mass_of[kVerifyChunk];
      result->flaw = load(draft, first, end, mass_of);
      Group sums{};
      for (int64_t i = 0; i < end - first; i += kGroup) {
        for (int p = 0; p < kParts; ++p) {
          const int64_t at = i + p * kLanes;
          sums.part[p] += load_first(mass_of + at, end - first - at);
        }
      }
      result->total = sum_in_order(sums);
    });
    double sum = 0.0;
    bool flaw = false;
    for (int64_t c = 0; c < reader.chunks(); ++c) {
      sum += reader.slot.chunks[c].total;
      flaw |= reader.slot.chunks[c].flaw != 0;
    }
    return flaw ? 0.0 : sum;
  }

  Trial attempt(int32_t child, int32_t token, uint32_t ordinal, int32_t depth) {
    const char* draft = draft_row(child);
    const double sum = draft_total(draft);
    float lanes[kLanes], score;
    load_as_it_is(draft, token, token + 1, lanes);
    const double q = static_cast<double>(lanes[0]) * scale;
    if (!(sum > 0.0) || q == 0.0) return Trial::no_mass;
    const double p = mass ? mass[token] : reader.weight_at(node, token, known, rule, &score);
    const double toss = coin(rule.seed, rule.position + static_cast<uint64_t>(depth), ordinal);
    if (toss * (q / sum) < p / total) return Trial::accepted;
    subtract(draft, sum);
    if (args.drafting == Drafting::without_replacement) reader.slot.candidates[num_tried++] = token;
    return Trial::rejected;
  }

  // mass = max(p - q, 0); left as it is where that is 0 everywhere, as it can be by rounding alone.
  void subtract(const char* draft, double draft_sum) {
    const T* entries = reader.row(node);
    float* next = mass == reader.slot.scores ? reader.slot.weights : reader.slot.scores;
    const Cut cut = cut_of(known, rule);
    const float per_mass = static_cast<float>(1.0 / total), per_draft = static_cast<float>(1.0 / draft_sum);
    reader.each_chunk(kComputingGrain, [&](int64_t first, int64_t end, ChunkResult* result) {
      float drafted[kVerifyChunk];
      load(draft, first, end, drafted);
      Group sums{};
      result->greatest = 0.0f;
      for (int64_t tile = first; tile < end; tile += kTokensPerTile) {
        const int64_t tile_end = tile + kTokensPerTile < end ? tile + kTokensPerTile : end;
        Floats peak{};
        for (int64_t i = tile; i < tile_end; i += kGroup) {
          for (int p = 0; p < kParts; ++p) {
            const int64_t at = i + p * kLanes;
            if (at >= end) break;
            Floats target;
            if (mass) {
              target = load_first(mass + at, end - at);
            } else {
              Floats weight;
              const Floats entry = load_entries(entries, at, end);
              const Floats score = score_of(entry, known.greatest, rule.temperature, &weight);
              target = keep(cut, score, weight, at);
            }
            Floats left = target * per_mass - load_first(drafted + (at - first), end - at) * per_draft;
            left = select(left >= splat(kLeastResidual), left, Floats{});
            sums.part[p] += left;
            store_first(next + at, left, end - at);
            peak = maximum(left, peak);
          }
        }
        const float greatest = horizontal_maximum(peak);
        reader.slot.peaks[tile / kTokensPerTile] = greatest;
        result->greatest = greatest > result->greatest ? greatest : result->greatest;
      }
      result->total = sum_in_order(sums);
    });
    *reader.peaks_node = -1;
    double sum = 0.0;
    float greatest = 0.0f;
    int64_t token = 0;
    for (int64_t c = 0; c < reader.chunks(); ++c) {
      sum += reader.slot.chunks[c].total;
      if (reader.slot.chunks[c].greatest > greatest) {
        greatest = reader.slot.chunks[c].greatest;
        token = c * kVerifyChunk;
      }
    }
    if (!(sum > 0.0)) return;
    while (next[token] != greatest) ++token;
    mass = next;
    total = sum;
    best = static_cast<int32_t>(token);
  }

  // A token in proportion to what is left.
  int32_t draw_token(uint64_t position) const {
    if (!mass) return reader.draw_token(node, known, rule, -1.0, position);
    const auto exact = [&](int32_t token, float* score) __attribute__((always_inline)) {
      if (mass[token] > 0.0f) *score = natural_log(mass[token]);
      return mass[token] > 0.0f;
    };
    const uint32_t word = token_word(rule.seed, position, static_cast<uint32_t>(best));
    const float floor = natural_log(mass[best]) + gumbel(word);
    const float* left = mass;
    reader.draw_from(
        {floor, best}, rule.seed, position,
        [&](int32_t token) __attribute__((always_inline)) { return left[token]; },
        [&](float value)
            __attribute__((always_inline)) { return value > 0.0f ? greatest_log(value) : -INFINITY; },
        exact);
    return reader.winner(floor, best);
  }
};

// How a request's walk ended.
struct Ending {
  WalkEnd end;
  int32_t bonus;
  RowSummary last;
  bool knows_entropy;  // last.nats is that of the whole row at temperature 1
};

template <typename T>
Ending verify_matching(const RowReader<T>& reader, const DraftTree& tree, const Rule& rule, bool draws,
                       int32_t* path) {
  Ending ending{};
  BestEntry last;
  ending.end = walk_matching(tree, path, &last, [&](int32_t node, int32_t depth) {
    if (!draws) return reader.best_entry(node);
    const RowSummary known = reader.summarize(node, rule, false);
    const int32_t token =
        reader.draw_token(node, known, rule, -1.0, rule.position + static_cast<uint64_t>(depth));
    return BestEntry{known.greatest, token, known.status};
  });
  ending.bonus = last.token;
  ending.last.greatest = last.value;
  ending.last.status = last.status;
  return ending;
}

template <typename T>
Ending verify_typical(const RowReader<T>& reader, const DraftTree& tree, const Rule& rule, int32_t* path) {
  RowSummary* rows = reader.slot.rows;
  for (int32_t node = 0; node < tree.num_nodes; ++node) rows[node].read = false;
  const auto read = [&](int32_t node) -> const RowSummary& {
    if (!rows[node].read) rows[node] = reader.summarize(node, rule, true);
    return rows[node];
  };
  const auto limit = [&](const RowSummary& known) {
    const double scaled = rule.delta * exp(-known.nats);
    return (rule.epsilon < scaled ? rule.epsilon : scaled) * known.total;
  };
  Ending ending{};
  ending.end = walk_typical(tree, reader.vocab_size, reader.slot.merits, path,
                            [&](int32_t node, int32_t token, double* log_prob) {
                              const RowSummary& known = read(node);
                              if (known.status != 0) return false;
                              float score;
                              const float weight = reader.weight_at(node, token, known, rule, &score);
                              *log_prob = static_cast<double>(score) - log(known.total);
                              return weight > 0.0f && static_cast<double>(weight) > limit(known);
                            });
  ending.last = read(ending.end.node);
  for (int32_t node = 0; node < tree.num_nodes; ++node) {
    if (rows[node].read) ending.end.status |= rows[node].status;
  }
  const uint64_t position = rule.position + static_cast<uint64_t>(ending.end.depth);
  ending.bonus = reader.draw_token(ending.end.node, ending.last, rule, limit(ending.last), position);
  ending.knows_entropy = true;
  return ending;
}

template <typename T>
Ending verify_rejection(const VerifyTreeArgs& args, int64_t b, const RowReader<T>& reader,
                        const DraftTree& tree, const Rule& rule, int32_t* path) {
  const int64_t first = first_row_offset(args, b, args.draft_batch_stride, args.draft_row_stride);
  const char* draft_rows =
      static_cast<const char*>(args.draft_probs) + first * (args.draft_dtype == DType::f32 ? 4 : 2);
  Residual<T> residual{reader, rule, args, draft_rows, {}, 0, nullptr, 0.0, 0, 0, 1.0f};
  Ending ending{};
  ending.end = walk_rejection(
      tree, args.vocab_size, path, [&](int32_t node) { return residual.read(node); },
      [&](int32_t child, int32_t token, uint32_t ordinal, int32_t depth) {
        return residual.attempt(child, token, ordinal, depth);
      });
  ending.last = residual.known;
  ending.bonus = residual.known.status != 0
                     ? residual.known.best
                     : residual.draw_token(rule.position + static_cast<uint64_t>(ending.end.depth));
  ending.knows_entropy = true;
  return ending;
}

template <typename T>
void verify_request(const VerifyTreeArgs& args, int64_t b, const VerifySlot& slot) {
  const DraftTree tree = draft_tree(args, b);
  const int64_t first = first_row_offset(args, b, args.logits_batch_stride, args.logits_row_stride);
  int32_t peaks_node = -1;
  const RowReader<T> reader{static_cast<const T*>(args.logits) + first, args.logits_row_stride,
                            args.vocab_size, slot, &peaks_node};
  int32_t* path = args.path + b * (args.max_depth + 1);
  const Rule rule{args.temperature[b],
                  args.min_p[b],
                  args.top_p[b],
                  args.epsilon[b],
                  args.delta[b],
                  args.top_k[b],
                  static_cast<uint64_t>(args.seed[b]),
                  static_cast<uint64_t>(args.position[b])};
  const VerifyMode mode =
      rule.temperature == 0.0f ? VerifyMode::greedy : static_cast<VerifyMode>(args.mode[b]);
  const Ending ending = mode == VerifyMode::typical ? verify_typical(reader, tree, rule, path)
                        : mode == VerifyMode::rejection
                            ? verify_rejection(args, b, reader, tree, rule, path)
                            : verify_matching(reader, tree, rule, mode == VerifyMode::sample, path);
  double nats = NAN;
  if (ending.last.status == 0) {
    const bool plain = rule.temperature == 1.0f && !rule.selects() && rule.min_p == 0.0f;
    double total;
    nats = ending.knows_entropy && plain ? ending.last.nats
                                         : reader.entropy(ending.end.node, ending.last.greatest, 1.0f,
                                                          {-INFINITY, kNoCut, 0.0f}, &total);
  }
  write_verdict(args, b, tree, ending.end, ending.bonus, static_cast<float>(nats));
}

template <typename T>
void verify_batch(const VerifyTreeArgs& args) {
  VerifySlot unplaced;
  const int64_t slot_bytes = lay_out_slot(args, nullptr, &unplaced);
  int64_t taken = 0;
  const auto verify_range = [&](int64_t first, int64_t last) {
    VerifySlot slot;
    lay_out_slot(args, args.workspace + __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED) * slot_bytes, &slot);
    for (int64_t b = first; b < last; ++b) verify_request<T>(args, b, slot);
  };
  if (args.slots > 1) {
    cpu::parallel_for(args.batch, 1, verify_range);
  } else {
    verify_range(0, args.batch);  // threads share each row instead
  }
}

}  // namespace

void verify_tree(const VerifyTreeArgs& args) {
  switch (args.dtype) {
    case DType::f32:
      return verify_batch<float>(args);
    case DType::f16:
      return verify_batch<Half>(args);
    case DType::bf16:
      return verify_batch<BFloat16>(args);
  }
}

}  // namespace cerberus::CERBERUS_ISA
