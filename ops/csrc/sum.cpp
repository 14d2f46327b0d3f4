#include "sum.h"

#include <cstring>

// gcc compiles each function for several kinds of CPU and picks a version when the library is loaded; other compilers
// vectorise the loops for the target machine only. Sanitizers do not support such functions.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace ascend_parallel {
namespace {

// Conversions of 16-bit types are written with integers and without branches, so that every compiler can vectorise
// them; a loop of c10::Half or _Float16 is not vectorised by all. Tests compare each value with torch's conversion.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

ALWAYS_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
ALWAYS_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
// `yes` if `condition`, else `no`.
ALWAYS_INLINE uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

ALWAYS_INLINE float widened(float value) { return value; }
ALWAYS_INLINE float widened(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }
ALWAYS_INLINE float widened(Half value) {
  constexpr uint32_t kBias = (127 - 15) << 23;
  const uint32_t magnitude = value.bits & 0x7FFF, sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t normal = (magnitude << 13) + kBias;
  const uint32_t special = normal + kBias;  // infinity and NaN
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return float_of(sign | choose(magnitude < 0x0400, subnormal, choose(magnitude < 0x7C00, normal, special)));
}

ALWAYS_INLINE void round_to(float& out, float value) { out = value; }
ALWAYS_INLINE void round_to(BFloat16& out, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  out.bits = static_cast<uint16_t>(choose((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest_even));
}
ALWAYS_INLINE void round_to(Half& out, float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF, sign = (bits >> 16) & 0x8000;
  const uint32_t rounded = (magnitude + 0x0FFF + ((magnitude >> 13) & 1) - ((127u - 15) << 23)) >> 13;
  const uint32_t normal = choose(rounded < 0x7C00, rounded, 0x7C00);
  // The last binary place of 0.5f is the place of half's subnormals, so adding 0.5f rounds to them.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
  const uint32_t finite = choose(magnitude < 0x38800000, subnormal, normal);
  out.bits = static_cast<uint16_t>(sign | choose(magnitude > 0x7F800000, 0x7E00, finite));
}

template <typename T, int ranks>
ALWAYS_INLINE void sum_of(T* __restrict out, const T* const* parts, int64_t begin, int64_t end) {
  const T* part[ranks];
  for (int rank = 0; rank < ranks; ++rank) part[rank] = parts[rank];
  for (int64_t i = begin; i < end; ++i) {
    float total = widened(part[0][i]);
    for (int rank = 1; rank < ranks; ++rank) total += widened(part[rank][i]);
    round_to(out[i], total);
  }
}

// A separate loop for every number of ranks, so that the sum stays in a register.
template <typename T, int at_least = 2>
ALWAYS_INLINE void sum(T* out, const T* const* parts, int ranks, int64_t begin, int64_t end) {
  if (ranks == at_least) return sum_of<T, at_least>(out, parts, begin, end);
  if constexpr (at_least < kMaxRanks) sum<T, at_least + 1>(out, parts, ranks, begin, end);
}

FOR_EACH_CPU void sum_float(float* out, const float* const* parts, int ranks, int64_t begin, int64_t end) {
  sum(out, parts, ranks, begin, end);
}
FOR_EACH_CPU void sum_bfloat16(BFloat16* out, const BFloat16* const* parts, int ranks, int64_t begin, int64_t end) {
  sum(out, parts, ranks, begin, end);
}
FOR_EACH_CPU void sum_half(Half* out, const Half* const* parts, int ranks, int64_t begin, int64_t end) {
  sum(out, parts, ranks, begin, end);
}

template <typename T>
void typed(void (*sum)(T*, const T* const*, int, int64_t, int64_t), void* out, const char* const* parts, int ranks,
           int64_t begin, int64_t end) {
  const T* of_type[kMaxRanks];
  for (int rank = 0; rank < ranks; ++rank) of_type[rank] = reinterpret_cast<const T*>(parts[rank]);
  sum(static_cast<T*>(out), of_type, ranks, begin, end);
}

}  // namespace

void sum_in_rank_order(Dtype dtype, void* out, const char* const* parts, int ranks, int64_t begin, int64_t end) {
  switch (dtype) {
    case Dtype::kFloat32: return typed<float>(sum_float, out, parts, ranks, begin, end);
    case Dtype::kBFloat16: return typed<BFloat16>(sum_bfloat16, out, parts, ranks, begin, end);
    case Dtype::kFloat16: return typed<Half>(sum_half, out, parts, ranks, begin, end);
  }
}

}  // namespace ascend_parallel
