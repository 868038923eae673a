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

/* Consecutive pairs of inputs whose sums are scaled; or, if none are, all pairs, and no scales. */
typedef struct {
    range pairs;
    const float *scales;
} narrow_group;

/* The group that begins with pair `begin` and has these scales. */
static inline narrow_group group_from(const linear *with, int64_t begin, const float *scales) {
    const int64_t num_pairs = steps_of(with->inputs, FORM_PAIRS);
    const int64_t end = with->num_groups == 1 ? num_pairs : begin + with->group / PAIR;
    return (narrow_group){{begin, end < num_pairs ? end : num_pairs}, scales};
}

/* The group with pair `pair` of the panel at `codes`. */
static narrow_group group_with(const linear *with, const char *codes, int64_t pair) {
    if (!with->scales_sums) return (narrow_group){{0, steps_of(with->inputs, FORM_PAIRS)}, NULL};
    const int64_t number = group_number(with, pair * PAIR);
    return group_from(with, number * (with->group / PAIR), scales_of(with, codes) + number * PANEL);
}

static inline range within(range group, int64_t pair, int64_t end) {
    return (range){pair, group.end < end ? group.end : end};
}

/* Products of some pairs of inputs with one tile. */
typedef struct {
    const linear *with;
    tile_results results;
    const char *weights; /* widened; NULL: codes are looked up in registers */
    range pairs;
    fetching ahead;
    narrow_sums *sums;
} narrow_task;

/* Sums that are complete with a group are scaled and added to those of the groups before, or to the bias. */
INLINE void add_group(const int rows, const narrow_task *task, const narrow_group *group, vec (*sums)[2]) {
    const float *bias = task->with->bias + task->results.panel * PANEL;
    UNROLLED
    for (int half = 0; half < 2; half++) {
        const vec scale = load(group->scales + half * LANES);
        UNROLLED
        for (int i = 0; i < rows; i++) {
            const vec before = group->pairs.begin == 0 ? load(bias + half * LANES) : task->sums->scaled[i][half];
            sums[i][half] = sums[i][half] * scale + before;
        }
    }
}

/* Products of pairs of one group, with codes that are looked up on the way. */
INLINE void sum_looked_up(const int rows, const int kind, const narrow_task *task, const narrow_group *of, range pairs,
                          vec (*sums)[2], fetching ahead) {
    const int32_t *tile = tile_at(task->results.from, task->results.first_row, FORM_PAIRS);
    const scaled_group group = group_at(task->with, panel_at(task->with, task->results.panel), of->scales);
    const int64_t turn = inputs_of_turn(kind) / PAIR;
    ahead.stride *= turn;
    ahead.lines = ahead.stride > LINE + LINE / 8 ? 2 : 1;
    for (int64_t k = pairs.begin; k < pairs.end; k += turn) {
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

/* The same memory, so many steps later. */
INLINE fetching later(fetching ahead, int64_t steps) {
    ahead.at += steps * ahead.stride;
    if (ahead.at < ahead.end) return ahead;
    ahead.at = ahead.then + (ahead.at - ahead.end);
    ahead.end = ahead.then + ((int64_t)1 << 40);
    return ahead;
}

/* The same, however codes are widened. */
INLINE void sum_of_group(const int rows, const narrow_task *task, const narrow_group *group, range pairs,
                         vec (*sums)[2]) {
    const int64_t done = pairs.begin - task->pairs.begin;
    const fetching ahead = later(task->ahead, done);
    if (task->weights != NULL) {
        const int32_t *tile = tile_at(task->results.from, task->results.first_row, FORM_PAIRS);
        sum_pairs(rows, tile, (const uint16_t *)(task->weights + done * PANEL * 4), pairs, sums, ahead);
        return;
    }
    switch (kind_of(task->with)) {
    case FLOATS: sum_looked_up(rows, FLOATS, task, group, pairs, sums, ahead); break;
    case WITH_ZEROS: sum_looked_up(rows, WITH_ZEROS, task, group, pairs, sums, ahead); break;
    default: sum_looked_up(rows, WITHOUT_ZEROS, task, group, pairs, sums, ahead);
    }
}

INLINE void multiply_pairs(const int rows, const narrow_task *task) {
    const linear *with = task->with;
    const float *bias = with->bias + task->results.panel * PANEL;
    const int64_t num_pairs = steps_of(with->inputs, FORM_PAIRS);
    narrow_group group = group_with(with, panel_at(with, task->results.panel), task->pairs.begin);
    for (range pairs = within(group.pairs, task->pairs.begin, task->pairs.end);;
         pairs = within(group.pairs, pairs.end, task->pairs.end)) {
        vec sums[TILE_ROWS][2];
        UNROLLED
        for (int i = 0; i < rows; i++) {
            UNROLLED
            for (int half = 0; half < 2; half++) {
                const vec first = group.scales == NULL ? load(bias + half * LANES) : (vec){0};
                sums[i][half] = pairs.begin == group.pairs.begin ? first : task->sums->in_hand[i][half];
            }
        }
        sum_of_group(rows, task, &group, pairs, sums);
        const int is_complete = pairs.end == group.pairs.end;
        if (is_complete && group.scales != NULL) add_group(rows, task, &group, sums);
        if (pairs.end == num_pairs) {
            finish_tile(rows, &task->results, task->sums->in_hand, sums);
            return;
        }
        vec(*kept)[2] = is_complete ? task->sums->scaled : task->sums->in_hand;
        UNROLLED
        for (int i = 0; i < rows; i++) kept[i][0] = sums[i][0], kept[i][1] = sums[i][1];
        if (pairs.end == task->pairs.end) return;
        group = group_from(with, pairs.end, group.scales + PANEL);
    }
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

static void widen_pairs(const linear *with, const char *codes, range pairs, char *to) {
    for (int64_t pair = pairs.begin, behind; pair < pairs.end; pair = behind) {
        behind = within(group_with(with, codes, pair).pairs, pair, pairs.end).end;
        widen_to_pairs(with, codes, pair * PAIR, (behind - pair) * PAIR, to + (pair - pairs.begin) * PANEL * 4);
    }
}

/* A tile alone fetches a little ahead of what it multiplies, near the end from the next panel; each of several, a part
 * of what is widened next. */
static fetching what_to_fetch(const linear *with, const char *codes, const char *next, range pairs, int64_t place,
                              int64_t count) {
    const int64_t num_pairs = steps_of(with->inputs, FORM_PAIRS), bytes = with->panel_bytes;
    const int64_t bytes_of_pair = (bytes + num_pairs - 1) / num_pairs, ahead = bytes < MOST_AHEAD ? bytes : MOST_AHEAD;
    if (count == 1) {
        const fetching from_here = {codes + ahead, codes + bytes, next, 1, bytes_of_pair};
        return later(from_here, pairs.begin);
    }
    const char *following = pairs.end < num_pairs ? codes + pairs.end * bytes_of_pair : next;
    return part_to_fetch(following, pairs, bytes_of_pair, place, count);
}

void multiply_narrow(const linear *with, const packed_inputs *from, int64_t panel, const char *next, int64_t first_tile,
                     int64_t end_tile, enum epilogue epilogue, float *out, int64_t stride) {
    assert(end_tile - first_tile <= CODED_TILES);
    const int64_t count = end_tile - first_tile, num_pairs = steps_of(with->inputs, FORM_PAIRS);
    const int looks_up = with->scales_sums && count <= most_that_look_up(kind_of(with));
    const int64_t depth = looks_up ? num_pairs : count == 1 ? DEPTH_OF_ONE : DEPTH_OF_SEVERAL;
    const char *codes = panel_at(with, panel);
    _Alignas(LINE) char widened[DEPTH_OF_SEVERAL * PANEL * 4];
    narrow_sums sums[CODED_TILES];
    fetch_additions(from, with, next, first_tile, end_tile);
    for (int64_t begin = 0; begin < num_pairs; begin += depth) {
        const range pairs = {begin, begin + depth < num_pairs ? begin + depth : num_pairs};
        if (!looks_up) widen_pairs(with, codes, pairs, widened);
        int64_t first = tile_start(first_tile, from->num_tiles, from->num_rows), rows;
        for (int64_t place = 0; place < count; place++, first += rows) {
            rows = tile_start(first_tile + place + 1, from->num_tiles, from->num_rows) - first;
            const narrow_task task = {
                .with = with,
                .results = results_of(from, panel, first, rows, epilogue, out, stride),
                .weights = looks_up ? NULL : widened,
                .pairs = pairs,
                .ahead = what_to_fetch(with, codes, next, pairs, place, count),
                .sums = &sums[place],
            };
            multiply_tile(&task, rows);
        }
    }
}

#endif
