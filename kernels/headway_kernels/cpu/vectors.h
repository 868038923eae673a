/* Vectors of float32 as wide as one register of the instruction set that this file is compiled for.
 *
 * Owns: the width, loads and stores, reductions, and the exponential function.
 * Must not know: what is computed with them.
 */
#ifndef HEADWAY_VECTORS_H
#define HEADWAY_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* LANES: floats in a register. TILE_ROWS: rows of a product whose sums (TILE_ROWS x 2 registers) stay in registers. */
#if defined(__AVX512F__)
#define LANES 16
#define TILE_ROWS 12
#elif defined(__AVX2__)
#define LANES 8
#define TILE_ROWS 6
#else
#define LANES 4
#define TILE_ROWS 8
#endif

/* A matrix unit for products of bfloat16s and of bytes, with tile registers. */
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

/* DO(rows) for every number of rows of a tile: a loop over rows is unrolled only if their number is known. */
#if TILE_ROWS == 12
#define EACH_TILE_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#elif TILE_ROWS == 8
#define EACH_TILE_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
#else
#define EACH_TILE_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("clang loop unroll(full)")

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t unaligned_ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec value) { *(unaligned_vec *)to = value; }
INLINE vec splat(float value) { return value - (vec){0}; }
INLINE ivec splat_int(int32_t value) { return value - (ivec){0}; }
INLINE vec bits_as_vec(ivec bits) { return (vec)bits; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return __builtin_elementwise_max(a, b); }

INLINE ivec lane_numbers(void) {
    ivec lanes;
    UNROLLED
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

INLINE float sum_of(vec value) {
    float sum = 0.0f;
    UNROLLED
    for (int i = 0; i < LANES; i++) sum += value[i];
    return sum;
}

INLINE float largest_of(vec value) { return __builtin_reduce_max(value); }

/* e^x to about one unit in the last place; exactly 1 at 0, exactly 0 below -87.3 (denormals included). x <= 88.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2 (Cody & Waite 1980: ln 2 in two parts); e^r by a polynomial; 2^n by its bits.
 */
INLINE vec exponential(vec x) {
    const float round_by = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to an integer */
    ivec vanishes = x < -87.3f;
    x = choose(vanishes, (vec){0}, x); /* so that no infinity is converted to an integer below */
    vec shifted = x * 1.44269504088896341f + round_by;
    vec n = shifted - round_by;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = __builtin_convertvector(n, ivec) + 127;
    vec result = p * bits_as_vec(power << 23);
    return choose(vanishes, (vec){0}, result);
}

/* x / (1 + e^-x), the sigmoid linear unit. */
INLINE vec silu(vec x) {
    vec magnitude = bits_as_vec((ivec)x & splat_int(0x7fffffff));
    vec decay = exponential(-magnitude); /* e^-|x| cannot overflow */
    vec sigmoid = choose(x < 0.0f, decay, splat(1.0f)) / (1.0f + decay);
    return x * sigmoid;
}

#endif
