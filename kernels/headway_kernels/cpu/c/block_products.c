#include "block_products.h"

#include "adapters.h"
#include "blocks.h"

#include <assert.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define MOST_TILES 10
#define LINES_AHEAD 128
#define DIGIT_ROWS (TILE_ROWS / NUM_DIGITS) /* rows of digits that are multiplied at once */
#define DEPTH 24 /* blocks that all tiles take before the next ones: so much of a panel stays in the L1 cache */

/* An instruction adds two products of bytes in 16 bits. */
#if !MULTIPLIES_BYTES && defined(__AVX2__)
#define MULTIPLIES_SMALL_BYTES 1
#else
#define MULTIPLIES_SMALL_BYTES 0
#endif

typedef _Float16 few_halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

/* ---- sums of a block ---- */

/* LANES outputs of a block, and the inputs of some rows: codes, or quads of digits. */
typedef struct {
    const char *weights;
    const void *inputs;
} half_block;

/* A QUAD of the inputs of row `place / digits`: its digit `place % digits`. */
INLINE const int8_t *inputs_at(const half_block *of, const int digits, const int block, const int place,
                               const int quad) {
    if (digits == 1) return (const int8_t *)of->inputs + place * block + quad * QUAD;
    const quad_of_digits *row = (const quad_of_digits *)of->inputs + place / digits * (block / QUAD);
    return row[quad].digits[place % digits];
}

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
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)quad_of(codes)));
    __asm__("" : "+x"(sum)); /* as below */
    return sum;
}

INLINE ivec pairs_added(__m256i shorts) { return (ivec)_mm256_madd_epi16(shorts, _mm256_set1_epi16(1)); }

/* Both operands are signed, and the instruction wants one that is not: the sign goes to the other. Additions stay in
 * their order: a compiler that sums in pairs has too few registers for what waits. */
INLINE ivec add_quad_products(ivec sum, ivec weights, const int8_t *codes) {
    const __m256i signed_codes = _mm256_sign_epi8((__m256i)quad_of(codes), (__m256i)weights);
    sum += pairs_added(_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), signed_codes));
    __asm__("" : "+x"(sum));
    return sum;
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

INLINE void sum_codes4(const int rows, const int digits, const int block, const half_block *of, ivec *sums) {
    const int quads = block / QUAD / 2;
#if MULTIPLIES_SMALL_BYTES
    __m256i shorts[TILE_ROWS];
    UNROLLED
    for (int row = 0; row < rows; row++) shorts[row] = _mm256_setzero_si256();
#endif
    UNROLLED
    for (int quad = 0; quad < quads; quad++) {
        const ivec pairs = weights_at(of, quad), lower = lower_codes(pairs), upper = upper_codes(pairs);
        UNROLLED
        for (int i = 0; i < rows * digits; i++) {
            const int8_t *first = inputs_at(of, digits, block, i, quad);
            const int8_t *second = inputs_at(of, digits, block, i, quad + quads);
#if MULTIPLIES_SMALL_BYTES
            shorts[i] = add_small_products(shorts[i], lower, first);
            shorts[i] = add_small_products(shorts[i], upper, second);
#else
            sums[i] = add_quad_products(sums[i], lower, first);
            sums[i] = add_quad_products(sums[i], upper, second);
#endif
        }
    }
#if MULTIPLIES_SMALL_BYTES
    UNROLLED
    for (int row = 0; row < rows; row++) sums[row] += pairs_added(shorts[row]);
#endif
}

INLINE void sum_table4(const int rows, const int digits, const int block, const code_table *table, const half_block *of,
                       ivec *sums) {
    const int quads = block / QUAD / 2;
    UNROLLED
    for (int quad = 0; quad < quads; quad++) {
        const ivec pairs = weights_at(of, quad);
        const ivec lower = integers_of(lower_codes(pairs), table), upper = integers_of(upper_codes(pairs), table);
        UNROLLED
        for (int i = 0; i < rows * digits; i++) {
            sums[i] = add_quad_products(sums[i], lower, inputs_at(of, digits, block, i, quad));
            sums[i] = add_quad_products(sums[i], upper, inputs_at(of, digits, block, i, quad + quads));
        }
    }
}

INLINE void sum_codes8(const int rows, const int digits, const int block, const half_block *of, ivec *sums) {
    UNROLLED
    for (int quad = 0; quad < block / QUAD; quad++) {
        const ivec weights = weights_at(of, quad);
        UNROLLED
        for (int i = 0; i < rows * digits; i++)
            sums[i] = add_quad_products(sums[i], weights, inputs_at(of, digits, block, i, quad));
    }
}

/* ---- products ---- */

INLINE vec scales_at(const linear *of, const char *values, const int half) {
    if (!of->has_half_scales) return load((const float *)values + half * LANES);
    return __builtin_convertvector(*(const few_halves *)(values + half * LANES * 2), vec);
}

/* Rows in a packed block, from one on. `scales` and `excess` only of one digit. */
typedef struct {
    const void *inputs;
    const float *scales;
    const int32_t *excess;
    const float *sums;
} block_rows;

INLINE const quad_of_digits *digits_of(const block_rows *of, const int block, const int row) {
    return (const quad_of_digits *)of->inputs + row * (block / QUAD);
}

/* The sum of all digits, of their sums with what these start from; exact but for the last addition, or, of codes of 8
 * bits, the last two. */
INLINE vec sum_of_digits(const ivec *sums, const quad_of_digits *quads) {
    const vec of_starts = bits_as_vec(splat_int(quads[NUM_DIGITS].number));
    return ((bits_as_vec(sums[0]) - of_starts) + bits_as_vec(sums[1])) + bits_as_vec(sums[2]);
}

/* Add the products of a block to `sums`. `values` are of its group. Each digit is multiplied as if it were a row. */
INLINE void add_block(const int rows, const int digits, const int form, const int block, const linear *with,
                      const char *values, const char *weights, const block_rows *from, vec (*sums)[2]) {
    UNROLLED
    for (int half = 0; half < 2; half++) {
        const half_block of = {weights + half * LANES * block / (has_pairs(form) ? 2 : 1), from->inputs};
        ivec integers[TILE_ROWS];
        UNROLLED
        for (int i = 0; i < rows * digits; i++)
            integers[i] =
                splat_int(digits == 1 ? from->excess[i] : digits_of(from, block, i / digits)[i % digits].number);
        if (form == FORM_BLOCKS4)
            sum_codes4(rows, digits, block, &of, integers);
        else if (form == FORM_BLOCKS_TABLE4)
            sum_table4(rows, digits, block, &with->table, &of, integers);
        else
            sum_codes8(rows, digits, block, &of, integers);
        const vec scales = scales_at(with, values, half);
        UNROLLED
        for (int row = 0; row < rows; row++) {
            const ivec *own = integers + row * digits;
            if (digits == 1)
                sums[row][half] += (scales * from->scales[row]) * __builtin_convertvector(*own, vec);
            else
                sums[row][half] += scales * sum_of_digits(own, digits_of(from, block, row));
        }
        if (!with->has_minima) continue;
        const vec minima = load((const float *)(values + bytes_of_scales(with)) + half * LANES);
        UNROLLED
        for (int row = 0; row < rows; row++) sums[row][half] += minima * from->sums[row];
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

INLINE void sum_blocks(const int rows, const int digits, const int form, const int block, const block_range *of,
                       fetching ahead, vec (*kept)[2]) {
    const linear *with = of->with;
    const int64_t per_group = blocks_per_group(with), values_bytes = bytes_of_values(with);
    const int64_t block_bytes = bytes_of_block(with);
    const int64_t row_bytes = digits > 1 ? bytes_of_packed_block(block, digits) : block;
    const int64_t packed_bytes = of->tile_rows * bytes_of_packed_block(block, digits);
    const char *tile = of->tile + of->begin * packed_bytes;
    const float *sums_of_tile = (const float *)(of->tile + blocks_in(with) * packed_bytes);
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
            const block_rows from = {tile + of->first_row * row_bytes, scales, (const int32_t *)scales + of->tile_rows,
                                     digits > 1 ? sums_of_tile + at * of->tile_rows + of->first_row
                                                : scales + 2 * of->tile_rows};
            fetch(&ahead);
            add_block(rows, digits, form, block, with, values, weights, &from, sums);
        }
    }
    UNROLLED
    for (int row = 0; row < rows; row++) kept[row][0] = sums[row][0], kept[row][1] = sums[row][1];
}

INLINE void sum_form(const int rows, const int digits, const block_range *of, fetching ahead, vec (*kept)[2]) {
    const int is_whole = block_of(of->with) == BLOCK;
    if (of->with->form == FORM_BLOCKS_TABLE4 && is_whole)
        sum_blocks(rows, digits, FORM_BLOCKS_TABLE4, BLOCK, of, ahead, kept);
    else if (of->with->form == FORM_BLOCKS_TABLE4)
        sum_blocks(rows, digits, FORM_BLOCKS_TABLE4, SMALL_BLOCK, of, ahead, kept);
    else if (of->with->form == FORM_BLOCKS4 && is_whole)
        sum_blocks(rows, digits, FORM_BLOCKS4, BLOCK, of, ahead, kept);
    else if (of->with->form == FORM_BLOCKS4)
        sum_blocks(rows, digits, FORM_BLOCKS4, SMALL_BLOCK, of, ahead, kept);
    else if (is_whole)
        sum_blocks(rows, digits, FORM_BLOCKS8, BLOCK, of, ahead, kept);
    else
        sum_blocks(rows, digits, FORM_BLOCKS8, SMALL_BLOCK, of, ahead, kept);
}

/* As in vector_products.c: all in one function, a compiler takes many times as long. */
#define SUMS(name, rows, digits)                                                                                       \
    static APART void name(const block_range *of, fetching ahead, vec(*kept)[2]) {                                     \
        sum_form(rows, digits, of, ahead, kept);                                                                       \
    }
#define SUMS_OF_ROWS(rows) SUMS(sum_rows_##rows, rows, 1)
#define CASE(rows)                                                                                                     \
    case rows: sum_rows_##rows(of, ahead, kept); break;

EACH_TILE_SIZE(SUMS_OF_ROWS)

#if MULTIPLIES_DIGITS
SUMS(sum_digits_1, 1, NUM_DIGITS)
SUMS(sum_digits_2, 2, NUM_DIGITS)
SUMS(sum_digits_3, 3, NUM_DIGITS)
SUMS(sum_digits_most, DIGIT_ROWS, NUM_DIGITS)

static void sum_rows_of_digits(int64_t rows, const block_range *of, fetching ahead, vec (*kept)[2]) {
    switch (rows) {
    case 1: sum_digits_1(of, ahead, kept); break;
    case 2: sum_digits_2(of, ahead, kept); break;
    case 3: sum_digits_3(of, ahead, kept); break;
    default: sum_digits_most(of, ahead, kept);
    }
}
#endif

static void sum_rows(int64_t rows, const block_range *of, fetching ahead, vec (*kept)[2]) {
#if MULTIPLIES_DIGITS
    if (of->with->num_digits > 1) {
        sum_rows_of_digits(rows, of, ahead, kept);
        return;
    }
#endif
    switch (rows) { EACH_TILE_SIZE(CASE) }
}

/* Rows are summed a part of a tile at a time. */
static int64_t parts_of(const linear *with, int64_t rows) {
    const int64_t most = with->num_digits > 1 ? DIGIT_ROWS : TILE_ROWS;
    return (rows + most - 1) / most;
}

static int64_t place_in_panel(const linear *of, int64_t block) {
    return block * bytes_of_block(of) + block / blocks_per_group(of) * bytes_of_values(of);
}

/* What part `place` of `count` fetches while it takes blocks [begin, end): alone it fetches a little ahead, near the
 * end from the next panel; several parts, which bring their weights into the nearest cache, fetch a share each of what
 * follows. */
static fetching what_to_fetch(const linear *with, const char *panel, const char *next, int64_t begin, int64_t end,
                              int64_t place, int64_t count) {
    const int64_t num_blocks = blocks_in(with), bytes = with->panel_bytes;
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

static void finish_rows(const linear *with, const packed_inputs *from, int64_t panel, int64_t first, int64_t rows,
                        vec (*sums)[2], enum epilogue epilogue, float *out, int64_t stride) {
    const int64_t column = panel * (epilogue == GATED ? LANES : PANEL);
    const float spared = with->num_digits > 1 ? 1 << SPARED_BITS : 1;
    for (int64_t i = 0; i < rows; i++) {
        vec low = sums[i][0] * spared, high = sums[i][1] * spared;
        if (from->added != NULL) add_low_rank(from->added, first + i, panel, &low, &high);
        finish_row(epilogue, low, high, out + (first + i) * stride + column);
    }
}

void multiply_in_blocks(const linear *with, const packed_inputs *from, int64_t panel, const char *next,
                        int64_t first_tile, int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    assert(end_tile - first_tile <= MOST_TILES && !is_packed(epilogue));
    const int64_t num_blocks = blocks_in(with), first_row = tile_start(first_tile, from->num_tiles, from->num_rows);
    const int64_t end_row = tile_start(end_tile, from->num_tiles, from->num_rows);
    int64_t num_parts = 0;
    vec sums[MOST_TILES * INPUT_ROWS][2];
    fetch_additions(from, with, next, first_tile, end_tile);
    const float spared = with->num_digits > 1 ? 1.0f / (1 << SPARED_BITS) : 1.0f;
    const vec low_bias = load(with->bias + panel * PANEL) * spared;
    const vec high_bias = load(with->bias + panel * PANEL + LANES) * spared;
    for (int64_t i = 0; i < end_row - first_row; i++) sums[i][0] = low_bias, sums[i][1] = high_bias;
    for (int64_t tile = first_tile; tile < end_tile; tile++)
        num_parts += parts_of(with, tile_start(tile + 1, from->num_tiles, from->num_rows) -
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
            const int64_t parts = parts_of(with, of.tile_rows);
            for (int64_t part = 0; part < parts; part++, place++) {
                of.first_row = tile_start(part, parts, of.tile_rows);
                sum_rows(tile_start(part + 1, parts, of.tile_rows) - of.first_row, &of,
                         what_to_fetch(with, of.panel, next, of.begin, of.end, place, num_parts),
                         &sums[first - first_row + of.first_row]);
            }
        }
    }
    finish_rows(with, from, panel, first_row, end_row - first_row, sums, epilogue, out, stride);
}
