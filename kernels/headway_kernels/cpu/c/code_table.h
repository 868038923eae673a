/* Codes of 4 bits that stand for 16 integers of 8 bits: floats (E2M1), each as twice its value, or unequal steps.
 *
 * Owns: looking them up in a register. Must not know: where codes lie, or which integers a checkpoint's codes have.
 */
#ifndef HEADWAY_CODE_TABLE_H
#define HEADWAY_CODE_TABLE_H

#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define CODES_OF_TABLE 16

typedef struct {
    int8_t integers[CODES_OF_TABLE];
    float numbers[CODES_OF_TABLE]; /* the same */
} code_table;

/* A table of these integers with `added`, which may take their bytes beyond those that have a sign. */
static inline code_table table_of(const int8_t *integers, int added) {
    code_table made;
    for (int code = 0; code < CODES_OF_TABLE; code++) {
        made.integers[code] = (int8_t)(integers[code] + added);
        made.numbers[code] = integers[code];
    }
    return made;
}

/* The integer of each byte, which is below 16. */
INLINE ivec integers_of(ivec codes, const code_table *table) {
#if defined(__AVX512F__)
    const __m128i integers = _mm_loadu_si128((const __m128i *)table->integers);
    return (ivec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(integers), (__m512i)codes);
#elif defined(__AVX2__)
    const __m128i integers = _mm_loadu_si128((const __m128i *)table->integers);
    return (ivec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(integers), (__m256i)codes);
#else
    return (ivec)vqtbl1q_s8(vld1q_s8(table->integers), (uint8x16_t)codes);
#endif
}

#endif
