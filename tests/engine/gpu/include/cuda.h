// What NVRTC knows by itself, for generated CUDA C that runs on a CPU.
#pragma once
#include "items.h"
#include <algorithm>
#include <cmath>

#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;
struct shim_index {
  uint* value;
  operator uint() const { return *value; }
};
struct shim_place {
  shim_index x;
};
static const shim_place threadIdx{{&shim::item}}, blockIdx{{&shim::group}}, blockDim{{&shim::size}};

inline float __int_as_float(int x) { return shim::as<float>(x); }
inline float __uint_as_float(uint x) { return shim::as<float>(x); }
inline int __float_as_int(float x) { return shim::as<int>(x); }
inline uint __float_as_uint(float x) { return shim::as<uint>(x); }
inline float sin(float x) { return std::sin(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float trunc(float x) { return std::trunc(x); }
inline void __syncthreads() { shim::barrier(); }
template <class T> T __shfl_xor_sync(uint, T x, int n) { return shim::exchange(x, shim::item ^ n); }
inline float zoo_float(ushort h) { return shim::from_half(h); }
inline ushort zoo_half(float x) { return shim::to_half(x); }

// Each of 32 items holds, of a row-major 16 x 16 left factor, the words (row, column) = (g, q),
// (g + 8, q), (g, q + 4), (g + 8, q + 4), of a right one by columns (g, q), (g, q + 4), and of the
// sums (g, 2 q), (g, 2 q + 1), (g + 8, 2 q), (g + 8, 2 q + 1); g = item / 4, q = item % 4, a word
// is two numbers. PTX ISA, "Matrix Fragments for mma.m16n8k16".
inline void zoo_mma(float* d, const uint* a, const uint* b) {
  static uint left[1024][4], right[1024][2];
  const uint me = shim::item, first = me / 32 * 32, g = me % 32 / 4, q = me % 4;
  memcpy(left[me], a, sizeof left[me]);
  memcpy(right[me], b, sizeof right[me]);
  shim::barrier();
  for (uint e = 0; e < 4; e++) {
    const uint row = g + e / 2 * 8, column = 2 * q + e % 2;
    for (uint k = 0; k < 16; k++) {
      const uint x = left[first + row % 8 * 4 + k / 2 % 4][row / 8 + k / 8 * 2];
      const uint w = right[first + column * 4 + k / 2 % 4][k / 8];
      const uint x16 = k % 2 ? x & 0xffff0000u : x << 16, w16 = k % 2 ? w & 0xffff0000u : w << 16;
      d[e] += shim::as<float>(x16) * shim::as<float>(w16);
    }
  }
  shim::barrier();
}
extern "C" void shim_launch(void* f, const uint64_t* given, uint count, uint groups, uint team,
                            bool together) {
  shim::before = nullptr;
  shim::launch(f, given, count, groups, team, together);
}
