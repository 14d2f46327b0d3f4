#include "graphs.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "acl/acl.h"
#include "marks.h"

namespace emulated {
namespace {

// What a replay queues: a task, a mark, or the wait for one.
struct Node {
  void* stream;
  Task kind;
  std::function<void()> run;
  std::string name;
  MarkOf marks, waits;
};

using Known = std::map<void*, size_t>;  // how many nodes of each stream lie before

struct Graph {
  uint64_t number;
  void* origin;
  std::mutex lock;
  std::vector<Node> nodes;
  std::map<void*, Known> streams;          // what lies before the next node of a stream, its own ones too
  std::map<const Mark*, Known> marks;
  std::map<void*, void*> of_replay;        // the stream that stands for a captured one beside the origin
  std::string invalid;
};

std::mutex lock;
std::atomic<int> captures{0};  // that go on
std::map<void*, Graph*>& captured() {
  static auto* all = new std::map<void*, Graph*>;
  return *all;
}

Graph* graph_of(void* stream) {
  if (!captures) return nullptr;
  std::lock_guard<std::mutex> hold(lock);
  auto found = captured().find(the_stream(stream));
  return found == captured().end() ? nullptr : found->second;
}
Graph* graph_of(const MarkOf& mark) {
  std::lock_guard<std::mutex> hold(lock);
  for (auto& each : captured())
    if (mark->capture && each.second->number == mark->capture) return each.second;
  return nullptr;
}

void add(Graph& graph, Node node) {
  graph.streams[node.stream][node.stream]++;
  graph.nodes.push_back(std::move(node));
}

int invalidate(Graph& graph, int code, const std::string& text) {
  std::lock_guard<std::mutex> hold(graph.lock);
  if (graph.invalid.empty()) graph.invalid = text;
  say(text);
  return code;
}
int refuse(int code, const std::string& text) {
  say(text);
  return code;
}

// How many streams have nodes for which the origin does not wait.
int unjoined(Graph& graph) {
  Known& known = graph.streams[graph.origin];
  return std::count_if(graph.streams.begin(), graph.streams.end(), [&](auto& each) { return known[each.first] < each.second[each.first]; });
}

}  // namespace

bool graphs::keep(void* stream, Task kind, const std::function<void()>& run, const std::string& name) {
  Graph* graph = graph_of(stream);
  if (!graph) return false;
  std::lock_guard<std::mutex> hold(graph->lock);
  add(*graph, {the_stream(stream), kind, run, name});
  return true;
}

bool graphs::keep_mark(void* stream, const MarkOf& mark) {
  Graph* graph = graph_of(stream);
  if (!graph) return false;
  std::lock_guard<std::mutex> hold(graph->lock);
  mark->capture = graph->number;
  graph->nodes.push_back({the_stream(stream), Task::Mark, nullptr, "", mark});
  graph->marks[mark.get()] = graph->streams[the_stream(stream)];
  return true;
}

bool graphs::keep_wait(void* stream, const MarkOf& mark, int* error) {
  Graph *own = graph_of(stream), *other = graph_of(mark);
  *error = ACL_SUCCESS;
  if (!own && !mark->capture) return false;
  if (!mark->capture) *error = invalidate(*own, ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a captured stream waits for an event that was recorded outside the capture");
  else if (!other) *error = refuse(ACL_ERROR_RT_EVENT_CAPTURED, "a stream waits for an event that was recorded in a capture that has ended");
  else if (own && own != other) *error = invalidate(*own, ACL_ERROR_STREAM_CAPTURE_CONFLICT, "a captured stream waits for an event of another capture");
  if (*error) return true;
  void* joined = the_stream(stream);
  {
    std::lock_guard<std::mutex> hold(lock);
    captured()[joined] = other;
  }
  std::lock_guard<std::mutex> hold(other->lock);
  add(*other, {joined, Task::Mark, nullptr, "", nullptr, mark});
  for (auto& each : other->marks[mark.get()]) other->streams[joined][each.first] = std::max(other->streams[joined][each.first], each.second);
  return true;
}

int graphs::refuse_wait(void* stream, const char* what) {
  if (!captures) return ACL_SUCCESS;
  Graph* graph = nullptr;
  {
    std::lock_guard<std::mutex> hold(lock);
    for (auto& each : captured())
      if (!stream || each.first == the_stream(stream)) graph = each.second;
  }
  if (!graph) return ACL_SUCCESS;
  return invalidate(*graph, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, std::string(what) + " while a graph is captured: the host cannot wait for what does not run yet");
}
int graphs::refuse_wait(const MarkOf& mark, const char* what) {
  if (!mark || !mark->capture) return ACL_SUCCESS;
  return refuse(ACL_ERROR_RT_EVENT_CAPTURED, std::string(what) + " of an event that was recorded in a capture, which never comes by itself");
}

}  // namespace emulated

using namespace emulated;

API aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
  static std::atomic<uint64_t> made{0};
  void* origin = the_stream(stream);
  if (graph_of(origin)) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is captured already");
  auto* graph = new Graph{++made, origin};
  std::lock_guard<std::mutex> hold(lock);
  captured()[origin] = graph;
  captures++;
  return ACL_SUCCESS;
}
API aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  Graph* graph = graph_of(stream);
  if (model) *model = graph;
  *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (!graph) return ACL_SUCCESS;
  std::lock_guard<std::mutex> hold(graph->lock);
  *status = graph->invalid.empty() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  return ACL_SUCCESS;
}
API aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* model) {
  *model = nullptr;
  std::unique_ptr<Graph> graph(graph_of(stream));
  if (!graph) return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not captured");
  if (graph->origin != the_stream(stream)) {
    graph.release();
    return refuse(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture began on another stream");
  }
  {
    std::lock_guard<std::mutex> hold(lock);
    for (auto& each : graph->streams) captured().erase(each.first);
    captured().erase(graph->origin);
    captures--;
  }
  if (!graph->invalid.empty()) return refuse(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture is invalid: " + graph->invalid);
  if (int number = unjoined(*graph))
    return refuse(ACL_ERROR_RT_STREAM_UNJOINED, "the capture ends while " + std::to_string(number) + " of its streams have work for which its first stream does not wait");
  *model = graph.release();
  return ACL_SUCCESS;
}
API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  static thread_local aclmdlRICaptureMode own = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(own, *mode);
  return ACL_SUCCESS;
}
// The host launches once; the streams of a replay wait for each other as those of the capture did.
API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  auto* graph = static_cast<Graph*>(model);
  if (graph_of(stream)) return refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a graph is replayed while another is captured");
  count("aclmdlRIExecuteAsync");
  std::lock_guard<std::mutex> hold(graph->lock);
  Replay now;
  std::map<const Mark*, MarkOf> marks;
  for (auto& node : graph->nodes) {
    void* own = stream;
    if (node.stream != graph->origin) {
      void*& made = graph->of_replay[node.stream];
      if (!made) aclrtCreateStream(&made);
      own = made;
    }
    if (node.marks) marks[node.marks.get()] = put_mark(own);
    else if (node.waits) put_wait(own, marks[node.waits.get()]);
    else enqueue(own, node.kind, node.run, node.name);
  }
  return failure_code();
}
API aclError aclmdlRIDestroy(aclmdlRI model) {
  std::unique_ptr<Graph> graph(static_cast<Graph*>(model));
  for (auto& each : graph->of_replay) aclrtDestroyStream(each.second);
  return ACL_SUCCESS;
}
