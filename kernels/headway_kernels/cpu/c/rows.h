/* What happens to rows between products: norms, rotation, activations.
 *
 * Owns: these functions of one row of one token.
 * Must not know: layers, products, threads, where rows lie.
 *
 * A result depends on its row alone, so it has the same bits in any step.
 */
#ifndef HEADWAY_ROWS_H
#define HEADWAY_ROWS_H

#include <stddef.h>
#include <stdint.h>

enum norm_kind { NORM_RMS = 0, NORM_LAYER = 1 };

/* `weight` and `bias` [width]; `weight` NULL: no norm; `bias` NULL: none. */
typedef struct {
    const float *weight;
    const float *bias;
} norm_weights;

enum activation {
    SILU = 0,
    GELU = 1,
    GELU_TANH = 2,
    RELU = 3,
    RELU2 = 4,
    CLAMPED_SWISH = 5,
    XIELU = 6,
    LIMITED_SILU = 7
};

/* RMS norms (Zhang & Sennrich 2019, arXiv 1910.07467), layer norms (Ba et al. 2016, arXiv 1607.06450). `out` may be
 * `row`. */
void normalise_row(enum norm_kind kind, norm_weights with, float eps, const float *row, int64_t width, float *out);

/* A norm of heads of `width` components, `stride` apart. */
typedef struct {
    enum norm_kind kind;
    float eps;
    int64_t stride;
    int64_t width;
} head_norm;

/* Each head by itself, or all `together`, which only the RMS norm can; weights lie side by side. */
void normalise_heads(const head_norm *of, norm_weights with, float *heads, int64_t num_heads, int together);

static inline norm_weights further_weights(norm_weights with, int64_t count) {
    return (norm_weights){with.weight + count, with.bias == NULL ? NULL : with.bias + count};
}

/* row = ln(1 + e^row) */
void soft_plus_row(float *row, int64_t width);

/* Rotary embedding (Su et al. 2021, arXiv 2104.09864), components i and i + half as a pair. */
void rotate(float *restrict head, const float *restrict cosines, const float *restrict sines, int64_t half);

/* to += factor * row */
void add_row(float *to, const float *row, int64_t width, float factor);

/* out [width] = activation(row); if gated, activation(row [width]) * (row + width) [width]. CLAMPED_SWISH (gpt-oss,
 * OpenAI 2025, arXiv 2508.10925) bounds gates from above by 7 and ups on both sides, and adds 1 to ups. XIELU (Huang &
 * Schlag 2024, arXiv 2411.13010) has a `curve` [3], a, b and c: above 0, a x^2 + c x, below, b (e^x - 1 - x) + c x. The
 * `curve` [1] of LIMITED_SILU bounds what it gives from above, and ups on both sides. */
void activate_row(enum activation kind, int gated, const float *curve, const float *row, int64_t width, float *out);

/* Bound a row on both sides. NaN stays. */
void clip_row(float *row, int64_t width, float limit);

/* Multiply a row with `factor`, and bound it smoothly if `softcap` is above 0. */
void scale_row(float *row, int64_t width, float factor, float softcap);

#endif
