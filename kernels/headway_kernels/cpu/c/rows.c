#include "rows.h"

#include "vectors.h"

#define SWISH_LIMIT 7.0f
#define SWISH_FACTOR 1.702f

/* The sum of (x - mean)^2 of a row. */
static float squares_around(const float *row, int64_t width, float mean) {
    vec squares = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vec x = load(row + i) - mean;
        squares += x * x;
    }
    float sum = sum_of(squares);
    for (; i < width; i++) sum += (row[i] - mean) * (row[i] - mean);
    return sum;
}

static float mean_of(const float *row, int64_t width) {
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) sums += load(row + i);
    float sum = sum_of(sums);
    for (; i < width; i++) sum += row[i];
    return sum / (float)width;
}

void normalise_row(enum norm_kind kind, norm_weights with, float eps, const float *row, int64_t width, float *out) {
    float mean = kind == NORM_LAYER ? mean_of(row, width) : 0.0f;
    float factor = 1.0f / sqrtf(squares_around(row, width, mean) / (float)width + eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vec normed = (load(row + i) - mean) * factor * load(with.weight + i);
        store(out + i, with.bias == NULL ? normed : normed + load(with.bias + i));
    }
    for (; i < width; i++)
        out[i] = (row[i] - mean) * factor * with.weight[i] + (with.bias == NULL ? 0.0f : with.bias[i]);
}

static float squares_of(const float *head, int64_t width) {
    float sum = 0.0f;
    for (int64_t i = 0; i < width; i++) sum += head[i] * head[i];
    return sum;
}

void normalise_heads(const head_norm *of, norm_weights with, float *heads, int64_t num_heads, int together) {
    const int64_t width = of->width;
    float factor = 0.0f;
    if (together) {
        for (int64_t head = 0; head < num_heads; head++) factor += squares_of(heads + head * of->stride, width);
        factor = 1.0f / sqrtf(factor / (float)(num_heads * width) + of->eps);
    }
    for (int64_t head = 0; head < num_heads; head++, heads += of->stride, with = further_weights(with, width)) {
        if (of->kind == NORM_LAYER) {
            normalise_row(NORM_LAYER, with, of->eps, heads, width, heads);
            continue;
        }
        if (!together) factor = 1.0f / sqrtf(squares_of(heads, width) / (float)width + of->eps);
        for (int64_t i = 0; i < width; i++) heads[i] *= factor * with.weight[i];
    }
}

void soft_plus_row(float *row, int64_t width) {
    for (int64_t i = 0; i < width; i++) row[i] = soft_plus(row[i]);
}

void rotate(float *restrict head, const float *restrict cosines, const float *restrict sines, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec low = load(head + i), high = load(head + half + i), cosine = load(cosines + i), sine = load(sines + i);
        store(head + i, low * cosine - high * sine);
        store(head + half + i, high * cosine + low * sine);
    }
    for (; i < half; i++) {
        float low = head[i], high = head[half + i];
        head[i] = low * cosines[i] - high * sines[i];
        head[half + i] = high * cosines[i] + low * sines[i];
    }
}

void add_row(float *to, const float *row, int64_t width, float factor) {
    for (int64_t i = 0; i < width; i++) to[i] += factor * row[i];
}

/* NaN stays. */
INLINE vec at_most(vec x, float limit) { return choose(x > limit, splat(limit), x); }

/* e^x - 1 - x for x up to 0. Near 0 the difference would be lost in rounding. */
INLINE vec exponential_above_line(vec x) {
    const vec series =
        0.5f + x * (1.0f / 6 + x * (1.0f / 24 + x * (1.0f / 120 + x * (1.0f / 720 + x * (1.0f / 5040)))));
    return choose(x > -0.25f, x * x * series, exponential(x) - 1.0f - x);
}

INLINE vec activated(const enum activation kind, const float *curve, vec x) {
    switch (kind) {
    case SILU: return silu(x);
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case RELU: return larger(x, (vec){0});
    case CLAMPED_SWISH: return silu(at_most(x, SWISH_LIMIT) * SWISH_FACTOR) / SWISH_FACTOR;
    case LIMITED_SILU: return at_most(silu(x), curve[0]);
    case XIELU: return choose(x > 0.0f, curve[0] * x * x, curve[1] * exponential_above_line(x)) + curve[2] * x;
    default: x = larger(x, (vec){0}); return x * x;
    }
}

INLINE vec up_of(const enum activation kind, const float *curve, vec x) {
    if (kind == LIMITED_SILU) return -at_most(-at_most(x, curve[0]), curve[0]);
    return kind == CLAMPED_SWISH ? 1.0f - at_most(-at_most(x, SWISH_LIMIT), SWISH_LIMIT) : x;
}

INLINE void activate(const enum activation kind, int gated, const float *curve, const float *row, int64_t width,
                     float *out) {
    for (int64_t i = 0; i < width; i += LANES) {
        int64_t count = width - i < LANES ? width - i : LANES;
        vec result = activated(kind, curve, load_some(row + i, count));
        if (gated) result *= up_of(kind, curve, load_some(row + width + i, count));
        store_some(out + i, result, count);
    }
}

void activate_row(enum activation kind, int gated, const float *curve, const float *row, int64_t width, float *out) {
    switch (kind) {
    case SILU: activate(SILU, gated, curve, row, width, out); break;
    case GELU: activate(GELU, gated, curve, row, width, out); break;
    case GELU_TANH: activate(GELU_TANH, gated, curve, row, width, out); break;
    case RELU: activate(RELU, gated, curve, row, width, out); break;
    case CLAMPED_SWISH: activate(CLAMPED_SWISH, gated, curve, row, width, out); break;
    case LIMITED_SILU: activate(LIMITED_SILU, gated, curve, row, width, out); break;
    case XIELU: activate(XIELU, gated, curve, row, width, out); break;
    default: activate(RELU2, gated, curve, row, width, out);
    }
}

void clip_row(float *row, int64_t width, float limit) {
    for (int64_t i = 0; i < width; i++) row[i] = row[i] > limit ? limit : row[i] < -limit ? -limit : row[i];
}

void scale_row(float *row, int64_t width, float factor, float softcap) {
    for (int64_t i = 0; i < width; i += LANES) {
        int64_t count = width - i < LANES ? width - i : LANES;
        vec scaled = load_some(row + i, count) * factor;
        if (softcap > 0.0f) scaled = capped(scaled, softcap);
        store_some(row + i, scaled, count);
    }
}
