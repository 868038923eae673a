/* Packing codes for products in blocks, and rounding rows of inputs. */
#include "blocks.h"

#include <assert.h>
#include <float.h>

#define MIDDLE_OF_CODES4 8 /* stands for zero without minima */

typedef int8_t few_codes __attribute__((vector_size(LANES), aligned(1), may_alias));

int64_t block_panel_bytes(const linear *of) {
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
    const int64_t half_bytes = bytes_of_block(of) / 2, half_block = BLOCK / 2;
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
    linear *made = linear_empty(outputs, inputs, form, gated);
    if (made == NULL) return NULL;
    made->group = from->group;
    made->num_groups = from->num_groups;
    made->has_minima = from->minima != NULL;
    made->has_half_scales = are_exact_halves(from->scales, outputs * from->num_groups);
    assert(from->group_of == NULL && (from->num_groups == 1 || from->group % block_of(made) == 0));
    made->panels = stream_alloc(made->num_panels * block_panel_bytes(made));
    if (made->panels == NULL) {
        linear_free(made);
        return NULL;
    }
    for (int64_t place = 0; place < made->num_panels * PANEL; place++) {
        const int64_t output = output_at(place / PANEL, place % PANEL, outputs, gated);
        if (output < 0) continue;
        pack_output(made, (char *)made->panels + place / PANEL * block_panel_bytes(made), place % PANEL, from, output);
        if (bias != NULL) made->bias[place] = bias[output];
    }
    return made;
}

/* The numbers of one row in a packed block. */
typedef struct {
    float *scale;
    int32_t *excess;
    float *sum;
} block_numbers;

/* Round a block of a row, symmetrically. A value that is not finite makes the scale NaN, and so all outputs: its bits
 * are larger than those of any other. */
INLINE void pack_block(const int block, const float *row, const float *weight, int64_t k, int64_t inputs, float factor,
                       int32_t added, int8_t *codes, block_numbers numbers) {
    vec values[BLOCK / LANES];
    ivec magnitudes = (ivec)splat(TINY), sums = {0};
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        values[i] = normed_inputs(row, weight, k + i * LANES, inputs);
        magnitudes = __builtin_elementwise_max(magnitudes, (ivec)magnitude_of(values[i]));
    }
    const int32_t largest_bits = __builtin_reduce_max(magnitudes);
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    const int is_finite = largest <= FLT_MAX;
    const float scale = is_finite ? INT8_MAX_VALUE / largest : 0.0f;
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        const vec scaled = is_finite ? values[i] * scale : (vec){0};
        const ivec rounded = __builtin_convertvector(__builtin_elementwise_rint(scaled), ivec);
        *(few_codes *)(codes + i * LANES) = __builtin_convertvector(rounded, few_codes);
        sums += rounded;
    }
    const int32_t sum = __builtin_reduce_add(sums);
    *numbers.scale = (is_finite ? largest / INT8_MAX_VALUE : NAN) * factor;
    *numbers.excess = -added * sum;
    *numbers.sum = *numbers.scale * (float)sum;
}

/* How much more than the codes stand for an instruction multiplies. */
static int32_t added_to_codes(const linear *of) {
    if (of->form == FORM_BLOCKS4) return of->has_minima ? 0 : MIDDLE_OF_CODES4;
    return of->form == FORM_BLOCKS8 ? ADDED_TO_CODES8 : ADDED_TO_FP4;
}

void pack_tile_in_blocks(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
                         rms_norm norm) {
    const int64_t first = tile_start(tile, to->num_tiles, to->num_rows);
    const int64_t rows = tile_start(tile + 1, to->num_tiles, to->num_rows) - first;
    const int64_t block = block_of(with), num_blocks = blocks_in(with);
    const int32_t added = added_to_codes(with);
    char *start = (char *)to->tiles + first * bytes_of_packed_row(with);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = from + row_taken(to, first + i) * stride;
        const float factor = norm.weight != NULL ? root_mean_square_factor(row, with->inputs, norm.eps) : 1.0f;
        char *at = start;
        for (int64_t k = 0; k < num_blocks; k++, at += rows * bytes_of_packed_block(block)) {
            float *scales = (float *)(at + rows * block);
            const block_numbers numbers = {scales + i, (int32_t *)scales + rows + i, scales + 2 * rows + i};
            int8_t *codes = (int8_t *)at + i * block;
            if (block == BLOCK)
                pack_block(BLOCK, row, norm.weight, k * block, with->inputs, factor, added, codes, numbers);
            else
                pack_block(SMALL_BLOCK, row, norm.weight, k * block, with->inputs, factor, added, codes, numbers);
        }
    }
}
