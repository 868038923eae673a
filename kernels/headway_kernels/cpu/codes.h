/* Weights kept as codes of 4 or 8 bits, with a scale and a minimum for each group of inputs: reading them.
 *
 * Owns: where codes, scales and minima of a panel lie, and what they stand for.
 * Must not know: how a product multiplies, or which format a checkpoint had.
 *
 * A weight is code * scale + minimum, rounded once. Codes of 8 bits are stored input after input. Of codes of 4 bits, a
 * word of 32 bits holds WORD inputs of one output, the first in its lowest bits: shifts and masks alone take them
 * apart.
 */
#ifndef HEADWAY_CODES_H
#define HEADWAY_CODES_H

#include "fp4.h"
#include "products.h"

#define GROUPS_AHEAD 8 /* whose scales are fetched */
#define WORD 8         /* codes of 4 bits in a word */

typedef uint8_t few_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t few_signed_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t few_shorts __attribute__((vector_size(LANES * 2)));
typedef _Float16 few_halves __attribute__((vector_size(LANES * 2)));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* What the codes of some consecutive inputs of a panel are multiplied with, and what is added; of both halves. */
typedef struct {
    vec scales[2];
    vec minima[2];
} group_values;

/* Inputs [begin, end) of a panel that share a group; `codes`: of the panel. */
typedef struct {
    const char *codes;
    int64_t begin;
    int64_t end;
    group_values values;
} coded_run;

/* Whether codes have 4 bits, and so lie in words. */
static inline int has_words(int64_t form) { return form == FORM_CODES4 || form == FORM_FP4; }

static inline int64_t bytes_of_codes(const linear *of) {
    const int64_t padded = steps_of(of->inputs, FORM_FLOAT32) * inputs_per_step(FORM_FLOAT32);
    return has_words(of->form) ? (padded + WORD - 1) / WORD * PANEL * 4 : padded * PANEL;
}

/* The run at input `begin`, which ends at `end` at the latest. Inputs behind the last one belong to the last group. */
INLINE coded_run run_at(const int form, const linear *of, int64_t panel, int64_t begin, int64_t end) {
    const char *codes = (const char *)of->panels + panel * coded_panel_bytes(of);
    int64_t group = of->num_groups - 1, last = end;
    if (begin < of->inputs) {
        group = of->group_of != NULL ? of->group_of[begin] : (int32_t)begin / (int32_t)of->group;
        last = of->group_of != NULL ? begin + 1 : (group + 1) * of->group;
    }
    const float *scales = (const float *)(codes + bytes_of_codes(of)) + group * PANEL;
    const float *minima = scales + of->num_groups * PANEL;
    coded_run run = {codes, begin, last < end ? last : end, {{load(scales), load(scales + LANES)}, {{0}, {0}}}};
    UNROLLED
    for (int half = 0; half < 2; half++) {
        __builtin_prefetch(scales + GROUPS_AHEAD * PANEL + half * LANES);
        if (of->has_minima) __builtin_prefetch(minima + GROUPS_AHEAD * PANEL + half * LANES);
        /* Without minima, integers of 4 bits are symmetric around 8. */
        if (of->has_minima)
            run.values.minima[half] = load(minima + half * LANES);
        else if (form == FORM_CODES4)
            run.values.minima[half] = run.values.scales[half] * -8.0f;
    }
    return run;
}

/* Code `place` of each word. A table takes the lowest bits of each lane, whatever stands above. */
INLINE vec codes_of_words(const int form, words from, const int place) {
#if defined(__AVX512F__)
    const vec integers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vec floats = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return (vec)_mm512_permutexvar_ps((__m512i)(from >> (4 * place)), (__m512)(form == FORM_FP4 ? floats : integers));
#else
    const ivec codes = (ivec)((from >> (4 * place)) & 15);
    return __builtin_convertvector(form == FORM_FP4 ? (fp4_numbers(codes, 0) << 24) >> 24 : codes, vec);
#endif
}

/* An 8-bit float (4 bits of exponent, 3 of mantissa; Micikevicius et al. 2022, arXiv 2209.05433) has the bits of a
 * float16 that is smaller by FP8_FACTOR, which the scales make good. */
INLINE vec of_fp8(few_signed_bytes codes) {
    few_shorts wide = __builtin_convertvector(codes, few_shorts);
    few_shorts bits = ((wide & 0x7f) << 7) | (wide & (short)0x8000);
    return __builtin_convertvector((few_halves)bits, vec);
}

INLINE vec codes_of_bytes(const int form, const char *at) {
    const few_signed_bytes codes = *(const few_signed_bytes *)at;
    if (form == FORM_FP8) return of_fp8(codes);
    return __builtin_convertvector(__builtin_convertvector(codes, ivec), vec);
}

/* The words with input `k`, of a half of a panel. */
INLINE words words_at(const coded_run *of, int64_t k, const int half) {
    return *(const words *)(of->codes + k / WORD * PANEL * 4 + half * LANES * 4);
}

/* LANES weights of input `k` of a run. */
INLINE vec weights_at(const int form, const coded_run *of, int64_t k, const int half) {
    vec codes;
    if (has_words(form))
        codes = codes_of_words(form, words_at(of, k, half) >> (uint32_t)(k % WORD * 4), 0);
    else
        codes = codes_of_bytes(form, of->codes + k * PANEL + half * LANES);
    return codes * of->values.scales[half] + of->values.minima[half];
}

/* The weights of inputs k to k + WORD - 1, which are one word. */
INLINE void weights_of_word(const int form, const coded_run *of, int64_t k, const int half, vec *weights) {
    const words from = words_at(of, k, half);
    UNROLLED
    for (int i = 0; i < WORD; i++)
        weights[i] = codes_of_words(form, from, i) * of->values.scales[half] + of->values.minima[half];
}

/* Whether the next inputs of a run from `k` on are one word. */
INLINE int is_word(const int form, const coded_run *of, int64_t k) {
    return has_words(form) && k % WORD == 0 && k + WORD <= of->end;
}

#endif
