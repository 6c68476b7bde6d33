"""What differs between the languages that kernels are written in: OpenCL C, CUDA C and Metal.

Generated code is C with OpenCL's words for types and conversions. A language that has other words
for them gets OpenCL's in a prelude. So a new language is one entry of DIALECTS.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """How a language spells what they don't share.

    kernel    begins a kernel's definition
    pointer   the space that buffers lie in
    shared    the space of memory that the work-items of a group share, in a pointer's type
    private   the space of a work-item's own memory, in a pointer's type
    room      begins the definition of such memory
    group     number of a work-group; alone: the same where each work-item is one of its own
    item      number of a work-item in its group
    barrier   all items of a group get here before one goes on, and see what the others wrote
    binding   behind a kernel's parameter number {}, if the language wants one
    number    a kernel's parameter that is an int called {}
    builtins  parameters that give a kernel its coordinates
    vectors   there are vector types, and pointers to them that lie anywhere
    shuffle   the value that {} has in the item of the same 32 whose number differs in the bit {}
    halves    float16 to float32 and back: bodies of functions of a ushort h and of a float x
    prelude   what makes OpenCL's words known
    """

    kernel: str
    pointer: str
    shared: str
    room: str
    group: str
    alone: str
    item: str
    barrier: str
    binding: str = ""
    number: str = "int {}"
    builtins: tuple[str, ...] = ()
    vectors: bool = False
    private: str = ""
    shuffle: str = ""
    halves: tuple[str, str] = (
        "return vload_half(0, (const __private half*)&h);",
        "ushort r; vstore_half_rte(x, 0, (__private half*)&r); return r;",
    )
    prelude: str = ""


CUDA = """
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
#ifndef __LP64__  // there a long has 32 bits
#define long long long
#endif
typedef unsigned long ulong;
#define restrict __restrict__
#define NAN __int_as_float(0x7fc00000)
#define INFINITY __int_as_float(0x7f800000)
#define as_char(x) ((char)(x))
#define as_uchar(x) ((uchar)(x))
#define as_short(x) ((short)(x))
#define as_ushort(x) ((ushort)(x))
#define as_long(x) ((long)(x))
#define as_ulong(x) ((ulong)(x))
inline float as_float(int x) { return __int_as_float(x); }
inline float as_float(uint x) { return __uint_as_float(x); }
inline float as_float(float x) { return x; }
inline int as_int(float x) { return __float_as_int(x); }
inline int as_int(int x) { return x; }
inline int as_int(uint x) { return (int)x; }
inline uint as_uint(float x) { return __float_as_uint(x); }
inline uint as_uint(int x) { return (uint)x; }
inline uint as_uint(uint x) { return x; }
#ifdef __CUDACC_RTC__
inline float zoo_float(ushort h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
inline ushort zoo_half(float x) {
  ushort h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
#endif
"""

METAL = """
#include <metal_stdlib>
using namespace metal;
#define restrict
#define as_char(x) as_type<char>(x)
#define as_uchar(x) as_type<uchar>(x)
#define as_short(x) as_type<short>(x)
#define as_ushort(x) as_type<ushort>(x)
#define as_int(x) as_type<int>(x)
#define as_uint(x) as_type<uint>(x)
#define as_long(x) as_type<long>(x)
#define as_ulong(x) as_type<ulong>(x)
#define as_float(x) as_type<float>(x)
"""

DIALECTS = {
    "opencl-cpu": Dialect(
        kernel="__kernel __attribute__((reqd_work_group_size(1,1,1))) void",
        pointer="__global",
        shared="__local",
        room="__local",
        group="get_group_id(0)",
        alone="get_group_id(0)",
        item="0",
        barrier="barrier(CLK_LOCAL_MEM_FENCE)",
        vectors=True,
    ),
    "opencl-gpu": Dialect(
        kernel="__kernel void",
        pointer="__global",
        shared="__local",
        room="__local",
        group="(int)get_group_id(0)",
        alone="(int)get_global_id(0)",
        item="(int)get_local_id(0)",
        barrier="barrier(CLK_LOCAL_MEM_FENCE)",
    ),
    "cuda": Dialect(
        kernel='extern "C" __global__ void',
        pointer="",
        shared="",
        room="__shared__ __align__(16)",
        group="(int)blockIdx.x",
        alone="(int)(blockIdx.x * blockDim.x + threadIdx.x)",
        item="(int)threadIdx.x",
        barrier="__syncthreads()",
        shuffle="__shfl_xor_sync(0xffffffffu, {}, {})",
        halves=(
            "return zoo_float(h);",
            "return zoo_half(x);",
        ),
        prelude=CUDA,
    ),
    "metal": Dialect(
        kernel="kernel void",
        pointer="device",
        shared="threadgroup",
        room="threadgroup",
        private="thread",
        group="(int)zoo_group",
        alone="(int)zoo_place",
        item="(int)zoo_item",
        barrier="threadgroup_barrier(mem_flags::mem_threadgroup)",
        binding=" [[buffer({})]]",
        number="constant int& {}",
        builtins=(
            "uint zoo_group [[threadgroup_position_in_grid]]",
            "uint zoo_place [[thread_position_in_grid]]",
            "uint zoo_item [[thread_position_in_threadgroup]]",
        ),
        halves=("return (float)as_type<half>(h);", "return as_type<ushort>((half)x);"),
        prelude=METAL,
    ),
}
