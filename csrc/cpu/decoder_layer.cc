// decoder_layer on the CPU: the operators that it is made of, and between them the rotary embedding, whose
// intermediate products round where those of transformers' Llama do.
#include "cerberus/decoder_layer.h"

#include "parallel.h"
#include "simd.h"

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int64_t kThreadElements = 1 << 14;  // rotated elements that pay for a thread

// x [head_dim] in place: (low, high) becomes (low cos - high sin, high cos + low sin).
template <typename T>
CERBERUS_SIMD void rotate(const T* cos, const T* sin, int64_t half, T* x) {
  for (int64_t d = 0; d < half; d += kLanes) {
    const int64_t count = half - d;
    const Floats low = load_first(x + d, count), high = load_first(x + half + d, count);
    const Floats low_part = rounded<T>(low * load_first(cos + d, count));
    const Floats high_part = rounded<T>(high * load_first(cos + half + d, count));
    const Floats from_high = rounded<T>(-high * load_first(sin + d, count));
    const Floats from_low = rounded<T>(low * load_first(sin + half + d, count));
    store_first(x + d, low_part + from_high, count);
    store_first(x + half + d, high_part + from_low, count);
  }
}

template <typename T>
void rotate_and_append(const DecoderLayerArgs& args) {
  const TreeAttentionArgs& attention = args.attention;
  const int64_t head_dim = attention.head_dim, rotated = attention.q_heads + attention.kv_heads;
  const int64_t heads = rotated + attention.kv_heads, row_size = heads * head_dim;
  T* k_cache = static_cast<T*>(const_cast<void*>(attention.k_cache));
  T* v_cache = static_cast<T*>(const_cast<void*>(attention.v_cache));
  cpu::parallel_for(args.qkv.rows, 1 + kThreadElements / row_size, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      T* x = static_cast<T*>(args.qkv.out) + row * row_size;
      for (int64_t head = 0; head < rotated; ++head) {
        rotate(static_cast<const T*>(args.cos) + row * head_dim,
               static_cast<const T*>(args.sin) + row * head_dim, head_dim / 2, x + head * head_dim);
      }
      const int64_t b = row / attention.nodes;
      const int64_t slot = attention.prefix_lens[b] + row % attention.nodes;
      T* k = k_cache + slot_offset(attention, attention.k_stride, b, slot);
      T* v = v_cache + slot_offset(attention, attention.v_stride, b, slot);
      const size_t bytes = static_cast<size_t>(head_dim) * sizeof(T);
      for (int64_t head = 0; head < attention.kv_heads; ++head) {
        memcpy(static_cast<void*>(k + head * attention.k_stride[2]),
               x + (attention.q_heads + head) * head_dim, bytes);
        memcpy(static_cast<void*>(v + head * attention.v_stride[2]), x + (rotated + head) * head_dim, bytes);
      }
    }
  });
}

}  // namespace

void decoder_layer(const DecoderLayerArgs& args) {
  cpu::packed_linear(args.qkv);
  switch (args.qkv.dtype) {
    case DType::f32:
      rotate_and_append<float>(args);
      break;
    case DType::f16:
      rotate_and_append<Half>(args);
      break;
    case DType::bf16:
      rotate_and_append<BFloat16>(args);
      break;
  }
  cpu::tree_attention(args.attention);
  cpu::packed_linear(args.output);
  cpu::packed_linear(args.gate_up);
  cpu::packed_linear(args.down);
}

}  // namespace cerberus::CERBERUS_ISA
