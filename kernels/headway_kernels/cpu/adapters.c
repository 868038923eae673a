#include "adapters.h"

#include "products.h"

#define AT_ONCE 4 /* dot products side by side, so that additions do not wait for each other */

/* `count` dot products of a normed row with rows of `down`. */
INLINE void dot_products(const int count, int64_t inputs, const float *row, const float *weight, const float *down,
                         float factor, float *out) {
    vec sums[AT_ONCE] = {{0}};
    for (int64_t k = 0; k < inputs; k += LANES) {
        const vec x = normed_inputs(row, weight, k, inputs);
        for (int i = 0; i < count; i++) sums[i] += x * normed_inputs(down + i * inputs, NULL, k, inputs);
    }
    for (int i = 0; i < count; i++) out[i] = factor * sum_of(sums[i]);
}

void apply_down(const low_rank *of, int64_t inputs, const float *row, rms_norm norm, float *out) {
    const float factor = norm.weight == NULL ? 1.0f : root_mean_square_factor(row, inputs, norm.eps);
    int64_t r = 0;
    for (; r + AT_ONCE <= of->rank; r += AT_ONCE)
        dot_products(AT_ONCE, inputs, row, norm.weight, of->down + r * inputs, factor, out + r);
    for (; r < of->rank; r++) dot_products(1, inputs, row, norm.weight, of->down + r * inputs, factor, out + r);
}
