/* Packing codes for products in blocks. */
#include "blocks.h"

#include <assert.h>

static int64_t block_panel_bytes(const linear *of) {
    const int64_t last = of->num_groups - 1, blocks = blocks_in(of) - last * blocks_per_group(of);
    const int64_t bytes = place_of_group(of, last) + bytes_of_values(of) + blocks * bytes_of_block(of);
    return (bytes + LINE - 1) / LINE * LINE;
}

static int are_exact_halves(const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if ((float)(_Float16)values[i] != values[i]) return 0;
    }
    return 1;
}

/* The largest number of which all of these are multiples, by Euclid's algorithm, which is exact, as remainders are. Its
 * sign makes the largest multiple negative, because a byte may be -128, but not 128. */
static float common_factor(const float *values, int64_t count) {
    float factor = 0, largest = 0;
    for (int64_t i = 0; i < count; i++) {
        float other = fabsf(values[i]);
        if (other > fabsf(largest)) largest = values[i];
        while (factor > 0) {
            const float rest = fmodf(other, factor);
            other = factor, factor = rest;
        }
        factor = other;
    }
    return copysignf(factor > 0 ? factor : 1, -largest);
}

static int64_t groups_in_section(const linear *of, int64_t first) {
    const int64_t left = of->num_groups - first, most = SECTION / of->group;
    return left < most ? left : most;
}

static int are_small_multiples(const linear *of, const float *values) {
    for (int64_t output = 0; output < of->outputs; output++, values += of->num_groups) {
        for (int64_t first = 0; first < of->num_groups; first += SECTION / of->group) {
            const int64_t count = groups_in_section(of, first);
            const float factor = common_factor(values + first, count);
            for (int64_t i = 0; i < count; i++) {
                const float times = rintf(values[first + i] / factor);
                const int is_small = times >= INT8_MIN && times <= INT8_MAX;
                if (!is_small || times * factor != values[first + i]) return 0;
            }
        }
    }
    return 1;
}

static int64_t bytes_of_scale(const linear *of, const coded_weight *from) {
    const int has_sections = of->num_groups > 1 && (of->group == BLOCK || of->group == SMALL_BLOCK);
    if (has_sections && are_small_multiples(of, from->scales) &&
        (from->minima == NULL || are_small_multiples(of, from->minima)))
        return 1;
    return are_exact_halves(from->scales, of->outputs * of->num_groups) ? 2 : 4;
}

/* One value for the output in `column`, as a multiple of its factor. */
static void pack_multiple(char *to, const float *factors, int64_t column, float value) {
    ((int8_t *)to)[column] = (int8_t)rintf(value / factors[column]);
}

/* Of group `group` of an output, whose values are from `scales` and `minima` on; these may be NULL. */
static void pack_values(const linear *of, char *panel, int64_t column, const float *scales, const float *minima,
                        int64_t group) {
    char *to = panel + place_of_group(of, group), *to_minima = to + bytes_of_scales(of);
    if (!has_factors(of)) {
        if (of->scale_bytes == 2)
            ((_Float16 *)to)[column] = (_Float16)scales[group];
        else
            ((float *)to)[column] = scales[group];
        if (minima != NULL) ((float *)to_minima)[column] = minima[group];
        return;
    }
    float *factors = (float *)(panel + place_of_factors(of, group));
    if (group % (1 << section_bits(of)) == 0) {
        const int64_t count = groups_in_section(of, group);
        factors[column] = common_factor(scales + group, count);
        if (minima != NULL) factors[PANEL + column] = common_factor(minima + group, count);
    }
    pack_multiple(to, factors, column, scales[group]);
    if (minima != NULL) pack_multiple(to_minima, factors + PANEL, column, minima[group]);
}

/* The codes of one output in a block; `count` of them. */
static void pack_codes(const linear *of, uint8_t *to, int64_t column, const uint8_t *codes, int64_t count) {
    const int64_t half_bytes = bytes_of_block(of) / 2, half_block = block_of(of) / 2;
    to += column / LANES * half_bytes + column % LANES * QUAD;
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = has_pairs(of->form) ? i % half_block : i;
        uint8_t *byte = to + place / QUAD * LANES * QUAD + place % QUAD;
        if (of->form == FORM_BLOCKS8)
            *byte = (uint8_t)(codes[i] + ADDED_TO_CODES8);
        else
            *byte |= (uint8_t)(codes[i] << (i < half_block ? 0 : 4));
    }
}

static void pack_output(const linear *of, char *panel, int64_t column, const coded_weight *from, int64_t output) {
    const int64_t block = block_of(of), num_blocks = blocks_in(of), per_group = blocks_per_group(of);
    const float *scales = from->scales + output * of->num_groups;
    const float *minima = from->minima == NULL ? NULL : from->minima + output * of->num_groups;
    for (int64_t i = 0; i < num_blocks; i++) {
        const int64_t left = of->inputs - i * block, group = i / per_group;
        if (i % per_group == 0) pack_values(of, panel, column, scales, minima, group);
        char *codes = panel + place_of_group(of, group) + bytes_of_values(of) + i % per_group * bytes_of_block(of);
        pack_codes(of, (uint8_t *)codes, column, from->codes + output * of->inputs + i * block,
                   left < block ? left : block);
    }
}

linear *linear_of_blocks(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                         int64_t gated) {
    linear *made = linear_empty(bias, outputs, inputs, form, gated);
    if (made == NULL) return NULL;
    made->group = from->group;
    made->num_groups = from->num_groups;
    made->has_minima = from->minima != NULL;
    made->table = table_of(from->table, ADDED_TO_CODES8);
    made->num_digits = from->rounds_inputs ? 1 : NUM_DIGITS;
    assert(MULTIPLIES_DIGITS || made->num_digits == 1);
    made->scale_bytes = bytes_of_scale(made, from);
    assert(from->group_of == NULL && (from->num_groups == 1 || from->group % block_of(made) == 0));
    made = linear_with_panels(made, block_panel_bytes(made), 1);
    if (made == NULL) return NULL;
    for (int64_t place = 0; place < made->num_panels * PANEL; place++) {
        const int64_t output = output_at(made, place / PANEL, place % PANEL);
        if (output >= 0) pack_output(made, panel_at(made, place / PANEL), place % PANEL, from, output);
    }
    return made;
}
