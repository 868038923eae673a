#include "block_inputs.h"

#include "blocks.h"

#include <float.h>
#if MULTIPLIES_DIGITS
#include <immintrin.h>
#endif

#define MANTISSA_BITS 23
#define BIAS 127 /* of a float's exponent */

typedef int8_t few_codes __attribute__((vector_size(LANES), aligned(1), may_alias));

int64_t most_bytes_of_packed_row(int64_t inputs) {
    const int64_t whole = bytes_of_packed_blocks(inputs, BLOCK, NUM_DIGITS);
    const int64_t small = bytes_of_packed_blocks(inputs, SMALL_BLOCK, NUM_DIGITS);
    return whole > small ? whole : small;
}

/* How much more than the codes stand for an instruction multiplies. */
static int32_t added_to_codes(const linear *of) {
    if (of->form == FORM_BLOCKS4) return of->has_minima ? 0 : MIDDLE_OF_CODES4;
    return ADDED_TO_CODES8;
}

/* ---- one digit ---- */

/* One row in a packed block. */
typedef struct {
    int8_t *codes;
    float *scale;
    int32_t *excess;
    float *sum;
} packed_block;

/* Round a block of a row to 8 bits, symmetrically. A value that is not finite makes the scale NaN, and so all outputs:
 * its bits are larger than those of any other. */
INLINE void pack_block(const int block, const float *row, const float *weight, int64_t k, int64_t inputs, float factor,
                       int32_t added, packed_block to) {
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
    const float scale = INT8_MAX_VALUE / largest;
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        const vec scaled = is_finite ? values[i] * scale : (vec){0};
        const ivec rounded = __builtin_convertvector(__builtin_elementwise_rint(scaled), ivec);
        *(few_codes *)(to.codes + i * LANES) = __builtin_convertvector(rounded, few_codes);
        sums += rounded;
    }
    const int32_t sum = __builtin_reduce_add(sums);
    *to.scale = (is_finite ? largest / INT8_MAX_VALUE : NAN) * factor;
    *to.excess = -added * sum;
    *to.sum = *to.scale * (float)sum;
}

INLINE void pack_row(const int block, const linear *with, const float *row, float factor, const float *weight,
                     char *tile, int64_t rows, int64_t place) {
    const int64_t num_blocks = blocks_in(with);
    const int32_t added = added_to_codes(with);
    for (int64_t k = 0; k < num_blocks; k++, tile += rows * bytes_of_packed_block(block, 1)) {
        float *scales = (float *)(tile + rows * block);
        const packed_block to = {(int8_t *)tile + place * block, scales + place, (int32_t *)scales + rows + place,
                                 scales + 2 * rows + place};
        pack_block(block, row, weight, k * block, with->inputs, factor, added, to);
    }
}

/* ---- several digits ---- */

#if MULTIPLIES_DIGITS

/* Four numbers, again and again. */
INLINE ivec fours(int32_t a, int32_t b, int32_t c, int32_t d) {
    return (ivec){a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d};
}

INLINE ivec largest_everywhere(ivec of) {
    of = __builtin_elementwise_max(of, EXCHANGED(of, 8));
    of = __builtin_elementwise_max(of, EXCHANGED(of, 4));
    of = __builtin_elementwise_max(of, EXCHANGED(of, 2));
    return __builtin_elementwise_max(of, EXCHANGED(of, 1));
}

/* The sums of each fourth lane, everywhere. */
INLINE ivec sums_of_fours(ivec of) {
    of += EXCHANGED(of, 8);
    return of + EXCHANGED(of, 4);
}

/* Integers of at most MOST_OF_DIGITS as `quad_of_digits`, without their numbers. */
INLINE ivec quads_of(ivec integers) {
    const ivec middles = splat_int(0x808080); /* so that no digit borrows from the next; then each gets its sign */
    const ivec bytes = (integers + middles) ^ middles;
    return (ivec)_mm512_shuffle_epi8((__m512i)bytes, (__m512i)fours(0x0e0a0602, 0x0d090501, 0x0c080400, 0x0f0b0703));
}

/* The exponent of `largest`, in its place in a float, or one more if largest times the power of two that makes it at
 * least 2^22 exceeds MOST_OF_DIGITS. */
INLINE ivec exponent_of(ivec largest) { return (largest + 0x010101) & 0x7f800000; }

/* Make integers of a block of a row. Largest is at least TINY. A value that is not finite makes the sum of all starts
 * NaN, and so all outputs: its bits are larger than those of any other. `sum` NULL: there are no minima. */
INLINE void pack_digits(const int block, const float *row, const float *weight, int64_t k, int64_t inputs, float factor,
                        int32_t added, quad_of_digits *to, float *sum) {
    const int32_t power = 1 << MANTISSA_BITS, half = power / 2; /* a factor of 2 in the bits of a float, and of 1.5 */
    const int32_t low = (1 - SPARED_BITS) * power + half, middle = low + DIGIT_BITS * power;
    const int32_t high = middle + DIGIT_BITS * power;
    const int32_t together = high + 3 * (half >> DIGIT_BITS) + 3 * (half >> 2 * DIGIT_BITS);
    vec values[BLOCK / LANES];
    ivec magnitudes = (ivec)splat(TINY), quads[BLOCK / LANES], sums = {0};
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        values[i] = normed_inputs(row, weight, k + i * LANES, inputs) * factor;
        magnitudes = __builtin_elementwise_max(magnitudes, (ivec)magnitude_of(values[i]));
    }
    const ivec largest = largest_everywhere(magnitudes), exponent = exponent_of(largest);
    const vec up = bits_as_vec((BIAS + 22) * power - (exponent - BIAS * power));
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        quads[i] = quads_of((ivec)_mm512_cvtps_epi32((__m512)(values[i] * up)));
        sums = (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)splat_int(0x01010101), (__m512i)quads[i]);
    }
    sums = sums_of_fours(sums);
    const ivec floats = exponent + fours(high, middle, low, together);
    ivec numbers = floats - sums * added;
    numbers = (ivec)choose(largest >= 0x7f800000, splat(NAN), bits_as_vec(numbers));
    const ivec places = {0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3};
    quads[0] = (ivec)_mm512_mask_permutexvar_epi32((__m512i)quads[0], 0x8888, (__m512i)places, (__m512i)numbers);
    UNROLLED
    for (int i = 0; i < block / LANES; i++) *(unaligned_ivec *)(to + i * LANES / QUAD) = quads[i];
    if (sum == NULL) return;
    const vec parts = bits_as_vec(floats + sums);
    *sum = ((parts[0] - parts[3]) + parts[1]) + parts[2];
}

INLINE void pack_row_of_digits(const int block, const linear *with, const float *row, float factor, const float *weight,
                               char *tile, int64_t rows, int64_t place) {
    const int64_t num_blocks = blocks_in(with), bytes = bytes_of_packed_block(block, NUM_DIGITS);
    const int32_t added = added_to_codes(with);
    float *sums = (float *)(tile + num_blocks * rows * bytes);
    for (int64_t k = 0; k < num_blocks; k++) {
        pack_digits(block, row, weight, k * block, with->inputs, factor, added,
                    (quad_of_digits *)(tile + (k * rows + place) * bytes),
                    with->has_minima ? sums + k * rows + place : NULL);
    }
}

#endif

void pack_tile_in_blocks(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
                         rms_norm norm) {
    const int64_t first = tile_start(tile, to->num_tiles, to->num_rows);
    const int64_t rows = tile_start(tile + 1, to->num_tiles, to->num_rows) - first;
    const int is_whole = block_of(with) == BLOCK;
    char *start = (char *)to->tiles + first * bytes_of_packed_row(with);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = from + row_taken(to, first + i) * stride;
        const float factor = input_factor(to, first + i, row, norm);
#if MULTIPLIES_DIGITS
        if (with->num_digits > 1 && is_whole) {
            pack_row_of_digits(BLOCK, with, row, factor, norm.weight, start, rows, i);
            continue;
        }
        if (with->num_digits > 1) {
            pack_row_of_digits(SMALL_BLOCK, with, row, factor, norm.weight, start, rows, i);
            continue;
        }
#endif
        if (is_whole)
            pack_row(BLOCK, with, row, factor, norm.weight, start, rows, i);
        else
            pack_row(SMALL_BLOCK, with, row, factor, norm.weight, start, rows, i);
    }
}
