// HCCL between processes of one machine: each communicator is a segment of shared memory with a slot for each rank, and a mailbox
// for each ordered pair of ranks. Every wait has a limit, notices a rank that has ended, and names it. Before data moves, the ranks
// compare what they were asked for: two ranks in different collectives are an error, not a wrong number.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

typedef void* aclrtStream;
#include "clock.h"
#include "hccl/hccl_types.h"
#include "races.h"
#include "runtime.h"

namespace emulated {
namespace {

// ---- types of data

size_t bytes_of(int type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: case HCCL_DATA_TYPE_UINT8: return 1;
    case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8;
    default: throw std::runtime_error("HCCL's data type " + std::to_string(type) + " is not emulated");
  }
}
float from_half(uint16_t half) {
  uint32_t sign = (half >> 15) << 31, exponent = (half >> 10) & 31, mantissa = half & 1023, bits;
  if (!exponent) {
    float value = mantissa / 16777216.f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  } else if (exponent == 31) bits = sign | 0x7f800000 | (mantissa << 13);
  else bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
uint16_t to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t sign = (bits >> 16) & 0x8000, mantissa = bits & 0x7fffff;
  int exponent = static_cast<int>((bits >> 23) & 255) - 112;
  if (exponent == 143) return sign | 0x7c00 | (mantissa ? 0x200 : 0);
  if (exponent >= 31) return sign | 0x7c00;
  if (exponent <= 0) {
    if (exponent < -10) return sign;
    mantissa |= 0x800000;
    int shift = 14 - exponent;
    uint32_t result = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return sign | (result + (rest > half || (rest == half && (result & 1))));
  }
  uint32_t result = (exponent << 10) | (mantissa >> 13), rest = mantissa & 0x1fff;
  return sign | (result + (rest > 0x1000 || (rest == 0x1000 && (result & 1))));
}
float from_brain(uint16_t brain) {
  uint32_t bits = static_cast<uint32_t>(brain) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
uint16_t to_brain(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
template <class V>
V reduced(V a, V b, int op) {
  switch (op) {
    case HCCL_REDUCE_SUM: return a + b;
    case HCCL_REDUCE_PROD: return a * b;
    case HCCL_REDUCE_MAX: return (a > b || a != a) ? a : b;
    default: return (a < b || a != a) ? a : b;
  }
}
template <class V>
void reduce_into(char* into, const char* from, uint64_t number, int op) {
  V* a = reinterpret_cast<V*>(into);
  const V* b = reinterpret_cast<const V*>(from);
  for (uint64_t i = 0; i < number; i++) a[i] = reduced<V>(a[i], b[i], op);
}
template <float (*Widen)(uint16_t), uint16_t (*Narrow)(float)>
void reduce_narrow(char* into, const char* from, uint64_t number, int op) {
  auto* a = reinterpret_cast<uint16_t*>(into);
  auto* b = reinterpret_cast<const uint16_t*>(from);
  for (uint64_t i = 0; i < number; i++) a[i] = Narrow(reduced<float>(Widen(a[i]), Widen(b[i]), op));
}
void reduce(char* into, const char* from, uint64_t number, int type, int op) {
  switch (type) {
    case HCCL_DATA_TYPE_FP32: return reduce_into<float>(into, from, number, op);
    case HCCL_DATA_TYPE_FP64: return reduce_into<double>(into, from, number, op);
    case HCCL_DATA_TYPE_INT8: return reduce_into<int8_t>(into, from, number, op);
    case HCCL_DATA_TYPE_UINT8: return reduce_into<uint8_t>(into, from, number, op);
    case HCCL_DATA_TYPE_INT16: return reduce_into<int16_t>(into, from, number, op);
    case HCCL_DATA_TYPE_INT32: return reduce_into<int32_t>(into, from, number, op);
    case HCCL_DATA_TYPE_INT64: return reduce_into<int64_t>(into, from, number, op);
    case HCCL_DATA_TYPE_FP16: return reduce_narrow<from_half, to_half>(into, from, number, op);
    case HCCL_DATA_TYPE_BFP16: return reduce_narrow<from_brain, to_brain>(into, from, number, op);
    default: throw std::runtime_error("HCCL's reduction of data type " + std::to_string(type) + " is not emulated");
  }
}

// ---- a segment of shared memory

constexpr size_t kSlot = 4u << 20, kMailbox = 1u << 20, kHeader = 4096;
constexpr int kMostRanks = 64;

struct RankState {
  std::atomic<uint64_t> arrived;  // how many barriers this rank has reached
  std::atomic<int> process, failed, left;
  char asked[96];                 // the collective in which this rank is
  char failure[256];
  clock::Nanos ready;             // when this rank's stream came to the collective, by its virtual clock
  double bytes;                   // what this rank gives to an exchange
};
struct Mailbox {
  std::atomic<uint64_t> written, read;
  uint64_t message;  // bytes of the whole message
  clock::Nanos ready;
};

bool has_ended(int process) {
  char path[64], state = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE* file = fopen(path, "r");
  if (!file) return true;
  char line[512];
  if (fgets(line, sizeof line, file))
    if (const char* name_end = strrchr(line, ')')) state = name_end[2];
  fclose(file);
  return state == 'Z' || state == 'X' || !state;
}

struct Segment {
  std::string name;
  int ranks, rank;
  char* base = nullptr;
  uint64_t barriers = 0;
  double most_bytes = 0;  // of the ranks of the last exchange

  Segment(std::string named, int number, int own) : name(std::move(named)), ranks(number), rank(own) {
    if (number > kMostRanks) throw std::runtime_error("a communicator of " + std::to_string(number) + " ranks; at most 64 are emulated");
    size_t bytes = states_bytes() + ranks * kSlot + static_cast<size_t>(ranks) * ranks * kMailbox;
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, bytes)) throw std::runtime_error("no shared memory for a communicator: " + std::string(strerror(errno)));
    base = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    ::close(file);
    if (base == MAP_FAILED) throw std::runtime_error("no shared memory for a communicator: " + std::string(strerror(errno)));
    state(rank).process = getpid();
  }
  static size_t states_bytes() { return kHeader * (1 + (kMostRanks * sizeof(RankState)) / kHeader); }
  RankState& state(int which) { return reinterpret_cast<RankState*>(base)[which]; }
  char* slot(int which) { return base + states_bytes() + which * kSlot; }
  char* mailbox(int from, int to) { return base + states_bytes() + ranks * kSlot + (static_cast<size_t>(from) * ranks + to) * kMailbox; }

  // Wait until `met(rank)` holds for every rank that is asked; `what` says what is waited for.
  template <class Met, class Ranks>
  void wait(const std::string& what, const Ranks& asked, Met met) {
    const char* of_hccl = getenv("HCCL_EXEC_TIMEOUT");
    const double limit = setting("TIMEOUT", of_hccl && *of_hccl ? atol(of_hccl) : 300);
    double from = seconds(), looked = from;
    for (int spins = 0;; spins++) {
      int missing = -1;
      for (int which : asked)
        if (!met(which)) missing = which;
      if (missing < 0) return;
      if (spins < 100) {
        sched_yield();
        continue;
      }
      usleep(spins < 1000 ? 20 : 200);
      double now = seconds();
      if (now - looked < 0.05) continue;
      looked = now;
      for (int which : asked) {
        if (met(which)) continue;
        auto& other = state(which);
        if (other.failed) throw std::runtime_error(what + ": rank " + std::to_string(which) + " of its group failed: " + other.failure);
        if (other.process && has_ended(other.process) && !met(which))
          throw std::runtime_error(what + ": rank " + std::to_string(which) + " of its group has ended");
      }
      if (failure_code()) throw std::runtime_error(what + ": given up, since this rank failed");
      if (now - from > limit)
        throw std::runtime_error(what + ": rank " + std::to_string(missing) + " of its group did not come within " +
                                 std::to_string(static_cast<long>(limit)) + " s (EMULATED_ASCEND_TIMEOUT)");
    }
  }
  std::vector<int> all() {
    std::vector<int> every;
    for (int i = 0; i < ranks; i++) every.push_back(i);
    return every;
  }
  void barrier(const std::string& what) {
    uint64_t mine = ++barriers;
    state(rank).arrived.store(mine);
    wait(what, all(), [&](int which) { return state(which).arrived.load() >= mine; });
  }
  // All ranks say in which collective they are, and compare.
  // Under the clock the streams go on together, when the last was ready.
  void agree(const std::string& what, double bytes = 0) {
    state(rank).ready = clock::on() ? clock::lane() ? clock::lane()->now : clock::host() : 0;
    state(rank).bytes = bytes;
    snprintf(state(rank).asked, sizeof state(rank).asked, "%s", what.c_str());
    barrier(what);
    for (int i = 0; i < ranks; i++)
      if (strncmp(state(i).asked, state(rank).asked, sizeof state(i).asked - 1))
        throw std::runtime_error("rank " + std::to_string(rank) + " of a group is in " + state(rank).asked + ", rank " + std::to_string(i) + " in " + state(i).asked);
    clock::Nanos last = 0;
    most_bytes = 0;
    for (int i = 0; i < ranks; i++) {
      last = std::max(last, state(i).ready);
      most_bytes = std::max(most_bytes, state(i).bytes);
    }
    if (clock::on() && clock::lane()) clock::wait_until(last, clock::Span::Ranks);
    barrier(what);
  }
};

// ---- messages between two ranks

struct Transfer {
  bool sends;
  int peer;
  char* data;
  uint64_t bytes, done = 0;
  bool started = false, moves = true;
};

// Move one piece of a message; whether something moved. An empty message is a piece too.
bool advance(Segment& segment, Transfer& transfer) {
  char* place = transfer.sends ? segment.mailbox(segment.rank, transfer.peer) : segment.mailbox(transfer.peer, segment.rank);
  auto* box = reinterpret_cast<Mailbox*>(place);
  char* data = place + 64;
  uint64_t piece = std::min<uint64_t>(kMailbox - 64, transfer.bytes - transfer.done);
  if (!transfer.moves) piece = transfer.bytes;
  if (transfer.sends) {
    if (box->written.load() != box->read.load()) return false;
    box->message = transfer.bytes;
    if (clock::on()) box->ready = clock::lane()->now;
    if (transfer.moves) memcpy(data, transfer.data + transfer.done, piece);
    box->written.fetch_add(1);
  } else {
    if (box->written.load() == box->read.load()) return false;
    if (box->message != transfer.bytes)
      throw std::runtime_error("HcclRecv of " + std::to_string(transfer.bytes) + " bytes from rank " + std::to_string(transfer.peer) +
                               " of its group, which sends " + std::to_string(box->message));
    if (clock::on()) clock::wait_until(box->ready, clock::Span::Ranks);
    if (transfer.moves) memcpy(transfer.data + transfer.done, data, piece);
    box->read.fetch_add(1);
  }
  transfer.done += piece;
  transfer.started = true;
  return true;
}

// Move all messages; those between the same two ranks in the same direction in order.
void move(Segment& segment, std::vector<Transfer> transfers, const std::string& what) {
  auto is_done = [](const Transfer& transfer) { return transfer.started && transfer.done == transfer.bytes; };
  auto step = [&] {
    bool moved = false;
    std::map<std::pair<bool, int>, bool> taken;
    for (auto& transfer : transfers) {
      if (is_done(transfer) || taken[{transfer.sends, transfer.peer}]) continue;
      taken[{transfer.sends, transfer.peer}] = true;
      moved |= advance(segment, transfer);
    }
    return moved;
  };
  while (true) {
    std::vector<int> peers;
    for (auto& transfer : transfers)
      if (!is_done(transfer)) peers.push_back(transfer.peer);
    if (peers.empty()) return;
    bool moved = step();
    if (!moved) segment.wait(what, std::vector<int>{peers[0]}, [&](int) { return moved = moved || step(); });
  }
}

// ---- collectives, in pieces that fit a slot

void all_reduce(Segment& group, const char* from, char* to, uint64_t number, int type, int op, const std::string& what) {
  size_t item = bytes_of(type), most = kSlot / item;
  for (uint64_t at = 0; at < number; at += most) {
    uint64_t piece = std::min<uint64_t>(most, number - at);
    memcpy(group.slot(group.rank), from + at * item, piece * item);
    group.barrier(what);
    char* result = to + at * item;
    memcpy(result, group.slot(0), piece * item);
    for (int i = 1; i < group.ranks; i++) reduce(result, group.slot(i), piece, type, op);
    group.barrier(what);
  }
}
// `numbers` and `places`: items of each rank, and where they go; ranks may have different numbers.
void all_gather(Segment& group, const char* from, char* to, const std::vector<uint64_t>& numbers, const std::vector<uint64_t>& places, size_t item, const std::string& what) {
  uint64_t most = 0;
  for (uint64_t number : numbers) most = std::max(most, number * item);
  for (uint64_t at = 0; at < most; at += kSlot) {
    auto piece = [&](int i) { return numbers[i] * item > at ? std::min<uint64_t>(kSlot, numbers[i] * item - at) : 0; };
    memcpy(group.slot(group.rank), from + at, piece(group.rank));
    group.barrier(what);
    for (int i = 0; i < group.ranks; i++) memcpy(to + places[i] * item + at, group.slot(i), piece(i));
    group.barrier(what);
  }
}
void reduce_scatter(Segment& group, const char* from, char* to, const std::vector<uint64_t>& numbers, const std::vector<uint64_t>& places, int type, int op, const std::string& what) {
  size_t item = bytes_of(type), most = kSlot / item / group.ranks;
  uint64_t longest = *std::max_element(numbers.begin(), numbers.end());
  for (uint64_t at = 0; at < longest; at += most) {
    auto piece = [&](int i) { return numbers[i] > at ? std::min<uint64_t>(most, numbers[i] - at) : 0; };
    for (int j = 0; j < group.ranks; j++) memcpy(group.slot(group.rank) + j * most * item, from + (places[j] + at) * item, piece(j) * item);
    group.barrier(what);
    uint64_t own = piece(group.rank);
    char* result = to + at * item;
    memcpy(result, group.slot(0) + group.rank * most * item, own * item);
    for (int i = 1; i < group.ranks; i++) reduce(result, group.slot(i) + group.rank * most * item, own, type, op);
    group.barrier(what);
  }
}
void broadcast(Segment& group, char* data, uint64_t bytes, int root, const std::string& what) {
  for (uint64_t at = 0; at < bytes; at += kSlot) {
    uint64_t piece = std::min<uint64_t>(kSlot, bytes - at);
    if (group.rank == root) memcpy(group.slot(root), data + at, piece);
    group.barrier(what);
    if (group.rank != root) memcpy(data + at, group.slot(root), piece);
    group.barrier(what);
  }
}

// ---- communicators

struct Communicator {
  std::string name;
  Segment* own;    // collectives of HCCL
  Segment* fused;  // those inside a fused operator, which runs on another stream at the same time
};
std::mutex communicators_lock;
std::map<std::string, Communicator*>& communicators() {
  static auto* all = new std::map<std::string, Communicator*>;
  return *all;
}
void tell_peers(const std::string& text) {
  std::lock_guard<std::mutex> hold(communicators_lock);
  for (auto& each : communicators())
    for (Segment* segment : {each.second->own, each.second->fused}) {
      auto& state = segment->state(segment->rank);
      snprintf(state.failure, sizeof state.failure, "%s", text.c_str());
      state.failed = 1;
    }
}

int refuse(const std::string& text) {
  say(text);
  fprintf(stderr, "[emulated ascend] %s\n", text.c_str());
  return HCCL_E_PARA;
}

int open(uint32_t ranks, const char* root, uint32_t rank, const char* named, HcclComm* out) {
  try {
    std::string base = std::string("/") + root;
    auto* made = new Communicator{named && *named ? named : root, new Segment(base, ranks, rank), new Segment(base + "f", ranks, rank)};
    {
      std::lock_guard<std::mutex> hold(communicators_lock);
      static bool told = false;
      if (!told) on_failure(tell_peers);
      told = true;
      communicators()[made->name] = made;
    }
    made->own->agree("HcclCommInit of " + std::to_string(ranks) + " ranks");
    if (rank == 0)
      for (const char* end : {"", "f"}) shm_unlink((base + end).c_str());
    *out = made;
    return HCCL_SUCCESS;
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
}

const char* name_of_type(int type) {
  static const char* names[] = {"int8", "int16", "int32", "fp16", "fp32", "int64", "uint64", "uint8", "uint16", "uint32", "fp64", "bf16"};
  return type >= 0 && type < 12 ? names[type] : "an unknown type";
}
std::string described(const char* name, uint64_t number, int type) { return std::string(name) + " of " + std::to_string(number) + " " + name_of_type(type); }

// Memory that a collective reads or writes.
struct Use {
  const void* memory;
  uint64_t bytes;
  bool writes;
};
Use reads(const void* memory, uint64_t bytes) { return {memory, bytes, false}; }
Use writes(const void* memory, uint64_t bytes) { return {memory, bytes, true}; }

bool is_floating(int type) { return type == HCCL_DATA_TYPE_FP16 || type == HCCL_DATA_TYPE_FP32 || type == HCCL_DATA_TYPE_FP64 || type == HCCL_DATA_TYPE_BFP16; }

// What the clock asks of a collective: its kind, the bytes of the whole, whether they are of floating point.
struct Priced {
  const char* kind;
  double bytes;
  bool floating;
};

// Queue a collective: the ranks agree on what it is, then `run` moves data.
template <class Run>
int collective(HcclComm communicator, aclrtStream stream, const char* name, const std::string& what, Priced priced, const std::vector<Use>& uses, Run run) {
  count(name);
  if (clock::on()) clock::host_spends(clock::collective_launch());
  const std::string label = name;
  Segment* group = static_cast<Communicator*>(communicator)->own;
  enqueue(stream, Task::Work, [=] {
    try {
      group->agree(what, priced.bytes);
      const double bytes = std::max(priced.bytes, group->most_bytes);  // alike on all ranks
      if (!clock::on() || clock::moves(bytes, priced.floating)) run(*group);
      for (auto& use : uses) races::access(use.memory, use.bytes, use.writes);
      if (clock::on()) clock::spend(label, clock::collective_time(priced.kind, group->ranks, bytes), clock::Span::Collective);
    } catch (const std::exception& error) {
      fail(507899, error.what());
    }
  }, name);
  return HCCL_SUCCESS;
}
int messages(HcclComm communicator, aclrtStream stream, const char* name, std::vector<Transfer> transfers, bool floating) {
  count(name);
  if (clock::on()) clock::host_spends(clock::collective_launch());
  Segment* group = static_cast<Communicator*>(communicator)->own;
  std::string what = name;
  double sent = 0, taken = 0;
  for (auto& transfer : transfers) {
    (transfer.sends ? sent : taken) += double(transfer.bytes);
    transfer.moves = !clock::on() || clock::moves(double(transfer.bytes), floating);
  }
  enqueue(stream, Task::Work, [=] {
    try {
      move(*group, transfers, what);
      for (auto& transfer : transfers) races::access(transfer.data, transfer.bytes, !transfer.sends);
      if (clock::on()) clock::spend(what, clock::collective_time("send", group->ranks, std::max(sent, taken)), clock::Span::Collective);
    } catch (const std::exception& error) {
      fail(507899, error.what());
    }
  }, name);
  return HCCL_SUCCESS;
}
std::vector<uint64_t> list_of(const void* values, int number) {
  auto* each = static_cast<const uint64_t*>(values);
  return {each, each + number};
}
std::vector<uint64_t> equal(uint64_t number, int ranks) { return std::vector<uint64_t>(ranks, number); }
std::vector<uint64_t> multiples(uint64_t number, int ranks) {
  std::vector<uint64_t> all;
  for (int i = 0; i < ranks; i++) all.push_back(number * i);
  return all;
}
double total(const std::vector<uint64_t>& numbers) {
  double all = 0;
  for (uint64_t number : numbers) all += double(number);
  return all;
}
int ranks_of(HcclComm communicator) { return static_cast<Communicator*>(communicator)->own->ranks; }
int rank_of(HcclComm communicator) { return static_cast<Communicator*>(communicator)->own->rank; }

// What a rank uses of its own part and of all ranks' parts, of which the second or the first is read.
std::vector<Use> of_all(const void* own, uint64_t number, const void* all, const std::vector<uint64_t>& each, const std::vector<uint64_t>& at, int type, bool reads_all) {
  size_t item = bytes_of(type);
  std::vector<Use> uses{{own, number * item, reads_all}};
  for (size_t i = 0; i < each.size(); i++) uses.push_back({static_cast<const char*>(all) + at[i] * item, each[i] * item, !reads_all});
  return uses;
}

// `sent` and `taken`: items to and from each rank, and where they lie.
void all_to_all(Segment& group, const char* from, char* to, const std::vector<uint64_t>& sent, const std::vector<uint64_t>& sent_at, const std::vector<uint64_t>& taken,
                const std::vector<uint64_t>& taken_at, size_t item, const std::string& what) {
  int own = group.rank;
  if (sent[own] != taken[own]) throw std::runtime_error(what + ": rank " + std::to_string(own) + " sends itself " + std::to_string(sent[own]) + " and takes " + std::to_string(taken[own]));
  memmove(to + taken_at[own] * item, from + sent_at[own] * item, sent[own] * item);
  std::vector<Transfer> transfers;
  for (int k = 1; k < group.ranks; k++) {
    int next = (own + k) % group.ranks, last = (own - k + group.ranks) % group.ranks;
    transfers.push_back({true, next, const_cast<char*>(from) + sent_at[next] * item, sent[next] * item});
    transfers.push_back({false, last, to + taken_at[last] * item, taken[last] * item});
  }
  move(group, transfers, what);
}
int exchange(HcclComm communicator, aclrtStream stream, const char* name, const void* from, const std::vector<uint64_t>& sent, const std::vector<uint64_t>& sent_at,
             const void* to, const std::vector<uint64_t>& taken, const std::vector<uint64_t>& taken_at, int type) {
  size_t item = bytes_of(type);
  std::string what = std::string(name) + " of " + name_of_type(type);
  std::vector<Use> uses;
  for (size_t i = 0; i < sent.size(); i++) {
    uses.push_back(reads(static_cast<const char*>(from) + sent_at[i] * item, sent[i] * item));
    uses.push_back(writes(static_cast<const char*>(to) + taken_at[i] * item, taken[i] * item));
  }
  return collective(communicator, stream, name, what, {"exchange", std::max(total(sent), total(taken)) * double(item), is_floating(type)}, uses, [=](Segment& group) {
    all_to_all(group, static_cast<const char*>(from), static_cast<char*>(const_cast<void*>(to)), sent, sent_at, taken, taken_at, item, what);
  });
}

}  // namespace
}  // namespace emulated

using namespace emulated;

API int HcclGetRootInfo(HcclRootInfo* info) {
  static std::atomic<int> made{0};
  memset(info, 0, sizeof *info);
  snprintf(info->internal, 100, "emulated_ascend_%d_%d_%lx", getpid(), made++, static_cast<long>(seconds() * 1e6));
  return HCCL_SUCCESS;
}
API int HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* out) { return open(ranks, info->internal, rank, nullptr, out); }
API int HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config, HcclComm* out) {
  return open(ranks, info->internal, rank, config ? config->hcclCommName : nullptr, out);
}
API uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_COMM_NAME + 1; }
API int HcclGetCommName(HcclComm communicator, char* name) {
  strcpy(name, static_cast<Communicator*>(communicator)->name.c_str());
  return HCCL_SUCCESS;
}
API int HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
API const char* HcclGetErrorString(int code) {
  static thread_local std::string text;
  text = "HCCL error " + std::to_string(code) + " of emulated_ascend";
  return text.c_str();
}
API int HcclCommDestroy(HcclComm) { return HCCL_SUCCESS; }
API int HcclGetRankSize(HcclComm communicator, uint32_t* ranks) {
  *ranks = ranks_of(communicator);
  return HCCL_SUCCESS;
}
API int HcclGetRankId(HcclComm communicator, uint32_t* rank) {
  *rank = rank_of(communicator);
  return HCCL_SUCCESS;
}
API int HcclSetConfig(int, HcclConfigValue) { return HCCL_SUCCESS; }

API int HcclAllReduce(void* from, void* to, uint64_t number, int type, int op, HcclComm communicator, aclrtStream stream) {
  auto what = described("HcclAllReduce", number, type);
  return collective(communicator, stream, "HcclAllReduce", what, {"all-reduce", double(number * bytes_of(type)), is_floating(type)}, {reads(from, number * bytes_of(type)), writes(to, number * bytes_of(type))}, [=](Segment& group) { all_reduce(group, (char*)from, (char*)to, number, type, op, what); });
}
API int HcclReduce(void* from, void* to, uint64_t number, int type, int op, uint32_t root, HcclComm communicator, aclrtStream stream) {
  auto what = described("HcclReduce", number, type) + " to " + std::to_string(root);
  std::vector<Use> uses{reads(from, number * bytes_of(type))};
  if (rank_of(communicator) == static_cast<int>(root)) uses.push_back(writes(to, number * bytes_of(type)));
  return collective(communicator, stream, "HcclReduce", what, {"all-reduce", double(number * bytes_of(type)), is_floating(type)}, uses, [=](Segment& group) {
    std::vector<char> result(number * bytes_of(type));
    all_reduce(group, (char*)from, result.data(), number, type, op, what);
    if (group.rank == static_cast<int>(root)) memcpy(to, result.data(), result.size());
  });
}
API int HcclBroadcast(void* data, uint64_t number, int type, uint32_t root, HcclComm communicator, aclrtStream stream) {
  auto what = described("HcclBroadcast", number, type) + " from " + std::to_string(root);
  return collective(communicator, stream, "HcclBroadcast", what, {"all-reduce", double(number * bytes_of(type)), is_floating(type)}, {{data, number * bytes_of(type), rank_of(communicator) != static_cast<int>(root)}}, [=](Segment& group) { broadcast(group, (char*)data, number * bytes_of(type), root, what); });
}
API int HcclAllGather(void* from, void* to, uint64_t number, int type, HcclComm communicator, aclrtStream stream) {
  auto what = described("HcclAllGather", number, type);
  uint64_t bytes = number * bytes_of(type);
  return collective(communicator, stream, "HcclAllGather", what, {"all-gather", double(number * bytes_of(type)) * ranks_of(communicator), is_floating(type)}, {reads(from, bytes), writes(to, bytes * ranks_of(communicator))}, [=](Segment& group) {
    all_gather(group, (char*)from, (char*)to, equal(number, group.ranks), multiples(number, group.ranks), bytes_of(type), what);
  });
}
API int HcclAllGatherV(void* from, uint64_t, void* to, const void* numbers, const void* places, int type, HcclComm communicator, aclrtStream stream) {
  auto each = list_of(numbers, ranks_of(communicator)), at = list_of(places, ranks_of(communicator));
  auto what = std::string("HcclAllGatherV of ") + name_of_type(type);
  return collective(communicator, stream, "HcclAllGatherV", what, {"all-gather", total(each) * double(bytes_of(type)), is_floating(type)}, of_all(from, each[rank_of(communicator)], to, each, at, type, false), [=](Segment& group) { all_gather(group, (char*)from, (char*)to, each, at, bytes_of(type), what); });
}
API int HcclReduceScatter(void* from, void* to, uint64_t number, int type, int op, HcclComm communicator, aclrtStream stream) {
  auto what = described("HcclReduceScatter", number, type);
  uint64_t bytes = number * bytes_of(type);
  return collective(communicator, stream, "HcclReduceScatter", what, {"reduce-scatter", double(number * bytes_of(type)) * ranks_of(communicator), is_floating(type)}, {reads(from, bytes * ranks_of(communicator)), writes(to, bytes)}, [=](Segment& group) {
    reduce_scatter(group, (char*)from, (char*)to, equal(number, group.ranks), multiples(number, group.ranks), type, op, what);
  });
}
API int HcclReduceScatterV(void* from, const void* numbers, const void* places, void* to, uint64_t, int type, int op, HcclComm communicator, aclrtStream stream) {
  auto each = list_of(numbers, ranks_of(communicator)), at = list_of(places, ranks_of(communicator));
  auto what = std::string("HcclReduceScatterV of ") + name_of_type(type);
  return collective(communicator, stream, "HcclReduceScatterV", what, {"reduce-scatter", total(each) * double(bytes_of(type)), is_floating(type)}, of_all(to, each[rank_of(communicator)], from, each, at, type, true), [=](Segment& group) { reduce_scatter(group, (char*)from, (char*)to, each, at, type, op, what); });
}
API int HcclScatter(void* from, void* to, uint64_t number, int type, uint32_t root, HcclComm communicator, aclrtStream stream) {
  auto what = described("HcclScatter", number, type) + " from " + std::to_string(root);
  uint64_t bytes = number * bytes_of(type);
  std::vector<Use> uses{writes(to, bytes)};
  if (rank_of(communicator) == static_cast<int>(root)) uses.push_back(reads(from, bytes * ranks_of(communicator)));
  return collective(communicator, stream, "HcclScatter", what, {"all-gather", double(number * bytes_of(type)) * ranks_of(communicator), is_floating(type)}, uses, [=](Segment& group) {
    if (group.rank != static_cast<int>(root)) return move(group, {{false, static_cast<int>(root), (char*)to, bytes}}, what);
    std::vector<Transfer> transfers;
    for (int i = 0; i < group.ranks; i++)
      if (i != group.rank) transfers.push_back({true, i, (char*)from + i * bytes, bytes});
    memmove(to, (char*)from + group.rank * bytes, bytes);
    move(group, transfers, what);
  });
}
API int HcclAlltoAll(const void* from, uint64_t sent, int type, const void* to, uint64_t taken, int, HcclComm communicator, aclrtStream stream) {
  int ranks = ranks_of(communicator);
  return exchange(communicator, stream, "HcclAlltoAll", from, equal(sent, ranks), multiples(sent, ranks), to, equal(taken, ranks), multiples(taken, ranks), type);
}
API int HcclAlltoAllV(const void* from, const void* sent, const void* sent_at, int type, const void* to, const void* taken, const void* taken_at, int,
                      HcclComm communicator, aclrtStream stream) {
  int ranks = ranks_of(communicator);
  return exchange(communicator, stream, "HcclAlltoAllV", from, list_of(sent, ranks), list_of(sent_at, ranks), to, list_of(taken, ranks), list_of(taken_at, ranks), type);
}
// Calls of a group are queued one by one: each stream has them in the order in which they came.
API int HcclGroupStart() { return HCCL_SUCCESS; }
API int HcclGroupEnd() { return HCCL_SUCCESS; }
API int HcclBarrier(HcclComm communicator, aclrtStream stream) {
  return collective(communicator, stream, "HcclBarrier", "HcclBarrier", {"all-gather", 0, false}, {}, [](Segment&) {});
}
API int HcclSend(void* data, uint64_t number, int type, uint32_t peer, HcclComm communicator, aclrtStream stream) {
  return messages(communicator, stream, "HcclSend", {{true, static_cast<int>(peer), static_cast<char*>(data), number * bytes_of(type)}}, is_floating(type));
}
API int HcclRecv(void* data, uint64_t number, int type, uint32_t peer, HcclComm communicator, aclrtStream stream) {
  return messages(communicator, stream, "HcclRecv", {{false, static_cast<int>(peer), static_cast<char*>(data), number * bytes_of(type)}}, is_floating(type));
}
API int HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t number, HcclComm communicator, aclrtStream stream) {
  std::vector<Transfer> transfers;
  for (uint32_t i = 0; i < number; i++)
    transfers.push_back({items[i].sendRecvType == HCCL_SEND, static_cast<int>(items[i].remoteRank), static_cast<char*>(items[i].buf), items[i].count * bytes_of(items[i].dataType)});
  return messages(communicator, stream, "HcclBatchSendRecv", transfers, number && is_floating(items[0].dataType));
}

// A fused operator's parts run one under the other, in pieces: the longer one, drawn out by what the other takes of memory,
// and one piece of the shorter.
clock::Nanos clock::fused_time(const std::string& name, const std::string& operation, const Work& work) {
  const Nanos matmul = work.duration;
  Communicator* communicator;
  {
    std::lock_guard<std::mutex> hold(communicators_lock);
    auto known = communicators().find(name);
    if (known == communicators().end()) return matmul;
    communicator = known->second;
  }
  Segment& group = *communicator->fused;
  try {
    group.agree(operation);
  } catch (const std::exception& error) {
    fail(507899, error.what());
    return 0;
  }
  Nanos moving = clock::collective_time(work.fused, group.ranks, work.fused_bytes * (work.fused_of_rank ? group.ranks : 1));
  constexpr double kContention = 1.15, kPieces = 8;
  return Nanos(double(std::max(moving, matmul)) * kContention + double(std::min(moving, matmul)) / kPieces);
}

// ---- the collectives inside fused operators, which a kernel calls on its stream's thread

API int emulated_ranks(const char* name) {
  std::lock_guard<std::mutex> hold(communicators_lock);
  auto known = communicators().find(name);
  return known == communicators().end() ? 0 : known->second->fused->ranks;
}
API int emulated_rank(const char* name) {
  std::lock_guard<std::mutex> hold(communicators_lock);
  auto known = communicators().find(name);
  return known == communicators().end() ? -1 : known->second->fused->rank;
}
API int emulated_fused(const char* collective, const char* name, void* from, void* to, uint64_t number, int type, char* error, size_t bytes) {
  Communicator* communicator;
  {
    std::lock_guard<std::mutex> hold(communicators_lock);
    communicator = communicators()[name];
  }
  Segment& group = *communicator->fused;
  const std::string kind = collective;
  try {
    auto what = described(("a fused operator's " + kind).c_str(), number, type);
    group.agree(what);
    auto each = equal(number, group.ranks), at = multiples(number, group.ranks);
    if (kind == "all-reduce") all_reduce(group, (char*)from, (char*)to, number, type, HCCL_REDUCE_SUM, what);
    else if (kind == "reduce-scatter") reduce_scatter(group, (char*)from, (char*)to, each, at, type, HCCL_REDUCE_SUM, what);
    else if (kind == "all-to-all") all_to_all(group, (char*)from, (char*)to, each, at, each, at, bytes_of(type), what);
    else all_gather(group, (char*)from, (char*)to, each, at, bytes_of(type), what);
    return 0;
  } catch (const std::exception& thrown) {
    snprintf(error, bytes, "%s", thrown.what());
    return 1;
  }
}
