// Work-items of a GPU as fibers on one thread: a barrier lets all the others get there first.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace shim {
struct Item {
  std::vector<char> stack;
  ucontext_t first;
  jmp_buf at;
  bool begun = false, done = false;
};
inline std::vector<Item> items;
inline jmp_buf scheduler;
inline ucontext_t home;
inline uint group, item, size;  // of the work-item that runs
inline uint64_t cells[1024];    // what items show each other
inline float fragments[1024][6];

// Run the items one after the other until each has met a barrier, or ended; true if any hasn't.
inline bool turn() {
  bool more = false;
  for (item = 0; item < size; item++) {
    if (items[item].done) continue;
    if (_setjmp(scheduler) == 0) {
      if (items[item].begun) _longjmp(items[item].at, 1);
      items[item].begun = true;
      setcontext(&items[item].first);
    }
    more |= !items[item].done;
  }
  return more;
}
inline void barrier() {
  if (_setjmp(items[item].at) == 0) _longjmp(scheduler, 1);
}
inline uint64_t other(uint64_t mine, uint which) {
  cells[item] = mine;
  barrier();
  const uint64_t found = cells[which];
  barrier();
  return found;
}
template <class T> T exchange(T mine, uint which) {
  uint64_t bits = 0;
  memcpy(&bits, &mine, sizeof mine);
  bits = other(bits, which);
  memcpy(&mine, &bits, sizeof mine);
  return mine;
}
template <class To, class From> To as(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same size");
  To to;
  memcpy(&to, &x, sizeof to);
  return to;
}
inline float from_half(ushort h) {
  const uint sign = (uint)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return as<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent) return as<float>(sign | (exponent + 112) << 23 | fraction << 13);
  return as<float>(sign | as<uint>((float)fraction * 0x1p-24f));
}
inline ushort to_half(float x) {
  const uint bits = as<uint>(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return (ushort)(sign | 0x7e00 | (size >> 13 & 0x3ff));
  if (size >= 0x477ff000) return (ushort)(sign | 0x7c00);  // 65520 and more
  if (size < 0x38800000)                                   // below 2**-14: the sum rounds
    return (ushort)(sign | (as<uint>(as<float>(size) + 0.5f) - 0x3f000000u));
  return (ushort)(sign | ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}

typedef uint64_t U;
inline U arguments[64];
inline void* code;
inline void (*before)();  // sets what differs between the items
// More arguments than a function has are ignored where integers are passed one by one.
inline void call() {
  if (before) before();
  const U* a = arguments;
  ((void (*)(U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U, U,
             U, U))code)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
                         a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19], a[20], a[21],
                         a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31]);
}
inline uint groups;
inline void fiber() {
  for (uint g = 0; g < groups; g++) {
    group = g;
    call();
    barrier();
  }
  items[item].done = true;
  _longjmp(scheduler, 1);
}
inline void launch(void* f, const U* given, uint count, uint how_many, uint team, bool together) {
  code = f;
  memcpy(arguments, given, count * sizeof(U));
  groups = how_many;
  size = team;
  if (!together) {
    for (group = 0; group < groups; group++)
      for (item = 0; item < size; item++) call();
    return;
  }
  if (items.size() < team) items.resize(team);
  for (uint i = 0; i < team; i++) {
    items[i].begun = items[i].done = false;
    items[i].stack.resize(1 << 16);
    getcontext(&items[i].first);
    items[i].first.uc_stack.ss_sp = items[i].stack.data();
    items[i].first.uc_stack.ss_size = items[i].stack.size();
    makecontext(&items[i].first, fiber, 0);
  }
  while (turn()) {}
}
}  // namespace shim
