#define _GNU_SOURCE
#include "products.h"

#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define HUGE_PAGE (2 << 20)
#define MOST_FETCHED (128 << 10)

void *stream_alloc(int64_t bytes) {
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    size_t rounded = ((size_t)bytes + alignment - 1) / alignment * alignment;
    void *made = aligned_alloc(alignment, rounded > 0 ? rounded : alignment);
    if (made == NULL) return NULL;
#if defined(__linux__)
    if (alignment == HUGE_PAGE) madvise(made, rounded, MADV_HUGEPAGE);
#endif
    memset(made, 0, rounded);
    return made;
}

int64_t panel_bytes(int64_t inputs, int64_t form) {
    int64_t padded = steps_of(inputs, form) * inputs_per_step(form);
    return padded * PANEL * (form == FORM_FLOAT32 ? 4 : form == FORM_BFLOAT16 ? 2 : 1);
}

/* The output in column `column` of panel `panel`; -1 if there is none. */
static int64_t output_at(int64_t panel, int64_t column, int64_t outputs, int64_t gated) {
    int64_t output = panel * PANEL + column;
    if (gated) {
        int64_t half = outputs / 2;
        output = panel * LANES + column % LANES;
        if (output >= half) return -1;
        return column < LANES ? output : half + output;
    }
    return output < outputs ? output : -1;
}

static void pack_float32(float *to, const float *row, int64_t inputs) {
    for (int64_t k = 0; k < inputs; k++) to[k * PANEL] = row[k];
}

static void pack_bfloat16(uint16_t *to, const float *row, int64_t inputs) {
    for (int64_t k = 0; k < inputs; k++) {
        uint32_t bits;
        memcpy(&bits, &row[k], 4);
        to[k / PAIR * PANEL * PAIR + k % PAIR] = (uint16_t)(bits >> 16);
    }
}

/* Symmetric, one scale per output; stored with 128 added, because the instruction takes weights as unsigned. */
static float pack_int8(uint8_t *to, const float *row, int64_t inputs) {
    float largest = TINY;
    for (int64_t k = 0; k < inputs; k++) largest = fmaxf(largest, fabsf(row[k]));
    float scale = fmaxf(largest / INT8_MAX_VALUE, TINY);
    for (int64_t k = 0; k < inputs; k++) {
        to[k / QUAD * PANEL * QUAD + k % QUAD] = (uint8_t)((int32_t)rintf(row[k] / scale) + 128);
    }
    return scale;
}

linear *linear_new(const float *weight, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                   int64_t gated) {
    linear *made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->form = form;
    made->outputs = outputs;
    made->inputs = inputs;
    int64_t columns = gated ? (outputs / 2 + LANES - 1) / LANES : (outputs + PANEL - 1) / PANEL;
    made->num_panels = columns;
    made->panels = stream_alloc(columns * panel_bytes(inputs, form));
    made->bias = stream_alloc(columns * PANEL * 4);
    made->scales = stream_alloc(columns * PANEL * 4);
    if (made->panels == NULL || made->bias == NULL || made->scales == NULL) {
        linear_free(made);
        return NULL;
    }
    for (int64_t panel = 0; panel < made->num_panels; panel++) {
        char *start = (char *)made->panels + panel * panel_bytes(inputs, form);
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t output = output_at(panel, column, outputs, gated);
            if (output < 0) continue;
            const float *row = weight + output * inputs;
            if (form == FORM_FLOAT32)
                pack_float32((float *)start + column, row, inputs);
            else if (form == FORM_BFLOAT16)
                pack_bfloat16((uint16_t *)start + column * PAIR, row, inputs);
            else
                made->scales[panel * PANEL + column] = pack_int8((uint8_t *)start + column * QUAD, row, inputs);
            if (bias != NULL) made->bias[panel * PANEL + column] = bias[output];
        }
    }
    return made;
}

void linear_free(linear *the_linear) {
    if (the_linear == NULL) return;
    free(the_linear->panels);
    free(the_linear->bias);
    free(the_linear->scales);
    free(the_linear);
}

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

typedef int8_t codes __attribute__((vector_size(LANES), aligned(1), may_alias));

float pack_int8_row(int8_t *tile, int64_t rows, int64_t place, const float *row, int64_t inputs, const float *weight,
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
        int8_t *to = tile + k * rows + place * stretch;
        for (int64_t i = 0; i < stretch; i += LANES) {
            vec scaled = normed_inputs(row, weight, k + i, inputs) * scale;
            scaled = choose(scaled == scaled, scaled, (vec){0});
            ivec rounded = __builtin_convertvector(__builtin_elementwise_rint(scaled), ivec);
            *(codes *)(to + i) = __builtin_convertvector(rounded, codes);
            sums += rounded;
        }
    }
    *offset = 128 * __builtin_reduce_add(sums);
    return largest / INT8_MAX_VALUE + sum_of(not_finite);
}

void fetch_panel(const linear *from, int64_t panel) {
    int64_t bytes = panel_bytes(from->inputs, from->form);
    const char *start = (const char *)from->panels + panel * bytes;
    if (bytes > MOST_FETCHED) bytes = MOST_FETCHED;
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(start + at, 0, 2);
}
