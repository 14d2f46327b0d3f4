// A mark: a record of an event. Who waits for it has the mark, so that a later record of the event changes nothing for it.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "clock.h"
#include "races.h"
#include "runtime.h"

namespace emulated {

struct Mark {
  std::mutex lock;
  std::condition_variable came;
  bool done = false, communicates = false;
  uint64_t capture = 0;  // the number of the capture in which it was recorded: it never comes itself
  double at = 0;
  clock::Nanos moment = 0;  // of the virtual clock
  races::Clock before;  // what lies before it
  void set() {
    std::lock_guard<std::mutex> hold(lock);
    done = true;
    at = seconds();
    if (clock::on()) {
      moment = clock::lane()->now;
      communicates = clock::lane()->communicates;
      at = double(moment) * 1e-9;
    }
    came.notify_all();
  }
  bool is_done() {
    if (!clock::on()) {
      std::lock_guard<std::mutex> hold(lock);
      return done;
    }
    wait(2);  // the stream's thread may be behind its own time
    clock::Nanos now = clock::host();
    std::lock_guard<std::mutex> hold(lock);
    return done && moment <= now;
  }
  bool wait(int milliseconds = -1) {
    std::unique_lock<std::mutex> hold(lock);
    if (milliseconds >= 0) return came.wait_for(hold, std::chrono::milliseconds(milliseconds), [this] { return done; });
    came.wait(hold, [this] { return done; });
    return true;
  }
};

}  // namespace emulated
