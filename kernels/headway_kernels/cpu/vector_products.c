/* Products on the vector unit: for all processors but those with a matrix unit (tile_products.c). */
#include "products.h"

#if !HAS_TILES

#include <assert.h>
#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#define STRETCH 16 /* steps of a sum (inputs, or quads of them) that a tile stores side by side for each row */
#define LINES_AHEAD 128
#define MOST_TILES 10
/* All tiles take so many steps of a sum before the next steps: this much of a panel stays in the cache. */
#define DEPTH 768

/* A step takes 4 bytes of each row. */
static int64_t packed_row_bytes(int64_t inputs, int64_t form) {
    return (steps_of(inputs, form) + STRETCH - 1) / STRETCH * STRETCH * 4;
}

int64_t packed_bytes(int64_t num_rows, int64_t inputs, int64_t form) {
    return num_rows * packed_row_bytes(inputs, form);
}

static void pack_float32_row(float *tile, int64_t rows, int64_t place, const float *row, int64_t inputs, float factor,
                             const float *weight) {
    for (int64_t k = 0; k < inputs; k += STRETCH) {
        float *to = tile + k * rows + place * STRETCH;
        for (int64_t i = 0; i < STRETCH; i += LANES) store(to + i, normed_inputs(row, weight, k + i, inputs) * factor);
    }
}

void pack_tile(const packed_inputs *to, int64_t form, int64_t tile, const float *from, int64_t stride, rms_norm norm) {
    int64_t first = tile_start(tile, to->num_tiles, to->num_rows);
    int64_t rows = tile_start(tile + 1, to->num_tiles, to->num_rows) - first;
    char *start = (char *)to->tiles + first * packed_row_bytes(to->inputs, form);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = from + (first + i) * stride;
        float factor = norm.weight != NULL ? root_mean_square_factor(row, to->inputs, norm.eps) : 1.0f;
        if (form == FORM_INT8) {
            float scale =
                pack_int8_row((int8_t *)start, rows, i, row, to->inputs, norm.weight, &to->offsets[first + i]);
            to->factors[first + i] = factor * scale;
        } else {
            pack_float32_row((float *)start, rows, i, row, to->inputs, factor, norm.weight);
        }
    }
}

/* Steps of a sum: inputs, or quads of them. */
typedef struct {
    int64_t begin;
    int64_t end;
} range;

/* Memory that is fetched little by little: so many lines per step of a sum, from `at` on, and from `then` on when
 * only `last_steps` are left. */
typedef struct {
    const char *at;
    int64_t lines;
    const char *then;
    int64_t last_steps;
} fetching;

INLINE void fetch(fetching *ahead, int64_t steps_left) {
    if (steps_left == ahead->last_steps) ahead->at = ahead->then;
    for (int64_t line = 0; line < ahead->lines; line++, ahead->at += LINE) __builtin_prefetch(ahead->at);
}

typedef uint16_t half_width __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

/* LANES weights of a panel in `form`, from number `at` on. */
INLINE vec load_weights(const int form, const void *panel, int64_t at) {
    if (form == FORM_FLOAT32) return load((const float *)panel + at);
    const half_width bits = *(const half_width *)((const uint16_t *)panel + at);
    return bits_as_vec(__builtin_convertvector(bits, ivec) << 16);
}

INLINE void sum_floats(const int rows, const int form, const float *tile, const void *panel, range inputs,
                       vec (*sums)[2], fetching ahead) {
    for (int64_t k = inputs.begin; k < inputs.end; k++) {
        fetch(&ahead, inputs.end - k);
        vec low = load_weights(form, panel, k * PANEL);
        vec high = load_weights(form, panel, k * PANEL + LANES);
        const float *column = tile + k / STRETCH * STRETCH * rows + k % STRETCH;
        UNROLLED
        for (int i = 0; i < rows; i++) {
            vec input = splat(column[i * STRETCH]);
            sums[i][0] += input * low;
            sums[i][1] += input * high;
        }
    }
}

/* Exact in int32: 4 products of unsigned and signed bytes are added to each lane. */
INLINE ivec add_quad_products(ivec sum, ivec weights, ivec inputs) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
#else
    UNROLLED
    for (int j = 0; j < QUAD; j++) {
        sum += ((weights >> (8 * j)) & 255) * ((inputs << (24 - 8 * j)) >> 24);
    }
    return sum;
#endif
}

INLINE void sum_int8(const int rows, const int8_t *tile, const uint8_t *panel, range quads, ivec (*sums)[2],
                     fetching ahead) {
    for (int64_t quad = quads.begin; quad < quads.end; quad++) {
        fetch(&ahead, quads.end - quad);
        ivec low = *(const unaligned_ivec *)(panel + quad * PANEL * QUAD);
        ivec high = *(const unaligned_ivec *)(panel + quad * PANEL * QUAD + LANES * QUAD);
        const int8_t *column = tile + (quad / STRETCH * STRETCH * rows + quad % STRETCH) * QUAD;
        UNROLLED
        for (int i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, column + i * STRETCH * QUAD, QUAD);
            ivec input = splat_int(four);
            sums[i][0] = add_quad_products(sums[i][0], low, input);
            sums[i][1] = add_quad_products(sums[i][1], high, input);
        }
    }
}

/* The sums of one tile with one panel, kept between one range of steps and the next. */
typedef union {
    vec floats[TILE_ROWS][2];
    ivec integers[TILE_ROWS][2];
} tile_sums;

INLINE void multiply_int8(const int rows, const linear *with, const packed_inputs *from, int64_t first, int64_t panel,
                          range steps, fetching ahead, tile_sums *kept, enum epilogue epilogue, float *out,
                          int64_t stride) {
    const uint8_t *weights = (const uint8_t *)with->panels + panel * panel_bytes(with->inputs, FORM_INT8);
    const int8_t *tile = (const int8_t *)from->tiles + first * packed_row_bytes(with->inputs, FORM_INT8);
    ivec sums[TILE_ROWS][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][0] = steps.begin > 0 ? kept->integers[i][0] : (ivec){0};
        sums[i][1] = steps.begin > 0 ? kept->integers[i][1] : (ivec){0};
    }
    sum_int8(rows, tile, weights, steps, sums, ahead);
    if (steps.end < steps_of(with->inputs, FORM_INT8)) {
        UNROLLED
        for (int i = 0; i < rows; i++) {
            kept->integers[i][0] = sums[i][0];
            kept->integers[i][1] = sums[i][1];
        }
        return;
    }
    const vec low_bias = load(with->bias + panel * PANEL), low_scale = load(with->scales + panel * PANEL);
    const vec high_bias = load(with->bias + panel * PANEL + LANES);
    const vec high_scale = load(with->scales + panel * PANEL + LANES);
    UNROLLED
    for (int i = 0; i < rows; i++) {
        vec low = __builtin_convertvector(sums[i][0] - from->offsets[first + i], vec);
        vec high = __builtin_convertvector(sums[i][1] - from->offsets[first + i], vec);
        vec factor = splat(from->factors[first + i]);
        finish_row(epilogue, low * (low_scale * factor) + low_bias, high * (high_scale * factor) + high_bias,
                   out + i * stride);
    }
}

INLINE void multiply_floats(const int rows, const int form, const linear *with, const packed_inputs *from,
                            int64_t first, int64_t panel, range steps, fetching ahead, tile_sums *kept,
                            enum epilogue epilogue, float *out, int64_t stride) {
    const char *weights = (const char *)with->panels + panel * panel_bytes(with->inputs, form);
    const char *tile = (const char *)from->tiles + first * packed_row_bytes(with->inputs, form);
    const vec low_bias = load(with->bias + panel * PANEL);
    const vec high_bias = load(with->bias + panel * PANEL + LANES);
    vec sums[TILE_ROWS][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][0] = steps.begin > 0 ? kept->floats[i][0] : low_bias;
        sums[i][1] = steps.begin > 0 ? kept->floats[i][1] : high_bias;
    }
    sum_floats(rows, form, (const float *)tile, weights, steps, sums, ahead);
    UNROLLED
    for (int i = 0; i < rows; i++) {
        if (steps.end < with->inputs) {
            kept->floats[i][0] = sums[i][0];
            kept->floats[i][1] = sums[i][1];
        } else {
            finish_row(epilogue, sums[i][0], sums[i][1], out + i * stride);
        }
    }
}

/* Steps `steps` of the sums of one tile, of exactly `rows` rows, with one panel; after the last step the results go to
 * `out`, the tile's first row at the panel's first column. */
INLINE void multiply_tile(const int rows, const linear *with, const packed_inputs *from, int64_t first, int64_t panel,
                          range steps, fetching ahead, tile_sums *kept, enum epilogue epilogue, float *out,
                          int64_t stride) {
    switch (with->form) {
    case FORM_INT8: multiply_int8(rows, with, from, first, panel, steps, ahead, kept, epilogue, out, stride); break;
    case FORM_BFLOAT16:
        multiply_floats(rows, FORM_BFLOAT16, with, from, first, panel, steps, ahead, kept, epilogue, out, stride);
        break;
    default: multiply_floats(rows, FORM_FLOAT32, with, from, first, panel, steps, ahead, kept, epilogue, out, stride);
    }
}

/* The memory that tile `place` of `count` fetches while it is multiplied with the weights at `current`. The first
 * tile, which brings these weights from memory, fetches a little ahead, and near the end from the next panel: the
 * memory behind the end belongs to another member. The second and third, with the weights in the cache, fetch the
 * rest of the next panel. */
static fetching what_to_fetch(const char *current, const char *next, int64_t bytes, int64_t lines, int64_t place,
                              int64_t count) {
    if (lines == 0) return (fetching){.at = current};
    if (place == 0) return (fetching){current + LINES_AHEAD * LINE, lines, next, LINES_AHEAD / lines};
    if (place == 1 && count == 2) return (fetching){.at = next, .lines = lines};
    if (place <= 2) return (fetching){.at = next + (place - 1) * bytes / 2 / LINE * LINE, .lines = (lines + 1) / 2};
    return (fetching){.at = current};
}

int64_t tiles_at_once(const linear *with) {
    (void)with;
    return MOST_TILES;
}

#define CASE(rows)                                                                                                     \
    case rows: multiply_tile(rows, with, from, first, panel, steps, ahead, &kept[place], epilogue, to, row_step); break;

void multiply(const linear *with, const packed_inputs *from, int64_t panel, int64_t next, int64_t first_tile,
              int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    assert(end_tile - first_tile <= MOST_TILES);
    int64_t column = panel * (epilogue == GATED || epilogue == GATED_PACKED ? LANES : PANEL);
    int64_t row_step = epilogue == GATED_PACKED ? STRETCH : stride;
    int64_t num_steps = steps_of(with->inputs, with->form);
    int64_t bytes = panel_bytes(with->inputs, with->form), step_bytes = bytes / num_steps;
    const char *weights = (const char *)with->panels + panel * bytes;
    tile_sums kept[MOST_TILES];
    for (int64_t begin = 0; begin < num_steps; begin += DEPTH) {
        const range steps = {begin, begin + DEPTH < num_steps ? begin + DEPTH : num_steps};
        const char *current = weights + begin * step_bytes;
        const char *following =
            steps.end < num_steps ? weights + steps.end * step_bytes : (const char *)with->panels + next * bytes;
        for (int64_t tile = first_tile; tile < end_tile; tile++) {
            int64_t first = tile_start(tile, from->num_tiles, from->num_rows), place = tile - first_tile;
            int64_t rows = tile_start(tile + 1, from->num_tiles, from->num_rows) - first;
            float *to = out + first * stride + column;
            if (epilogue == GATED_PACKED) {
                char *packed = (char *)out + first * packed_row_bytes(stride, FORM_FLOAT32);
                to = (float *)packed + column / STRETCH * STRETCH * rows + column % STRETCH;
            }
            fetching ahead = what_to_fetch(current, following, (steps.end - begin) * step_bytes, step_bytes / LINE,
                                           place, end_tile - first_tile);
            switch (rows) { EACH_TILE_SIZE(CASE) }
        }
    }
}

int products_permitted(void) { return 1; }

#endif
