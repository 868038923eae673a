/* Codes as bfloat16s: for the matrix unit, and for the vector unit's instruction for pairs. */
#include "narrow_codes.h"

#if HAS_PAIR_PRODUCTS

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

INLINE void widen_group(const int kind, const linear *of, const char *codes, int64_t first, int64_t count, char *to) {
    const scaled_group group = group_at(of, codes, scales_of(of, codes) + group_number(of, first) * PANEL);
    for (int64_t k = first; k < first + count; k += inputs_of_turn(kind)) {
        if (kind == FLOATS) fetch_codes(FORM_FP8, codes, k, PAIR);
        UNROLLED
        for (int pair = 0; pair < inputs_of_turn(kind) / PAIR; pair++, to += PANEL * 4) {
            _mm512_storeu_si512(to, numbers_at(kind, &group, k, pair, 0));
            _mm512_storeu_si512(to + LANES * 4, numbers_at(kind, &group, k, pair, 1));
        }
    }
}

void widen_to_pairs(const linear *of, const char *codes, int64_t first, int64_t count, char *to) {
    if (of->scales_sums) {
        switch (kind_of(of)) {
        case FLOATS: widen_group(FLOATS, of, codes, first, count, to); break;
        case WITH_ZEROS: widen_group(WITH_ZEROS, of, codes, first, count, to); break;
        default: widen_group(WITHOUT_ZEROS, of, codes, first, count, to);
        }
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
