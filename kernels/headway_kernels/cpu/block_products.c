/* Products of integer codes with inputs that are rounded to 8 bits block by block, on the vector unit.
 *
 * The inputs of a row are cut into blocks of 32, or of 16 where the weight's groups are that small, each with a scale
 * of its own, as llama.cpp does (Q8_0 of ggml). The products of a block are added exactly, in integers; the sum times
 * both scales is added to the output in float32, block after block. So a row's result depends on the row alone.
 *
 * A panel stores group after group: the scales of its outputs, then their minima if there are any, then the codes of
 * each block. Of a block stand first the codes of one half of the panel, a QUAD of inputs of each output side by side,
 * then of the other half. A byte of 4-bit codes has an input of the first half of the block below, of the second above.
 */
#include "adapters.h"
#include "products.h"

#include <assert.h>
#include <float.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define MOST_TILES 10
#define LINES_AHEAD 128
#define DEPTH 24 /* blocks that all tiles take before the next ones: so much of a panel stays in the L1 cache */
#define BLOCK_OF_CODES4 32
#define MOST_BLOCK 32
#define SMALL_BLOCK 16

/* Weights of 8 bits are stored with 128 added where the instruction takes them as unsigned. */
#if MULTIPLIES_BYTES
#define ADDED_TO_CODES8 128
#else
#define ADDED_TO_CODES8 0
#endif

/* An instruction adds two products of bytes in 16 bits. */
#if !MULTIPLIES_BYTES && defined(__AVX2__)
#define MULTIPLIES_SMALL_BYTES 1
#else
#define MULTIPLIES_SMALL_BYTES 0
#endif

#define MIDDLE_OF_CODES4 8 /* stands for zero without minima */

typedef _Float16 few_halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t few_codes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* ---- sizes ---- */

static int64_t block_of(const linear *of) {
    return of->form == FORM_BLOCKS8 && of->group == SMALL_BLOCK ? SMALL_BLOCK : MOST_BLOCK;
}

static int64_t blocks_in(const linear *of) { return (of->inputs + block_of(of) - 1) / block_of(of); }

static int64_t blocks_per_group(const linear *of) {
    return of->num_groups == 1 ? blocks_in(of) : of->group / block_of(of);
}

static int64_t bytes_of_scales(const linear *of) { return PANEL * (of->has_half_scales ? 2 : 4); }

static int64_t bytes_of_values(const linear *of) { return bytes_of_scales(of) + (of->has_minima ? PANEL * 4 : 0); }

static int64_t bytes_of_block(const linear *of) { return PANEL * block_of(of) / (of->form == FORM_BLOCKS4 ? 2 : 1); }

int64_t block_panel_bytes(const linear *of) {
    const int64_t bytes = of->num_groups * bytes_of_values(of) + blocks_in(of) * bytes_of_block(of);
    return (bytes + LINE - 1) / LINE * LINE;
}

/* Of a row of a packed tile. A tile stores, block after block, the codes of each row, then three numbers of each row:
 * the scale; what the sum of unsigned codes has too much, negative; and the sum of the inputs, for minima. */
static int64_t bytes_of_packed_block(int64_t block) { return block + 12; }
static int64_t bytes_of_packed_row(const linear *of) { return blocks_in(of) * bytes_of_packed_block(block_of(of)); }

/* ---- packing ---- */

static int are_exact_halves(const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if ((float)(_Float16)values[i] != values[i]) return 0;
    }
    return 1;
}

static void pack_values(const linear *of, char *to, int64_t column, const coded_weight *from, int64_t at) {
    if (of->has_half_scales)
        ((_Float16 *)to)[column] = (_Float16)from->scales[at];
    else
        ((float *)to)[column] = from->scales[at];
    if (of->has_minima) ((float *)(to + bytes_of_scales(of)))[column] = from->minima[at];
}

/* The codes of one output in a block; `count` of them. */
static void pack_codes(const linear *of, uint8_t *to, int64_t column, const uint8_t *codes, int64_t count) {
    const int64_t half_bytes = bytes_of_block(of) / 2, half_block = BLOCK_OF_CODES4 / 2;
    to += column / LANES * half_bytes + column % LANES * QUAD;
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = of->form == FORM_BLOCKS4 ? i % half_block : i;
        uint8_t *byte = to + place / QUAD * LANES * QUAD + place % QUAD;
        if (of->form == FORM_BLOCKS8)
            *byte = (uint8_t)(codes[i] + ADDED_TO_CODES8);
        else
            *byte |= (uint8_t)(codes[i] << (i < half_block ? 0 : 4));
    }
}

static void pack_output(const linear *of, char *panel, int64_t column, const coded_weight *from, int64_t output) {
    const int64_t block = block_of(of), num_blocks = blocks_in(of), per_group = blocks_per_group(of);
    for (int64_t i = 0; i < num_blocks; i++) {
        const int64_t left = of->inputs - i * block;
        if (i % per_group == 0) {
            pack_values(of, panel, column, from, output * of->num_groups + i / per_group);
            panel += bytes_of_values(of);
        }
        pack_codes(of, (uint8_t *)panel, column, from->codes + output * of->inputs + i * block,
                   left < block ? left : block);
        panel += bytes_of_block(of);
    }
}

linear *linear_of_blocks(const coded_weight *from, const float *bias, int64_t outputs, int64_t inputs, int64_t form,
                         int64_t gated) {
    linear *made = linear_empty(outputs, inputs, form, gated);
    if (made == NULL) return NULL;
    made->group = from->group;
    made->num_groups = from->num_groups;
    made->has_minima = from->minima != NULL;
    made->has_half_scales = are_exact_halves(from->scales, outputs * from->num_groups);
    assert(from->group_of == NULL && (from->num_groups == 1 || from->group % block_of(made) == 0));
    made->panels = stream_alloc(made->num_panels * block_panel_bytes(made));
    if (made->panels == NULL) {
        linear_free(made);
        return NULL;
    }
    for (int64_t place = 0; place < made->num_panels * PANEL; place++) {
        const int64_t output = output_at(place / PANEL, place % PANEL, outputs, gated);
        if (output < 0) continue;
        pack_output(made, (char *)made->panels + place / PANEL * block_panel_bytes(made), place % PANEL, from, output);
        if (bias != NULL) made->bias[place] = bias[output];
    }
    return made;
}

/* The numbers of one row in a packed block. */
typedef struct {
    float *scale;
    int32_t *excess;
    float *sum;
} block_numbers;

/* Round a block of a row, symmetrically. A value that is not finite makes the scale NaN, and so all outputs: its bits
 * are larger than those of any other. */
INLINE void pack_block(const int block, const float *row, const float *weight, int64_t k, int64_t inputs, float factor,
                       int32_t added, int8_t *codes, block_numbers numbers) {
    vec values[MOST_BLOCK / LANES];
    ivec magnitudes = (ivec)splat(TINY), sums = {0};
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        values[i] = normed_inputs(row, weight, k + i * LANES, inputs);
        magnitudes = __builtin_elementwise_max(magnitudes, (ivec)magnitude_of(values[i]));
    }
    const int32_t largest_bits = __builtin_reduce_max(magnitudes);
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    const int is_finite = largest <= FLT_MAX;
    const float scale = is_finite ? INT8_MAX_VALUE / largest : 0.0f;
    UNROLLED
    for (int i = 0; i < block / LANES; i++) {
        const vec scaled = is_finite ? values[i] * scale : (vec){0};
        const ivec rounded = __builtin_convertvector(__builtin_elementwise_rint(scaled), ivec);
        *(few_codes *)(codes + i * LANES) = __builtin_convertvector(rounded, few_codes);
        sums += rounded;
    }
    const int32_t sum = __builtin_reduce_add(sums);
    *numbers.scale = (is_finite ? largest / INT8_MAX_VALUE : NAN) * factor;
    *numbers.excess = -added * sum;
    *numbers.sum = *numbers.scale * (float)sum;
}

void pack_tile_in_blocks(const packed_inputs *to, const linear *with, int64_t tile, const float *from, int64_t stride,
                         rms_norm norm) {
    const int64_t first = tile_start(tile, to->num_tiles, to->num_rows);
    const int64_t rows = tile_start(tile + 1, to->num_tiles, to->num_rows) - first;
    const int64_t block = block_of(with), num_blocks = blocks_in(with);
    const int32_t added = with->form == FORM_BLOCKS8 ? ADDED_TO_CODES8 : with->has_minima ? 0 : MIDDLE_OF_CODES4;
    char *start = (char *)to->tiles + first * bytes_of_packed_row(with);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = from + row_taken(to, first + i) * stride;
        const float factor = norm.weight != NULL ? root_mean_square_factor(row, with->inputs, norm.eps) : 1.0f;
        char *at = start;
        for (int64_t k = 0; k < num_blocks; k++, at += rows * bytes_of_packed_block(block)) {
            float *scales = (float *)(at + rows * block);
            const block_numbers numbers = {scales + i, (int32_t *)scales + rows + i, scales + 2 * rows + i};
            int8_t *codes = (int8_t *)at + i * block;
            if (block == MOST_BLOCK)
                pack_block(MOST_BLOCK, row, norm.weight, k * block, with->inputs, factor, added, codes, numbers);
            else
                pack_block(SMALL_BLOCK, row, norm.weight, k * block, with->inputs, factor, added, codes, numbers);
        }
    }
}

/* ---- sums of a block ---- */

/* LANES outputs of a block, and the inputs of some rows, which are a block apart. */
typedef struct {
    const char *weights;
    const int8_t *codes;
} half_block;

INLINE ivec weights_at(const half_block *of, const int quad) {
    return *(const unaligned_ivec *)(of->weights + quad * LANES * QUAD);
}

#if MULTIPLIES_BYTES || MULTIPLIES_SMALL_BYTES
INLINE ivec quad_of(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, QUAD);
    return splat_int(four);
}
#endif

#if MULTIPLIES_BYTES

INLINE ivec add_quad_products(ivec sum, ivec weights, const int8_t *codes) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)quad_of(codes));
}

#elif MULTIPLIES_SMALL_BYTES

/* Of codes of 4 bits a whole block fits 16 bits: 16 products of 15 and 127. */
INLINE __m256i add_small_products(__m256i sum, ivec weights, const int8_t *codes) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)quad_of(codes)));
}

INLINE ivec pairs_added(__m256i shorts) { return (ivec)_mm256_madd_epi16(shorts, _mm256_set1_epi16(1)); }

/* Both operands are signed, and the instruction wants one that is not: the sign goes to the other. */
INLINE ivec add_quad_products(ivec sum, ivec weights, const int8_t *codes) {
    const __m256i signed_codes = _mm256_sign_epi8((__m256i)quad_of(codes), (__m256i)weights);
    return sum + pairs_added(_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), signed_codes));
}

#else

/* One byte of each lane at a time, with its sign. */
INLINE ivec add_quad_products(ivec sum, ivec weights, const int8_t *codes) {
    UNROLLED
    for (int i = 0; i < QUAD; i++) sum += ((weights << (24 - 8 * i)) >> 24) * (int32_t)codes[i];
    return sum;
}

#endif

/* The first half of a block is in the lower bits. */
INLINE ivec lower_codes(ivec pairs) { return pairs & splat_int(0x0f0f0f0f); }
INLINE ivec upper_codes(ivec pairs) { return (pairs >> 4) & splat_int(0x0f0f0f0f); }

INLINE void sum_codes4(const int rows, const half_block *of, ivec *sums) {
    const int quads = BLOCK_OF_CODES4 / QUAD / 2;
#if MULTIPLIES_SMALL_BYTES
    __m256i shorts[TILE_ROWS];
    UNROLLED
    for (int row = 0; row < rows; row++) shorts[row] = _mm256_setzero_si256();
#endif
    UNROLLED
    for (int quad = 0; quad < quads; quad++) {
        const ivec pairs = weights_at(of, quad), lower = lower_codes(pairs), upper = upper_codes(pairs);
        UNROLLED
        for (int row = 0; row < rows; row++) {
            const int8_t *codes = of->codes + row * BLOCK_OF_CODES4 + quad * QUAD;
#if MULTIPLIES_SMALL_BYTES
            shorts[row] = add_small_products(shorts[row], lower, codes);
            shorts[row] = add_small_products(shorts[row], upper, codes + quads * QUAD);
#else
            sums[row] = add_quad_products(sums[row], lower, codes);
            sums[row] = add_quad_products(sums[row], upper, codes + quads * QUAD);
#endif
        }
    }
#if MULTIPLIES_SMALL_BYTES
    UNROLLED
    for (int row = 0; row < rows; row++) sums[row] += pairs_added(shorts[row]);
#endif
}

INLINE void sum_codes8(const int rows, const int block, const half_block *of, ivec *sums) {
    UNROLLED
    for (int quad = 0; quad < block / QUAD; quad++) {
        const ivec weights = weights_at(of, quad);
        UNROLLED
        for (int row = 0; row < rows; row++)
            sums[row] = add_quad_products(sums[row], weights, of->codes + row * block + quad * QUAD);
    }
}

/* ---- products ---- */

INLINE vec scales_at(const linear *of, const char *values, const int half) {
    if (!of->has_half_scales) return load((const float *)values + half * LANES);
    return __builtin_convertvector(*(const few_halves *)(values + half * LANES * 2), vec);
}

/* The numbers of rows from one on, in a packed block. */
typedef struct {
    const int8_t *codes;
    const float *scales;
    const int32_t *excess;
    const float *sums;
} block_rows;

/* Add the products of a block to `sums`. `values` are of its group. */
INLINE void add_block(const int rows, const int form, const int block, const linear *with, const char *values,
                      const char *weights, const block_rows *inputs, vec (*sums)[2]) {
    UNROLLED
    for (int half = 0; half < 2; half++) {
        const half_block of = {weights + half * LANES * block / (form == FORM_BLOCKS4 ? 2 : 1), inputs->codes};
        ivec integers[TILE_ROWS];
        UNROLLED
        for (int row = 0; row < rows; row++) integers[row] = splat_int(inputs->excess[row]);
        if (form == FORM_BLOCKS4)
            sum_codes4(rows, &of, integers);
        else
            sum_codes8(rows, block, &of, integers);
        const vec scales = scales_at(with, values, half);
        UNROLLED
        for (int row = 0; row < rows; row++)
            sums[row][half] += (scales * inputs->scales[row]) * __builtin_convertvector(integers[row], vec);
        if (!with->has_minima) continue;
        const vec minima = load((const float *)(values + bytes_of_scales(with)) + half * LANES);
        UNROLLED
        for (int row = 0; row < rows; row++) sums[row][half] += minima * inputs->sums[row];
    }
}

/* Memory that is fetched meanwhile, `lines` of it with each block; from `end` on it goes on at `then`, or not if that
 * is NULL. */
typedef struct {
    const char *at;
    const char *end;
    const char *then;
    int64_t lines;
} fetching;

INLINE void fetch(fetching *ahead) {
    if (ahead->at >= ahead->end) {
        if (ahead->then == NULL) return;
        ahead->at = ahead->then;
        ahead->end = ahead->then + ((int64_t)1 << 40);
    }
    for (int64_t line = 0; line < ahead->lines; line++, ahead->at += LINE) __builtin_prefetch(ahead->at);
}

/* Some rows of a tile, and some blocks of a panel. */
typedef struct {
    const linear *with;
    const char *panel;
    const char *tile;  /* packed, from its first block on */
    int64_t tile_rows; /* all of the tile */
    int64_t first_row; /* of the tile */
    int64_t begin;     /* blocks */
    int64_t end;
} block_range;

INLINE void sum_blocks(const int rows, const int form, const int block, const block_range *of, fetching ahead,
                       vec (*kept)[2]) {
    const linear *with = of->with;
    const int64_t per_group = blocks_per_group(with), values_bytes = bytes_of_values(with);
    const int64_t block_bytes = bytes_of_block(with), packed_bytes = of->tile_rows * bytes_of_packed_block(block);
    const char *tile = of->tile + of->begin * packed_bytes;
    vec sums[TILE_ROWS][2];
    UNROLLED
    for (int row = 0; row < rows; row++) sums[row][0] = kept[row][0], sums[row][1] = kept[row][1];
    for (int64_t at = of->begin; at < of->end;) {
        const int64_t group = at / per_group, end = (group + 1) * per_group;
        const char *values = of->panel + group * values_bytes + group * per_group * block_bytes;
        const char *weights = values + values_bytes + (at - group * per_group) * block_bytes;
        const int64_t last = end < of->end ? end : of->end;
        for (; at < last; at++, weights += block_bytes, tile += packed_bytes) {
            const float *scales = (const float *)(tile + of->tile_rows * block) + of->first_row;
            const block_rows inputs = {(const int8_t *)tile + of->first_row * block, scales,
                                       (const int32_t *)scales + of->tile_rows, scales + 2 * of->tile_rows};
            fetch(&ahead);
            add_block(rows, form, block, with, values, weights, &inputs, sums);
        }
    }
    UNROLLED
    for (int row = 0; row < rows; row++) kept[row][0] = sums[row][0], kept[row][1] = sums[row][1];
}

#define CASE(rows)                                                                                                     \
    case rows:                                                                                                         \
        if (of->with->form == FORM_BLOCKS4)                                                                            \
            sum_blocks(rows, FORM_BLOCKS4, BLOCK_OF_CODES4, of, ahead, kept);                                          \
        else if (block_of(of->with) == MOST_BLOCK)                                                                     \
            sum_blocks(rows, FORM_BLOCKS8, MOST_BLOCK, of, ahead, kept);                                               \
        else                                                                                                           \
            sum_blocks(rows, FORM_BLOCKS8, SMALL_BLOCK, of, ahead, kept);                                              \
        break;

static void sum_rows(int64_t rows, const block_range *of, fetching ahead, vec (*kept)[2]) {
    switch (rows) { EACH_TILE_SIZE(CASE) }
}

/* Rows are summed a part of a tile at a time. */
static int64_t parts_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

static int64_t place_in_panel(const linear *of, int64_t block) {
    return block * bytes_of_block(of) + block / blocks_per_group(of) * bytes_of_values(of);
}

/* What part `place` of `count` fetches while it takes blocks [begin, end): alone it fetches a little ahead, near the
 * end from the next panel; several parts, which bring their weights into the nearest cache, fetch a share each of what
 * follows. */
static fetching what_to_fetch(const linear *with, const char *panel, const char *next, int64_t begin, int64_t end,
                              int64_t place, int64_t count) {
    const int64_t num_blocks = blocks_in(with), bytes = block_panel_bytes(with);
    if (count == 1) {
        const int64_t lines = (bytes / num_blocks + LINE - 1) / LINE;
        return (fetching){panel + place_in_panel(with, begin) + LINES_AHEAD * LINE, panel + bytes, next, lines};
    }
    const char *from = end < num_blocks ? panel + place_in_panel(with, end) : next;
    const int64_t following = place_in_panel(with, end - begin) / count;
    return (fetching){from + place * following, from + (place + 1) * following, NULL,
                      (following / (end - begin) + LINE - 1) / LINE};
}

int64_t tiles_at_once_in_blocks(void) { return MOST_TILES; }

static void finish_rows(const packed_inputs *from, int64_t panel, int64_t first, int64_t rows, vec (*sums)[2],
                        enum epilogue epilogue, float *out, int64_t stride) {
    const int64_t column = panel * (epilogue == GATED ? LANES : PANEL);
    for (int64_t i = 0; i < rows; i++) {
        vec low = sums[i][0], high = sums[i][1];
        if (from->added != NULL) add_low_rank(from->added, first + i, panel, &low, &high);
        finish_row(epilogue, low, high, out + (first + i) * stride + column);
    }
}

void multiply_in_blocks(const linear *with, const packed_inputs *from, int64_t panel, const char *next,
                        int64_t first_tile, int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    assert(end_tile - first_tile <= MOST_TILES && epilogue != GATED_PACKED);
    const int64_t num_blocks = blocks_in(with), first_row = tile_start(first_tile, from->num_tiles, from->num_rows);
    const int64_t end_row = tile_start(end_tile, from->num_tiles, from->num_rows);
    int64_t num_parts = 0;
    vec sums[MOST_TILES * INPUT_ROWS][2];
    if (from->added != NULL) fetch_additions(from->added, panel_number(with, next), first_row, end_row - first_row);
    const vec low_bias = load(with->bias + panel * PANEL), high_bias = load(with->bias + panel * PANEL + LANES);
    for (int64_t i = 0; i < end_row - first_row; i++) sums[i][0] = low_bias, sums[i][1] = high_bias;
    for (int64_t tile = first_tile; tile < end_tile; tile++)
        num_parts += parts_of(tile_start(tile + 1, from->num_tiles, from->num_rows) -
                              tile_start(tile, from->num_tiles, from->num_rows));
    block_range of = {.with = with, .panel = panel_at(with, panel)};
    const int64_t depth = num_parts > 1 ? DEPTH : num_blocks;
    for (of.begin = 0; of.begin < num_blocks; of.begin = of.end) {
        of.end = of.begin + depth < num_blocks ? of.begin + depth : num_blocks;
        int64_t place = 0;
        for (int64_t tile = first_tile; tile < end_tile; tile++) {
            const int64_t first = tile_start(tile, from->num_tiles, from->num_rows);
            of.tile_rows = tile_start(tile + 1, from->num_tiles, from->num_rows) - first;
            of.tile = (const char *)from->tiles + first * bytes_of_packed_row(with);
            const int64_t parts = parts_of(of.tile_rows);
            for (int64_t part = 0; part < parts; part++, place++) {
                of.first_row = tile_start(part, parts, of.tile_rows);
                sum_rows(tile_start(part + 1, parts, of.tile_rows) - of.first_row, &of,
                         what_to_fetch(with, of.panel, next, of.begin, of.end, place, num_parts),
                         &sums[first - first_row + of.first_row]);
            }
        }
    }
    finish_rows(from, panel, first_row, end_row - first_row, sums, epilogue, out, stride);
}
