/* Packing codes for products in blocks. */
#include "blocks.h"

#include <assert.h>

static int64_t block_panel_bytes(const linear *of) {
    const int64_t bytes = of->num_groups * bytes_of_values(of) + blocks_in(of) * bytes_of_block(of);
    return (bytes + LINE - 1) / LINE * LINE;
}

static int are_exact_halves(const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if ((float)(_Float16)values[i] != values[i]) return 0;
    }
    return 1;
}

static void pack_values(const linear *of, char *to, int64_t column, const coded_weight *from, int64_t at) {
    if (of->has_half_scales)
        ((_Float16 *)to)[column] = (_Float16)from->scales[at];
    else
        ((float *)to)[column] = from->scales[at];
    if (of->has_minima) ((float *)(to + bytes_of_scales(of)))[column] = from->minima[at];
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
    for (int64_t i = 0; i < num_blocks; i++) {
        const int64_t left = of->inputs - i * block;
        if (i % per_group == 0) {
            pack_values(of, panel, column, from, output * of->num_groups + i / per_group);
            panel += bytes_of_values(of);
        }
        pack_codes(of, (uint8_t *)panel, column, from->codes + output * of->inputs + i * block,
                   left < block ? left : block);
        panel += bytes_of_block(of);
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
    made->has_half_scales = are_exact_halves(from->scales, outputs * from->num_groups);
    assert(MULTIPLIES_DIGITS || made->num_digits == 1);
    assert(from->group_of == NULL && (from->num_groups == 1 || from->group % block_of(made) == 0));
    made = linear_with_panels(made, block_panel_bytes(made), 1);
    if (made == NULL) return NULL;
    for (int64_t place = 0; place < made->num_panels * PANEL; place++) {
        const int64_t output = output_at(made, place / PANEL, place % PANEL);
        if (output >= 0) pack_output(made, panel_at(made, place / PANEL), place % PANEL, from, output);
    }
    return made;
}
