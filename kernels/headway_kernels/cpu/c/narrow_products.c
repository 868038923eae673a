/* Products on the vector unit with codes that are rounded to bfloat16.
 *
 * Codes of some inputs of a panel are widened in the cache, then multiplied with one tile of rows after the other.
 * Where sums of groups are scaled, a tile has a sum of the group in hand, and one of all groups before.
 */
#include "narrow_products.h"

#include "narrow_codes.h"
#include "vector_results.h"

#if HAS_PAIR_PRODUCTS && !HAS_TILES

#include <assert.h>

#define MOST_AHEAD 16384     /* of the codes that are fetched for a tile alone */
#define DEPTH_OF_ONE 64      /* pairs that are widened at once for a tile alone: they stay in the L1 cache */
#define DEPTH_OF_SEVERAL 384 /* the same for several: they stay in the L2 cache */

/* Tiles that take fewer instructions if each looks up codes in registers than if all share what one widens. */
static inline int64_t most_that_look_up(enum narrow_kind kind) { return kind == FLOATS ? 1 : 4; }

/* The sums of a tile with a panel: of the group in hand, or of all inputs if sums are not scaled; and, scaled, of the
 * groups before. */
typedef struct {
    vec in_hand[TILE_ROWS][2];
    vec scaled[TILE_ROWS][2];
} narrow_sums;

/* Products of some pairs of inputs, which are of one group, with one tile. */
typedef struct {
    const linear *with;
    tile_results results;
    const char *weights; /* widened; NULL: codes are looked up in registers */
    range pairs;
    range group;         /* pairs of the group, or of all */
    const float *scales; /* of the group; NULL: sums are not scaled */
    fetching ahead;
    narrow_sums *sums;
} narrow_task;

/* Sums that are complete with the group are scaled and added to those of the groups before, or to the bias. */
INLINE void add_group(const int rows, const narrow_task *task, vec (*sums)[2]) {
    const float *bias = task->with->bias + task->results.panel * PANEL;
    UNROLLED
    for (int half = 0; half < 2; half++) {
        const vec scale = load(task->scales + half * LANES);
        UNROLLED
        for (int i = 0; i < rows; i++) {
            const vec before = task->group.begin == 0 ? load(bias + half * LANES) : task->sums->scaled[i][half];
            sums[i][half] = sums[i][half] * scale + before;
        }
    }
}

/* Products with codes that are looked up on the way. */
INLINE void sum_looked_up(const int rows, const int kind, const narrow_task *task, vec (*sums)[2]) {
    const int32_t *tile = tile_at(task->results.from, task->results.first_row, FORM_PAIRS);
    const scaled_group group =
        group_at(task->with, panel_at(task->with, task->results.panel), task->pairs.begin * PAIR);
    const int64_t turn = inputs_of_turn(kind) / PAIR, stride = turn * task->ahead.stride;
    fetching ahead = {.at = task->ahead.at, .lines = stride > LINE + LINE / 8 ? 2 : 1, .stride = stride};
    for (int64_t k = task->pairs.begin; k < task->pairs.end; k += turn) {
        const int32_t *column = tile + k / STRETCH * STRETCH * rows + k % STRETCH;
        fetch(&ahead);
        UNROLLED
        for (int pair = 0; pair < turn; pair++) {
            const ivec low = (ivec)numbers_at(kind, &group, k * PAIR, pair, 0);
            const ivec high = (ivec)numbers_at(kind, &group, k * PAIR, pair, 1);
            add_products_of_pairs(rows, column + pair, low, high, sums);
        }
    }
}

INLINE void sum_of_panel(const int rows, const narrow_task *task, vec (*sums)[2]) {
    const int32_t *tile = tile_at(task->results.from, task->results.first_row, FORM_PAIRS);
    if (task->weights != NULL) {
        sum_pairs(rows, tile, (const uint16_t *)task->weights, task->pairs, sums, task->ahead);
        return;
    }
    switch (kind_of(task->with)) {
    case FLOATS: sum_looked_up(rows, FLOATS, task, sums); break;
    case WITH_ZEROS: sum_looked_up(rows, WITH_ZEROS, task, sums); break;
    default: sum_looked_up(rows, WITHOUT_ZEROS, task, sums);
    }
}

INLINE void multiply_pairs(const int rows, const narrow_task *task) {
    const linear *with = task->with;
    const float *bias = with->bias + task->results.panel * PANEL;
    vec sums[TILE_ROWS][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const vec first = task->scales == NULL ? load(bias + half * LANES) : (vec){0};
            sums[i][half] = task->pairs.begin == task->group.begin ? first : task->sums->in_hand[i][half];
        }
    }
    sum_of_panel(rows, task, sums);
    const int completes_group = task->pairs.end == task->group.end;
    if (completes_group && task->scales != NULL) add_group(rows, task, sums);
    if (task->pairs.end == steps_of(with->inputs, FORM_PAIRS)) {
        finish_tile(rows, &task->results, task->sums->in_hand, sums);
        return;
    }
    vec(*kept)[2] = completes_group ? task->sums->scaled : task->sums->in_hand;
    UNROLLED
    for (int i = 0; i < rows; i++) kept[i][0] = sums[i][0], kept[i][1] = sums[i][1];
}

/* A function for each size of a tile, whose sums stay in registers. */
#define MULTIPLY_PAIRS_OF(rows)                                                                                        \
    static APART void multiply_pairs_of_##rows(const narrow_task *task) { multiply_pairs(rows, task); }

EACH_TILE_SIZE(MULTIPLY_PAIRS_OF)

#define CASE(rows)                                                                                                     \
    case rows: multiply_pairs_of_##rows(task); break;

static void multiply_tile(const narrow_task *task, int64_t rows) {
    switch (rows) { EACH_TILE_SIZE(CASE) }
}

/* The group with pair `pair`; all pairs if sums are not scaled. */
static range group_with(const linear *with, int64_t pair, int64_t num_pairs) {
    if (!with->scales_sums || with->num_groups == 1) return (range){0, num_pairs};
    const int64_t size = with->group / PAIR, begin = pair / size * size;
    return (range){begin, begin + size < num_pairs ? begin + size : num_pairs};
}

static range within(range group, int64_t pair, int64_t end) { return (range){pair, group.end < end ? group.end : end}; }

static void widen_pairs(const linear *with, const char *codes, range pairs, char *to) {
    for (int64_t pair = pairs.begin, behind; pair < pairs.end; pair = behind) {
        behind = within(group_with(with, pair, pairs.end), pair, pairs.end).end;
        widen_to_pairs(with, codes, pair * PAIR, (behind - pair) * PAIR, to + (pair - pairs.begin) * PANEL * 4);
    }
}

/* What lies so many bytes behind the beginning of a panel, or, behind its end, in the next one. */
static const char *at_or_in_next(const char *codes, const char *next, int64_t at, int64_t panel_bytes) {
    return at < panel_bytes ? codes + at : next + at - panel_bytes;
}

void multiply_narrow(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
                     int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    assert(end_tile - first_tile <= NARROW_TILES);
    const int64_t count = end_tile - first_tile, num_pairs = steps_of(with->inputs, FORM_PAIRS);
    const int looks_up = with->scales_sums && count <= most_that_look_up(kind_of(with));
    const int64_t depth = looks_up ? num_pairs : count == 1 ? DEPTH_OF_ONE : DEPTH_OF_SEVERAL;
    const int64_t bytes_of_pair = (with->panel_bytes + num_pairs - 1) / num_pairs;
    const int64_t most_ahead = with->panel_bytes < MOST_AHEAD ? with->panel_bytes : MOST_AHEAD;
    const int64_t ahead = count > 1 ? depth * bytes_of_pair : most_ahead;
    const char *codes = panel_at(with, panel);
    _Alignas(LINE) char widened[DEPTH_OF_SEVERAL * PANEL * 4];
    narrow_sums sums[NARROW_TILES];
    fetch_additions(from, with, next, first_tile, end_tile);
    for (int64_t begin = 0, end; begin < num_pairs; begin = end) {
        end = begin + depth < num_pairs ? begin + depth : num_pairs;
        if (!looks_up) widen_pairs(with, codes, (range){begin, end}, widened);
        int64_t first = tile_start(first_tile, from->num_tiles, from->num_rows), rows;
        for (int64_t place = 0; place < count; place++, first += rows) {
            rows = tile_start(first_tile + place + 1, from->num_tiles, from->num_rows) - first;
            narrow_task task = {
                .with = with,
                .results = results_of(from, panel, first, rows, epilogue, out, stride),
                .sums = &sums[place],
            };
            for (int64_t pair = begin; pair < end; pair = task.pairs.end) {
                task.group = group_with(with, pair, num_pairs);
                task.pairs = within(task.group, pair, end);
                if (!looks_up) task.weights = widened + (pair - begin) * PANEL * 4;
                if (with->scales_sums) task.scales = scales_of(with, codes) + group_number(with, pair * PAIR) * PANEL;
                const char *following = at_or_in_next(codes, next, pair * bytes_of_pair + ahead, with->panel_bytes);
                task.ahead = part_to_fetch(following, task.pairs, bytes_of_pair, place, count);
                multiply_tile(&task, rows);
            }
        }
    }
}

#endif
