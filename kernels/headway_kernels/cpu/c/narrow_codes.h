/* Codes that are rounded to bfloat16 where they are multiplied: on the matrix unit, and with the vector unit's
 * instruction for pairs.
 *
 * Owns: what such codes are widened to.
 * Must not know: how pairs are multiplied.
 */
#ifndef HEADWAY_NARROW_CODES_H
#define HEADWAY_NARROW_CODES_H

#include "codes.h"

#if HAS_PAIR_PRODUCTS

#include <immintrin.h>

/* Codes of groups whose sums are scaled: of 4 bits, which are looked up, without and with zero points of their groups,
 * and floats of 8 bits. */
enum narrow_kind { WITHOUT_ZEROS, WITH_ZEROS, FLOATS };

static inline enum narrow_kind kind_of(const linear *with) {
    return with->form == FORM_FP8 ? FLOATS : with->has_minima ? WITH_ZEROS : WITHOUT_ZEROS;
}

/* The codes of a panel, and of one of its groups the zero points. */
typedef struct {
    const char *codes;
    const int32_t *zeros;
    const uint16_t *numbers;
} scaled_group;

/* The group whose scales are at `scales`, of the panel at `codes`. */
INLINE scaled_group group_at(const linear *of, const char *codes, const float *scales) {
    return (scaled_group){codes, zeros_behind(of, scales), of->narrow};
}

/* Inputs whose codes are taken apart at once. */
static inline int inputs_of_turn(const int kind) { return kind == FLOATS ? PAIR : WORD; }

/* Floats of 8 bits as bfloat16s, which have room for their mantissa: only the exponent changes, but the smallest floats
 * have none, and are looked up. */
INLINE __m512i pairs_of_fp8(__m512i codes) {
    static const uint16_t smallest[2 * CODES_OF_TABLE] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi16(0x7f0));
    const __m512i number = _mm512_add_epi16(bits, _mm512_set1_epi16(120 << 7));
    const __mmask32 is_small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    const __m512i size = _mm512_mask_permutexvar_epi16(number, is_small, codes, _mm512_loadu_si512(smallest));
    /* The sign of the codes, all else of the size. */
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16((short)0x8000), codes, size, 0xca);
}

/* Pair `pair` of the inputs of a turn, which begins at input `k`: LANES pairs of bfloat16s, of half of a panel. */
INLINE __m512i numbers_at(const int kind, const scaled_group *of, int64_t k, const int pair, const int half) {
    if (kind == FLOATS) {
        const char *at = of->codes + k * PANEL + half * LANES * PAIR;
        return pairs_of_fp8(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at)));
    }
    __m512i places = _mm512_loadu_si512(of->codes + k / WORD * PANEL * 4 + half * LANES * 4);
    if (pair > 0) places = _mm512_srli_epi32(places, 4 * pair);
    /* The number of a code is its distance from the zero of its group. */
    if (kind == WITH_ZEROS)
        places = _mm512_add_epi16(_mm512_and_si512(places, _mm512_set1_epi16(15)),
                                  _mm512_loadu_si512(of->zeros + half * LANES));
    return _mm512_permutexvar_epi16(places, _mm512_loadu_si512(of->numbers));
}

/* The weights of pairs of inputs of the panel at `codes`, `count` inputs from input `first` on, as the nearest
 * bfloat16s: [count / PAIR, PANEL], a pair side by side. Where sums are
 * scaled: numbers that the scales still have to multiply, of inputs of one group. */
void widen_to_pairs(const linear *of, const char *codes, int64_t first, int64_t count, char *to);

#endif

#endif
