#include "runtime.h"

#include "clock.h"
#include "graphs.h"
#include "marks.h"
#include "races.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <sys/mman.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

namespace emulated {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

long setting(const char* name, long otherwise) {
  const char* text = getenv((std::string("EMULATED_ASCEND_") + name).c_str());
  return text && *text ? atol(text) : otherwise;
}

// ---- counts

namespace {
std::mutex count_lock;
std::map<std::string, long>& counts() {
  static auto* all = new std::map<std::string, long>;
  return *all;
}
}  // namespace

void count(const std::string& name) {
  std::lock_guard<std::mutex> hold(count_lock);
  counts()[name]++;
  static const bool trace = setting("TRACE", 0);
  if (trace) fprintf(stderr, "[emulated ascend %d] %s\n", (int)getpid(), name.c_str());
}

// ---- failures

namespace {
std::mutex failure_lock;
std::atomic<int> code_of_failure{0};
std::string text_of_failure, recent;
std::vector<std::function<void(const std::string&)>>& tellers() {
  static auto* all = new std::vector<std::function<void(const std::string&)>>;
  return *all;
}
}  // namespace

void say(const std::string& text) {
  std::lock_guard<std::mutex> hold(failure_lock);
  recent = text;
}

void fail(int code, const std::string& text) {
  std::vector<std::function<void(const std::string&)>> told;
  {
    std::lock_guard<std::mutex> hold(failure_lock);
    if (code_of_failure) return;
    text_of_failure = recent = text;
    code_of_failure = code;
    told = tellers();
  }
  fprintf(stderr, "[emulated ascend] %s\n", text.c_str());
  for (auto& tell : told) tell(text);
}

int failure_code() { return code_of_failure; }

std::string failure_text() {
  std::lock_guard<std::mutex> hold(failure_lock);
  return text_of_failure;
}

void on_failure(std::function<void(const std::string&)> tell) {
  std::lock_guard<std::mutex> hold(failure_lock);
  tellers().push_back(std::move(tell));
}

// ---- streams

namespace {

// torch_npu starts a thread for each stream that gives the arguments of calls back: it asks every microsecond whether there is one,
// a tenth of a core for a stream that does nothing. The system may wake such a thread later.
void rest_release_threads() {
  DIR* threads = opendir("/proc/self/task");
  if (!threads) return;
  while (dirent* thread = readdir(threads)) {
    char path[300], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", thread->d_name);
    FILE* file = fopen(path, "r");
    if (!file) continue;
    bool releases = fgets(name, sizeof name, file) && !strncasecmp(name, "release_thread", 14);
    fclose(file);
    if (!releases) continue;
    snprintf(path, sizeof path, "/proc/%s/timerslack_ns", thread->d_name);
    if ((file = fopen(path, "w"))) {
      fputs("4000000", file);
      fclose(file);
    }
  }
  closedir(threads);
}

// When the host launched the graph that the thread replays; 0: it replays none.
thread_local clock::Nanos replayed = 0;

struct Stream {
  std::mutex lock;
  std::condition_variable filled, emptied;
  struct Queued {
    Task kind;
    std::function<void()> run;
    clock::Nanos launched = 0;
  };
  std::deque<Queued> queue;
  clock::Lane lane;
  bool busy = false, ending = false, started = false;
  int id;
  std::mt19937 random;

  Stream() {
    static std::atomic<int> made{0};
    lane.stream = id = made++;
    random.seed(setting("SEED", 0) * 1000003 + atoi(getenv("RANK") ? getenv("RANK") : "0") * 1009 + id);
  }
  void put(Task kind, std::function<void()> run) {
    clock::Nanos launched = !clock::on() ? 0 : replayed ? replayed : clock::launch(kind == Task::Mark);
    std::lock_guard<std::mutex> hold(lock);
    queue.push_back({kind, std::move(run), launched});
    if (!started) {
      started = true;
      std::thread([this] { serve(); }).detach();
    }
    filled.notify_one();
  }
  void serve() {
    const long delay = setting("DELAY_US", 0);
    if (clock::on()) clock::lane() = &lane;
    std::unique_lock<std::mutex> hold(lock);
    auto is_wanted = [this] { return ending || !queue.empty(); };
    for (bool rested = false;;) {
      if (!rested && !filled.wait_for(hold, std::chrono::milliseconds(100), is_wanted)) {
        rest_release_threads();
        rested = true;
      }
      filled.wait(hold, is_wanted);
      if (queue.empty()) {
        hold.unlock();
        delete this;
        return;
      }
      auto task = std::move(queue.front());
      queue.pop_front();
      busy = true;
      hold.unlock();
      if (task.kind == Task::Mark || !failure_code()) {
        if (clock::on()) clock::arrive(lane, task.launched);
        if (delay && task.kind == Task::Work && random() % 4 == 0) usleep(random() % delay);
        task.run();
      }
      task.run = nullptr;
      hold.lock();
      busy = false;
      if (queue.empty()) emptied.notify_all();
    }
  }
  bool idle() {
    std::lock_guard<std::mutex> hold(lock);
    return queue.empty() && !busy;
  }
  bool wait(int milliseconds = -1) {
    std::unique_lock<std::mutex> hold(lock);
    auto is_idle = [this] { return queue.empty() && !busy; };
    if (milliseconds >= 0) return emptied.wait_for(hold, std::chrono::milliseconds(milliseconds), is_idle);
    emptied.wait(hold, is_idle);
    return true;
  }
  void end() {
    std::unique_lock<std::mutex> hold(lock);
    ending = true;
    if (started) return filled.notify_all();
    hold.unlock();
    delete this;
  }
};

struct Context {
  int device;
};

std::mutex device_lock;
std::map<int, Context*> contexts;
std::map<int, Stream*> defaults;
std::set<Stream*> streams;
thread_local int current = -1;

int devices() { return static_cast<int>(setting("DEVICES", 8)); }

Stream* stream_of(void* given) {
  if (given) return static_cast<Stream*>(given);
  std::lock_guard<std::mutex> hold(device_lock);
  Stream*& stream = defaults[current < 0 ? 0 : current];
  if (!stream) streams.insert(stream = new Stream);
  return stream;
}

struct Event {
  std::mutex lock;
  MarkOf record;
  MarkOf now() {
    std::lock_guard<std::mutex> hold(lock);
    return record;
  }
};

bool happened(aclrtEvent event) {
  auto record = static_cast<Event*>(event)->now();
  if (record && !record->is_done()) return false;
  if (record && races::on()) races::host_queried(record->before);
  return true;
}

// ---- memory

std::mutex memory_lock;
std::map<void*, size_t> blocks;
size_t used = 0, most_used = 0;

size_t capacity() { return static_cast<size_t>(setting("MEMORY_MB", 65536)) << 20; }

// All bits set: NaN in each type of floating point, -1 in each type of integer.
void poison(void* memory, size_t bytes) { memset(memory, 0xFF, bytes); }

aclError allocate(void** memory, size_t bytes) {
  std::lock_guard<std::mutex> hold(memory_lock);
  *memory = nullptr;
  if (used + bytes > capacity()) {
    say("the emulated device has " + std::to_string(capacity() >> 20) + " MB, of which " + std::to_string(used >> 20) +
        " MB are allocated; " + std::to_string(bytes >> 20) + " MB more were asked for (EMULATED_ASCEND_MEMORY_MB)");
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  if (clock::on()) {  // kernels do not compute: pages that nobody touches are never there
    *memory = mmap(nullptr, bytes + 64, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*memory == MAP_FAILED) return ACL_ERROR_BAD_ALLOC;
  } else {
    if (posix_memalign(memory, 512, bytes + 64)) return ACL_ERROR_BAD_ALLOC;
    poison(*memory, bytes);
  }
  used += bytes;
  most_used = std::max(most_used, used);
  blocks[*memory] = bytes;
  return ACL_SUCCESS;
}

// The host waits for a stream, no longer than a limit, and then knows that its tasks are done; its time goes on to the stream's.
bool see(Stream* stream, int milliseconds = -1) {
  clock::Section section;
  races::Clock before = races::on() ? races::recorded(stream->id) : races::Clock();
  if (!stream->wait(milliseconds)) return false;
  clock::host_waits(stream->lane.now);
  if (races::on()) races::host_saw(before);
  return true;
}
bool see(const MarkOf& record, int milliseconds = -1) {
  clock::Section section;
  if (!record->wait(milliseconds)) return false;
  clock::host_waits(record->moment);
  if (races::on()) races::host_saw(record->before);
  return true;
}

void wait_for_all() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> hold(device_lock);
    all.assign(streams.begin(), streams.end());
  }
  for (Stream* stream : all) see(stream);
}

}  // namespace

void enqueue(void* stream, Task kind, std::function<void()> run, const std::string& name) {
  clock::Section section;
  if (graphs::keep(stream, kind, run, name)) return;
  Stream* queue = stream_of(stream);
  if (!races::on() || name.empty()) return queue->put(kind, std::move(run));
  races::PointOf point = races::launched(queue->id, name);
  queue->put(kind, [point, run = std::move(run)] {
    races::Running now(point);
    run();
  });
}
void drain(void* stream) { see(stream_of(stream)); }
void* the_stream(void* stream) { return stream_of(stream); }

MarkOf put_mark(void* stream) {
  auto mark = std::make_shared<Mark>();
  if (races::on()) mark->before = races::recorded(stream_of(stream)->id);
  if (!graphs::keep_mark(stream, mark)) enqueue(stream, Task::Mark, [mark] { mark->set(); });
  return mark;
}
void put_wait(void* stream, const MarkOf& mark) {
  if (races::on()) races::waits(stream_of(stream)->id, mark->before);
  enqueue(stream, Task::Mark, [mark] {
    mark->wait();
    if (clock::on()) clock::wait_until(mark->moment, mark->communicates && !clock::lane()->communicates ? clock::Span::Exposed : clock::Span::Wait);
  });
}

Replay::Replay() { replayed = clock::on() ? clock::launch(false) : 0; }
Replay::~Replay() { replayed = 0; }

bool is_of_device(const void* address) {
  std::lock_guard<std::mutex> hold(memory_lock);
  auto block = blocks.upper_bound(const_cast<void*>(address));
  if (block == blocks.begin()) return false;
  --block;
  return address < static_cast<char*>(block->first) + block->second;
}

}  // namespace emulated

using namespace emulated;

// ---- device

// The kernels are Python's: the interpreter in which torch_npu runs imports them.
API aclError aclInit(const char*) {
  clock::start();
  auto ensure = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  auto run = reinterpret_cast<int (*)(const char*)>(dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
  auto release = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
  if (!ensure || !run || !release) return ACL_SUCCESS;
  int state = ensure();
  run("import emulated_ascend.load");
  release(state);
  return ACL_SUCCESS;
}
API aclError aclFinalize() { return ACL_SUCCESS; }
API const char* aclrtGetSocName() {
  const char* name = getenv("EMULATED_ASCEND_SOC");
  return name && *name ? name : "Ascend910B1";
}
API const char* aclGetRecentErrMsg() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> hold(failure_lock);
  text = "[emulated ascend] " + (recent.empty() ? std::string("no message") : recent);
  return text.c_str();
}
API aclError aclrtGetDeviceCount(uint32_t* number) {
  *number = devices();
  return ACL_SUCCESS;
}
API aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= devices()) {
    say("device " + std::to_string(device) + " was asked for; there are " + std::to_string(devices()) + " (EMULATED_ASCEND_DEVICES)");
    return ACL_ERROR_INVALID_PARAM;
  }
  current = device;
  std::lock_guard<std::mutex> hold(device_lock);
  if (!contexts[device]) contexts[device] = new Context{device};
  return ACL_SUCCESS;
}
API aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
API aclError aclrtGetDevice(int32_t* device) {
  if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = current;
  return ACL_SUCCESS;
}
API aclError aclrtGetCurrentContext(aclrtContext* context) {
  std::lock_guard<std::mutex> hold(device_lock);
  if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = contexts[current];
  return ACL_SUCCESS;
}
API aclError aclrtSetCurrentContext(aclrtContext context) {
  current = static_cast<Context*>(context)->device;
  return ACL_SUCCESS;
}
API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  std::lock_guard<std::mutex> hold(device_lock);
  *active = contexts.count(device) && contexts[device];
  if (flags) *flags = 0;
  return ACL_SUCCESS;
}
API aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = 24;  // cores
  return ACL_SUCCESS;
}
API aclError aclrtSynchronizeDevice() {
  if (int refused = graphs::refuse_wait(nullptr, "aclrtSynchronizeDevice")) return refused;
  wait_for_all();
  return failure_code();
}
API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}
API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
API aclError aclrtDeviceGetBareTgid(int32_t* process) {
  *process = getpid();
  return ACL_SUCCESS;
}
API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return failure_code(); }
API aclError aclrtGetLastError(aclrtLastErrLevel) { return failure_code(); }

// ---- streams

static aclError make_stream(aclrtStream* stream) {
  auto* made = new Stream;
  std::lock_guard<std::mutex> hold(device_lock);
  streams.insert(made);
  *stream = made;
  return ACL_SUCCESS;
}
static aclError destroy_stream(aclrtStream stream) {
  if (!stream) return ACL_SUCCESS;
  {
    std::lock_guard<std::mutex> hold(device_lock);
    streams.erase(static_cast<Stream*>(stream));
  }
  static_cast<Stream*>(stream)->end();
  return ACL_SUCCESS;
}
API aclError aclrtCreateStream(aclrtStream* stream) { return make_stream(stream); }
API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return make_stream(stream); }
API aclError aclrtDestroyStream(aclrtStream stream) { return destroy_stream(stream); }
API aclError aclrtDestroyStreamForce(aclrtStream stream) { return destroy_stream(stream); }
API aclError aclrtSynchronizeStream(aclrtStream stream) {
  if (int refused = graphs::refuse_wait(stream_of(stream), "aclrtSynchronizeStream")) return refused;
  see(stream_of(stream));
  return failure_code();
}
API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t limit) {
  if (int refused = graphs::refuse_wait(stream_of(stream), "aclrtSynchronizeStreamWithTimeout")) return refused;
  if (!see(stream_of(stream), limit)) return ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
  return failure_code();
}
API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  Stream* queue = stream_of(stream);
  if (int refused = graphs::refuse_wait(queue, "aclrtStreamQuery")) return refused;
  races::Clock before = races::on() ? races::recorded(queue->id) : races::Clock();
  bool idle = queue->idle() && (!clock::on() || queue->lane.now <= clock::host());
  if (idle && races::on()) races::host_queried(before);
  *status = idle ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return failure_code();
}
API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream_of(stream)->id;
  return ACL_SUCCESS;
}
API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
API aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* on) {
  *on = 0;
  return ACL_SUCCESS;
}

// ---- how many cores a stream, or the device, may take; here they change no time and no number

static uint32_t cores_of(aclrtDevResLimitType type) { return type == ACL_RT_DEV_RES_CUBE_CORE ? 24 : 48; }
static std::map<std::pair<void*, int>, uint32_t> limits;  // by stream, or the null pointer: the device
static thread_local aclrtStream stream_in_use = nullptr;

static uint32_t limit_of(void* stream, aclrtDevResLimitType type) {
  std::lock_guard<std::mutex> hold(device_lock);
  for (void* owner : {stream, static_cast<void*>(nullptr)}) {
    auto found = limits.find({owner, type});
    if (found != limits.end()) return found->second;
  }
  return cores_of(type);
}
static aclError set_limit(void* owner, aclrtDevResLimitType type, uint32_t value) {
  if (!value || value > cores_of(type)) return ACL_ERROR_INVALID_PARAM;
  std::lock_guard<std::mutex> hold(device_lock);
  limits[{owner, type}] = value;
  return ACL_SUCCESS;
}
static aclError reset_limits(void* owner) {
  std::lock_guard<std::mutex> hold(device_lock);
  for (int type : {ACL_RT_DEV_RES_CUBE_CORE, ACL_RT_DEV_RES_VECTOR_CORE}) limits.erase({owner, type});
  return ACL_SUCCESS;
}
API aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  *value = limit_of(nullptr, type);
  return ACL_SUCCESS;
}
API aclError aclrtSetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t value) {
  count("aclrtSetDeviceResLimit");
  return set_limit(nullptr, type, value);
}
API aclError aclrtResetDeviceResLimit(int32_t) { return reset_limits(nullptr); }
API aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t* value) {
  *value = limit_of(stream_of(stream), type);
  return ACL_SUCCESS;
}
API aclError aclrtSetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t value) {
  count("aclrtSetStreamResLimit");
  return set_limit(stream_of(stream), type, value);
}
API aclError aclrtResetStreamResLimit(aclrtStream stream) {
  count("aclrtResetStreamResLimit");
  return reset_limits(stream_of(stream));
}
API aclError aclrtUseStreamResInCurrentThread(aclrtStream stream) {
  stream_in_use = stream_of(stream);
  return ACL_SUCCESS;
}
API aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) {
  stream_in_use = nullptr;
  return ACL_SUCCESS;
}
API aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  *value = limit_of(stream_in_use, type);
  return ACL_SUCCESS;
}

// ---- events

static aclError make_event(aclrtEvent* event) {
  *event = new Event;
  return ACL_SUCCESS;
}
API aclError aclrtCreateEvent(aclrtEvent* event) { return make_event(event); }
API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return make_event(event); }
API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return make_event(event); }
API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}
API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  MarkOf mark = put_mark(stream);
  auto* own = static_cast<Event*>(event);
  std::lock_guard<std::mutex> hold(own->lock);
  own->record = mark;
  return ACL_SUCCESS;
}
API aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
static int refuse_query(aclrtEvent event) { return graphs::refuse_wait(static_cast<Event*>(event)->now(), "a query"); }
// The waits of streams so far, and the number of the one that is to be left out: a planted fault.
static std::atomic<long> stream_waits{0}, planted{-1};
API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  auto record = static_cast<Event*>(event)->now();
  if (!record || stream_waits++ == planted) return ACL_SUCCESS;
  int error;
  if (!graphs::keep_wait(stream, record, &error)) put_wait(stream, record);
  return error;
}
API aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t) {
  return aclrtStreamWaitEvent(stream, event);
}
API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t limit);
API aclError aclrtSynchronizeEvent(aclrtEvent event) { return aclrtSynchronizeEventWithTimeout(event, -1); }
API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t limit) {
  auto mark = static_cast<Event*>(event)->now();
  if (int refused = graphs::refuse_wait(mark, "aclrtSynchronizeEvent")) return refused;
  if (mark && !see(mark, limit)) return ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;
  return failure_code();
}
API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  if (int refused = refuse_query(event)) return refused;
  *status = happened(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return failure_code();
}
API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  if (int refused = refuse_query(event)) return refused;
  *status = happened(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return failure_code();
}
API aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus* status) {
  if (int refused = refuse_query(event)) return refused;
  *status = happened(event) ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
  return failure_code();
}
API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  auto first = static_cast<Event*>(from)->now(), last = static_cast<Event*>(to)->now();
  if (!first || !last) return ACL_ERROR_INVALID_PARAM;
  for (auto& mark : {first, last})
    if (int refused = graphs::refuse_wait(mark, "aclrtEventElapsedTime")) return refused;
  see(first);
  see(last);
  *milliseconds = static_cast<float>((last->at - first->at) * 1e3);
  return failure_code();
}
API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  auto record = static_cast<Event*>(event)->now();
  *microseconds = record ? static_cast<uint64_t>(record->at * 1e6) : 0;
  return ACL_SUCCESS;
}

// ---- memory

API aclError aclrtMalloc(void** memory, size_t bytes, aclrtMemMallocPolicy) { return allocate(memory, bytes); }
API aclError aclrtMallocAlign32(void** memory, size_t bytes, aclrtMemMallocPolicy) { return allocate(memory, bytes); }
API aclError aclrtFree(void* memory) {
  wait_for_all();
  std::lock_guard<std::mutex> hold(memory_lock);
  auto block = blocks.find(memory);
  if (block == blocks.end()) return ACL_ERROR_INVALID_PARAM;
  const size_t bytes = block->second;
  races::forget(memory, bytes);
  used -= bytes;
  blocks.erase(block);
  if (clock::on()) return munmap(memory, bytes + 64) ? ACL_ERROR_INVALID_PARAM : ACL_SUCCESS;
  poison(memory, bytes);
  free(memory);
  return ACL_SUCCESS;
}
API aclError aclrtMallocHost(void** memory, size_t bytes) {
  return posix_memalign(memory, 64, bytes ? bytes : 64) ? ACL_ERROR_BAD_ALLOC : ACL_SUCCESS;
}
API aclError aclrtFreeHost(void* memory) {
  free(memory);
  return ACL_SUCCESS;
}
API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* unused, size_t* total) {
  std::lock_guard<std::mutex> hold(memory_lock);
  *total = capacity();
  *unused = *total - used;
  return ACL_SUCCESS;
}
static void copy(void* to, const void* from, size_t bytes) {
  races::access(from, bytes, false);
  races::access(to, bytes, true);
  // With a clock a copy of many bytes moves none: those by which a program decides are few.
  if (!clock::on() || clock::moves(double(bytes), false)) memcpy(to, from, bytes);
}
API aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  clock::Section section;
  copy(to, from, bytes);
  if (clock::on()) clock::host_waits(clock::host() + clock::copy_time(bytes, kind != ACL_MEMCPY_DEVICE_TO_DEVICE));
  return failure_code();
}
API aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  auto run = [=] {
    copy(to, from, bytes);
    if (!clock::on()) return;
    const bool across = kind != ACL_MEMCPY_DEVICE_TO_DEVICE;
    clock::spend(kind == ACL_MEMCPY_HOST_TO_DEVICE ? "copy from the host" : across ? "copy to the host" : "copy", clock::copy_time(bytes, across), clock::Span::Copy);
  };
  enqueue(stream, Task::Work, run, "a copy");
  return ACL_SUCCESS;
}
API aclError aclrtMemset(void* memory, size_t, int32_t value, size_t bytes) {
  races::access(memory, bytes, true);
  memset(memory, value, bytes);
  return failure_code();
}
API aclError aclrtMemsetAsync(void* memory, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  auto fill = [=] {
    races::access(memory, bytes, true);
    if (!clock::on() || clock::moves(double(bytes), false)) memset(memory, value, bytes);
    if (clock::on()) clock::spend("memset", clock::copy_time(bytes, false), clock::Span::Copy);
  };
  enqueue(stream, Task::Work, fill, "a memset");
  return ACL_SUCCESS;
}

// ---- options, callbacks

API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
API aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
static int64_t system_options[64];
API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  system_options[option & 63] = value;
  return ACL_SUCCESS;
}
API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = system_options[option & 63];
  return ACL_SUCCESS;
}
API aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
API size_t aclGetCompileoptSize(aclCompileOpt) { return 8; }
API aclError aclGetCompileopt(aclCompileOpt, char* value, size_t bytes) {
  snprintf(value, bytes, "disable");
  return ACL_SUCCESS;
}
API aclError aclrtProcessReport(int32_t) {
  usleep(1000);
  return ACL_SUCCESS;
}
API aclError aclrtLaunchCallback(aclrtCallback call, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  enqueue(stream, Task::Mark, [=] { call(data); });
  return ACL_SUCCESS;
}
API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

// ---- for emulated_ascend's Python side

// Write "name number" lines into a buffer; returns the bytes that all lines need.
API size_t emulated_counts(char* buffer, size_t bytes) {
  std::string all;
  std::lock_guard<std::mutex> hold(count_lock);
  for (auto& each : counts()) all += each.first + " " + std::to_string(each.second) + "\n";
  if (buffer && bytes > all.size()) memcpy(buffer, all.c_str(), all.size() + 1);
  return all.size() + 1;
}
// Leave out the wait of a stream that comes after `number` others; -1: none. Returns how many came since the last call.
API long emulated_plant(long number) {
  long came = stream_waits.exchange(0);
  planted = number;
  return came;
}
API void emulated_wait_for_all() { wait_for_all(); }
API void emulated_fail(const char* text) { fail(kKernelFailed, text); }
// A failed device works again; for tests that fail on purpose.
API void emulated_forget_failure() {
  wait_for_all();
  std::lock_guard<std::mutex> hold(failure_lock);
  code_of_failure = 0;
  text_of_failure = recent = "";
}
// A moment of the run on the host and on a stream, as emulated_clock_write lists them.
API void emulated_clock_mark(void* stream) {
  if (!clock::on()) return;
  clock::Section section;
  size_t memory;
  {
    std::lock_guard<std::mutex> hold(memory_lock);
    memory = most_used;
  }
  size_t number = clock::mark(memory);
  enqueue(stream, Task::Mark, [number] { clock::mark_reached(number); });
}
