/* Weights kept as codes of 4 or 8 bits, with a scale and a minimum for each group of inputs.
 *
 * Owns: packing them, and widening a part of a panel to float32, which the products then take.
 * Must not know: how a product multiplies, or which format a checkpoint had.
 *
 * A weight is code * scale + minimum, rounded once. A product widens a few inputs of a panel into the nearest cache and
 * multiplies these: so its results have the bits of a product with the same weights in float32, while memory is read as
 * codes. */
#include "products.h"

#include <stdlib.h>

#define LINES_AHEAD 24 /* of the codes that are widened next */

static int64_t padded_inputs(int64_t inputs) { return steps_of(inputs, FORM_FLOAT32) * inputs_per_step(FORM_FLOAT32); }

static int64_t bytes_per_input(int64_t form) { return form == FORM_CODES4 ? PANEL / 2 : PANEL; }

static int64_t bytes_of_codes(const linear *of) { return padded_inputs(of->inputs) * bytes_per_input(of->form); }

int64_t coded_panel_bytes(const linear *of) {
    int64_t bytes = bytes_of_codes(of) + of->num_groups * PANEL * 4 * (of->has_minima ? 2 : 1);
    return (bytes + LINE - 1) / LINE * LINE;
}

typedef uint8_t few_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t few_signed_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t few_shorts __attribute__((vector_size(LANES * 2)));
typedef _Float16 few_halves __attribute__((vector_size(LANES * 2)));

/* An 8-bit float (4 bits of exponent, 3 of mantissa; Micikevicius et al. 2022, arXiv 2209.05433) has the bits of a
 * float16 that is smaller by FP8_FACTOR, which the scales make good. */
INLINE vec of_fp8(few_signed_bytes codes) {
    few_shorts wide = __builtin_convertvector(codes, few_shorts);
    few_shorts bits = ((wide & 0x7f) << 7) | (wide & (short)0x8000);
    return __builtin_convertvector((few_halves)bits, vec);
}

/* The codes of one input: of the low and the high half of a panel. */
INLINE void load_codes(const int form, const char *at, vec *low, vec *high) {
    if (form == FORM_CODES4) {
        ivec both = __builtin_convertvector(*(const few_bytes *)at, ivec);
        *low = __builtin_convertvector(both & 15, vec);
        *high = __builtin_convertvector(both >> 4, vec);
    } else if (form == FORM_CODES8) {
        *low = __builtin_convertvector(__builtin_convertvector(*(const few_signed_bytes *)at, ivec), vec);
        *high = __builtin_convertvector(__builtin_convertvector(*(const few_signed_bytes *)(at + LANES), ivec), vec);
    } else {
        *low = of_fp8(*(const few_signed_bytes *)at);
        *high = of_fp8(*(const few_signed_bytes *)(at + LANES));
    }
}

/* Inputs that share a group. */
INLINE void widen_run(const int form, const char *codes, int64_t count, const float *scales, const float *minima,
                      float *to) {
    const vec low_scale = load(scales), high_scale = load(scales + LANES);
    /* Without minima, codes of 4 bits are symmetric around 8. */
    const vec low_minimum = minima != NULL ? load(minima) : form == FORM_CODES4 ? low_scale * -8.0f : (vec){0};
    const vec high_minimum = minima != NULL        ? load(minima + LANES)
                             : form == FORM_CODES4 ? high_scale * -8.0f
                                                   : (vec){0};
    for (int64_t i = 0; i < count; i++) {
        vec low, high;
        const char *at = codes + i * (form == FORM_CODES4 ? PANEL / 2 : PANEL);
        if (i * (form == FORM_CODES4 ? PANEL / 2 : PANEL) % LINE == 0) __builtin_prefetch(at + LINES_AHEAD * LINE);
        load_codes(form, at, &low, &high);
        store(to + i * PANEL, low * low_scale + low_minimum);
        store(to + i * PANEL + LANES, high * high_scale + high_minimum);
    }
}

static int64_t group_at(const linear *of, int64_t input) {
    if (input >= of->inputs) return of->num_groups - 1;
    return of->group_of != NULL ? of->group_of[input] : input / of->group;
}

static int64_t end_of_run(const linear *of, int64_t input, int64_t end) {
    if (input >= of->inputs) return end;
    int64_t last = of->group_of != NULL ? input + 1 : (input / of->group + 1) * of->group;
    return last < end ? last : end;
}

void widen(const linear *of, int64_t panel, int64_t first, int64_t count, float *to) {
    const char *start = (const char *)of->panels + panel * coded_panel_bytes(of);
    const float *scales = (const float *)(start + bytes_of_codes(of));
    const float *minima = of->has_minima ? scales + of->num_groups * PANEL : NULL;
    for (int64_t at = first, end; at < first + count; at = end) {
        const int64_t group = group_at(of, at);
        const float *scale = scales + group * PANEL, *minimum = minima == NULL ? NULL : minima + group * PANEL;
        const char *codes = start + at * bytes_per_input(of->form);
        float *widened = to + (at - first) * PANEL;
        end = end_of_run(of, at, first + count);
        switch (of->form) {
        case FORM_CODES4: widen_run(FORM_CODES4, codes, end - at, scale, minimum, widened); break;
        case FORM_CODES8: widen_run(FORM_CODES8, codes, end - at, scale, minimum, widened); break;
        default: widen_run(FORM_FP8, codes, end - at, scale, minimum, widened);
        }
    }
}

/* The codes of one output of a panel. */
static void pack_codes(uint8_t *to, int64_t form, int64_t column, const uint8_t *row, int64_t inputs) {
    for (int64_t k = 0; k < inputs; k++) {
        if (form != FORM_CODES4)
            to[k * PANEL + column] = row[k];
        else
            to[k * LANES + column % LANES] |= (uint8_t)(row[k] << (column < LANES ? 0 : 4));
    }
}

static void pack_group_values(float *to, int64_t column, const float *row, int64_t num_groups, float factor) {
    for (int64_t group = 0; group < num_groups; group++) to[group * PANEL + column] = row[group] * factor;
}

linear *linear_of_codes(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                        int64_t gated) {
    linear *made = linear_empty(outputs, inputs, form, gated);
    if (made == NULL) return NULL;
    made->group = from->group;
    made->num_groups = from->num_groups;
    made->has_minima = from->minima != NULL;
    made->panels = stream_alloc(made->num_panels * coded_panel_bytes(made));
    if (from->group_of != NULL) made->group_of = stream_alloc(inputs * 4);
    if (made->panels == NULL || (from->group_of != NULL && made->group_of == NULL)) {
        linear_free(made);
        return NULL;
    }
    if (from->group_of != NULL) memcpy(made->group_of, from->group_of, (size_t)inputs * 4);
    const int64_t groups = from->num_groups;
    for (int64_t panel = 0; panel < made->num_panels; panel++) {
        char *start = (char *)made->panels + panel * coded_panel_bytes(made);
        float *scales = (float *)(start + bytes_of_codes(made));
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t output = output_at(panel, column, outputs, gated);
            if (output < 0) continue;
            pack_codes((uint8_t *)start, form, column, from->codes + output * inputs, inputs);
            pack_group_values(scales, column, from->scales + output * groups, groups,
                              form == FORM_FP8 ? FP8_FACTOR : 1.0f);
            if (made->has_minima)
                pack_group_values(scales + groups * PANEL, column, from->minima + output * groups, groups, 1.0f);
            if (bias != NULL) made->bias[panel * PANEL + column] = bias[output];
        }
    }
    return made;
}
