#include "clock.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include <time.h>

#include "runtime.h"

namespace emulated {
namespace clock {
namespace {

// ---- figures of the device and the host: EMULATED_ASCEND_FIGURES is "name=value,...", written by devices.py

struct Piece {
  double limit, c0, c1, c2;  // up to so many bytes: c0 + c1 x + c2 x^2 microseconds, x in MiB
};
struct Figures {
  std::map<std::string, double> values;
  std::vector<Piece> all_reduce;
  double operator[](const char* name) const {
    auto known = values.find(name);
    if (known == values.end()) {
      fprintf(stderr, "[emulated ascend] the device's table has no %s\n", name);
      abort();
    }
    return known->second;
  }
};
Figures& figures() {
  static auto* all = [] {
    auto* read = new Figures;
    const char* text = getenv("EMULATED_ASCEND_FIGURES");
    std::stringstream words(text ? text : "");
    for (std::string word; std::getline(words, word, ',');) {
      auto equals = word.find('=');
      std::string name = word.substr(0, equals), value = word.substr(equals + 1);
      if (name != "all_reduce") {
        read->values[name] = atof(value.c_str());
        continue;
      }
      std::stringstream pieces(value);
      for (std::string piece; std::getline(pieces, piece, '|');) {
        Piece made{};
        if (sscanf(piece.c_str(), "%lf:%lf:%lf:%lf", &made.limit, &made.c0, &made.c1, &made.c2) == 4) read->all_reduce.push_back(made);
      }
    }
    return read;
  }();
  return *all;
}

// ---- the host

bool active = false;
std::atomic<Nanos> host_time{0}, host_busy{0}, launcher{0};
Nanos entry_cost = 0;  // what asking for a thread's processor time costs, which is not the program's
thread_local Nanos seen = -1;
thread_local int depth = 0;
thread_local Lane* own_lane = nullptr;

Nanos thread_time() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return Nanos(t.tv_sec) * 1000000000 + t.tv_nsec;
}
void add_host(Nanos spent) {
  host_time += spent;
  host_busy += spent;
}
void touch() {
  if (own_lane) return;
  Nanos now = thread_time();
  static const double scale = figures()["host"];
  if (seen >= 0) add_host(std::max<Nanos>(0, Nanos(double(now - seen - entry_cost) * scale)));
  seen = now;
}

// ---- what happened

struct Record {
  int stream;  // -1: the host
  Span kind;
  Nanos from, to;
  std::string name;
};
struct Mark {
  Nanos host, busy, device;
  size_t memory;
};
std::mutex record_lock;
std::vector<Record> records;
std::deque<Mark> marks;
constexpr size_t kMostRecords = 4000000;

void record(int stream, Span kind, Nanos from, Nanos to, const std::string& name) {
  std::lock_guard<std::mutex> hold(record_lock);
  if (records.size() < kMostRecords) records.push_back({stream, kind, from, to, name});
}

// Collectives that take cores from matmuls: each pair that ran at the same time costs the matmul's stream once.
struct Interval {
  Nanos from, to;
  Lane* lane;
};
std::mutex overlap_lock;
std::deque<Interval> matmuls, collectives;
void share_cores(Lane* lane, Nanos from, Nanos to, bool matmul) {
  static const double share = figures()["collective_cores"];
  if (share <= 0) return;
  std::lock_guard<std::mutex> hold(overlap_lock);
  for (auto& other : matmul ? collectives : matmuls) {
    Nanos beside = std::min(to, other.to) - std::max(from, other.from);
    if (beside > 0) (matmul ? lane : other.lane)->debt += Nanos(double(beside) * share / (1 - share));
  }
  auto& own = matmul ? matmuls : collectives;
  own.push_back({from, to, lane});
  if (own.size() > 512) own.pop_front();
}
void pay(Lane& lane) {
  std::lock_guard<std::mutex> hold(overlap_lock);
  if (lane.debt <= 0) return;
  record(lane.stream, Span::Shared, lane.now, lane.now + lane.debt, "cores taken by collectives");
  lane.now += lane.debt;
  lane.debt = 0;
}

}  // namespace

void start() {
  if (active || !setting("CLOCK", 0)) return;
  figures();
  constexpr int kTimes = 200;
  Nanos from = thread_time();
  for (int i = 0; i < kTimes; i++) thread_time();
  entry_cost = (thread_time() - from) / kTimes;
  active = true;
}
bool on() { return active; }

Nanos host() {
  if (active && depth == 0 && seen >= 0) touch();
  return host_time;
}
void host_waits(Nanos until) {
  if (!active) return;
  Nanos now = host_time;
  const Nanos from = now;
  while (now < until && !host_time.compare_exchange_weak(now, until)) {
  }
  if (from < until) record(-1, Span::Wait, from, until, "waits for the device");
}
void host_spends(double microseconds) {
  static const double scale = active ? figures()["host"] : 1;
  if (active && !own_lane) add_host(Nanos(microseconds * 1e3 * scale));
}
Section::Section() {
  if (active && depth++ == 0) touch();
}
Section::~Section() {
  if (active && depth > 0 && --depth == 0 && !own_lane) seen = thread_time();
}
Nanos launch(bool is_mark) {
  const auto& table = figures();
  static const double scale = table["host"], cost = table["launch"], small = table["mark"], latency = table["latency"], queued = table["queue"];
  const Nanos spent = Nanos((is_mark ? small : cost) * 1e3 * scale);
  if (!queued) {
    if (!own_lane) add_host(spent);
    return host_time + (is_mark ? 0 : Nanos(latency * 1e3));
  }
  // torch_npu's queue: a second thread of the host launches, in order.
  Nanos before = launcher, after;
  do after = std::max<Nanos>(before, host_time) + spent;
  while (!launcher.compare_exchange_weak(before, after));
  return after + (is_mark ? 0 : Nanos(latency * 1e3));
}

Lane*& lane() { return own_lane; }
void arrive(Lane& lane, Nanos launched) {
  pay(lane);
  if (launched <= lane.now) return;
  record(lane.stream, Span::Host, lane.now, launched, "waits for the host");
  lane.now = launched;
}
void wait_until(Nanos moment, Span why) {
  Lane& lane = *own_lane;
  if (moment <= lane.now) return;
  record(lane.stream, why, lane.now, moment, why == Span::Ranks ? "waits for other ranks" : why == Span::Exposed ? "waits for a collective" : "waits for a stream");
  lane.now = moment;
}
void spend(const std::string& name, Nanos duration, Span kind) {
  Lane& lane = *own_lane;
  const Nanos from = lane.now;
  lane.now += duration;
  if (kind == Span::Collective) lane.communicates = true;
  if (kind == Span::Matmul || kind == Span::Collective) share_cores(&lane, from, lane.now, kind == Span::Matmul);
  record(lane.stream, kind, from, lane.now, name);
}

// ---- the table

namespace {

size_t item_bytes(int dtype) {
  switch (dtype) {
    case 2: case 4: case 12: return 1;
    case 1: case 6: case 7: case 27: return 2;
    case 9: case 10: case 11: case 16: return 8;
    default: return 4;
  }
}
bool is_floating(int dtype) { return dtype == 0 || dtype == 1 || dtype == 11 || dtype == 27; }
double numel(const Tensor& tensor) {
  double number = 1;
  for (auto size : tensor.dims) number *= double(size);
  return number;
}
// The bytes that a tensor has in memory: an expanded dimension is there once.
double bytes_of(const Tensor& tensor) {
  double number = double(item_bytes(tensor.dtype));
  for (size_t i = 0; i < tensor.dims.size(); i++) number *= i < tensor.strides.size() && tensor.strides[i] == 0 ? (tensor.dims[i] ? 1 : 0) : double(tensor.dims[i]);
  return number;
}

// Tiles by waves over the cores; a product with few tiles splits K.
double matmul_us(int dtype, double batch, double m, double n, double k) {
  if (batch * m * n * k == 0) return 0;
  const auto& table = figures();
  static const double cores = table["cores"], per_core = table["tflops"] * 1e6 * table["utilisation"] / cores, narrow = table["share_32_bit"],
                      multiple = table["k_multiple"], unaligned = table["k_unaligned"];
  static const double tiles[][3] = {{256, 128, 1.0}, {128, 256, 1.0}, {128, 128, 0.95}, {128, 64, 0.8}, {64, 128, 0.8}, {64, 64, 0.6}};
  double best = 1e30;
  for (auto& tile : tiles) {
    double count = batch * std::ceil(m / tile[0]) * std::ceil(n / tile[1]);
    double split = std::max(1.0, std::min(std::floor(cores / count), std::floor(k / 512)));
    double waves = std::ceil(count * split / cores);
    best = std::min(best, waves * 2 * tile[0] * tile[1] * (k / split + 64) / (per_core * tile[2]));
  }
  if (std::fmod(k, multiple) != 0) best /= unaligned;
  if (dtype == 2) return best / 2;
  return dtype == 0 || dtype == 11 ? best / narrow : best;
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
bool begins(const std::string& text, const char* part) { return text.compare(0, strlen(part), part) == 0; }

struct Tensors {
  std::vector<const Tensor*> single, all;  // those that are arguments themselves; with those of lists
};

double product_us(const Tensor& a, const Tensor& b, std::string& shape) {
  if (a.dims.empty() || b.dims.empty()) return 0;
  double k = double(a.dims.back()), n = b.dims.size() > 1 ? double(b.dims.back()) : 1;
  double batch = 1;
  for (size_t i = 0; i + 2 < b.dims.size(); i++) batch *= double(b.dims[i]);
  const double m = numel(a) / k / batch;
  shape = batch > 1 ? " " + std::to_string(int64_t(batch)) + " x" : "";
  shape += " " + std::to_string(int64_t(m)) + " x " + std::to_string(int64_t(k)) + " x " + std::to_string(int64_t(n));
  return matmul_us(a.dtype, batch, m, n, k);
}

double attention_us(const std::string& name, const Tensors& tensors, const std::vector<Argument>& arguments) {
  const auto& table = figures();
  const Tensor &query = *tensors.single[0], &key = *tensors.single[1];
  std::string layout;
  std::vector<int64_t> integers;  // behind the layout: precision, then the sparse mode
  for (auto& argument : arguments) {
    if (argument.text) layout = argument.text;
    else if (argument.letter == 'i' && !layout.empty()) integers.push_back(argument.integer);
  }
  size_t at = layout == "SBH" ? 0 : layout == "BNSD" ? 2 : 1;
  double keys = at < key.dims.size() ? double(key.dims[at]) : 1;
  double flops = 4 * numel(query) * keys * (has(name, "Grad") ? 2.5 : 1);
  if (integers.size() > 1 && integers[1] >= 2) flops /= 2;  // causal: blocks that nobody sees are left out
  return flops / (table["tflops"] * 1e6 * table["attention"]);
}

double compute_us(const std::string& name, const Tensors& tensors, const std::vector<Argument>& arguments, Work& work) {
  bool& matmul = work.matmul;
  auto& single = tensors.single;
  matmul = true;
  if (begins(name, "FlashAttention") && single.size() > 2) return attention_us(name, tensors, arguments);
  if (begins(name, "GroupedMatmul")) {
    const TensorList *x = nullptr, *weight = nullptr;
    for (auto& argument : arguments)
      if (argument.letter == 'L' && argument.container) (x ? weight : x) = weight ? weight : static_cast<const TensorList*>(argument.container);
    double time = 0;
    if (x && weight && !x->values.empty() && !weight->values.empty())
      for (auto& rows : x->values) time += rows.dims.empty() ? 0 : matmul_us(rows.dtype, 1, numel(rows) / double(rows.dims.back()), double(weight->values[0].dims.back()), double(rows.dims.back()));
    return time;
  }
  bool added = has(name, "ddmm") && single.size() > 2;
  if (added) return product_us(*single[1], *single[2], work.shape);
  if ((has(name, "Matmul") || name == "Mm" || name == "BatchMatMul" || name == "Bmm") && single.size() > 2) return product_us(*single[0], *single[1], work.shape);
  matmul = false;
  return 0;
}

}  // namespace

bool moves(double bytes, bool floating) { return bytes < (floating ? 65536 : 8 << 20); }

Work work_of(const std::string& full, const std::vector<Argument>& arguments) {
  const std::string name = begins(full, "aclnn") ? full.substr(5) : full;
  Tensors tensors;
  for (auto& argument : arguments) {
    if (!argument.container) continue;
    char kind = kind_at(argument.container);
    if (kind == 't') {
      tensors.single.push_back(static_cast<const Tensor*>(argument.container));
      tensors.all.push_back(tensors.single.back());
    } else if (kind == 'L') {
      for (auto& tensor : static_cast<const TensorList*>(argument.container)->values) tensors.all.push_back(&tensor);
    }
  }
  Work work;
  double bytes = 0, held = 0;
  bool floats = false, tells = false;
  const bool looks_up = name == "Embedding" || name == "IndexSelect" || name == "Gather" || name == "Index" || begins(name, "GatherV");
  for (size_t i = 0; i < tensors.all.size(); i++) {
    const Tensor& tensor = *tensors.all[i];
    held += numel(tensor) * double(item_bytes(tensor.dtype));
    floats |= is_floating(tensor.dtype);
    bool last = i + 1 == tensors.all.size();
    if (looks_up && i == 0) continue;  // of a table only the rows that are asked for are read
    bytes += bytes_of(tensor) * (looks_up && last ? 2 : 1);
  }
  if (begins(name, "Inplace") && !tensors.all.empty()) bytes += bytes_of(*tensors.all[0]);
  for (auto& argument : arguments) tells |= argument.letter == 'r';
  const auto& table = figures();
  const double busy = compute_us(name, tensors, arguments, work);
  const double moved = bytes / (table["bandwidth"] * 1e3 * table["bandwidth_share"]);
  work.duration = Nanos(1e3 * std::max({busy, moved, table["kernel"]}));
  work.computes = tells || moves(held, floats);
  const bool gathers = has(name, "AllGatherMatmul"), scatters = has(name, "MatmulReduceScatter");
  const bool before = has(name, "AlltoAllMatmul"), behind = has(name, "MatmulAlltoAll");  // of an exchange, with a product
  if (tensors.single.size() < 3 || !(gathers || scatters || before || behind || has(name, "MatmulAllReduce"))) return work;
  work.fused = gathers ? "all-gather" : scatters ? "reduce-scatter" : before || behind ? "exchange" : "all-reduce";
  const Tensor &x = *tensors.single[0], &weight = *tensors.single[1];
  if (before || behind) {
    const double k = double(weight.dims[0]), n = double(weight.dims.back()), rows = numel(x) / k;
    work.shape = " " + std::to_string(int64_t(rows)) + " x " + std::to_string(int64_t(k)) + " x " + std::to_string(int64_t(n));
    work.duration = Nanos(1e3 * matmul_us(x.dtype, 1, rows, n, k));
    work.fused_bytes = before ? bytes_of(x) : rows * n * double(item_bytes(x.dtype));
    return work;
  }
  work.fused_of_rank = gathers || scatters;
  work.fused_bytes = bytes_of(gathers ? x : *tensors.single.back());
  if (gathers)  // it multiplies the rows of all ranks: those of its result
    for (size_t i = 2; i < tensors.single.size(); i++)
      if (tensors.single[i]->dims.size() == 2 && tensors.single[i]->dims.back() == weight.dims.back()) {
        work.duration = Nanos(1e3 * matmul_us(x.dtype, 1, double(tensors.single[i]->dims[0]), double(weight.dims.back()), double(x.dims.back())));
        break;
      }
  return work;
}

double collective_launch() { return figures()["collective_launch"]; }
Nanos copy_time(size_t bytes, bool across) {
  const auto& table = figures();
  double bandwidth = across ? table["host_bandwidth"] : table["bandwidth"] * table["bandwidth_share"] / 2;
  return Nanos(1e3 * std::max(double(bytes) / (bandwidth * 1e3), table["kernel"]));
}

// `bytes` are those of the whole: of an all-reduce's tensor, of what an all-gather has behind it and a reduce-scatter before it.
Nanos collective_time(const std::string& kind, int ranks, double bytes) {
  const auto& table = figures();
  const double fitted = table["fitted_ranks"];
  if (ranks < 2) return Nanos(1e3 * table["kernel"]);
  // A full mesh has a link for each pair, so 1 / ranks of the whole goes over each; in a ring (ranks - 1) / ranks go round.
  double scale = table["mesh"] ? fitted / ranks : (double(ranks - 1) / ranks) / ((fitted - 1) / fitted);
  double x = bytes * scale, time = 0;
  for (auto& piece : figures().all_reduce) {
    double mib = x / 1048576;
    time = piece.c0 + piece.c1 * mib + piece.c2 * mib * mib;
    if (x <= piece.limit) break;
  }
  if (kind == "send") {
    double pairs = table["mesh"] ? bytes * fitted : bytes * fitted / (fitted - 1);  // one link, one direction
    auto& last = figures().all_reduce.back();
    return Nanos(1e3 * std::max(figures().all_reduce.front().c0, last.c1 * pairs / 1048576 / 2));
  }
  return Nanos(1e3 * (kind == "all-reduce" ? time : std::max(time * table["gather_share"], figures().all_reduce.front().c0 * table["gather_share"])));
}

size_t mark(size_t memory) {
  std::lock_guard<std::mutex> hold(record_lock);
  marks.push_back({host_time, host_busy, -1, memory});
  return marks.size() - 1;
}
void mark_reached(size_t mark) {
  std::lock_guard<std::mutex> hold(record_lock);
  if (mark < marks.size()) marks[mark].device = own_lane->now;
}

}  // namespace clock
}  // namespace emulated

using namespace emulated;

static void quote(FILE* file, const std::string& text) {
  fputc('"', file);
  for (char letter : text) {
    if (letter == '"' || letter == '\\') fputc('\\', file);
    fputc(letter, file);
  }
  fputc('"', file);
}

API int emulated_clock_on() { return clock::on(); }
API double emulated_clock_now() {
  clock::Section section;
  return double(clock::host()) * 1e-9;
}
API void emulated_clock_wait(double seconds) {
  clock::Section section;
  clock::host_waits(clock::host() + clock::Nanos(seconds * 1e9));
}
// Write all that happened as JSON; 0 if it could not be written.
API int emulated_clock_write(const char* path) {
  std::lock_guard<std::mutex> hold(clock::record_lock);
  FILE* file = fopen(path, "w");
  if (!file) return 0;
  fprintf(file, "{\"marks\":[");
  for (size_t i = 0; i < clock::marks.size(); i++) {
    auto& mark = clock::marks[i];
    fprintf(file, "%s[%ld,%ld,%ld,%zu]", i ? "," : "", long(mark.host), long(mark.busy), long(mark.device), mark.memory);
  }
  fprintf(file, "],\"spans\":[");
  for (size_t i = 0; i < clock::records.size(); i++) {
    auto& span = clock::records[i];
    fprintf(file, "%s\n[%d,\"%c\",%ld,%ld,", i ? "," : "", span.stream, char(span.kind), long(span.from), long(span.to));
    quote(file, span.name);
    fputc(']', file);
  }
  fprintf(file, "]}\n");
  return fclose(file) == 0;
}
API void emulated_clock_forget() {
  std::lock_guard<std::mutex> hold(clock::record_lock);
  clock::records.clear();
  clock::marks.clear();
}
