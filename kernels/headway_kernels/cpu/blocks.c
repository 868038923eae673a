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

int64_t most_bytes_of_packed_row(int64_t inputs) {
    const int64_t whole = (inputs + BLOCK - 1) / BLOCK * bytes_of_packed_block(BLOCK, MOST_DIGITS);
    const int64_t small = (inputs + SMALL_BLOCK - 1) / SMALL_BLOCK * bytes_of_packed_block(SMALL_BLOCK, MOST_DIGITS);
    return whole > small ? whole : small;
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
    made->num_digits = from->rounds_inputs ? 1 : MOST_DIGITS;
    made->has_half_scales = are_exact_halves(from->scales, outputs * from->num_groups);
    assert(MULTIPLIES_DIGITS || made->num_digits == 1);
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

/* One row in a packed block. */
typedef struct {
    int8_t *codes;
    float *scale;
    int32_t *excess;
    int32_t *last_excess; /* of several digits */
    float *sum;
} packed_block;

typedef struct {
    float down;
    float up;
} block_scale;

static float power_of_two(int32_t exponent) {
    const int32_t bits = (127 + exponent) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Powers of two, 1 / `up` and `up`: the largest one such that `largest` times it is at most MOST_OF_DIGITS. `largest`
 * is finite and at least TINY. */
INLINE block_scale scale_of_digits(float largest) {
    int32_t bits;
    memcpy(&bits, &largest, sizeof bits);
    int32_t exponent = 22 - ((bits >> 23) - 127);
    if (largest * power_of_two(exponent) > MOST_OF_DIGITS) exponent--;
    return (block_scale){power_of_two(-exponent), power_of_two(exponent)};
}

/* Take the lowest digit off: a signed byte. */
INLINE ivec lowest_digit(ivec *numbers) {
    const ivec digit = (*numbers << (32 - DIGIT_BITS)) >> (32 - DIGIT_BITS);
    *numbers = (*numbers - digit) >> DIGIT_BITS;
    return digit;
}

/* Make integers of a block of a row, symmetrically. A value that is not finite makes the scale NaN, and so all outputs:
 * its bits are larger than those of any other. */
INLINE void pack_block(const int block, const int digits, const float *row, const float *weight, int64_t k,
                       int64_t inputs, float factor, int32_t added, packed_block to) {
    vec values[BLOCK / LANES];
    ivec magnitudes = (ivec)splat(TINY), sums = {0}, last_sums = {0};
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        values[i] = normed_inputs(row, weight, k + i * LANES, inputs);
        magnitudes = __builtin_elementwise_max(magnitudes, (ivec)magnitude_of(values[i]));
    }
    const int32_t largest_bits = __builtin_reduce_max(magnitudes);
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    const int is_finite = largest <= FLT_MAX;
    const block_scale scale =
        digits > 1 ? scale_of_digits(largest) : (block_scale){largest / INT8_MAX_VALUE, INT8_MAX_VALUE / largest};
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        const vec scaled = is_finite ? values[i] * scale.up : (vec){0};
        ivec rounded = __builtin_convertvector(__builtin_elementwise_rint(scaled), ivec);
        UNROLLED
        for (int digit = digits - 1; digit > 0; digit--) {
            const ivec lowest = lowest_digit(&rounded);
            *(few_codes *)(to.codes + digit * block + i * LANES) = __builtin_convertvector(lowest, few_codes);
            if (digit == digits - 1) last_sums += lowest, sums += rounded;
        }
        *(few_codes *)(to.codes + i * LANES) = __builtin_convertvector(rounded, few_codes);
        if (digits == 1) sums += rounded;
    }
    const int32_t sum = __builtin_reduce_add(sums), last_sum = __builtin_reduce_add(last_sums);
    *to.scale = (is_finite ? scale.down : NAN) * factor;
    *to.excess = -added * sum;
    if (digits > 1) *to.last_excess = -added * last_sum;
    *to.sum = *to.scale * (float)(digits > 1 ? sum * (1 << DIGIT_BITS) + last_sum : sum);
}

/* How much more than the codes stand for an instruction multiplies. */
static int32_t added_to_codes(const linear *of) {
    if (of->form == FORM_BLOCKS4) return of->has_minima ? 0 : MIDDLE_OF_CODES4;
    return of->form == FORM_BLOCKS8 ? ADDED_TO_CODES8 : ADDED_TO_FP4;
}

INLINE void pack_row(const int block, const int digits, const linear *with, const float *row, rms_norm norm, char *tile,
                     int64_t rows, int64_t place) {
    const float factor = norm.weight != NULL ? root_mean_square_factor(row, with->inputs, norm.eps) : 1.0f;
    const int64_t num_blocks = blocks_in(with), sums = numbers_of_packed_block(digits) - 1;
    const int32_t added = added_to_codes(with);
    for (int64_t k = 0; k < num_blocks; k++, tile += rows * bytes_of_packed_block(block, digits)) {
        float *scales = (float *)(tile + rows * digits * block);
        const packed_block to = {(int8_t *)tile + place * digits * block, scales + place,
                                 (int32_t *)scales + rows + place, (int32_t *)scales + 2 * rows + place,
                                 scales + sums * rows + place};
        pack_block(block, digits, row, norm.weight, k * block, with->inputs, factor, added, to);
    }
}

void pack_tile_in_blocks(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
                         rms_norm norm) {
    const int64_t first = tile_start(tile, to->num_tiles, to->num_rows);
    const int64_t rows = tile_start(tile + 1, to->num_tiles, to->num_rows) - first;
    const int is_whole = block_of(with) == BLOCK;
    char *start = (char *)to->tiles + first * bytes_of_packed_row(with);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = from + row_taken(to, first + i) * stride;
        if (with->num_digits > 1 && is_whole)
            pack_row(BLOCK, MOST_DIGITS, with, row, norm, start, rows, i);
        else if (with->num_digits > 1)
            pack_row(SMALL_BLOCK, MOST_DIGITS, with, row, norm, start, rows, i);
        else if (is_whole)
            pack_row(BLOCK, 1, with, row, norm, start, rows, i);
        else
            pack_row(SMALL_BLOCK, 1, with, row, norm, start, rows, i);
    }
}
