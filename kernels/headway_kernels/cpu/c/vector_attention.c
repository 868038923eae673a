/* Attention on the vector unit. */
#include "attention_groups.h"

#define SCORED 4 /* the most registers of scores, or of values, that are summed at once */

/* Queries: scaled, [rows][LANES] components after [rows][LANES] components; with KV_PAIRS the same in pairs. */
INLINE void pack_query(const int form, const int64_t rows, int64_t row, const float *query, float scale,
                       int64_t head_dim, float *queries) {
    for (int64_t d = 0; d < head_dim; d += LANES) {
        const vec scaled = load(query + d) * scale;
        if (form == KV_PAIRS)
            *(half_ivec *)((bfloat16_pair *)queries + (d * rows + row * LANES) / 2) = as_pairs(scaled);
        else
            store(queries + d * rows + row * LANES, scaled);
    }
}

/* What one register of keys, at `at`, adds to the scores of a group: of one component, or two. `queries`: these
 * components of the first row. */
INLINE void add_scores(const int form, const int rows, const int j, const char *at, const float *queries,
                       vec (*sums)[SCORED]) {
    if (form == KV_FLOAT32) {
        const vec keys = load((const float *)at);
        UNROLLED
        for (int i = 0; i < rows; i++) sums[i][j] += splat(queries[i * LANES]) * keys;
        return;
    }
    const ivec pairs = *(const unaligned_ivec *)at;
    if (form == KV_PAIRS) {
        UNROLLED
        for (int i = 0; i < rows; i++)
            sums[i][j] =
                add_bfloat16_products(sums[i][j], pairs, splat_int(((const bfloat16_pair *)queries)[i * LANES / 2]));
        return;
    }
    const vec first = of_lower_halves(pairs), second = of_upper_halves(pairs);
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][j] += splat(queries[i * LANES]) * first;
        sums[i][j] += splat(queries[i * LANES + 1]) * second;
    }
}

/* Scores of `width` groups, each [rows][CHUNK] at its place in the chunk.
 *
 * Keys come from memory in a stream; at the same time the keys of `ahead` are fetched. */
INLINE void score(const int form, const int rows, const int width, const float *queries, const group *groups,
                  const group *ahead, int64_t head_dim, float *scores) {
    const int64_t step = form == KV_FLOAT32 ? 1 : 2, wide = form == KV_PAIRS ? LANES / 2 : LANES;
    vec sums[TILE_ROWS][SCORED];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) sums[i][j] = (vec){0};
    }
    for (int64_t d = 0; d < head_dim; d += step) {
        const int64_t at = form == KV_PAIRS ? d / 2 : d;
        const float *column = queries + at / wide * wide * rows + at % wide;
        UNROLLED
        for (int j = 0; j < width; j++) {
            const int64_t place = d / step * LANES * (int64_t)sizeof(float);
            __builtin_prefetch(ahead[j].keys + place);
            add_scores(form, rows, j, groups[j].keys + place, column, sums);
        }
    }
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) store(scores + i * CHUNK + j * LANES, sums[i][j]);
    }
}

/* What one register of values, at `at`, adds: of the position `p` of a group, or of that and the next, whose value
 * counts only if it is not the `last`. `weights`: of the first row in this group. */
INLINE void add_weighted(const int form, const int rows, const int j, const char *at, const float *weights, int64_t p,
                         const int last, vec (*sums)[SCORED]) {
    if (form == KV_FLOAT32) {
        const vec values = load((const float *)at);
        UNROLLED
        for (int i = 0; i < rows; i++) sums[i][j] += splat(weights[i * CHUNK + p]) * values;
        return;
    }
    ivec pairs = *(const unaligned_ivec *)at;
    if (last) pairs &= 0xffff;
    if (form == KV_PAIRS) {
        UNROLLED
        for (int i = 0; i < rows; i++)
            sums[i][j] = add_bfloat16_products(sums[i][j], pairs,
                                               splat_int(((const bfloat16_pair *)(weights + i * CHUNK))[p / 2]));
        return;
    }
    const vec first = of_lower_halves(pairs), second = of_upper_halves(pairs);
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][j] += splat(weights[i * CHUNK + p]) * first;
        sums[i][j] += splat(weights[i * CHUNK + p + 1]) * second;
    }
}

/* attended = attended * decay + weights x values, for `width` registers of components from `d` on, of all rows. The
 * values of `ahead` are fetched. */
INLINE void add_values(const int form, const int rows, const int width, const group *groups, const group *ahead,
                       int64_t num_groups, int64_t end, const float *weights, const float *decays, int64_t head_dim,
                       int64_t d, float *attended) {
    const int64_t step = form == KV_FLOAT32 ? 1 : 2;
    vec sums[TILE_ROWS][SCORED];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) {
            sums[i][j] = load(attended + i * head_dim + d + j * LANES) * decays[i];
        }
    }
    for (int64_t g = 0; g < num_groups; g++) {
        /* Positions from `end` on may hold a NaN of an earlier owner. A weight of zero would not hide it. */
        const int64_t count = positions_before(&groups[g], end);
        for (int64_t p = 0; p < count; p += step) {
            UNROLLED
            for (int j = 0; j < width; j++) {
                const int64_t place = (p / step * head_dim + d + j * LANES) * (int64_t)sizeof(float);
                __builtin_prefetch(ahead[g].values + place);
                add_weighted(form, rows, j, groups[g].values + place, weights + g * LANES, p, p + 1 == count, sums);
            }
        }
    }
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int j = 0; j < width; j++) store(attended + i * head_dim + d + j * LANES, sums[i][j]);
    }
}

/* Queries are packed. */
INLINE void attend_packed(const int form, const int rows, const tile *of, const tile *next, const float *queries,
                          const attended_rows *to) {
    /* With few rows, more registers at once: an addition takes several cycles, in which others can begin. */
    const int width = 2 * rows <= TILE_ROWS ? 4 : 2;
    const int64_t head_dim = of->shape->head_dim, end = last_position(of) + 1;
    const seen_groups own = groups_seen(of), following = groups_seen(next);
    float decays[TILE_ROWS];
    _Alignas(64) float scores[TILE_ROWS * CHUNK];
    start_rows(to, rows, head_dim);
    for (int64_t g = own.start; g < own.end; g += CHUNK_GROUPS) {
        int64_t num_groups = own.end - g < CHUNK_GROUPS ? own.end - g : CHUNK_GROUPS;
        group groups[CHUNK_GROUPS], ahead[CHUNK_GROUPS];
        find_groups(&own, &following, g, num_groups, groups, ahead);
        for (int64_t i = 0; i < num_groups; i += width) {
            score(form, rows, width, queries, groups + i, ahead + i, head_dim, scores + i * LANES);
        }
        soften_rows(form, of, groups, num_groups, rows, scores, to, decays);
        int64_t d = 0;
        for (; d + width * LANES <= head_dim; d += width * LANES) {
            add_values(form, rows, width, groups, ahead, num_groups, end, scores, decays, head_dim, d, to->values);
        }
        for (; d < head_dim; d += LANES) {
            add_values(form, rows, 1, groups, ahead, num_groups, end, scores, decays, head_dim, d, to->values);
        }
    }
}

INLINE void attend_in_form(const int form, const int rows, const tile *of, const tile *next, const float *query_rows,
                           int64_t query_stride, const attended_rows *to) {
    const int64_t head_dim = of->shape->head_dim;
    _Alignas(64) float queries[TILE_ROWS * MAX_HEAD_DIM];
    for (int64_t i = 0; i < rows; i++) {
        const float *row = query_rows + i / of->heads * query_stride + i % of->heads * head_dim;
        pack_query(form, rows, i, row, of->shape->scale, head_dim, queries);
    }
    attend_packed(form, rows, of, next, queries, to);
}

/* As in vector_products.c: all in one function, a compiler takes many times as long. */
#define ATTEND_ROWS_OF(rows)                                                                                           \
    static APART void attend_rows_##rows(const tile *of, const tile *next, const float *query_rows,                    \
                                         int64_t query_stride, const attended_rows *to) {                              \
        switch (of->shape->form) {                                                                                     \
        case KV_FLOAT32: attend_in_form(KV_FLOAT32, rows, of, next, query_rows, query_stride, to); break;              \
        case KV_BFLOAT16: attend_in_form(KV_BFLOAT16, rows, of, next, query_rows, query_stride, to); break;            \
        default: attend_in_form(KV_PAIRS, rows, of, next, query_rows, query_stride, to);                               \
        }                                                                                                              \
    }
#define CASE(rows)                                                                                                     \
    case rows: attend_rows_##rows(of, next, query_rows, query_stride, to); break;

EACH_TILE_SIZE(ATTEND_ROWS_OF)

void attend_on_vectors(const tile *of, const tile *next, int64_t rows, const float *query_rows, int64_t query_stride,
                       const attended_rows *to) {
    switch (rows) { EACH_TILE_SIZE(CASE) }
}
