#include "products.h"

#include "block_inputs.h"
#include "block_products.h"
#include "whole_products.h"

#if HAS_PAIR_PRODUCTS && !HAS_TILES
#include <cpuid.h>
#define HAS_PAIR_INSTRUCTION (1u << 5) /* in what leaf 7.1 says first */

int multiplies_pairs(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b == signature_INTEL_ebx) return 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & HAS_PAIR_INSTRUCTION) != 0;
}
#else
int multiplies_pairs(void) { return HAS_TILES; }
#endif

int64_t packed_bytes(int64_t num_rows, int64_t inputs) { return packed_bytes_whole(num_rows, inputs, FORM_FLOAT32); }

int64_t most_packed_bytes(int64_t num_rows, int64_t inputs) {
    const int64_t floats = packed_bytes(num_rows, inputs);
    const int64_t codes = packed_bytes_whole(num_rows, inputs, FORM_INT8);
    const int64_t digits = num_rows * most_bytes_of_packed_row(inputs);
    const int64_t largest = floats > codes ? floats : codes;
    return largest > digits ? largest : digits;
}

void pack_tile(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
               rms_norm norm) {
    if (is_in_blocks(with))
        pack_tile_in_blocks(to, with, tile, from, stride, norm);
    else
        pack_tile_whole(to, form_of_inputs(with), tile, from, stride, norm);
}

int64_t tiles_at_once(const linear *with) {
    return is_in_blocks(with) ? tiles_at_once_in_blocks() : tiles_at_once_whole(with);
}

void multiply(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
              int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    (is_in_blocks(with) ? multiply_in_blocks : multiply_whole)(with, from, panel, next, first_tile, end_tile, epilogue,
                                                               out, stride);
}
