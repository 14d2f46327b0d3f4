#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <stdexcept>

namespace ascend_parallel {
namespace {

size_t whole_pages(size_t bytes) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error("shared memory: " + what + ": " + std::strerror(error));
}

// Locks of the process, not of the open file: a forked child has none of them. The child can neither keep its
// parent's lock beyond the parent's end nor release it by closing the inherited file.
struct flock lock_on(int rank, short kind) {
  struct flock lock {};
  lock.l_type = kind;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

uint64_t this_process() {
  static const uint64_t number = (static_cast<uint64_t>(std::random_device()()) << 32) | std::random_device()();
  return number;
}

}  // namespace

Segment::Segment(const std::string& name, int rank, int ranks, size_t half_bytes)
    : half_bytes_(whole_pages(half_bytes)),
      bytes_(whole_pages(sizeof(Header)) + static_cast<size_t>(ranks) * 2 * half_bytes_) {
  const int flags = O_RDWR | O_CLOEXEC | (rank == 0 ? O_CREAT | O_EXCL : 0);
  file_ = ::shm_open(name.c_str(), flags, 0600);
  if (file_ < 0) fail(rank == 0 ? "cannot make a segment" : "cannot open the segment that rank 0 made", errno);
  try {
    open(name, rank);
  } catch (...) {
    ::close(file_);
    if (rank == 0) ::shm_unlink(name.c_str());
    throw;
  }
  header().process[rank].value.store(this_process(), std::memory_order_release);
}

void Segment::open(const std::string& name, int rank) {
  // Allocate the space here: touching an unavailable page later would end the process with SIGBUS.
  if (rank == 0) {
    if (const int error = ::posix_fallocate(file_, 0, static_cast<off_t>(bytes_))) {
      fail(std::to_string(bytes_) + " bytes are not to be had in /dev/shm for " + name, error);
    }
  }
  struct stat found {};
  if (::fstat(file_, &found) != 0) fail("cannot look at the segment", errno);
  if (static_cast<size_t>(found.st_size) != bytes_ || found.st_uid != ::geteuid()) {
    throw std::runtime_error("shared memory: the segment has another size or owner than agreed");
  }
  struct flock lock = lock_on(rank, F_WRLCK);
  if (::fcntl(file_, F_SETLK, &lock) != 0) fail("cannot lock this rank's byte", errno);
  memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, 0);
  if (memory_ == MAP_FAILED) {
    memory_ = nullptr;
    fail("cannot map the segment", errno);
  }
}

Segment::~Segment() {
  if (memory_ != nullptr) ::munmap(memory_, bytes_);
  if (file_ >= 0) ::close(file_);
}

char* Segment::stage(int rank, uint64_t half) const {
  return static_cast<char*>(memory_) + whole_pages(sizeof(Header)) +
         (static_cast<size_t>(rank) * 2 + half) * half_bytes_;
}

bool Segment::alive(int rank) const {
  if (header().process[rank].value.load(std::memory_order_acquire) == this_process()) return true;
  struct flock lock = lock_on(rank, F_WRLCK);
  if (::fcntl(file_, F_GETLK, &lock) != 0) return true;  // an unknown state does not prove the rank dead
  return lock.l_type != F_UNLCK;
}

void Segment::unlink(const std::string& name) { ::shm_unlink(name.c_str()); }

}  // namespace ascend_parallel
