/* Codes of 4 bits that stand for 16 numbers, such as twice the values of floats (E2M1), or unequal steps.
 *
 * Owns: looking them up in a register. Must not know: where codes lie, or which numbers a checkpoint's codes have.
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
    float numbers[CODES_OF_TABLE];
} code_table;

/* A table of these numbers. `integers`, of those that are integers of 8 bits, are what the instruction takes: with
 * `added`, they may be beyond bytes that have a sign. */
static inline code_table table_of(const float *numbers, int added) {
    code_table made;
    for (int code = 0; code < CODES_OF_TABLE; code++) {
        const float number = numbers[code];
        made.integers[code] = number >= -128 && number < 128 ? (int8_t)((int)number + added) : 0;
        made.numbers[code] = number;
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

/* The number of the lowest 4 bits of each lane, whatever stands above. */
INLINE vec numbers_of(ivec codes, const float *numbers) {
#if defined(__AVX512F__)
    return (vec)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(numbers));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)load(numbers), (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)load(numbers + LANES), (__m256i)codes);
    return (vec)_mm256_blendv_ps(low, high, (__m256)(codes << 28)); /* by the highest bit, the fourth of the code */
#else
    const uint8x16x4_t bytes = vld1q_u8_x4((const uint8_t *)numbers);
    const uint8x16_t first = (uint8x16_t)((codes & 15) * 0x04040404 + 0x03020100);
    return (vec)vqtbl4q_u8(bytes, first);
#endif
}

#endif
