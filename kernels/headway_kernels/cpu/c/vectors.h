/* Vectors of float32 as wide as one register of the instruction set that this file is compiled for.
 *
 * Owns: the width, the cache line, loads and stores, reductions, the exponential function, and activations.
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

#define LINE 64 /* bytes of a cache line */

/* A matrix unit for products of bfloat16s and of bytes, with tile registers. */
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif
#define TILE_SIDE 16 /* rows of a tile register, and its columns of 4 bytes */

/* An instruction for pairs of bfloat16s, which only some processors of this variant have. */
#define HAS_PAIR_PRODUCTS (LANES == 16)

/* DO(rows) for every number of rows of a tile: a loop over rows is unrolled only if their number is known. */
#if TILE_ROWS == 12
#define EACH_TILE_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#elif TILE_ROWS == 8
#define EACH_TILE_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
#else
#define EACH_TILE_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#endif

/* The sums of a tile stay in registers if all that touches them is one function without loops. A compiler that adds
 * checks to each access takes minutes for functions of that size: with LOOPS_STAY it leaves them as they are written.
 */
#ifdef LOOPS_STAY
#define INLINE static inline
#define UNROLLED
#else
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("clang loop unroll(full)")
#endif
#define APART __attribute__((noinline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t unaligned_ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec value) { *(unaligned_vec *)to = value; }

/* The first `count` floats, at most LANES; the others are zeros. */
INLINE vec load_some(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
    vec some = {0};
    memcpy(&some, from, (size_t)count * sizeof *from);
    return some;
}

INLINE void store_some(float *to, vec value, int64_t count) {
    if (count >= LANES)
        store(to, value);
    else
        memcpy(to, &value, (size_t)count * sizeof *to);
}

INLINE vec splat(float value) { return value - (vec){0}; }
INLINE ivec splat_int(int32_t value) { return value - (ivec){0}; }
INLINE vec bits_as_vec(ivec bits) { return (vec)bits; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return __builtin_elementwise_max(a, b); }

/* Two numbers of LANES each, as bfloat16s: `pairs` has the first ones in the lower halves. */
INLINE vec of_lower_halves(ivec pairs) { return bits_as_vec(pairs << 16); }
INLINE vec of_upper_halves(ivec pairs) { return bits_as_vec(pairs & splat_int((int32_t)0xffff0000)); }

/* LANES numbers that are stored as bfloat16s. */
INLINE vec load_bfloat16(const uint16_t *from) {
    typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
    return bits_as_vec(__builtin_convertvector(*(const halves *)from, ivec) << 16);
}

/* The products of two bfloat16s and two others are added to each lane. The instruction is in words, as the compiler
 * takes it only for a variant all of whose processors have it: whoever calls this must know. */
INLINE vec add_bfloat16_products(vec sum, ivec pairs, ivec others) {
#if HAS_PAIR_PRODUCTS
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(others));
    return sum;
#else
    sum += of_upper_halves(pairs) * of_upper_halves(others);
    return sum + of_lower_halves(pairs) * of_lower_halves(others);
#endif
}

typedef int32_t bfloat16_pair __attribute__((may_alias));
typedef int32_t half_ivec __attribute__((vector_size(LANES * 2), aligned(4), may_alias));

/* The nearest bfloat16s, side by side. */
INLINE half_ivec as_pairs(vec values) {
#if HAS_PAIR_PRODUCTS
    half_ivec pairs;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(pairs) : "v"(values));
    return pairs;
#else
    typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
    typedef uint32_t words __attribute__((vector_size(LANES * 4)));
    const words bits = (words)values, odd = (bits >> 16) & 1;
    const words rounded = (words)choose(values == values, (vec)(bits + 0x7fff + odd), splat(NAN));
    return (half_ivec) __builtin_convertvector(rounded >> 16, halves);
#endif
}

INLINE ivec lane_numbers(void) {
    ivec lanes;
    UNROLLED
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

/* The lower or upper halves of two, lane by lane in turn. */
#if LANES == 16
#define ALTERNATE(a, b, from)                                                                                          \
    __builtin_shufflevector(a, b, from, 16 + from, from + 1, 17 + from, from + 2, 18 + from, from + 3, 19 + from,      \
                            from + 4, 20 + from, from + 5, 21 + from, from + 6, 22 + from, from + 7, 23 + from)
#elif LANES == 8
#define ALTERNATE(a, b, from)                                                                                          \
    __builtin_shufflevector(a, b, from, 8 + from, from + 1, 9 + from, from + 2, 10 + from, from + 3, 11 + from)
#else
#define ALTERNATE(a, b, from) __builtin_shufflevector(a, b, from, 4 + from, from + 1, 5 + from)
#endif

/* Transpose a square of words. Each round lets the first half of the vectors and the second alternate. */
INLINE void transpose(ivec square[LANES]) {
    UNROLLED
    for (int round = 1; round < LANES; round *= 2) {
        ivec before[LANES];
        UNROLLED
        for (int i = 0; i < LANES; i++) before[i] = square[i];
        UNROLLED
        for (int i = 0; i < LANES / 2; i++) {
            square[2 * i] = ALTERNATE(before[i], before[i + LANES / 2], 0);
            square[2 * i + 1] = ALTERNATE(before[i], before[i + LANES / 2], LANES / 2);
        }
    }
}

/* Lanes whose numbers differ in `bit` alone change places. */
#define OF_FOUR(first, bit) (first) ^ (bit), ((first) + 1) ^ (bit), ((first) + 2) ^ (bit), ((first) + 3) ^ (bit)
#if LANES == 16
#define EXCHANGED(value, bit)                                                                                          \
    __builtin_shufflevector(value, value, OF_FOUR(0, bit), OF_FOUR(4, bit), OF_FOUR(8, bit), OF_FOUR(12, bit))
#elif LANES == 8
#define EXCHANGED(value, bit) __builtin_shufflevector(value, value, OF_FOUR(0, bit), OF_FOUR(4, bit))
#else
#define EXCHANGED(value, bit) __builtin_shufflevector(value, value, OF_FOUR(0, bit))
#endif

/* All lanes, in pairs, and pairs of pairs: one after the other, each would wait for the one before. */
INLINE float sum_of(vec value) {
#if LANES == 16
    value += EXCHANGED(value, 8);
#endif
#if LANES >= 8
    value += EXCHANGED(value, 4);
#endif
    value += EXCHANGED(value, 2);
    value += EXCHANGED(value, 1);
    return value[0];
}

INLINE float largest_of(vec value) {
#if LANES == 16
    value = larger(value, EXCHANGED(value, 8));
#endif
#if LANES >= 8
    value = larger(value, EXCHANGED(value, 4));
#endif
    value = larger(value, EXCHANGED(value, 2));
    value = larger(value, EXCHANGED(value, 1));
    return value[0];
}

/* e^x to about one unit in the last place, for x within 87.3; anything beyond.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2 (Cody & Waite 1980: ln 2 in two parts); e^r by a polynomial; 2^n by its bits.
 */
INLINE vec exponential_within(vec x) {
    const float round_by = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which is in the lowest bits */
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
    return p * bits_as_vec(((ivec)shifted << 23) + (127 << 23));
}

/* The same for any x up to 88; exactly 1 at 0, exactly 0 below -87.3 (denormals included). */
INLINE vec exponential(vec x) { return choose(x < -87.3f, (vec){0}, exponential_within(x)); }

INLINE vec magnitude_of(vec x) { return bits_as_vec((ivec)x & splat_int(0x7fffffff)); }

/* 1 + e^-x, as if x were at most 87 from 0. */
INLINE vec decay_and_one(vec x) {
    const vec bounded = __builtin_elementwise_min(__builtin_elementwise_max(x, splat(-87.0f)), splat(87.0f));
    return 1.0f + exponential_within(-bounded);
}

/* NaN stays. */
INLINE vec sigmoid(vec x) { return choose(x == x, 1.0f / decay_and_one(x), x); }

/* ln(1 + e^x); from 20 on the two are the same, as in PyTorch. */
static inline float soft_plus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* x / (1 + e^-x), the sigmoid linear unit. */
INLINE vec silu(vec x) { return x / decay_and_one(x); }

/* x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3) (Hendrycks & Gimpel 2016, arXiv 1606.08415), as
 * (1 + tanh(u)) / 2 is the sigmoid of 2 u. */
INLINE vec gelu_tanh(vec x) { return x * sigmoid(1.59576912160573f * (x + 0.044715f * x * x * x)); }

/* x times the normal distribution function. The complementary error function is a fraction and a polynomial in an
 * exponent (Press et al., Numerical Recipes, erfcc), to 1.2e-7 of itself. */
INLINE vec gelu(vec x) {
    vec z = magnitude_of(x) * 0.707106781186548f;
    vec t = 1.0f / (1.0f + 0.5f * z);
    vec p = t * 0.17087277f - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    vec half_tail = 0.5f * t * exponential(p * t - 1.26551223f - z * z);
    return x * choose(x < 0.0f, half_tail, 1.0f - half_tail);
}

/* Small arguments by a polynomial (Moshier, Cephes, tanhf), others by e^2x. */
INLINE vec tangent(vec x) {
    vec magnitude = magnitude_of(x), square = x * x;
    vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    vec decay = exponential(-2.0f * magnitude);
    vec large = (1.0f - decay) / (1.0f + decay);
    return choose(magnitude < 0.625f, p * square * x + x, choose(x < 0.0f, -large, large));
}

/* The hyperbolic tangent bounds x by `bound`. */
INLINE vec capped(vec x, float bound) { return bound * tangent(x / bound); }

#endif
