/* Weights kept as integer codes for inputs that become integers block by block: where everything lies.
 *
 * Owns: the layout of such panels, and of packed rows.
 * Must not know: how a product multiplies, what codes a checkpoint has, or when inputs may be rounded.
 *
 * The inputs of a row are cut into blocks of 32, or of 16 where the weight's groups are that small, each with a scale
 * of its own, as llama.cpp does (Q8_0 of ggml). With one digit an input is a code of 8 bits. With three it is an
 * integer of 24 bits, whose scale is a power of two: it differs from the input by at most 2^-23 of the block's largest,
 * so the product is as exact as one in float32. Each digit is a signed byte, as an instruction multiplies four of these
 * at once; so three of them cost less than float32.
 *
 * A panel stores group after group: the scales of its outputs, then their minima if there are any, then the codes of
 * each block. Of a block stand first the codes of one half of the panel, a QUAD of inputs of each output side by side,
 * then of the other half. A byte of 4-bit codes has an input of the first half of the block below, of the second above.
 */
#ifndef HEADWAY_BLOCKS_H
#define HEADWAY_BLOCKS_H

#include "inputs.h"
#include "linear.h"

#define BLOCK 32 /* inputs that are rounded with one scale */
#define SMALL_BLOCK 16

/* Weights of 8 bits, also those of a table, have 128 added where the instruction takes them as unsigned. */
#if MULTIPLIES_BYTES
#define ADDED_TO_CODES8 128
#else
#define ADDED_TO_CODES8 0
#endif

/* Whether a byte has two codes. */
static inline int has_pairs(int64_t form) { return form != FORM_BLOCKS8; }

static inline int64_t block_of(const linear *of) { return of->group == SMALL_BLOCK ? SMALL_BLOCK : BLOCK; }

static inline int64_t blocks_in(const linear *of) { return (of->inputs + block_of(of) - 1) / block_of(of); }

static inline int64_t blocks_per_group(const linear *of) {
    return of->num_groups == 1 ? blocks_in(of) : of->group / block_of(of);
}

static inline int64_t bytes_of_scales(const linear *of) { return PANEL * (of->has_half_scales ? 2 : 4); }

static inline int64_t bytes_of_values(const linear *of) {
    return bytes_of_scales(of) + (of->has_minima ? PANEL * 4 : 0);
}

static inline int64_t bytes_of_block(const linear *of) { return PANEL * block_of(of) / (has_pairs(of->form) ? 2 : 1); }

/* An input of several digits, the highest first, is an integer of at most MOST_OF_DIGITS: 127 in each. */
#define NUM_DIGITS 3
#define MOST_OF_DIGITS 8355711
#define DIGIT_BITS 8

/* A QUAD of inputs of a row, and one of the numbers of its block. The first quads have what the sum of each digit
 * starts from: the bits of 1.5 * 2^23 times what one is worth in this digit, less what unsigned codes are too much. So
 * the sum's bits are those of a float: this number, and the sum of signed codes times their worth; nothing is
 * converted, scaled or rounded. The next quad has the sum of these numbers of all digits, as a float. */
typedef struct {
    int8_t digits[NUM_DIGITS][QUAD];
    int32_t number;
} quad_of_digits;

/* All floats of digits are smaller by 2^SPARED_BITS than what they stand for, so that the largest is finite. */
#define SPARED_BITS 18

/* A packed tile of one digit stores, block after block, the codes of each row, then three numbers of each row: the
 * scale; what the sum of unsigned codes has too much, negative; and the sum of the inputs, for minima. A tile of digits
 * stores, block after block, the quads of each row; behind all blocks the sums of the inputs, block after block. */
static inline int64_t bytes_of_packed_block(int64_t block, int64_t digits) {
    return digits > 1 ? block / QUAD * (int64_t)sizeof(quad_of_digits) : block + 3 * 4;
}
static inline int64_t bytes_of_packed_blocks(int64_t inputs, int64_t block, int64_t digits) {
    const int64_t num_blocks = (inputs + block - 1) / block, sums = digits > 1 ? 4 : 0;
    return (num_blocks * (bytes_of_packed_block(block, digits) + sums) + LINE - 1) / LINE * LINE;
}
static inline int64_t bytes_of_packed_row(const linear *of) {
    return bytes_of_packed_blocks(of->inputs, block_of(of), of->num_digits);
}

/* Codes packed into panels for products in blocks; see `linear_of_codes`. Groups are consecutive, and one or of whole
 * blocks. */
linear *linear_of_blocks(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                         int64_t gated);

#endif
