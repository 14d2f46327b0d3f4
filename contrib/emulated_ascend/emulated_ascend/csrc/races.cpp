#include "races.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "runtime.h"

namespace emulated::races {
namespace {

// Writes the line of Python that the calling thread is at; takes the interpreter's lock, so never under ours.
typedef void (*Where)(char* text, size_t bytes);
Where where = nullptr;

std::mutex lock;
Clock host(1);
std::map<int, Clock>& streams() {
  static auto* all = new std::map<int, Clock>;
  return *all;
}
std::vector<std::string>& found() {
  static auto* all = new std::vector<std::string>;
  return *all;
}
std::set<std::string>& known() {  // pairs of lines that were found
  static auto* all = new std::set<std::string>;
  return *all;
}
thread_local PointOf running;
thread_local bool launches = false;

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}
uint64_t at(const Clock& clock, size_t actor) { return actor < clock.size() ? clock[actor] : 0; }

// Takes the next tick of an actor's clock.
Clock& tick(Clock& clock, size_t actor) {
  if (clock.size() <= actor) clock.resize(actor + 1);
  clock[actor]++;
  return clock;
}

std::string line_of_python() {
  char text[600] = "";
  if (where) where(text, sizeof text);
  return text;
}

// ---- what was done last to each byte

struct Bytes {
  uint64_t end;
  PointOf write;
  std::vector<PointOf> reads;  // since the write, of each actor the last
};
std::map<uint64_t, Bytes>& memory() {
  static auto* all = new std::map<uint64_t, Bytes>;
  return *all;
}

// Let a piece begin at a place, if one lies there.
void split(uint64_t place) {
  auto next = memory().upper_bound(place);
  if (next == memory().begin()) return;
  auto piece = std::prev(next);
  if (piece->first == place || piece->second.end <= place) return;
  Bytes rest = piece->second;
  piece->second.end = place;
  memory().emplace_hint(next, place, std::move(rest));
}

std::string described(const Point& point, bool writes) {
  std::string who = point.actor ? "on stream " + std::to_string(point.actor - 1) : "by the host";
  return point.name + " " + who + (writes ? " writes" : " reads") + (point.line.empty() ? "" : " (" + point.line + ")");
}

void compare(const PointOf& before, bool wrote, const PointOf& now, bool writes) {
  if (!before || at(now->clock, before->actor) >= at(before->clock, before->actor)) return;
  std::string text = described(*now, writes) + ", " + described(*before, wrote) + " the same memory, and nothing orders them";
  std::string pair = now->name + now->line + before->name + before->line + (writes ? "w" : "r") + (wrote ? "w" : "r");
  if (!known().insert(pair).second) return;
  found().push_back(text);
  fprintf(stderr, "[emulated ascend] race: %s\n", text.c_str());
}

void touch(uint64_t begin, uint64_t end, bool writes, const PointOf& now) {
  split(begin);
  split(end);
  uint64_t place = begin;
  std::vector<std::pair<uint64_t, uint64_t>> gaps;
  auto piece = memory().lower_bound(begin);
  for (; piece != memory().end() && piece->first < end; ++piece) {
    if (place < piece->first) gaps.push_back({place, piece->first});
    place = piece->second.end;
    auto& reads = piece->second.reads;
    compare(piece->second.write, true, now, writes);
    if (writes) {
      for (auto& read : reads)
        if (read != now) compare(read, false, now, true);
    } else {
      auto own = [&](const PointOf& read) { return read->actor == now->actor; };
      reads.erase(std::remove_if(reads.begin(), reads.end(), own), reads.end());
      reads.push_back(now);
    }
  }
  if (writes) {
    memory().erase(memory().lower_bound(begin), piece);
    memory()[begin] = {end, now, {}};
    return;
  }
  if (place < end) gaps.push_back({place, end});
  for (auto& gap : gaps) memory()[gap.first] = {gap.second, nullptr, {now}};
}

// The running task; else an access of the host, which takes a tick of its own.
PointOf who(const std::string& line) {
  if (running) return running;
  return std::make_shared<Point>(Point{0, tick(host, 0), "a copy", line});
}

constexpr size_t kMostRuns = 65536;  // of a strided tensor; one with more counts as all bytes between its first and its last

}  // namespace

bool on() {
  static const bool asked = setting("RACES", 0);
  return asked;
}

PointOf launched(int stream, const std::string& name) {
  std::string line = line_of_python();
  launches = true;
  std::lock_guard<std::mutex> hold(lock);
  Clock& clock = streams()[stream];
  join(clock, host);
  return std::make_shared<Point>(Point{static_cast<size_t>(stream) + 1, tick(clock, stream + 1), name, line});
}

Clock recorded(int stream) {
  std::lock_guard<std::mutex> hold(lock);
  Clock& clock = streams()[stream];
  join(clock, host);
  return clock;
}

void waits(int stream, const Clock& mark) {
  std::lock_guard<std::mutex> hold(lock);
  join(streams()[stream], mark);
}

void host_saw(const Clock& mark) {
  std::lock_guard<std::mutex> hold(lock);
  join(host, mark);
}

void host_queried(const Clock& mark) {
  if (launches) host_saw(mark);
}

Running::Running(PointOf point) { running = std::move(point); }
Running::~Running() { running = nullptr; }

void access(const void* place, size_t bytes, bool writes) {
  if (!on() || !bytes || !is_of_device(place)) return;
  std::string line = running ? "" : line_of_python();
  std::lock_guard<std::mutex> hold(lock);
  auto begin = reinterpret_cast<uint64_t>(place);
  touch(begin, begin + bytes, writes, who(line));
}

void access_strided(const void* place, size_t item, const int64_t* dims, const int64_t* strides, int number, bool writes) {
  std::vector<std::pair<int64_t, int64_t>> outer;  // stride and size, in elements
  for (int i = 0; i < number; i++) {
    if (dims[i] == 0) return;
    if (dims[i] > 1 && strides[i]) outer.push_back({strides[i], dims[i]});
  }
  if (!on() || !is_of_device(place)) return;
  std::sort(outer.begin(), outer.end());
  int64_t run = 1;
  size_t inner = 0;
  while (inner < outer.size() && outer[inner].first == run) run *= outer[inner++].second;
  outer.erase(outer.begin(), outer.begin() + inner);
  size_t runs = 1;
  int64_t span = run;
  for (auto& [stride, size] : outer) {
    runs *= size;
    span += stride * (size - 1);
  }
  if (runs > kMostRuns) return access(place, span * item, writes);
  std::lock_guard<std::mutex> hold(lock);
  PointOf now = who("");
  std::vector<int64_t> index(outer.size());
  for (size_t left = runs; left; left--) {
    int64_t offset = 0;
    for (size_t i = 0; i < outer.size(); i++) offset += index[i] * outer[i].first;
    auto begin = reinterpret_cast<uint64_t>(place) + offset * item;
    touch(begin, begin + run * item, writes, now);
    for (size_t i = 0; i < outer.size() && ++index[i] == outer[i].second; i++) index[i] = 0;
  }
}

void forget(const void* place, size_t bytes) {
  if (!on()) return;
  std::lock_guard<std::mutex> hold(lock);
  auto begin = reinterpret_cast<uint64_t>(place);
  split(begin);
  split(begin + bytes);
  memory().erase(memory().lower_bound(begin), memory().lower_bound(begin + bytes));
}

}  // namespace emulated::races

// ---- for emulated_ascend's Python side

using namespace emulated;

API int emulated_finds_races() { return races::on(); }
API void emulated_set_where(races::Where asked) { races::where = asked; }
API void emulated_access(const void* memory, size_t item, const int64_t* dims, const int64_t* strides, int number, int writes) {
  races::access_strided(memory, item, dims, strides, number, writes);
}
// Write the races, a line each, into a buffer; returns the bytes that all need.
API size_t emulated_races(char* buffer, size_t bytes) {
  std::string all;
  std::lock_guard<std::mutex> hold(races::lock);
  for (auto& text : races::found()) all += text + "\n";
  if (buffer && bytes > all.size()) memcpy(buffer, all.c_str(), all.size() + 1);
  return all.size() + 1;
}
API void emulated_forget_races() {
  std::lock_guard<std::mutex> hold(races::lock);
  races::found().clear();
  races::known().clear();
}
