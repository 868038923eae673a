/* Products on the vector unit: for all processors but those with a matrix unit (tile_products.c). */
#include "adapters.h"
#include "products.h"

#if !HAS_TILES

#include <assert.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define STRETCH 16 /* steps of a sum (inputs, or quads of them) that a tile stores side by side for each row */
#define LINES_AHEAD 128
#define MOST_TILES 10
/* All tiles take so many steps of a sum before the next steps: this much of a panel stays in the cache. */
#define DEPTH 768
#define CODED_DEPTH 128 /* the same of a panel of codes, which is widened to float32 for them */

/* A step takes one float of each row, or a QUAD of codes. */
static int64_t packed_row_bytes(int64_t inputs, int64_t form) {
    const int64_t step_bytes = form == FORM_INT8 ? QUAD * sizeof(code) : sizeof(float);
    return (steps_of(inputs, form) + STRETCH - 1) / STRETCH * STRETCH * step_bytes;
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
        const float *row = from + row_taken(to, first + i) * stride;
        float factor = norm.weight != NULL ? root_mean_square_factor(row, to->inputs, norm.eps) : 1.0f;
        if (form == FORM_INT8) {
            float scale = pack_int8_row((code *)start, rows, i, row, to->inputs, norm.weight, &to->offsets[first + i]);
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

/* `weights` of a panel, from the first of `inputs` on. */
INLINE void sum_floats(const int rows, const int form, const float *tile, const void *weights, range inputs,
                       vec (*sums)[2], fetching ahead) {
    for (int64_t k = inputs.begin; k < inputs.end; k++) {
        fetch(&ahead, inputs.end - k);
        vec low = load_weights(form, weights, (k - inputs.begin) * PANEL);
        vec high = load_weights(form, weights, (k - inputs.begin) * PANEL + LANES);
        const float *column = tile + k / STRETCH * STRETCH * rows + k % STRETCH;
        UNROLLED
        for (int i = 0; i < rows; i++) {
            vec input = splat(column[i * STRETCH]);
            sums[i][0] += input * low;
            sums[i][1] += input * high;
        }
    }
}

#if MULTIPLIES_BYTES

/* Exact in int32: 4 products of unsigned and signed bytes are added to each lane. */
INLINE ivec add_quad_products(ivec sum, ivec weights, const code *inputs) {
    int32_t four;
    memcpy(&four, inputs, QUAD);
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)splat_int(four));
}

#else

/* Exact in int32: the products of two 16-bit numbers and two others are added to each lane. */
INLINE ivec add_pair_products(ivec sum, ivec weights, const code *inputs) {
    int32_t two;
    memcpy(&two, inputs, 2 * sizeof *inputs);
    const ivec pair = splat_int(two);
#if defined(__AVX2__) && LANES == 8
    return sum + (ivec)_mm256_madd_epi16((__m256i)weights, (__m256i)pair);
#else
    return sum + ((weights << 16) >> 16) * ((pair << 16) >> 16) + (weights >> 16) * (pair >> 16);
#endif
}

/* The same of 4 unsigned bytes and 4 inputs. */
INLINE ivec add_quad_products(ivec sum, ivec weights, const code *inputs) {
    const ivec bytes = splat_int(0x00ff00ff);
    sum = add_pair_products(sum, weights & bytes, inputs);
    return add_pair_products(sum, (weights >> 8) & bytes, inputs + 2);
}

#endif

INLINE void sum_int8(const int rows, const code *tile, const char *weights, range quads, ivec (*sums)[2],
                     fetching ahead) {
    for (int64_t quad = quads.begin; quad < quads.end; quad++) {
        fetch(&ahead, quads.end - quad);
        const char *at = weights + (quad - quads.begin) * PANEL * QUAD;
        const code *column = tile + (quad / STRETCH * STRETCH * rows + quad % STRETCH) * QUAD;
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const ivec of_half = *(const unaligned_ivec *)(at + half * LANES * QUAD);
            UNROLLED
            for (int i = 0; i < rows; i++) {
                sums[i][half] = add_quad_products(sums[i][half], of_half, column + i * STRETCH * QUAD);
            }
        }
    }
}

/* The sums of one tile with one panel, kept between one range of steps and the next. */
typedef union {
    vec floats[TILE_ROWS][2];
    ivec integers[TILE_ROWS][2];
} tile_sums;

INLINE void multiply_int8(const int rows, const linear *with, const packed_inputs *from, int64_t first, int64_t panel,
                          const char *weights, range steps, fetching ahead, tile_sums *kept, enum epilogue epilogue,
                          float *out, int64_t stride) {
    const char *start = (const char *)from->tiles + first * packed_row_bytes(with->inputs, FORM_INT8);
    const code *tile = (const code *)start;
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
        low = low * (low_scale * factor) + low_bias;
        high = high * (high_scale * factor) + high_bias;
        if (from->added != NULL) add_low_rank(from->added, first + i, panel, &low, &high);
        finish_row(epilogue, low, high, out + i * stride);
    }
}

INLINE void multiply_floats(const int rows, const int form, const linear *with, const packed_inputs *from,
                            int64_t first, int64_t panel, const char *weights, range steps, fetching ahead,
                            tile_sums *kept, enum epilogue epilogue, float *out, int64_t stride) {
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
            if (from->added != NULL) add_low_rank(from->added, first + i, panel, &sums[i][0], &sums[i][1]);
            finish_row(epilogue, sums[i][0], sums[i][1], out + i * stride);
        }
    }
}

/* Steps `steps` of the sums of one tile, of exactly `rows` rows, with one panel, whose weights of these steps are at
 * `weights`; after the last step the results go to `out`, the tile's first row at the panel's first column. */
INLINE void multiply_tile(const int rows, const linear *with, const packed_inputs *from, int64_t first, int64_t panel,
                          const char *weights, range steps, fetching ahead, tile_sums *kept, enum epilogue epilogue,
                          float *out, int64_t stride) {
    switch (with->form) {
    case FORM_INT8:
        multiply_int8(rows, with, from, first, panel, weights, steps, ahead, kept, epilogue, out, stride);
        break;
    case FORM_BFLOAT16:
        multiply_floats(rows, FORM_BFLOAT16, with, from, first, panel, weights, steps, ahead, kept, epilogue, out,
                        stride);
        break;
    default:
        multiply_floats(rows, FORM_FLOAT32, with, from, first, panel, weights, steps, ahead, kept, epilogue, out,
                        stride);
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
    case rows:                                                                                                         \
        multiply_tile(rows, with, from, first, panel, taken, steps, ahead, &kept[place], epilogue, to, row_step);      \
        break;

void multiply(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
              int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    assert(end_tile - first_tile <= MOST_TILES);
    int64_t column = panel * (epilogue == GATED || epilogue == GATED_PACKED ? LANES : PANEL);
    int64_t row_step = epilogue == GATED_PACKED ? STRETCH : stride;
    const int64_t num_steps = steps_of(with->inputs, with->form), depth = is_coded(with) ? CODED_DEPTH : DEPTH;
    const int64_t bytes = panel_bytes(with), step_bytes = bytes / num_steps;
    const int64_t lines = is_coded(with) ? 0 : step_bytes / LINE; /* codes are fetched where they are widened */
    const char *weights = panel_at(with, panel);
    float widened[CODED_DEPTH * PANEL];
    tile_sums kept[MOST_TILES];
    if (from->added != NULL) {
        int64_t first = tile_start(first_tile, from->num_tiles, from->num_rows);
        fetch_additions(from->added, panel_number(with, next), first,
                        tile_start(end_tile, from->num_tiles, from->num_rows) - first);
    }
    for (int64_t begin = 0; begin < num_steps; begin += depth) {
        const range steps = {begin, begin + depth < num_steps ? begin + depth : num_steps};
        const char *current = weights + begin * step_bytes;
        const char *following = steps.end < num_steps ? weights + steps.end * step_bytes : next;
        const char *taken = is_coded(with) ? (const char *)widened : current;
        if (is_coded(with)) widen(with, panel, begin, steps.end - begin, widened);
        for (int64_t tile = first_tile; tile < end_tile; tile++) {
            int64_t first = tile_start(tile, from->num_tiles, from->num_rows), place = tile - first_tile;
            int64_t rows = tile_start(tile + 1, from->num_tiles, from->num_rows) - first;
            float *to = out + first * stride + column;
            if (epilogue == GATED_PACKED) {
                char *packed = (char *)out + first * packed_row_bytes(stride, FORM_FLOAT32);
                to = (float *)packed + column / STRETCH * STRETCH * rows + column % STRETCH;
            }
            fetching ahead = what_to_fetch(current, following, (steps.end - begin) * step_bytes, lines, place,
                                           end_tile - first_tile);
            switch (rows) { EACH_TILE_SIZE(CASE) }
        }
    }
}

int products_permitted(void) { return 1; }

#endif
