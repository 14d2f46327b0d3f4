// The containers of aclnn arguments. Each begins with a word that says what it is, so that a call's arguments can be checked.
#pragma once
#include <cstdint>
#include <vector>

namespace emulated {

constexpr uint64_t kMark = 0xACE15EED00ull;  // the low byte is the letter of the kind, as signatures write it

struct Tensor {
  uint64_t kind = kMark + 't';
  std::vector<int64_t> dims, strides, storage;
  int64_t offset = 0;
  int dtype = 0, format = 0;
  char* data = nullptr;
};
struct Scalar {
  uint64_t kind = kMark + 's';
  int dtype = 0;
  unsigned char bytes[16] = {};
};
struct IntArray {
  uint64_t kind = kMark + 'I';
  std::vector<int64_t> values;
};
struct FloatArray {
  uint64_t kind = kMark + 'E';
  std::vector<float> values;
};
struct BoolArray {
  uint64_t kind = kMark + 'B';
  std::vector<char> values;
};
struct TensorList {
  uint64_t kind = kMark + 'L';
  std::vector<Tensor> values;
};
struct ScalarList {
  uint64_t kind = kMark + 'S';
  std::vector<Scalar> values;
};

// The letter of the container at an address; 0: there is none.
inline char kind_at(const void* address) {
  auto number = reinterpret_cast<uint64_t>(address);
  if (number < 65536 || number % 8) return 0;
  uint64_t word = *static_cast<const uint64_t*>(address);
  return (word & ~0xFFull) == kMark ? static_cast<char>(word & 0xFF) : 0;
}

}  // namespace emulated
