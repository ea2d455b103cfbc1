// Which work on the device is ordered, and which only happened to run so: a clock for each stream
// and for the host, as a vector of how far each has seen the others.
//
// Memory is told apart by allocation. What is freed is forgotten, as an allocator with memory of its
// own for each stream allows.

#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace races {

using Key = int64_t;  // a device and its stream
using Clock = std::map<Key, int64_t>;
constexpr Key HOST = -1;
constexpr size_t MOST_TOLD = 20;

struct Access {
  Key stream = HOST;
  int64_t time = 0;
  std::string work;
};

struct Memory {
  Access write;
  std::map<Key, Access> reads;
};

struct Watch {
  std::mutex lock;
  bool is_on = false;
  std::map<Key, Clock> clocks;
  std::unordered_map<const void*, Memory> memory;
  std::vector<std::string> found;
};
inline Watch watch;

inline Key key_of(int device, int64_t stream) { return (int64_t(device) << 32) | stream; }

inline void merge(Clock& into, const Clock& from) {
  for (const auto& [key, time] : from)
    if (into[key] < time) into[key] = time;
}

// Work that the host launches comes after all that it has waited for.
inline int64_t launch(Key stream) {
  auto& clock = watch.clocks[stream];
  merge(clock, watch.clocks[HOST]);
  return ++clock[stream];
}

inline bool is_before(const Access& access, const Clock& now) {
  const auto seen = now.find(access.stream);
  return !access.time || (seen != now.end() && seen->second >= access.time);
}

inline void tell(const Access& first, const Access& second) {
  if (watch.found.size() < MOST_TOLD)
    watch.found.push_back(second.work + " on stream " + std::to_string(second.stream & 0xffffffff) +
                          " does not wait for " + first.work + " on stream " +
                          std::to_string(first.stream & 0xffffffff) + ", which uses the same memory");
}

inline void touch(const void* place, Key stream, int64_t time, bool writes, const std::string& work) {
  const Access mine{stream, time, work};
  const auto& now = watch.clocks[stream];
  auto& memory = watch.memory[place];
  if (!is_before(memory.write, now)) tell(memory.write, mine);
  if (!writes) {
    memory.reads[stream] = mine;
    return;
  }
  for (const auto& [key, read] : memory.reads)
    if (!is_before(read, now)) tell(read, mine);
  memory = Memory{mine, {}};
}

inline void forget(const void* place) {
  std::lock_guard<std::mutex> hold(watch.lock);
  if (watch.is_on) watch.memory.erase(place);
}

inline Clock recorded(Key stream) {
  std::lock_guard<std::mutex> hold(watch.lock);
  if (watch.is_on) launch(stream);
  return watch.is_on ? watch.clocks[stream] : Clock{};
}

// `who`, a stream or the host, goes on after an event.
inline void wait_for(Key who, const Clock& event) {
  std::lock_guard<std::mutex> hold(watch.lock);
  if (watch.is_on) merge(watch.clocks[who], event);
}

inline void host_waits_for(Key stream) {
  std::lock_guard<std::mutex> hold(watch.lock);
  if (watch.is_on) merge(watch.clocks[HOST], watch.clocks[stream]);
}

inline void host_waits_for_all() {
  std::lock_guard<std::mutex> hold(watch.lock);
  if (!watch.is_on) return;
  Clock all;
  for (const auto& [key, clock] : watch.clocks) merge(all, clock);
  watch.clocks[HOST] = all;
}

inline void start(bool is_on) {
  std::lock_guard<std::mutex> hold(watch.lock);
  watch.is_on = is_on;
  watch.clocks.clear();
  watch.memory.clear();
  watch.found.clear();
}

inline std::vector<std::string> found() {
  std::lock_guard<std::mutex> hold(watch.lock);
  return watch.found;
}

}  // namespace races
