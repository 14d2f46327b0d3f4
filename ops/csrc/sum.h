// Sums over ranks: in rank order, in fp32, rounded once to the operands' type.
#pragma once

#include <cstdint>

namespace ascend_parallel {

constexpr int kMaxRanks = 16;

enum class Dtype : uint8_t { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// out[i] = parts[0][i] + parts[1][i] + ... for i in [begin, end); 2 to kMaxRanks parts.
void sum_in_rank_order(Dtype dtype, void* out, const char* const* parts, int ranks, int64_t begin, int64_t end);

}  // namespace ascend_parallel
