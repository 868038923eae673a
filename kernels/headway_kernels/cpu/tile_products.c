/* Products on a matrix unit: AMX, where a processor has it (Intel 2023, "Architecture instruction set extensions
 * programming reference", chapter 3). Compiled only for the variant that asks for it.
 *
 * A float32 is the sum of three bfloat16s of 8 bits each, so a product of two is nine products of those, added in
 * float32 (Henry, Tang & Heinecke 2019, arXiv 1904.06376). The three smallest, below 2^-22 of the product together, are
 * left out. What remains is six instructions where the unit is sixteen times as fast as the vector unit. Weights are
 * split panel by panel, when they are in the cache: memory is read as little as without. Weights of 8 bits and those
 * that are bfloat16s go in as they are.
 *
 * An output's additions come in an order that depends on the number of inputs only, as everywhere in these kernels.
 *
 * The unit takes denormals as zeros and makes no others: parts, and products, below 1.2e-38 are lost. A row with an
 * infinity gives NaN in all outputs, since what is left of an infinity without itself is no number; so it does after
 * the next normalisation anyway.
 */
#define _GNU_SOURCE
#include "products.h"

#if HAS_TILES

#include <assert.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SIDE 16         /* rows of a tile, and columns of 4 bytes */
#define TILE_BYTES 1024 /* of one tile: SIDE rows of a cache line */
#define PARTS 3         /* bfloat16s that are a float32 together */
#define DEPTH 24        /* steps that all rows take before the next steps: so much of a split panel stays in L2 */
#define SHALLOW 2       /* the same if there are few rows: so much stays in L1 */
#define SPLIT_STEP (2 * PARTS * TILE_BYTES)
#define LINES_AHEAD 128
#define FEW_TILES 2 /* of inputs: then a product waits for memory */

/* Tile registers: sums of two tiles of rows with both halves of a panel, two tiles of inputs, two of weights. */
#define SUMS_LOW 0
#define SUMS_HIGH 1
#define MORE_SUMS_LOW 2
#define MORE_SUMS_HIGH 3
#define INPUTS 4
#define MORE_INPUTS 5
#define WEIGHTS_LOW 6
#define WEIGHTS_HIGH 7

typedef struct {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

static void shape_tiles(int64_t rows) {
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = LINE;
        shapes.rows[i] = (uint8_t)(i < WEIGHTS_LOW ? rows : SIDE);
    }
    _tile_loadconfig(&shapes);
}

static int64_t bytes_of_inputs(int64_t form) { return (form == FORM_INT8 ? 1 : PARTS) * TILE_BYTES; }

static int64_t packed_tile_bytes(int64_t inputs, int64_t form) {
    return steps_of(inputs, form) * bytes_of_inputs(form);
}

int64_t packed_bytes(int64_t num_rows, int64_t inputs, int64_t form) {
    return tiles_of(num_rows) * packed_tile_bytes(inputs, form);
}

/* ---- inputs ---- */

typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

/* The bfloat16 nearest to each value goes to `to`; what is left of the value is returned. */
INLINE vec take_part(vec value, char *to) {
    __m256i part = (__m256i)_mm512_cvtneps_pbh((__m512)value);
    _mm256_storeu_si256((__m256i *)to, part);
    return value - (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16);
}

/* LANES inputs of row `place` of a packed tile, from input `k` on. */
INLINE void pack_parts(char *tile, int64_t place, int64_t k, vec value) {
    char *to = tile + k / (SIDE * PAIR) * PARTS * TILE_BYTES + place * LINE + k % (SIDE * PAIR) * 2;
    for (int part = 0; part < PARTS; part++) value = take_part(value, to + part * TILE_BYTES);
}

static void pack_float32_row(char *tile, int64_t place, const float *row, int64_t inputs, float factor,
                             const float *weight) {
    int64_t end = steps_of(inputs, FORM_FLOAT32) * SIDE * PAIR;
    for (int64_t k = 0; k < end; k += LANES) {
        pack_parts(tile, place, k, normed_inputs(row, weight, k, inputs) * factor);
    }
}

void pack_tile(const packed_inputs *to, int64_t form, int64_t tile, const float *from, int64_t stride, rms_norm norm) {
    int64_t first = tile_start(tile, to->num_tiles, to->num_rows);
    int64_t rows = tile_start(tile + 1, to->num_tiles, to->num_rows) - first;
    char *start = (char *)to->tiles + tile * packed_tile_bytes(to->inputs, form);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = from + (first + i) * stride;
        float factor = norm.weight != NULL ? root_mean_square_factor(row, to->inputs, norm.eps) : 1.0f;
        if (form == FORM_INT8) {
            float scale =
                pack_int8_row((int8_t *)start, SIDE, i, row, to->inputs, norm.weight, &to->offsets[first + i]);
            to->factors[first + i] = factor * scale;
        } else {
            pack_float32_row(start, i, row, to->inputs, factor, norm.weight);
        }
    }
}

/* ---- weights ---- */

/* Memory that is fetched bit by bit, `lines` with every step of a sum: from `at` to `end`, then from `then` on; without
 * an `end`, from `at` on. */
typedef struct {
    const char *at;
    const char *end;
    const char *then;
    int64_t lines;
} fetching;

INLINE void fetch_lines(fetching *ahead, int64_t lines) {
    if (ahead->at == NULL) return;
    for (int64_t line = 0; line < lines; line++, ahead->at += LINE) {
        if (ahead->at == ahead->end) ahead->at = ahead->then;
        __builtin_prefetch(ahead->at);
    }
}

/* The upper halves of two float32s, side by side. */
INLINE __m512i upper_halves(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

INLINE __m512i without_upper_half(__m512i value) {
    __m512i upper = _mm512_and_si512(value, _mm512_set1_epi32((int32_t)0xffff0000));
    return (__m512i)_mm512_sub_ps((__m512)value, (__m512)upper);
}

/* One step of a float32 panel as bfloat16 tiles: all first parts, low and high half of the panel, all second, all third.
 * A part is what the part before has left, cut off after 8 bits: nothing is lost, and no value grows to infinity. */
INLINE void split_step(const float *weights, char *tiles, fetching *ahead) {
    for (int64_t pair = 0; pair < SIDE; pair++) {
        fetch_lines(ahead, 2 * PAIR);
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const float *from = weights + pair * PAIR * PANEL + half * LANES;
            char *to = tiles + half * TILE_BYTES + pair * LINE;
            __m512i even = _mm512_loadu_si512(from), odd = _mm512_loadu_si512(from + PANEL);
            _mm512_store_si512(to, upper_halves(even, odd));
            even = without_upper_half(even), odd = without_upper_half(odd);
            _mm512_store_si512(to + 2 * TILE_BYTES, upper_halves(even, odd));
            even = without_upper_half(even), odd = without_upper_half(odd);
            _mm512_store_si512(to + 4 * TILE_BYTES, upper_halves(even, odd));
        }
    }
}

/* ---- sums ---- */

/* What one pass over some steps works with. `more`: NULL if there is one tile of rows only. `weights`: split tiles of a
 * float32 panel, or the panel. */
typedef struct {
    const char *inputs;
    const char *more;
    const char *weights;
    int64_t steps;
} sum_range;

INLINE void load_inputs(const int both, const sum_range *of, int64_t at) {
    _tile_loadd(INPUTS, of->inputs + at, LINE);
    if (both) _tile_loadd(MORE_INPUTS, of->more + at, LINE);
}

INLINE void load_split_weights(const char *at) {
    _tile_loadd(WEIGHTS_LOW, at, LINE);
    _tile_loadd(WEIGHTS_HIGH, at + TILE_BYTES, LINE);
}

INLINE void load_weights(const char *at) {
    _tile_loadd(WEIGHTS_LOW, at, 2 * LINE);
    _tile_loadd(WEIGHTS_HIGH, at + LINE, 2 * LINE);
}

INLINE void add_products(const int both, const int form) {
    if (form == FORM_INT8) {
        _tile_dpbsud(SUMS_LOW, INPUTS, WEIGHTS_LOW);
        _tile_dpbsud(SUMS_HIGH, INPUTS, WEIGHTS_HIGH);
        if (!both) return;
        _tile_dpbsud(MORE_SUMS_LOW, MORE_INPUTS, WEIGHTS_LOW);
        _tile_dpbsud(MORE_SUMS_HIGH, MORE_INPUTS, WEIGHTS_HIGH);
    } else {
        _tile_dpbf16ps(SUMS_LOW, INPUTS, WEIGHTS_LOW);
        _tile_dpbf16ps(SUMS_HIGH, INPUTS, WEIGHTS_HIGH);
        if (!both) return;
        _tile_dpbf16ps(MORE_SUMS_LOW, MORE_INPUTS, WEIGHTS_LOW);
        _tile_dpbf16ps(MORE_SUMS_HIGH, MORE_INPUTS, WEIGHTS_HIGH);
    }
}

/* Part i of the inputs times part j of the weights, for i + j <= 2, in an order in which one of them stays where it is. */
INLINE void sum_float32(const int both, const sum_range *of, fetching *ahead) {
    for (int64_t step = 0; step < of->steps; step++) {
        const int64_t inputs = step * PARTS * TILE_BYTES;
        const char *weights = of->weights + step * SPLIT_STEP;
        load_split_weights(weights);
        load_inputs(both, of, inputs + 2 * TILE_BYTES);
        add_products(both, FORM_FLOAT32);
        fetch_lines(ahead, ahead->lines);
        load_inputs(both, of, inputs + TILE_BYTES);
        add_products(both, FORM_FLOAT32);
        load_split_weights(weights + 2 * TILE_BYTES);
        add_products(both, FORM_FLOAT32);
        load_inputs(both, of, inputs);
        add_products(both, FORM_FLOAT32);
        load_split_weights(weights + 4 * TILE_BYTES);
        add_products(both, FORM_FLOAT32);
        load_split_weights(weights);
        add_products(both, FORM_FLOAT32);
    }
}

/* The same for weights whose second and third parts are zeros. */
INLINE void sum_bfloat16(const int both, const sum_range *of, fetching *ahead) {
    for (int64_t step = 0; step < of->steps; step++) {
        fetch_lines(ahead, ahead->lines);
        load_weights(of->weights + step * 2 * TILE_BYTES);
        for (int64_t part = PARTS - 1; part >= 0; part--) {
            load_inputs(both, of, (step * PARTS + part) * TILE_BYTES);
            add_products(both, FORM_BFLOAT16);
        }
    }
}

INLINE void sum_int8(const int both, const sum_range *of, fetching *ahead) {
    for (int64_t step = 0; step < of->steps; step++) {
        fetch_lines(ahead, ahead->lines);
        load_weights(of->weights + step * 2 * TILE_BYTES);
        load_inputs(both, of, step * TILE_BYTES);
        add_products(both, FORM_INT8);
    }
}

/* The sums of one tile of rows with one panel: low half, high half. */
typedef struct {
    _Alignas(LINE) char halves[2][TILE_BYTES];
} tile_sums;

INLINE void sum_tiles(const int both, int64_t form, const sum_range *of, tile_sums *kept, int begins, fetching *ahead) {
    if (begins) {
        _tile_zero(SUMS_LOW);
        _tile_zero(SUMS_HIGH);
        if (both) _tile_zero(MORE_SUMS_LOW);
        if (both) _tile_zero(MORE_SUMS_HIGH);
    } else {
        _tile_loadd(SUMS_LOW, kept[0].halves[0], LINE);
        _tile_loadd(SUMS_HIGH, kept[0].halves[1], LINE);
        if (both) _tile_loadd(MORE_SUMS_LOW, kept[1].halves[0], LINE);
        if (both) _tile_loadd(MORE_SUMS_HIGH, kept[1].halves[1], LINE);
    }
    switch (form) {
    case FORM_INT8: sum_int8(both, of, ahead); break;
    case FORM_BFLOAT16: sum_bfloat16(both, of, ahead); break;
    default: sum_float32(both, of, ahead);
    }
    _tile_stored(SUMS_LOW, kept[0].halves[0], LINE);
    _tile_stored(SUMS_HIGH, kept[0].halves[1], LINE);
    if (both) _tile_stored(MORE_SUMS_LOW, kept[1].halves[0], LINE);
    if (both) _tile_stored(MORE_SUMS_HIGH, kept[1].halves[1], LINE);
}

/* ---- results ---- */

/* The sums of tile `tile` with panel `panel` are complete. */
static void finish_tile(const linear *with, const packed_inputs *from, int64_t panel, int64_t tile,
                        const tile_sums *sums, enum epilogue epilogue, float *out, int64_t stride) {
    int64_t first = tile_start(tile, from->num_tiles, from->num_rows);
    int64_t rows = tile_start(tile + 1, from->num_tiles, from->num_rows) - first;
    const vec low_bias = load(with->bias + panel * PANEL), high_bias = load(with->bias + panel * PANEL + LANES);
    const vec low_scale = load(with->scales + panel * PANEL), high_scale = load(with->scales + panel * PANEL + LANES);
    for (int64_t i = 0; i < rows; i++) {
        const char *low_sums = sums->halves[0] + i * LINE, *high_sums = sums->halves[1] + i * LINE;
        vec low, high;
        if (with->form == FORM_INT8) {
            int32_t offset = from->offsets[first + i];
            vec factor = splat(from->factors[first + i]);
            low = __builtin_convertvector(*(const unaligned_ivec *)low_sums - offset, vec);
            high = __builtin_convertvector(*(const unaligned_ivec *)high_sums - offset, vec);
            low = low * (low_scale * factor) + low_bias;
            high = high * (high_scale * factor) + high_bias;
        } else {
            low = load((const float *)low_sums) + low_bias;
            high = load((const float *)high_sums) + high_bias;
        }
        if (epilogue == GATED_PACKED) {
            char *packed = (char *)out + tile * packed_tile_bytes(stride, FORM_FLOAT32);
            pack_parts(packed, i, panel * LANES, silu(low) * high);
        } else {
            int64_t column = panel * (epilogue == GATED ? LANES : PANEL);
            finish_row(epilogue, low, high, out + (first + i) * stride + column);
        }
    }
}

/* Split or whole, the weights of steps [begin, begin + steps) as the unit takes them. */
static const char *weights_for(const linear *with, const char *weights, int64_t steps, char *split, fetching *ahead) {
    if (with->form != FORM_FLOAT32) return weights;
    for (int64_t step = 0; step < steps; step++) {
        split_step((const float *)weights + step * SIDE * PAIR * PANEL, split + step * SPLIT_STEP, ahead);
    }
    return split;
}

void multiply(const linear *with, const packed_inputs *from, int64_t panel, int64_t next, int64_t first_tile,
              int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    const int64_t form = with->form, num_tiles = end_tile - first_tile;
    assert(num_tiles <= MOST_TILES);
    const int64_t num_steps = steps_of(with->inputs, form), bytes = panel_bytes(with->inputs, form);
    const int64_t step_bytes = bytes / num_steps, tile_bytes = packed_tile_bytes(with->inputs, form);
    const int64_t depth = num_tiles <= FEW_TILES ? SHALLOW : DEPTH;
    const char *weights = (const char *)with->panels + panel * bytes, *end = weights + bytes;
    const char *following = (const char *)with->panels + next * bytes;
    _Alignas(LINE) char split[DEPTH * SPLIT_STEP];
    tile_sums sums[MOST_TILES];
    fetching nothing = {0}, ahead = {.at = weights + LINES_AHEAD * LINE, .end = end, .then = following};
    if (ahead.at >= end) ahead.at = following + (ahead.at - end), ahead.end = NULL;
    shape_tiles((from->num_rows + from->num_tiles - 1) / from->num_tiles);
    for (int64_t begin = 0; begin < num_steps; begin += depth) {
        const int64_t steps = begin + depth < num_steps ? depth : num_steps - begin;
        const char *current = weights_for(with, weights + begin * step_bytes, steps, split, num_tiles <= FEW_TILES ? &ahead : &nothing);
        if (num_tiles > FEW_TILES) {
            /* What comes next, a little with each step. */
            ahead = (fetching){.at = begin + depth < num_steps ? weights + (begin + depth) * step_bytes : following};
            ahead.lines = (2 * step_bytes / LINE + num_tiles - 1) / num_tiles;
        } else if (form != FORM_FLOAT32) {
            ahead.lines = step_bytes / LINE;
        }
        for (int64_t tile = 0; tile < num_tiles; tile += 2) {
            const char *at = (const char *)from->tiles + (first_tile + tile) * tile_bytes + begin * bytes_of_inputs(form);
            const sum_range of = {at, at + tile_bytes, current, steps};
            if (tile + 1 < num_tiles)
                sum_tiles(1, form, &of, sums + tile, begin == 0, &ahead);
            else
                sum_tiles(0, form, &of, sums + tile, begin == 0, &ahead);
        }
    }
    _tile_release();
    for (int64_t tile = 0; tile < num_tiles; tile++)
        finish_tile(with, from, panel, first_tile + tile, sums + tile, epilogue, out, stride);
}

/* A thread's tile registers are 8 KB that the system has to save: a process must ask (Linux,
 * Documentation/arch/x86/xstate.rst). */
int products_permitted(void) {
#if defined(__linux__)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

#endif
