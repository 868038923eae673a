/* Packing codes, and widening a part of a panel for the matrix unit. */
#include "codes.h"

#include <stdlib.h>

#define LEAST_SCALED 64 /* inputs of a group */

static int64_t coded_panel_bytes(const linear *of) {
    int64_t bytes = bytes_of_codes(of) + of->num_groups * PANEL * 4 * (of->has_minima ? 2 : 1);
    return (bytes + LINE - 1) / LINE * LINE;
}

#if HAS_TILES

#define LINES_AHEAD 24 /* of the codes that are widened next */

INLINE void fetch_codes(const int form, const char *codes, int64_t k, const int count) {
    const char *ahead = codes + (has_words(form) ? k / WORD * PANEL * 4 : k * PANEL) + LINES_AHEAD * LINE;
    for (int at = 0; at < (has_words(form) ? PANEL * 4 : count * PANEL); at += LINE) __builtin_prefetch(ahead + at);
}

INLINE void widen_run(const int form, const coded_run *run, float *to) {
    for (int64_t k = run->begin; k < run->end;) {
        fetch_codes(form, run->codes, k, 1);
        UNROLLED
        for (int half = 0; half < 2; half++) {
            if (!is_word(form, run, k)) {
                store(to + half * LANES, weights_at(form, run, k, half));
                continue;
            }
            UNROLLED
            for (int i = 0; i < WORD; i++) store(to + i * PANEL + half * LANES, weights_of_word(form, run, k, half, i));
        }
        const int64_t done = is_word(form, run, k) ? WORD : 1;
        k += done, to += done * PANEL;
    }
}

INLINE void widen_form(const int form, const linear *of, const char *codes, int64_t first, int64_t count, float *to) {
    const int64_t end = first + count;
    for (int64_t k = first; k < end;) {
        group_values values;
        const coded_run run = run_at(form, of, codes, k, end, &values);
        widen_run(form, &run, to + (k - first) * PANEL);
        k = run.end;
    }
}

void widen(const linear *of, const char *codes, int64_t first, int64_t count, float *to) {
    switch (of->form) {
    case FORM_CODES4: widen_form(FORM_CODES4, of, codes, first, count, to); break;
    case FORM_CODES8: widen_form(FORM_CODES8, of, codes, first, count, to); break;
    case FORM_TABLE4: widen_form(FORM_TABLE4, of, codes, first, count, to); break;
    default: widen_form(FORM_FP8, of, codes, first, count, to);
    }
}

/* The nearest bfloat16s; of two that are as near, those farther from zero. */
INLINE void store_pair(char *to, vec even, vec odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    __m512i lower = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16);
    __asm__("" : "+v"(lower)); /* a compiler would shuffle both, which takes longer */
    const __m512i pairs = _mm512_mask_blend_epi16(0xaaaaaaaa, lower, _mm512_add_epi32((__m512i)odd, half));
    _mm512_storeu_si512(to, pairs);
}

/* As many pairs of a run as lie in whole words or side by side; returns the input behind them. */
INLINE int64_t widen_pairs_of_run(const int form, const coded_run *run, char *to) {
    const int count = has_words(form) ? WORD : PAIR;
    int64_t k = run->begin;
    for (; has_words(form) ? is_word(form, run, k) : k + PAIR <= run->end; k += count, to += count / PAIR * PANEL * 4) {
        fetch_codes(form, run->codes, k, PAIR);
        UNROLLED
        for (int half = 0; half < 2; half++) {
            UNROLLED
            for (int i = 0; i < count; i += PAIR) {
                const int is_in_word = has_words(form);
                const vec even = is_in_word ? weights_of_word(form, run, k, half, i) : weights_at(form, run, k, half);
                const vec odd =
                    is_in_word ? weights_of_word(form, run, k, half, i + 1) : weights_at(form, run, k + 1, half);
                store_pair(to + i / PAIR * PANEL * 4 + half * LANES * 4, even, odd);
            }
        }
    }
    return k;
}

INLINE void widen_pairs_of_form(const int form, const linear *of, const char *codes, int64_t first, int64_t count,
                                char *to) {
    const int64_t end = first + count;
    for (int64_t k = first; k < end;) {
        group_values values, values_of_odd;
        const coded_run run = run_at(form, of, codes, k, end, &values);
        const int64_t widened = widen_pairs_of_run(form, &run, to);
        to += (widened - k) / PAIR * PANEL * 4;
        k = widened;
        if (k >= run.end) continue;
        const coded_run odd = run_at(form, of, codes, k + 1, end, &values_of_odd);
        UNROLLED
        for (int half = 0; half < 2; half++)
            store_pair(to + half * LANES * 4, weights_at(form, &run, k, half), weights_at(form, &odd, k + 1, half));
        to += PANEL * 4, k += PAIR;
    }
}

/* Numbers of the codes of words, all of one group. Where groups have zero points, the number of a code is its distance
 * from the zero of its group. */
INLINE void look_up_words(const int has_zeros, const linear *of, const char *codes, int64_t first, int64_t count,
                          char *to) {
    const __m512i numbers = _mm512_loadu_si512(of->narrow), lowest = _mm512_set1_epi16(15);
    const int32_t *zeros = zeros_of(of, codes) + (of->num_groups == 1 ? 0 : first / of->group * PANEL);
    for (int64_t k = first; k < first + count; k += WORD, to += WORD / PAIR * PANEL * 4) {
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const __m512i some = _mm512_loadu_si512(codes + k / WORD * PANEL * 4 + half * LANES * 4);
            UNROLLED
            for (int pair = 0; pair < WORD / PAIR; pair++) {
                __m512i places = _mm512_srli_epi32(some, 4 * pair);
                if (has_zeros)
                    places =
                        _mm512_add_epi16(_mm512_and_si512(places, lowest), _mm512_loadu_si512(zeros + half * LANES));
                _mm512_storeu_si512(to + pair * PANEL * 4 + half * LANES * 4,
                                    _mm512_permutexvar_epi16(places, numbers));
            }
        }
    }
}

void widen_to_pairs(const linear *of, const char *codes, int64_t first, int64_t count, char *to) {
    if (of->scales_sums) {
        if (of->has_minima)
            look_up_words(1, of, codes, first, count, to);
        else
            look_up_words(0, of, codes, first, count, to);
        return;
    }
    switch (of->form) {
    case FORM_CODES4: widen_pairs_of_form(FORM_CODES4, of, codes, first, count, to); break;
    case FORM_CODES8: widen_pairs_of_form(FORM_CODES8, of, codes, first, count, to); break;
    case FORM_TABLE4: widen_pairs_of_form(FORM_TABLE4, of, codes, first, count, to); break;
    default: widen_pairs_of_form(FORM_FP8, of, codes, first, count, to);
    }
}

#endif

/* The codes of one output of a panel. */
static void pack_codes(const linear *of, uint8_t *to, int64_t column, const uint8_t *row) {
    for (int64_t k = 0; k < of->inputs; k++) {
        const int64_t place = place_in_word(of, k);
        if (!has_words(of->form))
            to[k * PANEL + column] = row[k];
        else
            to[(k / WORD * PANEL + column) * 4 + place / 2] |= (uint8_t)(row[k] << (place % 2 * 4));
    }
}

static void pack_group_values(float *to, int64_t column, const float *row, int64_t num_groups, float factor) {
    for (int64_t group = 0; group < num_groups; group++) to[group * PANEL + column] = row[group] * factor;
}

/* The code that stands for zero, if minima are such that one does; else -1. */
static int zero_point_of(float scale, float minimum) {
    const float zero = minimum == 0.0f ? 0.0f : rintf(-minimum / scale);
    return zero >= 0.0f && zero <= CODES_OF_TABLE && -zero * scale == minimum ? (int)zero : -1;
}

static int has_zero_points(const coded_weight *from, int64_t outputs) {
    for (int64_t at = 0; at < outputs * from->num_groups; at++) {
        if (zero_point_of(from->scales[at], from->minima[at]) < 0) return 0;
    }
    return 1;
}

/* Whether the groups of codes of 4 bits have a zero and are of whole steps of a sum, and so large that to scale their
 * sums takes less time than to scale weights. */
static int sums_can_be_scaled(const coded_weight *from, int64_t outputs, int64_t form) {
    const int has_whole_steps = from->group % inputs_per_step(FORM_FLOAT32) == 0 && from->group >= LEAST_SCALED;
    if (!has_words(form) || from->group_of != NULL || (!has_whole_steps && from->num_groups > 1)) return 0;
    return from->minima == NULL || (form == FORM_CODES4 && has_zero_points(from, outputs));
}

/* What is looked up: with zero points, the distance from CODES_OF_TABLE; else what codes stand for, twice, since the
 * instruction takes 5 bits. */
static void write_narrow_numbers(linear *to) {
    for (int place = 0; place < 2 * CODES_OF_TABLE; place++) {
        const int code = place % CODES_OF_TABLE;
        const float number = to->has_minima            ? (float)(place - CODES_OF_TABLE)
                             : to->form == FORM_TABLE4 ? to->table.numbers[code]
                                                       : (float)(code - MIDDLE_OF_CODES4);
        const half_ivec pairs = as_pairs(splat(number));
        to->narrow[place] = (uint16_t)pairs[0];
    }
}

/* For each half of a word, what is added to a code so that zero has the place CODES_OF_TABLE. */
static void pack_zeros(int32_t *to, int64_t column, const float *scales, const float *minima, int64_t num_groups) {
    for (int64_t group = 0; group < num_groups; group++)
        to[group * PANEL + column] = (CODES_OF_TABLE - zero_point_of(scales[group], minima[group])) * 0x10001;
}

linear *linear_of_widened_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs,
                                int64_t form, int64_t gated) {
    linear *made = linear_empty(bias, outputs, inputs, form, gated);
    if (made == NULL) return NULL;
    made->group = from->group;
    made->num_groups = from->num_groups;
    made->has_minima = from->minima != NULL;
    made->table = table_of(from->table, 0);
    made->is_narrow = from->may_be_narrow && HAS_TILES;
    made->scales_sums = made->is_narrow && sums_can_be_scaled(from, outputs, form);
    if (made->scales_sums) write_narrow_numbers(made);
    if (from->group_of != NULL) {
        made->group_of = stream_alloc(inputs * 4);
        if (made->group_of == NULL) {
            linear_free(made);
            return NULL;
        }
        memcpy(made->group_of, from->group_of, (size_t)inputs * 4);
    }
    made = linear_with_panels(made, coded_panel_bytes(made), 1);
    if (made == NULL) return NULL;
    const int64_t groups = from->num_groups;
    for (int64_t panel = 0; panel < made->num_panels; panel++) {
        char *start = panel_at(made, panel);
        float *scales = (float *)(start + bytes_of_codes(made));
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t output = output_at(made, panel, column);
            if (output < 0) continue;
            pack_codes(made, (uint8_t *)start, column, from->codes + output * inputs);
            pack_group_values(scales, column, from->scales + output * groups, groups,
                              form == FORM_FP8 ? FP8_FACTOR : 1.0f);
            const float *minima = made->has_minima ? from->minima + output * groups : NULL;
            if (made->scales_sums && minima != NULL)
                pack_zeros((int32_t *)(scales + groups * PANEL), column, from->scales + output * groups, minima,
                           groups);
            else if (minima != NULL)
                pack_group_values(scales + groups * PANEL, column, minima, groups, 1.0f);
        }
    }
    return made;
}
