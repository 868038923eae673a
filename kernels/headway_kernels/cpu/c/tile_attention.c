/* Attention on the matrix unit.
 *
 * A group of keys lies in memory as a tile register wants it: a row is a pair of components of TILE_SIDE positions. So
 * does a group of values, whose rows are pairs of positions. Queries and weights are the other factor, a row of each
 * register a query row. Of more than TILE_SIDE rows there are two such registers, so that what is loaded is multiplied
 * twice.
 *
 * Pairs of components are multiplied sixteen at a time, and the last eight of a head by themselves, as are the eight
 * pairs of positions of a group. A row's result does not depend on how many rows a register has.
 */
#include "attention_groups.h"
#include "rows.h"
#include "tile_registers.h"

#if HAS_TILES

#define HALF (TILE_SIDE / 2) /* pairs of a half step */
#define STEP (2 * TILE_SIDE) /* components of a whole one */

/* Tile registers. 0 to 3 hold sums: of two registers of rows with two others, or of one with four. A whole step has
 * sixteen pairs, a half step eight. */
#define ROWS 4
#define OTHERS 5
#define HALF_ROWS 6
#define HALF_OTHERS 7

static void shape_registers(int64_t rows) {
    tile_shapes shapes = {.palette = TILE_PALETTE};
    for (int i = 0; i < TILE_REGISTERS; i++) {
        shapes.row_bytes[i] = i == HALF_ROWS ? LINE / 2 : LINE;
        shapes.rows[i] = (uint8_t)(i == OTHERS ? TILE_SIDE : i == HALF_OTHERS ? HALF : rows);
    }
    _tile_loadconfig(&shapes);
}

/* Where the factors of one step lie. */
typedef struct {
    const char *rows;
    const char *more_rows;
    int64_t row_stride;
    const char *others[4];
    int64_t other_stride;
} factors;

/* Add the products of a step to the sums. The register that is multiplied last with the first rows is multiplied first
 * with the second, and need not be loaded again. */
#define ADD_PRODUCTS(NAME, QUERY_SIDE, OTHER_SIDE)                                                                     \
    INLINE void NAME(const int both, const int width, const factors *of) {                                             \
        _tile_loadd(QUERY_SIDE, of->rows, of->row_stride);                                                             \
        _tile_loadd(OTHER_SIDE, of->others[0], of->other_stride);                                                      \
        _tile_dpbf16ps(0, QUERY_SIDE, OTHER_SIDE);                                                                     \
        if (width > 1) {                                                                                               \
            _tile_loadd(OTHER_SIDE, of->others[1], of->other_stride);                                                  \
            _tile_dpbf16ps(1, QUERY_SIDE, OTHER_SIDE);                                                                 \
        }                                                                                                              \
        if (width > 2) {                                                                                               \
            _tile_loadd(OTHER_SIDE, of->others[2], of->other_stride);                                                  \
            _tile_dpbf16ps(2, QUERY_SIDE, OTHER_SIDE);                                                                 \
            _tile_loadd(OTHER_SIDE, of->others[3], of->other_stride);                                                  \
            _tile_dpbf16ps(3, QUERY_SIDE, OTHER_SIDE);                                                                 \
        }                                                                                                              \
        if (!both) return;                                                                                             \
        _tile_loadd(QUERY_SIDE, of->more_rows, of->row_stride);                                                        \
        if (width > 1) {                                                                                               \
            _tile_dpbf16ps(3, QUERY_SIDE, OTHER_SIDE);                                                                 \
            _tile_loadd(OTHER_SIDE, of->others[0], of->other_stride);                                                  \
        }                                                                                                              \
        _tile_dpbf16ps(2, QUERY_SIDE, OTHER_SIDE);                                                                     \
    }

ADD_PRODUCTS(add_products, ROWS, OTHERS)
ADD_PRODUCTS(add_half_products, HALF_ROWS, HALF_OTHERS)

INLINE void fetch(const char *from, int64_t lines, int64_t stride) {
    for (int64_t line = 0; line < lines; line++) __builtin_prefetch(from + line * stride, 0, 2);
}

/* Scores of `width` groups, each [rows][CHUNK] at its place in the chunk. `queries`: [rows][head_dim]. */
INLINE void score(const int both, const int width, int64_t rows, const uint16_t *queries, const group *groups,
                  const group *ahead, int64_t head_dim, float *scores) {
    factors of = {.row_stride = head_dim * 2, .other_stride = LINE};
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < head_dim; d += STEP) {
        const int is_whole = d + STEP <= head_dim;
        of.rows = (const char *)(queries + d);
        of.more_rows = (const char *)(queries + rows * head_dim + d);
        UNROLLED
        for (int j = 0; j < width; j++) {
            of.others[j] = groups[j].keys + d / 2 * LINE;
            fetch(ahead[j].keys + d / 2 * LINE, is_whole ? TILE_SIDE : HALF, LINE);
        }
        if (is_whole)
            add_products(both, width, &of);
        else
            add_half_products(both, width, &of);
    }
    const int64_t stride = CHUNK * 4;
    float *more = scores + (both ? rows * CHUNK : 2 * LANES);
    _tile_stored(0, scores, stride);
    _tile_stored(1, scores + LANES, stride);
    _tile_stored(2, more, stride);
    _tile_stored(3, more + LANES, stride);
}

/* attended += weights x values, for `width` registers of components from `d` on. */
INLINE void add_values(const int both, const int width, int64_t rows, const group *groups, const group *ahead,
                       int64_t num_groups, const float *weights, int64_t head_dim, int64_t d, float *attended) {
    factors of = {.row_stride = CHUNK * 4, .other_stride = head_dim * 4};
    const int64_t stride = head_dim * 4;
    float *low = attended + d, *high = both ? low + rows * head_dim : low + 2 * LANES;
    _tile_loadd(0, low, stride);
    if (width > 1) _tile_loadd(1, low + LANES, stride);
    if (both || width > 2) _tile_loadd(2, high, stride);
    if (width > (both ? 1 : 2)) _tile_loadd(3, high + LANES, stride);
    for (int64_t g = 0; g < num_groups; g++) {
        of.rows = (const char *)(weights + g * LANES);
        of.more_rows = of.rows + rows * CHUNK * 4;
        UNROLLED
        for (int j = 0; j < width; j++) {
            const int64_t place = (d + j * LANES) * 4;
            of.others[j] = groups[g].values + place;
            fetch(ahead[g].values + place, HALF, stride);
        }
        add_half_products(both, width, &of);
    }
    _tile_stored(0, low, stride);
    if (width > 1) _tile_stored(1, low + LANES, stride);
    if (both || width > 2) _tile_stored(2, high, stride);
    if (width > (both ? 1 : 2)) _tile_stored(3, high + LANES, stride);
}

/* Positions from `end` on may hold a NaN of an earlier owner, and those behind a block's last one are no positions. A
 * weight of zero would not hide it, so values of such a group are copied to `whole`, with zeros there. */
static void hide_what_is_not_seen(group *of, int64_t end, int64_t head_dim, int32_t *whole) {
    const int64_t count = positions_before(of, end);
    if (count == LANES) return;
    memset(whole, 0, (size_t)(HALF * head_dim) * sizeof *whole);
    memcpy(whole, of->values, (size_t)(count / 2 * head_dim) * sizeof *whole);
    const int32_t *last = (const int32_t *)of->values + count / 2 * head_dim;
    for (int64_t d = 0; count % 2 && d < head_dim; d++) whole[count / 2 * head_dim + d] = last[d] & 0xffff;
    of->values = (const char *)whole;
}

INLINE void attend_chunks(const int both, int64_t rows, const tile *of, const tile *next, int64_t num_rows,
                          const uint16_t *queries, const attended_rows *to) {
    const int width = both ? 2 : 4;
    const int64_t head_dim = of->shape->head_dim, end = last_position(of) + 1;
    const seen_groups own = groups_seen(of), following = groups_seen(next);
    float decays[MOST_ON_TILES];
    _Alignas(LINE) float scores[MOST_ON_TILES * CHUNK];
    _Alignas(LINE) int32_t whole[CHUNK_GROUPS][HALF * MAX_HEAD_DIM];
    for (int64_t g = own.start; g < own.end; g += CHUNK_GROUPS) {
        const int64_t num_groups = own.end - g < CHUNK_GROUPS ? own.end - g : CHUNK_GROUPS;
        group groups[CHUNK_GROUPS], ahead[CHUNK_GROUPS];
        find_groups(&own, &following, g, num_groups, groups, ahead);
        for (int64_t i = 0; i < num_groups; i += width)
            score(both, width, rows, queries, groups + i, ahead + i, head_dim, scores + i * LANES);
        soften_rows(KV_PAIRS, of, groups, num_groups, num_rows, scores, to, decays);
        for (int64_t i = 0; i < num_rows; i++) {
            if (decays[i] != 1.0f) scale_row(to->values + i * head_dim, head_dim, decays[i], 0.0f);
        }
        for (int64_t i = 0; i < num_groups; i++) hide_what_is_not_seen(&groups[i], end, head_dim, whole[i]);
        int64_t d = 0;
        for (; d + width * LANES <= head_dim; d += width * LANES)
            add_values(both, width, rows, groups, ahead, num_groups, scores, head_dim, d, to->values);
        for (; d < head_dim; d += LANES)
            add_values(both, 1, rows, groups, ahead, num_groups, scores, head_dim, d, to->values);
    }
}

void attend_on_tiles(const tile *of, const tile *next, int64_t num_rows, const float *query_rows, int64_t query_stride,
                     const attended_rows *to) {
    const int both = num_rows > TILE_SIDE;
    const int64_t rows = both ? (num_rows + 1) / 2 : num_rows, head_dim = of->shape->head_dim;
    _Alignas(LINE) uint16_t queries[MOST_ON_TILES * MAX_HEAD_DIM];
    memset(queries + num_rows * head_dim, 0, (size_t)(((1 + both) * rows - num_rows) * head_dim) * sizeof *queries);
    for (int64_t i = 0; i < num_rows; i++) {
        const float *row = query_rows + i / of->heads * query_stride + i % of->heads * head_dim;
        for (int64_t d = 0; d < head_dim; d += LANES)
            *(half_ivec *)(queries + i * head_dim + d) = as_pairs(load(row + d) * of->shape->scale);
    }
    start_rows(to, (1 + both) * rows, head_dim);
    shape_registers(rows);
    if (both)
        attend_chunks(1, rows, of, next, num_rows, queries, to);
    else
        attend_chunks(0, rows, of, next, num_rows, queries, to);
    _tile_release();
}

#else

void attend_on_tiles(const tile *of, const tile *next, int64_t num_rows, const float *query_rows, int64_t query_stride,
                     const attended_rows *to) {
    attend_on_vectors(of, next, num_rows, query_rows, query_stride, to);
}

#endif
