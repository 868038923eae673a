/* Sums of one tile of inputs with one panel of weights, on the vector unit.
 *
 * Owns: the order in which a tile's products are added, and what is fetched meanwhile.
 * Must not know: where sums begin or end, or how codes are widened.
 */
#ifndef HEADWAY_VECTOR_SUMS_H
#define HEADWAY_VECTOR_SUMS_H

#include "inputs.h"
#include "linear.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define STRETCH 16 /* inputs, or quads of them, that a tile stores side by side for each row */

/* Steps of a sum: inputs, or quads of them. */
typedef struct {
    int64_t begin;
    int64_t end;
} range;

/* Memory that is fetched little by little: `lines` lines, 1 or 2, per step of a sum; a step later, `stride` bytes on.
 * From `end` on, it goes on at `then`. */
typedef struct {
    const char *at;
    const char *end;
    const char *then;
    int64_t lines;
    int64_t stride;
} fetching;

/* Before each stretch. */
INLINE void turn(fetching *ahead) {
    if (ahead->at < ahead->end) return;
    ahead->at = ahead->then;
    ahead->end = ahead->then + ((int64_t)1 << 40);
}

INLINE void fetch(fetching *ahead) {
    __builtin_prefetch(ahead->at);
    if (PANEL * 4 > LINE && ahead->lines > 1) __builtin_prefetch(ahead->at + LINE);
    ahead->at += ahead->stride;
}

INLINE int64_t steps_of_stretch(range steps, int64_t from) {
    return steps.end - from < STRETCH ? steps.end - from : STRETCH;
}

/* The products of an input of each row. `turn` counts inputs: each other one takes the rows backwards, without which
 * Zen 4 puts off some sums of five rows. */
INLINE void add_products(const int rows, const int64_t turn, const float *column, vec low, vec high, vec (*sums)[2]) {
    UNROLLED
    for (int i = 0; i < rows; i++) {
        const int row = turn % 2 == 0 ? i : rows - 1 - i;
        const vec input = splat(column[row * STRETCH]);
        sums[row][0] += input * low;
        sums[row][1] += input * high;
    }
}

/* `weights` of inputs from `inputs.begin` on, which may be within a stretch. */
INLINE void sum_float32(const int rows, const float *tile, const float *weights, range inputs, vec (*sums)[2],
                        fetching ahead) {
    for (int64_t k = inputs.begin, count; k < inputs.end; k += count) {
        const int64_t place = k % STRETCH;
        const float *column = tile + (k - place) * rows + place;
        count = STRETCH - place < inputs.end - k ? STRETCH - place : inputs.end - k;
        turn(&ahead);
        int64_t i = 0;
        for (; i + 1 < count; i += 2, weights += 2 * PANEL) {
            fetch(&ahead);
            add_products(rows, 0, column + i, load(weights), load(weights + LANES), sums);
            fetch(&ahead);
            add_products(rows, 1, column + i + 1, load(weights + PANEL), load(weights + PANEL + LANES), sums);
        }
        if (i == count) continue;
        fetch(&ahead);
        add_products(rows, 0, column + i, load(weights), load(weights + LANES), sums);
        weights += PANEL;
    }
}

INLINE ivec pairs_at(const uint16_t *weights) { return *(const unaligned_ivec *)weights; }

/* The inputs of a row end with zeros, so a last pair may be half full. */
INLINE void sum_bfloat16(const int rows, const float *tile, const uint16_t *weights, range inputs, vec (*sums)[2],
                         fetching ahead) {
    for (int64_t k = inputs.begin; k < inputs.end; k += STRETCH) {
        const float *column = tile + k * rows;
        const int64_t count = steps_of_stretch(inputs, k);
        turn(&ahead);
        for (int64_t i = 0; i < count; i += PAIR, weights += PAIR * PANEL) {
            fetch(&ahead);
            add_products(rows, 0, column + i, of_lower_halves(pairs_at(weights)),
                         of_lower_halves(pairs_at(weights + PANEL)), sums);
            __asm__("" : "+r"(weights)); /* so that they are loaded again: the sums need the registers */
            add_products(rows, 1, column + i + 1, of_upper_halves(pairs_at(weights)),
                         of_upper_halves(pairs_at(weights + PANEL)), sums);
        }
    }
}

/* The products of a pair of inputs of each row. */
INLINE void add_products_of_pairs(const int rows, const int32_t *column, ivec low, ivec high, vec (*sums)[2]) {
    UNROLLED
    for (int row = 0; row < rows; row++) {
        const ivec inputs = splat_int(column[row * STRETCH]);
        sums[row][0] = add_bfloat16_products(sums[row][0], low, inputs);
        sums[row][1] = add_bfloat16_products(sums[row][1], high, inputs);
    }
}

INLINE void sum_pairs(const int rows, const int32_t *tile, const uint16_t *weights, range pairs, vec (*sums)[2],
                      fetching ahead) {
    for (int64_t k = pairs.begin; k < pairs.end; k += STRETCH) {
        const int32_t *column = tile + k * rows;
        const int64_t count = steps_of_stretch(pairs, k);
        turn(&ahead);
        for (int64_t i = 0; i < count; i++, weights += PAIR * PANEL) {
            fetch(&ahead);
            add_products_of_pairs(rows, column + i, pairs_at(weights), pairs_at(weights + PANEL), sums);
        }
    }
}

#if MULTIPLIES_BYTES

/* Exact in int32: 4 products of unsigned and signed bytes are added to each lane. */
INLINE ivec add_quad_products(ivec sum, ivec weights, const code *inputs) {
    int32_t four;
    memcpy(&four, inputs, QUAD);
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)splat_int(four));
}

#else

/* Exact in int32: the products of two 16-bit numbers and two others are added to each lane. */
INLINE ivec add_pair_products(ivec sum, ivec weights, const code *inputs) {
    int32_t two;
    memcpy(&two, inputs, 2 * sizeof *inputs);
    const ivec pair = splat_int(two);
#if defined(__AVX2__) && LANES == 8
    return sum + (ivec)_mm256_madd_epi16((__m256i)weights, (__m256i)pair);
#else
    return sum + ((weights << 16) >> 16) * ((pair << 16) >> 16) + (weights >> 16) * (pair >> 16);
#endif
}

/* The same of 4 unsigned bytes and 4 inputs. */
INLINE ivec add_quad_products(ivec sum, ivec weights, const code *inputs) {
    const ivec bytes = splat_int(0x00ff00ff);
    sum = add_pair_products(sum, weights & bytes, inputs);
    return add_pair_products(sum, (weights >> 8) & bytes, inputs + 2);
}

#endif

#if MULTIPLIES_BYTES

/* A quad of inputs of each row, with both halves of a panel. */
INLINE void add_int8_products(const int rows, const code *column, const char *weights, ivec (*sums)[2]) {
    const ivec low = *(const unaligned_ivec *)weights, high = *(const unaligned_ivec *)(weights + LANES * QUAD);
    UNROLLED
    for (int row = 0; row < rows; row++) {
        const code *inputs = column + row * STRETCH * QUAD;
        sums[row][0] = add_quad_products(sums[row][0], low, inputs);
        sums[row][1] = add_quad_products(sums[row][1], high, inputs);
    }
}

#else

/* The same, half by half: beside the sums, registers hold the widened weights of one half. */
INLINE void add_int8_products(const int rows, const code *column, const char *weights, ivec (*sums)[2]) {
    UNROLLED
    for (int half = 0; half < 2; half++) {
        const ivec of_half = *(const unaligned_ivec *)(weights + half * LANES * QUAD);
        UNROLLED
        for (int row = 0; row < rows; row++)
            sums[row][half] = add_quad_products(sums[row][half], of_half, column + row * STRETCH * QUAD);
        __asm__("" : "+r"(column)); /* so that inputs are loaded again */
    }
}

#endif

INLINE void sum_int8(const int rows, const code *tile, const char *weights, range quads, ivec (*sums)[2],
                     fetching ahead) {
    for (int64_t k = quads.begin; k < quads.end; k += STRETCH) {
        const code *column = tile + k * rows * QUAD;
        const int64_t count = steps_of_stretch(quads, k);
        turn(&ahead);
        for (int64_t i = 0; i < count; i++, weights += PANEL * QUAD) {
            fetch(&ahead);
            add_int8_products(rows, column + i * QUAD, weights, sums);
        }
    }
}

#endif
