#include "grouped.h"

#define FEW_TILES 4 /* a group with no more tiles than this waits for memory */

void add_group(grouped_product *to, product_group group) {
    group.first_tile = to->num_tiles;
    group.first_task = to->num_tasks;
    product_group *added = &to->groups[to->num_groups++];
    *added = group;
    if (group.adapters.by_token != NULL) added->inputs.added = &added->adapters.added;
    if (group.from != NULL) to->num_tiles += group.inputs.num_tiles;
    to->num_tasks += blocks_of(group.with, group.inputs.num_tiles) * group.with->num_panels;
}

/* The group of a task, found by halving: the last one that begins at or before it. */
static const product_group *group_of(const grouped_product *of, int64_t task, const int packing) {
    int64_t low = 0, high = of->num_groups;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        const product_group *group = &of->groups[middle];
        if ((packing ? group->first_tile : group->first_task) <= task)
            low = middle;
        else
            high = middle;
    }
    return &of->groups[low];
}

static void pack_task(void *work, int64_t task) {
    const grouped_product *of = work;
    const product_group *group = group_of(of, task, 1);
    const packed_inputs *inputs = &group->inputs;
    const int64_t tile = task - group->first_tile;
    const rms_norm norm = {group->norm == NULL ? of->norm.weight : group->norm, of->norm.eps};
    pack_tile(inputs, group->with, tile, group->from, of->from_stride, norm);
    if (group->adapters.by_token == NULL) return;
    const int64_t end = tile_start(tile + 1, inputs->num_tiles, inputs->num_rows);
    for (int64_t row = tile_start(tile, inputs->num_tiles, inputs->num_rows); row < end; row++) {
        const float *from = group->from + row_taken(inputs, row) * of->from_stride;
        adapt_row(&group->adapters, row, inputs, from, norm);
    }
}

static int64_t panel_of(const product_group *group, int64_t task) {
    return (task - group->first_task) % group->with->num_panels;
}

/* As with one product, tasks go through all panels of a group with the same block of inputs. */
static void multiply_task(void *work, int64_t task) {
    const grouped_product *of = work;
    const product_group *group = group_of(of, task, 0);
    int64_t num_tiles = group->inputs.num_tiles, at_once = tiles_per_block(group->with, num_tiles);
    int64_t first = (task - group->first_task) / group->with->num_panels * at_once;
    int64_t end = first + at_once < num_tiles ? first + at_once : num_tiles;
    /* Members take turns, more or less: this is the probable next task of this member. */
    int64_t next_task = task + of->num_members < of->num_tasks ? task + of->num_members : task;
    const product_group *next = group_of(of, next_task, 0);
    multiply(group->with, &group->inputs, panel_of(group, task), panel_at(next->with, panel_of(next, next_task)), first,
             end, of->epilogue, group->out, group->out_stride);
}

static void fetch_first_panel(const member *self, const grouped_product *of) {
    if (self->number >= of->num_tasks) return;
    const product_group *group = group_of(of, self->number, 0);
    if (group->inputs.num_tiles <= FEW_TILES) fetch_panel(group->with, panel_of(group, self->number));
}

void run_grouped(member *self, grouped_product *product, const grouped_product *next) {
    if (product->num_tiles > 0) team_phase(self, pack_task, product, product->num_tiles);
    team_take(self, multiply_task, product, product->num_tasks);
    if (next != NULL) fetch_first_panel(self, next);
    team_wait(self, product->num_tasks);
}
