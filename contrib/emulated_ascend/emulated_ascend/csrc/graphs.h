// Graphs: what is queued on a captured stream is kept, and is queued again by each replay, without the host.
//
// A capture begins with one stream. Another joins it where it waits for a mark of the capture, and has to be waited for before the
// capture ends. The host may not wait for a captured stream, and a captured stream not for a mark from outside: the capture is invalid.
#pragma once
#include <functional>
#include <string>

#include "runtime.h"

namespace emulated::graphs {

// Keep a task, if its stream is captured; whether it was kept.
bool keep(void* stream, Task kind, const std::function<void()>& run, const std::string& name);
// Keep the record of a mark, if its stream is captured; whether it was kept.
bool keep_mark(void* stream, const MarkOf& mark);
// Keep the wait of a stream for a mark, if one of them is of a capture; whether it was kept, or refused with an error code.
bool keep_wait(void* stream, const MarkOf& mark, int* error);
// The host asks for what a capture cannot give: `stream`, nullptr for all, or a mark is to be waited for. Returns an error code, or 0.
int refuse_wait(void* stream, const char* what);
int refuse_wait(const MarkOf& mark, const char* what);

}  // namespace emulated::graphs
