/* Floats of 4 bits (E2M1; Rouhani et al. 2023, arXiv 2310.10537), as integers: twice what they stand for.
 *
 * Owns: these numbers. Must not know: where codes lie.
 */
#ifndef HEADWAY_FP4_H
#define HEADWAY_FP4_H

#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define FP4_MOST 12

/* The number of each byte, which is below 16, with `added`. */
INLINE ivec fp4_numbers(ivec codes, const int added) {
#if defined(__AVX2__)
    typedef int8_t table_bytes __attribute__((vector_size(16)));
    const table_bytes numbers = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const __m128i table = (__m128i)(numbers + (int8_t)added);
#if defined(__AVX512F__)
    return (ivec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#else
    return (ivec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#endif
#else
    typedef int8_t bytes __attribute__((vector_size(LANES * 4)));
    const bytes from = (bytes)codes, exponents = (from >> 1) & 3, are_normal = exponents > 0; /* -1 or 0 */
    const bytes magnitudes = ((from & 1) | (are_normal & 2)) << (exponents + are_normal), signs = -(from >> 3);
    return (ivec)(((magnitudes ^ signs) - signs) + (int8_t)added);
#endif
}

#endif
