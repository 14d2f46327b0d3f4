// aclnn calls: the arguments are decoded by the kernel's signature, checked, and handed to a Python kernel on the stream's thread.
//
// A signature has a letter for each argument: t tensor, o tensor or none, r tensor whose shape the kernel tells (the call then waits),
// s scalar, z scalar or none, I E B arrays of integers, floats, bools, L S lists of tensors, scalars, i integer, b bool, d double, f float, c text,
// p an array or list or none. Behind them every call passes where it wants its workspace's size and its executor.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <sys/uio.h>
#include <unistd.h>

#include "clock.h"
#include "graphs.h"
#include "names.h"
#include "objects.h"
#include "runtime.h"

namespace emulated {
namespace {

// Runs a kernel: its number, the arguments as JSON. Returns 0; or 1, and a text in the buffer.
typedef int (*Run)(int kernel, const char* arguments, char* error, size_t bytes);
Run run_kernel = nullptr;

struct Kernel {
  std::string signature;
  int number;
  int outputs;  // so many of its last arguments are results; 0: its first argument is
};
std::unordered_map<std::string, Kernel>& kernels() {
  static auto* all = new std::unordered_map<std::string, Kernel>;
  return *all;
}

// What is to be said of a function that is called and not run.
std::unordered_map<std::string, std::string>& notes() {
  static auto* all = new std::unordered_map<std::string, std::string>;
  return *all;
}

struct Call {
  std::string name, arguments;
  int kernel;
  bool tells_shape;
  clock::Work work;
  std::vector<std::pair<char*, size_t>> cleared;  // results that are not computed, but that a program may decide by
  std::string group;
};

void append(std::string& text, double number) {
  char buffer[40];
  if (std::isnan(number)) snprintf(buffer, sizeof buffer, "NaN");
  else if (std::isinf(number)) snprintf(buffer, sizeof buffer, number > 0 ? "Infinity" : "-Infinity");
  else snprintf(buffer, sizeof buffer, "%.17g", number);
  text += buffer;
}
template <class Values>
void append_all(std::string& text, const Values& values) {
  text += '[';
  for (size_t i = 0; i < values.size(); i++) {
    if (i) text += ',';
    append(text, static_cast<double>(values[i]));
  }
  text += ']';
}
void append_integers(std::string& text, const std::vector<int64_t>& values) {
  text += '[';
  for (size_t i = 0; i < values.size(); i++) text += (i ? "," : "") + std::to_string(values[i]);
  text += ']';
}
void append(std::string& text, const Tensor& tensor) {
  text += "[\"t\"," + std::to_string(tensor.dtype) + ',' + std::to_string(reinterpret_cast<uint64_t>(tensor.data)) + ',' +
          std::to_string(tensor.offset) + ',';
  append_integers(text, tensor.dims);
  text += ',';
  append_integers(text, tensor.strides);
  text += ',' + std::to_string(reinterpret_cast<uint64_t>(&tensor)) + ']';
}
void append(std::string& text, const Scalar& scalar) {
  text += "[\"s\"," + std::to_string(scalar.dtype) + ",\"";
  char pair[3];
  for (unsigned char byte : scalar.bytes) {
    snprintf(pair, sizeof pair, "%02x", byte);
    text += pair;
  }
  text += "\"]";
}
template <class Values>
void append_each(std::string& text, const char* kind, const Values& values) {
  text += std::string("[\"") + kind + "\",[";
  for (size_t i = 0; i < values.size(); i++) {
    if (i) text += ',';
    append(text, values[i]);
  }
  text += "]]";
}

const char* name_of(char letter) {
  switch (letter) {
    case 't': case 'o': case 'r': return "a tensor";
    case 's': case 'z': return "a scalar";
    case 'I': return "an array of integers";
    case 'E': return "an array of floats";
    case 'B': return "an array of bools";
    case 'L': return "a list of tensors";
    case 'S': return "a list of scalars";
    case 'p': return "an array, a list or none";
    default: return "no container";
  }
}

void append_container(std::string& text, const void* address, char kind) {
  switch (kind) {
    case 't': append(text, *static_cast<const Tensor*>(address)); break;
    case 's': append(text, *static_cast<const Scalar*>(address)); break;
    case 'I': text += "[\"a\","; append_integers(text, static_cast<const IntArray*>(address)->values); text += ']'; break;
    case 'E': text += "[\"a\","; append_all(text, static_cast<const FloatArray*>(address)->values); text += ']'; break;
    case 'B': text += "[\"a\","; append_all(text, static_cast<const BoolArray*>(address)->values); text += ']'; break;
    case 'L': append_each(text, "l", static_cast<const TensorList*>(address)->values); break;
    case 'S': append_each(text, "l", static_cast<const ScalarList*>(address)->values); break;
  }
}

// Whether an address is one of this process; asked of the kernel, since a number may look like one.
bool is_readable(const void* address) {
  auto number = reinterpret_cast<uint64_t>(address);
  if (number < 65536 || number % 8) return false;
  uint64_t word = 0;
  iovec to{&word, sizeof word}, from{const_cast<void*>(address), sizeof word};
  return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == sizeof word;
}
// The letter of the container at what may be an address; a seed is a number that may look like one.
char kind_at_readable(const void* address) { return is_readable(address) ? kind_at(address) : 0; }

// Reads the arguments of a call as the x86-64 calling convention passes them.
struct Arguments {
  const uint64_t* integers;
  const double* floats;
  const uint64_t* stack;
  int taken_integers = 0, taken_floats = 0, taken_stack = 0;
  uint64_t integer() { return taken_integers < 6 ? integers[taken_integers++] : stack[taken_stack++]; }
  double real() {
    if (taken_floats < 8) return floats[taken_floats++];
    double value;
    memcpy(&value, &stack[taken_stack++], sizeof value);
    return value;
  }
};

// What a call passes, one letter an argument, for the message of an error: containers, n for a number or none, * for another address.
std::string passed(Arguments arguments) {
  std::string letters;
  int places = 0;
  for (int i = 0; i < 48 && places < 2; i++) {
    uint64_t value = arguments.integer();
    auto* address = reinterpret_cast<const void*>(value);
    char kind = kind_at_readable(address);
    bool stack = value >> 40 == reinterpret_cast<uint64_t>(arguments.stack) >> 40 && !kind;
    places = stack ? places + 1 : 0;
    letters += kind ? kind : stack ? '*' : 'n';
  }
  return letters;
}

// What a call takes on the device, and which of its results are zero if it does not compute.
void price(Call& call, const Kernel& kernel, const std::vector<clock::Argument>& arguments) {
  call.work = clock::work_of(call.name, arguments);
  for (auto& argument : arguments)
    if (argument.text && call.group.empty()) call.group = argument.text;
  if (call.work.computes) return;
  std::vector<const void*> held;
  for (auto& argument : arguments)
    if (argument.container && strchr("torL", argument.letter)) held.push_back(argument.container);
  size_t first = kernel.outputs ? held.size() - std::min<size_t>(held.size(), kernel.outputs) : 0, last = kernel.outputs ? held.size() : std::min<size_t>(1, held.size());
  auto clear = [&](const Tensor& tensor) {
    static const size_t sizes[] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1};
    size_t bytes = tensor.dtype == 27 ? 2 : tensor.dtype >= 0 && tensor.dtype <= 12 ? sizes[tensor.dtype] : 0, span = bytes ? 1 : 0;
    for (size_t i = 0; i < tensor.dims.size(); i++) span = tensor.dims[i] && span ? span + (tensor.dims[i] - 1) * tensor.strides[i] : 0;
    bool floating = tensor.dtype == 0 || tensor.dtype == 1 || tensor.dtype == 11 || tensor.dtype == 27;
    if (span && tensor.data && clock::moves(double(span * bytes), floating)) call.cleared.push_back({tensor.data + tensor.offset * bytes, span * bytes});
  };
  for (size_t i = first; i < last; i++) {
    if (kind_at(held[i]) == 't') clear(*static_cast<const Tensor*>(held[i]));
    else if (kind_at(held[i]) == 'L') for (auto& tensor : static_cast<const TensorList*>(held[i])->values) clear(tensor);
  }
}

// The stream's part of a call under the clock.
void pass_time(const Call& call, void (*compute)(const Call&)) {
  if (call.work.computes) compute(call);
  for (auto& result : call.cleared) memset(result.first, 0, result.second);
  clock::Nanos duration = call.work.duration;
  const bool fused = !call.work.fused.empty();
  if (fused) duration = clock::fused_time(call.group, call.name, call.work);
  clock::spend(call.name.substr(5) + call.work.shape, duration, fused || call.work.matmul ? clock::Span::Matmul : clock::Span::Kernel);
}
void compute(const Call& call) {
  char error[2000] = "";
  if (run_kernel(call.kernel, call.arguments.c_str(), error, sizeof error)) fail(kKernelFailed, call.name + ": " + error);
}

int refuse(const std::string& text) {
  say(text);
  fprintf(stderr, "[emulated ascend] %s\n", text.c_str());
  return kNoKernel;
}

}  // namespace
}  // namespace emulated

using namespace emulated;

API int emulated_prepare(int index, const uint64_t* integers, const double* floats, const uint64_t* stack) {
  clock::Section section;
  const std::string name = NAMES[index];
  count(name);
  auto known = kernels().find(name);
  const Arguments begin{integers, floats, stack};
  auto given = [&] { return " (its integers and addresses are " + passed(begin) + ")"; };
  if (!run_kernel) return refuse(name + ": emulated_ascend's kernels are not loaded (is the package installed in this environment?)");
  if (known == kernels().end()) {
    auto note = notes().find(name);
    return refuse(name + (note == notes().end() ? " has no kernel in emulated_ascend; its list of arguments is not known" : note->second) + given());
  }
  Arguments arguments = begin;
  std::string text = "[";
  int position = 0;
  bool tells_shape = false;
  std::vector<clock::Argument> priced;
  for (char letter : known->second.signature) {
    if (position++) text += ',';
    const std::string place = name + ", argument " + std::to_string(position) + " of " + std::to_string(known->second.signature.size());
    switch (letter) {
      case 'd': append(text, arguments.real()); break;
      case 'f': {
        double whole = arguments.real();
        float value;
        memcpy(&value, &whole, sizeof value);
        append(text, static_cast<double>(value));
        break;
      }
      case 'i': {
        uint64_t value = arguments.integer();
        if (kind_at_readable(reinterpret_cast<void*>(value))) return refuse(place + ": an integer is expected, a container is passed: the list of arguments is another one" + given());
        text += std::to_string(static_cast<int64_t>(value));
        if (clock::on()) priced.push_back({letter, nullptr, static_cast<int64_t>(value)});
        break;
      }
      case 'b': text += (arguments.integer() & 255) ? "true" : "false"; break;
      case 'c': {
        auto* value = reinterpret_cast<const char*>(arguments.integer());
        text += value ? '"' + std::string(value) + '"' : "null";
        if (clock::on()) priced.push_back({letter, nullptr, 0, value});
        break;
      }
      default: {
        auto* address = reinterpret_cast<const void*>(arguments.integer());
        char kind = kind_at_readable(address);
        bool optional = letter == 'o' || letter == 'p' || letter == 'z';
        bool fits = letter == 'o' || letter == 'r' ? kind == 't' : letter == 'z' ? kind == 's' : letter == 'p' ? kind != 0 : kind == letter;
        if (!address && optional) text += "null";
        else if (fits) append_container(text, address, kind);
        else return refuse(place + ": " + name_of(letter) + " is expected, " + (address ? name_of(kind) : "nothing") + " is passed: the list of arguments is another one" + given());
        tells_shape |= letter == 'r';
        if (clock::on()) priced.push_back({letter, address});
      }
    }
  }
  text += ']';
  auto* workspace = reinterpret_cast<uint64_t*>(arguments.integer());
  auto** executor = reinterpret_cast<Call**>(arguments.integer());
  auto is_place = [](const void* address) { return is_readable(address) && !kind_at(address); };
  if (!is_place(workspace) || !is_place(executor) || *workspace || *executor)
    return refuse(name + " is called with another number of arguments than the " + std::to_string(position) + " of its kernel" + given());
  *workspace = 0;
  *executor = new Call{name, text, known->second.number, tells_shape};
  if (clock::on()) price(**executor, known->second, priced);
  return 0;
}

API int emulated_execute(void*, uint64_t, void* executor, void* stream) {
  clock::Section section;
  std::shared_ptr<Call> call(static_cast<Call*>(executor));  // a graph runs it again
  bool waits = call->tells_shape;
  if (waits && graphs::refuse_wait(stream, (call->name + " tells the shape of its result").c_str())) waits = false;
  // Not asked behind the queue: a fast kernel's own failure would be its call's, after which torch_npu runs nothing more.
  int before = failure_code();
  enqueue(stream, Task::Work, [call] {
    if (clock::on()) pass_time(*call, compute);
    else compute(*call);
  }, call->name.substr(5));
  if (!waits) return before;
  drain(stream);
  return failure_code();
}

// A kernel tells the shape of its result, whose size only its computation knows.
API void emulated_set_shape(void* container, const int64_t* dims, int number) {
  static_cast<Tensor*>(container)->dims.assign(dims, dims + number);
}
API void emulated_register(const char* name, const char* signature, int number, int outputs) { kernels()[name] = {signature, number, outputs}; }
API void emulated_note(const char* name, const char* text) { notes()[name] = text; }
API void emulated_set_run(Run run) { run_kernel = run; }
API int emulated_is_named(const char* name) {
  for (const char* known : NAMES)
    if (!strcmp(known, name)) return 1;
  return 0;
}
