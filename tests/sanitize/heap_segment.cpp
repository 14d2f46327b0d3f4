// A Segment of ordinary memory, for ranks that are threads of one process: ThreadSanitizer tells memory by its
// address, so the ranks have to see the stages at the same one. Takes the place of ops/csrc/segment.cpp.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "segment.h"

namespace ascend_parallel {
namespace {

constexpr size_t kPage = 4096;
std::mutex guard;
std::map<std::string, void*> segments;  // kept until the process ends

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

Segment::Segment(const std::string& name, int, int ranks, size_t half_bytes)
    : half_bytes_(whole_pages(half_bytes)),
      bytes_(whole_pages(sizeof(Header)) + static_cast<size_t>(ranks) * 2 * half_bytes_) {
  const std::lock_guard<std::mutex> hold(guard);
  void*& memory = segments[name];
  if (memory == nullptr) memory = std::memset(std::aligned_alloc(kPage, bytes_), 0, bytes_);
  memory_ = memory;
}

Segment::~Segment() = default;

char* Segment::stage(int rank, uint64_t half) const {
  return static_cast<char*>(memory_) + whole_pages(sizeof(Header)) +
         (static_cast<size_t>(rank) * 2 + half) * half_bytes_;
}

bool Segment::alive(int) const { return true; }
void Segment::unlink(const std::string&) {}

}  // namespace ascend_parallel
