#include "product_phases.h"

#include <stdlib.h>

#define FEW_TILES 4           /* a product with no more tiles than this waits for memory */
#define SMALL_TASK (64 << 10) /* bytes of panels */
#define TASKS_OF_MEMBER 4     /* at least, so that members end at about the same time */

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static void pack_task(void *work, int64_t task) {
    const product *of = work;
    const int64_t row = task - of->inputs.num_tiles;
    if (row >= 0) {
        adapt_row(&of->adapters, row, &of->inputs, of->from + row * of->from_stride, of->norm);
        return;
    }
    pack_tile(&of->inputs, of->with, task, of->from, of->from_stride, of->norm);
}

/* Tasks of a block of tiles, as equal as can be and for all members the same number, unless there are fewer panels. To
 * take a task, members wait for each other, longer than a small panel takes with few rows: then a task has several. */
static int64_t tasks_per_block(const linear *with, int64_t num_tiles, int64_t num_members) {
    const int64_t panels = larger_of(SMALL_TASK / (with->panel_bytes * larger_of(num_tiles, 1)), 1);
    const int64_t fewest = larger_of(with->num_panels / panels, TASKS_OF_MEMBER * num_members);
    const int64_t even = (fewest + num_members - 1) / num_members * num_members;
    return even < with->num_panels ? even : with->num_panels;
}

/* Panels [first_panel(task), first_panel(task + 1)) are a task's; tasks go on from block to block. */
static int64_t first_panel(const linear *of, int64_t task, int64_t num_tasks) {
    return task * of->num_panels / num_tasks;
}

/* Tasks go through all panels with the same block of inputs, which stays in cache, then to the next block. */
static void multiply_task(void *work, int64_t task) {
    const product *of = work;
    const int64_t num_tasks = tasks_per_block(of->with, of->inputs.num_tiles, of->num_members);
    const int64_t place = task % num_tasks;
    int64_t at_once = tiles_per_block(of->with, of->inputs.num_tiles), first = task / num_tasks * at_once;
    int64_t end = first + at_once < of->inputs.num_tiles ? first + at_once : of->inputs.num_tiles;
    const int64_t last = first_panel(of->with, place + 1, num_tasks);
    /* Members take turns, more or less: this is the probable next panel of this member. */
    const int64_t after = first_panel(of->with, (place + of->num_members) % num_tasks, num_tasks);
    for (int64_t panel = first_panel(of->with, place, num_tasks); panel < last; panel++) {
        const int64_t next = panel + 1 < last ? panel + 1 : after;
        multiply(of->with, &of->inputs, panel, panel_at(of->with, next), first, end, of->epilogue, of->out,
                 of->out_stride);
    }
}

/* A product of few rows keeps the memory busy, but between two products the memory is idle. So the next weights are
 * fetched beforehand. With many rows this is not needed, and the cache has better uses. */
static void fetch_first_panel(const member *self, const linear *of, int64_t num_rows) {
    const int64_t num_tiles = tiles_of(num_rows), num_tasks = tasks_per_block(of, num_tiles, team_size(self->of));
    if (num_tiles <= FEW_TILES && self->number < num_tasks) fetch_panel(of, first_panel(of, self->number, num_tasks));
}

void run_product(member *self, product *of, const linear *next) {
    of->num_members = team_size(self->of);
    const int64_t num_adapted = of->adapters.by_token == NULL ? 0 : of->inputs.num_rows;
    if (num_adapted > 0) of->inputs.added = &of->adapters.added;
    if (of->from != NULL) team_phase(self, pack_task, of, of->inputs.num_tiles + num_adapted);
    int64_t num_tasks =
        blocks_of(of->with, of->inputs.num_tiles) * tasks_per_block(of->with, of->inputs.num_tiles, of->num_members);
    team_take(self, multiply_task, of, num_tasks);
    if (next != NULL) fetch_first_panel(self, next, of->inputs.num_rows);
    team_wait(self, num_tasks);
}

product product_of(const product_space *space, const linear *with, int64_t num_rows, const float *from,
                   int64_t from_stride, rms_norm norm, enum epilogue epilogue, float *out, int64_t out_stride) {
    return (product){.with = with,
                     .inputs = {.num_rows = num_rows,
                                .inputs = with->inputs,
                                .num_tiles = tiles_of(num_rows),
                                .tiles = space->tiles,
                                .factors = space->factors,
                                .offsets = space->offsets},
                     .from = from,
                     .from_stride = from_stride,
                     .norm = norm,
                     .epilogue = epilogue,
                     .out = out,
                     .out_stride = out_stride,
                     .num_members = 1};
}

/* ---- memory ---- */

void free_products(product_space *space) {
    free(space->tiles);
    free(space->factors);
    free(space->offsets);
    free(space->downs);
    free(space->additions);
    *space = (product_space){0};
}

int reserve_products(product_space *space, int64_t num_rows, int64_t widest_input) {
    space->tiles = stream_alloc(most_packed_bytes(num_rows, widest_input));
    space->factors = stream_alloc(num_rows * 4);
    space->offsets = stream_alloc(num_rows * 4);
    return space->tiles && space->factors && space->offsets;
}

int reserve_additions(product_space *space, int64_t num_rows, int64_t most_rank) {
    if (space->downs != NULL && most_rank <= space->most_rank) return 1;
    free(space->downs);
    free(space->additions);
    space->most_rank = most_rank;
    space->downs = stream_alloc(num_rows * most_rank * 4);
    space->additions = malloc((size_t)num_rows * sizeof *space->additions);
    if (space->downs && space->additions) return 1;
    free(space->downs);
    free(space->additions);
    space->downs = NULL, space->additions = NULL;
    return 0;
}
