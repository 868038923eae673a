#include "inputs.h"

float root_mean_square_factor(const float *row, int64_t inputs, float eps) {
    vec squares = {0};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        vec x = load(row + k);
        squares += x * x;
    }
    float sum = sum_of(squares);
    for (; k < inputs; k++) sum += row[k] * row[k];
    return 1.0f / sqrtf(sum / (float)inputs + eps);
}

float input_factor(const packed_inputs *inputs, int64_t row, const float *from, rms_norm norm) {
    const float factor = norm.weight == NULL ? 1.0f : root_mean_square_factor(from, inputs->inputs, norm.eps);
    return inputs->weights == NULL ? factor : inputs->weights[row] * factor;
}

typedef code codes __attribute__((vector_size(LANES * sizeof(code)), aligned(1), may_alias));

/* In the order in which a tile stores them. */
INLINE codes as_codes(ivec numbers) {
    codes made = __builtin_convertvector(numbers, codes);
#if !MULTIPLIES_BYTES && LANES == 16
    return __builtin_shufflevector(made, made, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#elif !MULTIPLIES_BYTES && LANES == 8
    return __builtin_shufflevector(made, made, 0, 2, 1, 3, 4, 6, 5, 7);
#elif !MULTIPLIES_BYTES
    return __builtin_shufflevector(made, made, 0, 2, 1, 3);
#else
    return made;
#endif
}

float pack_int8_row(code *tile, int64_t rows, int64_t place, const float *row, int64_t inputs, const float *weight,
                    int32_t *offset) {
    const ivec sign_off = splat_int(0x7fffffff);
    vec magnitudes = splat(TINY), not_finite = {0};
    for (int64_t k = 0; k < inputs; k += LANES) {
        vec x = normed_inputs(row, weight, k, inputs);
        magnitudes = larger(magnitudes, bits_as_vec((ivec)x & sign_off));
        not_finite += x * 0.0f;
    }
    const float largest = largest_of(magnitudes), scale = INT8_MAX_VALUE / largest;
    const int64_t stretch = CODES_SIDE_BY_SIDE;
    ivec sums = {0};
    for (int64_t k = 0; k < inputs; k += stretch) {
        code *to = tile + k * rows + place * stretch;
        for (int64_t i = 0; i < stretch; i += LANES) {
            vec scaled = normed_inputs(row, weight, k + i, inputs) * scale;
            scaled = choose(scaled == scaled, scaled, (vec){0});
            ivec rounded = __builtin_convertvector(__builtin_elementwise_rint(scaled), ivec);
            *(codes *)(to + i) = as_codes(rounded);
            sums += rounded;
        }
    }
    *offset = 128 * __builtin_reduce_add(sums);
    return largest / INT8_MAX_VALUE + sum_of(not_finite);
}
