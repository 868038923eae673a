/* Weights kept as codes of 4 or 8 bits, with a scale and a minimum for each group of inputs: reading them.
 *
 * Owns: where codes, scales and minima of a panel lie, and what they stand for.
 * Must not know: how a product multiplies, or which format a checkpoint had.
 *
 * A weight is code * scale + minimum, rounded once. Codes of 8 bits are stored input after input. Of codes of 4 bits, a
 * word of 32 bits holds WORD inputs of one output, the first in its lowest bits: shifts and masks alone take them
 * apart. Where sums of groups are scaled, pairs of inputs lie side by side (`place_of_byte`, `place_in_word`). On the
 * vector unit, a product has the bits of one with the same weights in float32, unless codes are narrow.
 */
#ifndef HEADWAY_CODES_H
#define HEADWAY_CODES_H

#include "linear.h"

#define GROUPS_AHEAD 8 /* whose scales are fetched */
#define CODES_AHEAD 24 /* lines of codes that are fetched */
#define WORD 8         /* codes of 4 bits in a word */
#define FP8_FACTOR 256.0f

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

/* Inputs [begin, end) of a panel that share a group; `codes`: of the panel. `values` are in memory, as registers hold
 * sums. */
typedef struct {
    const char *codes;
    int64_t begin;
    int64_t end;
    const group_values *values;
    const code_table *table; /* TABLE4 */
} coded_run;

/* Whether codes have 4 bits, and so lie in words. */
static inline int has_words(int64_t form) { return form == FORM_CODES4 || form == FORM_TABLE4; }

/* The place of input `k` in its word: where sums are scaled, each half of a word has one input of each pair. */
static inline int64_t place_in_word(const linear *of, int64_t k) {
    return of->scales_sums ? k % PAIR * (WORD / PAIR) + k % WORD / PAIR : k % WORD;
}

/* The place of input `k` of an output among codes of 8 bits: where sums are scaled, pairs lie side by side. */
static inline int64_t place_of_byte(const linear *of, int64_t k, int64_t column) {
    return of->scales_sums ? (k / PAIR * PANEL + column) * PAIR + k % PAIR : k * PANEL + column;
}

static inline int64_t bytes_of_codes(const linear *of) {
    const int64_t form = of->is_narrow ? FORM_PAIRS : FORM_FLOAT32;
    const int64_t padded = steps_of(of->inputs, form) * inputs_per_step(form);
    return has_words(of->form) ? (padded + WORD - 1) / WORD * PANEL * 4 : padded * PANEL;
}

/* The group of input `k`, where consecutive inputs are one. */
static inline int64_t group_number(const linear *of, int64_t k) { return of->num_groups == 1 ? 0 : k / of->group; }

/* Of the first group of the panel at `codes`; those of the next one follow, then, after all scales, minima. */
static inline const float *scales_of(const linear *of, const char *codes) {
    return (const float *)(codes + bytes_of_codes(of));
}

/* Where sums are scaled, zero points stand in place of minima: those of the group whose scales are at `scales`. */
static inline const int32_t *zeros_behind(const linear *of, const float *scales) {
    return (const int32_t *)(scales + of->num_groups * PANEL);
}

/* The values of the group whose scales are at `scales`. */
INLINE group_values values_at(const int64_t form, const linear *of, const float *scales) {
    const float *minima = scales + of->num_groups * PANEL;
    group_values values = {{load(scales), load(scales + LANES)}, {{0}, {0}}};
    UNROLLED
    for (int half = 0; half < 2; half++) {
        __builtin_prefetch(scales + GROUPS_AHEAD * PANEL + half * LANES);
        if (of->has_minima) __builtin_prefetch(minima + GROUPS_AHEAD * PANEL + half * LANES);
        /* Without minima, integers of 4 bits are symmetric around 8. */
        if (of->has_minima)
            values.minima[half] = load(minima + half * LANES);
        else if (form == FORM_CODES4)
            values.minima[half] = values.scales[half] * -(float)MIDDLE_OF_CODES4;
    }
    return values;
}

/* The run at input `begin` of the panel at `codes`, which ends at `end` at the latest; its values are written
 * to `values`. Inputs behind the last one belong to the last group. */
INLINE coded_run run_at(const int form, const linear *of, const char *codes, int64_t begin, int64_t end,
                        group_values *values) {
    int64_t group = of->num_groups - 1, last = end;
    if (begin < of->inputs) {
        group = of->group_of != NULL ? of->group_of[begin] : (int32_t)begin / (int32_t)of->group;
        last = of->group_of != NULL ? begin + 1 : (group + 1) * of->group;
    }
    *values = values_at(form, of, scales_of(of, codes) + group * PANEL);
    return (coded_run){codes, begin, last < end ? last : end, values, &of->table};
}

/* Code `place` of each word. */
INLINE vec codes_of_words(const int form, const code_table *table, words from, const int place) {
    const ivec codes = (ivec)(from >> (4 * place));
    if (form == FORM_TABLE4) return numbers_of(codes, table->numbers);
#if defined(__AVX512F__)
    static const float integers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return numbers_of(codes, integers);
#else
    return __builtin_convertvector(codes & 15, vec);
#endif
}

/* An 8-bit float (4 bits of exponent, 3 of mantissa; Micikevicius et al. 2022, arXiv 2209.05433) has the bits of a
 * float16 that is smaller by FP8_FACTOR, which the scales make good. */
INLINE vec of_fp8(few_signed_bytes codes) {
    few_shorts wide = __builtin_convertvector(codes, few_shorts);
    few_shorts bits = (wide << 7) & (short)0xbfff; /* the sign, a zero, exponent and mantissa */
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

/* LANES weights, of codes. */
INLINE vec weights_of(vec codes, const group_values *of, const int half) {
    return codes * of->scales[half] + of->minima[half];
}

/* LANES weights of input `k` of a run. */
INLINE vec weights_at(const int form, const coded_run *of, int64_t k, const int half) {
    if (!has_words(form))
        return weights_of(codes_of_bytes(form, of->codes + k * PANEL + half * LANES), of->values, half);
    const words from = words_at(of, k, half) >> (uint32_t)(k % WORD * 4);
    return weights_of(codes_of_words(form, of->table, from, 0), of->values, half);
}

/* Weights of input `place` of a word, the one with input k. */
INLINE vec weights_of_word(const int form, const coded_run *of, int64_t k, const int half, const int place) {
    return weights_of(codes_of_words(form, of->table, words_at(of, k, half), place), of->values, half);
}

/* Whether the next inputs of a run from `k` on are one word. */
INLINE int is_word(const int form, const coded_run *of, int64_t k) {
    return has_words(form) && k % WORD == 0 && k + WORD <= of->end;
}

/* Fetch codes that are widened soon, while those of `count` inputs from `k` on are. */
INLINE void fetch_codes(const int form, const char *codes, int64_t k, const int count) {
    const char *ahead = codes + (has_words(form) ? k / WORD * PANEL * 4 : k * PANEL) + CODES_AHEAD * LINE;
    for (int at = 0; at < (has_words(form) ? PANEL * 4 : count * PANEL); at += LINE) __builtin_prefetch(ahead + at);
}

/* Whether groups of codes of 4 bits with a zero, or of 8-bit floats, are of whole steps of a sum of pairs, and so large
 * that to scale their sums takes less time than to scale weights. */
int sums_can_be_scaled(const coded_weight *from, int64_t outputs, int64_t form);

/* Codes packed into panels, whose weights are widened where they are multiplied; see `linear_of_codes`. */
linear *linear_of_widened_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs,
                                int64_t form, int64_t gated);

/* The weights of `count` inputs of the panel at `codes`, from input `first` on, as float32: [count, PANEL]. */
void widen(const linear *of, const char *codes, int64_t first, int64_t count, float *to);

#endif
