/* Packing codes, and widening a part of a panel for the matrix unit. */
#include "codes.h"

#include <stdlib.h>

/* Inputs of a group, at least: a matrix unit takes longer for the sums of small ones. */
#define LEAST_SCALED (HAS_TILES ? 64 : 32)

static int64_t coded_panel_bytes(const linear *of) {
    int64_t bytes = bytes_of_codes(of) + of->num_groups * PANEL * 4 * (of->has_minima ? 2 : 1);
    return (bytes + LINE - 1) / LINE * LINE;
}

#if HAS_TILES

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

#endif

/* The codes of one output of a panel. */
static void pack_codes(const linear *of, uint8_t *to, int64_t column, const uint8_t *row) {
    for (int64_t k = 0; k < of->inputs; k++) {
        const int64_t place = place_in_word(of, k);
        if (!has_words(of->form))
            to[place_of_byte(of, k, column)] = row[k];
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

int sums_can_be_scaled(const coded_weight *from, int64_t outputs, int64_t form) {
    const int has_whole_steps = from->group % INPUTS_OF_PAIRS == 0 && from->group >= LEAST_SCALED;
    if (form == FORM_CODES8 || from->group_of != NULL || (!has_whole_steps && from->num_groups > 1)) return 0;
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
    made->is_narrow = from->is_narrow;
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
                              form == FORM_FP8 && !made->scales_sums ? FP8_FACTOR : 1.0f);
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
