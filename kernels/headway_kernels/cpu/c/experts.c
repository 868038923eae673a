#include "experts.h"

#include <stdlib.h>

#define NOT_OPEN (-INFINITY)

/* One layer's work on a step: each member has a copy. */
typedef struct {
    const expert_layer *layer;
    expert_space *space;
    expert_products *products;
    float *hidden;
    int64_t stride;
    int64_t num_tokens;
    int64_t num_members;
    rms_norm norm;
    const expert_part *part;
} expert_pass;

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t experts_of(const expert_layer *layer) { return layer->choose.num_experts + layer->has_shared; }
static int64_t per_token(const expert_layer *layer) { return layer->choose.num_chosen + layer->has_shared; }
static int64_t widest_inner(const expert_layer *layer) {
    return larger_of(layer->down[0]->inputs, layer->down[experts_of(layer) - 1]->inputs);
}
/* Whether the products before activations compute them. */
static int in_products(const expert_layer *layer) { return layer->activation == SILU && layer->is_gated; }
static int64_t score_stride(const expert_layer *layer) { return layer->router->num_panels * PANEL; }

/* ---- choosing ---- */

/* The first of the largest, always one that is not taken: comparisons with NaN are false. */
static int64_t best_of(const float *scores, const char *taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++) {
        if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
    }
    return best;
}

/* Scores of SCORE_NEAR in place; -1 where an expert is not among the best. */
static void make_near_scores(const routing *by, float *scores) {
    float shares[MOST_EXPERTS];
    char taken[MOST_EXPERTS] = {0};
    for (int64_t i = 0; i < by->num_experts; i++) shares[i] = -1.0f;
    for (int64_t n = 0; n < by->num_chosen; n++) {
        const int64_t best = best_of(scores, taken, by->num_experts);
        const float largest = scores[best];
        float sum = 0.0f;
        for (int64_t i = 0; i < by->num_experts; i++) {
            const float size = fabsf(scores[i]);
            const int is_far = (largest - scores[i]) / (size > largest ? size : largest) > by->tolerance;
            if (!taken[i] && !is_far) sum += exponential(splat(scores[i] - largest))[0];
        }
        shares[best] = 1.0f / sum;
        taken[best] = 1;
    }
    memcpy(scores, shares, (size_t)by->num_experts * sizeof *scores);
}

/* Scores of all experts in place, in whole registers: what follows the last expert becomes anything. */
static void make_scores(const routing *by, float *scores) {
    if (by->scoring == SCORE_NEAR) {
        make_near_scores(by, scores);
        return;
    }
    float largest = scores[0];
    for (int64_t i = 1; i < by->num_experts; i++) largest = scores[i] > largest ? scores[i] : largest;
    for (int64_t i = 0; i < by->num_experts; i += LANES) {
        vec some = load(scores + i);
        store(scores + i, by->scoring == SCORE_SIGMOID ? sigmoid(some) : exponential(some - largest));
    }
    if (by->scoring == SCORE_SIGMOID) return;
    float sum = 0.0f;
    for (int64_t i = 0; i < by->num_experts; i++) sum += scores[i];
    for (int64_t i = 0; i < by->num_experts; i++) scores[i] /= sum;
}

static void take_best(const float *scores, char *taken, int64_t count, int64_t wanted) {
    for (int64_t i = 0; i < wanted; i++) taken[best_of(scores, taken, count)] = 1;
}

/* The sum of the `wanted` largest of a group. */
static float group_score(const float *scores, int64_t count, int64_t wanted) {
    char taken[MOST_EXPERTS] = {0};
    float sum = 0.0f;
    for (int64_t i = 0; i < wanted; i++) {
        int64_t best = best_of(scores, taken, count);
        taken[best] = 1;
        sum += scores[best];
    }
    return sum;
}

/* Scores in groups that take no part become -infinity. */
static void close_groups(const routing *by, float *scores) {
    int64_t size = by->num_experts / by->num_groups;
    float of_groups[MOST_EXPERTS];
    char open[MOST_EXPERTS] = {0};
    for (int64_t i = 0; i < by->num_groups; i++) {
        of_groups[i] = group_score(scores + i * size, size, by->scores_per_group);
    }
    take_best(of_groups, open, by->num_groups, by->num_open_groups);
    for (int64_t i = 0; i < by->num_experts; i++) {
        if (!open[i / size]) scores[i] = NOT_OPEN;
    }
}

static void correct(const routing *by, const float *scores, float *corrected) {
    for (int64_t i = 0; i < by->num_experts; i++)
        corrected[i] = scores[i] + (by->correction == NULL ? 0.0f : by->correction[i]);
}

/* `chosen` ascending, and their weights. */
static void choose_experts(const routing *by, float *scores, int32_t *chosen, float *weights) {
    float corrected[MOST_EXPERTS];
    char taken[MOST_EXPERTS] = {0};
    if (by->corrects_outputs) correct(by, scores, corrected);
    make_scores(by, scores);
    if (!by->corrects_outputs) correct(by, scores, corrected);
    if (by->num_groups > 1) close_groups(by, corrected);
    take_best(corrected, taken, by->num_experts, by->num_chosen);
    float sum = 0.0f;
    for (int64_t i = 0, count = 0; i < by->num_experts; i++) {
        if (!taken[i]) continue;
        chosen[count] = (int32_t)i;
        weights[count++] = scores[i];
        sum += scores[i];
    }
    float factor = by->is_normalised ? by->scaling / (sum + 1e-20f) : by->scaling;
    for (int64_t i = 0; i < by->num_chosen; i++) weights[i] *= factor;
}

static void choose_task(void *work, int64_t token) {
    const expert_pass *now = work;
    const expert_layer *layer = now->layer;
    const int64_t each = per_token(layer), routed = layer->choose.num_chosen;
    float *scores = now->space->scores + token * score_stride(layer);
    int32_t *chosen = now->space->chosen + token * each;
    float *weights = now->space->weights + token * each;
    if (layer->has_shared) {
        chosen[routed] = (int32_t)layer->choose.num_experts;
        weights[routed] = layer->has_gate ? sigmoid(splat(scores[layer->choose.num_experts]))[0] : 1.0f;
    }
    choose_experts(&layer->choose, scores, chosen, weights);
    for (int64_t i = 0; layer->norms.factors != NULL && i < routed; i++) weights[i] *= layer->norms.factors[chosen[i]];
}

/* ---- sorting ---- */

/* Give every pair its place, expert after expert; within an expert, tokens keep their order. */
static void place_pairs(const expert_pass *now, int64_t *counts) {
    const expert_space *space = now->space;
    const int64_t num_pairs = now->num_tokens * per_token(now->layer);
    int64_t next[MOST_EXPERTS + 1] = {0};
    for (int64_t i = 0; i < num_pairs; i++) counts[space->chosen[i]]++;
    for (int64_t i = 1; i < experts_of(now->layer); i++) next[i] = next[i - 1] + counts[i - 1];
    for (int64_t i = 0; i < num_pairs; i++) {
        int64_t place = next[space->chosen[i]]++;
        space->places[i] = (int32_t)place;
        space->of_inputs[place] = space->weights[i];
        if (now->layer->choose.weighs_inputs) space->weights[i] = 1.0f;
        space->tokens[place] = (int32_t)(i / per_token(now->layer));
    }
}

/* The inputs of `count` pairs from `first` on. */
static packed_inputs inputs_of(const expert_space *space, const linear *with, int64_t first, int64_t count, void *tiles,
                               const int32_t *rows, const float *weights) {
    const product_space *of = &space->inputs;
    return (packed_inputs){count, with->inputs, tiles_of(count), tiles, of->factors + first, of->offsets + first,
                           rows,  NULL,         weights};
}

/* What adapters add to pairs from `first` on in one product, by its number behind the router. */
static row_adapters adapters_of(const expert_pass *now, int64_t first, int64_t number) {
    const product_space *space = &now->space->inputs;
    row_adapters of = now->part->adapters;
    if (of.by_token == NULL) return of;
    of.rows = now->space->tokens + first;
    of.addition += 1 + number;
    of.added = (added_rows){space->additions + first, space->downs + first * space->most_rank, space->most_rank};
    return of;
}

static grouped_product no_groups(const expert_pass *now, product_group *groups, rms_norm norm, int64_t from_stride,
                                 enum epilogue epilogue) {
    return (grouped_product){groups, 0, 0, 0, from_stride, norm, epilogue, now->num_members};
}

/* The activations of a pair, all columns: pairs of the shared expert come last, one of each token. */
static float *activations_of(const expert_pass *now, int64_t pair) {
    const int64_t width = widest_inner(now->layer), num_chosen = now->num_tokens * now->layer->choose.num_chosen;
    if (now->part->pairs == NULL) return now->space->activations + pair * width;
    return pair < num_chosen ? now->part->pairs + pair * width : now->part->of_shared + (pair - num_chosen) * width;
}

/* Experts may be stored in different ways. */
static enum epilogue gated_in_all(const expert_layer *layer) {
    const enum epilogue first = gated_before(layer->down[0], layer->gate_up[0]);
    for (int64_t i = 1; i < experts_of(layer); i++) {
        if (gated_before(layer->down[i], layer->gate_up[i]) != first) return GATED;
    }
    return first;
}

/* Both products of every expert that has tokens. The inputs of the second are packed at once, unless they must be
 * quantised or activated, which needs whole rows, as adapters do, or other ranks have parts of them. */
static void sort_task(void *work, int64_t task) {
    (void)task;
    const expert_pass *now = work;
    const expert_layer *layer = now->layer;
    expert_space *space = now->space;
    const int activates = in_products(layer);
    const int may_pack = now->part->pairs == NULL && now->part->adapters.by_token == NULL;
    const enum epilogue gated = may_pack ? gated_in_all(layer) : GATED;
    const enum epilogue epilogue = activates ? gated : STORE;
    const int packs = is_packed(epilogue);
    const int64_t num_experts = experts_of(layer), widest = widest_inner(layer);
    int64_t counts[MOST_EXPERTS + 1] = {0};
    place_pairs(now, counts);
    grouped_product *first_products = &now->products->gate_up, *last_products = &now->products->down;
    product_group *groups = now->products->groups;
    *first_products = no_groups(now, groups, now->norm, now->stride, epilogue);
    *last_products = no_groups(now, groups + num_experts, (rms_norm){0}, widest, STORE);
    char *tiles = space->inputs.tiles, *packed = (char *)space->activations;
    for (int64_t i = 0, first = 0; i < num_experts; first += counts[i++]) {
        if (counts[i] == 0) continue;
        const linear *gate_up = layer->gate_up[i], *down = layer->down[i];
        float *rows = activations_of(now, first);
        float *own = rows + (i < layer->choose.num_experts ? layer->inner_start : layer->shared_start);
        float *out = packs ? (float *)packed : own;
        if (!activates) out = space->gate_up + first * 2 * widest;
        const float *weights = layer->choose.weighs_inputs ? space->of_inputs + first : NULL;
        packed_inputs inputs = inputs_of(space, gate_up, first, counts[i], tiles, space->tokens + first, weights);
        packed_inputs inner = inputs_of(space, down, first, counts[i], packs ? packed : tiles, NULL, NULL);
        add_group(first_products,
                  (product_group){.with = gate_up,
                                  .inputs = inputs,
                                  .from = now->hidden,
                                  .norm = i < layer->choose.num_experts ? layer->norms.experts : layer->norms.shared,
                                  .adapters = adapters_of(now, first, 2 * i),
                                  .out = out,
                                  .out_stride = packs       ? down->inputs
                                                : activates ? widest
                                                            : 2 * widest});
        add_group(last_products, (product_group){.with = down,
                                                 .inputs = inner,
                                                 .from = packs ? NULL : rows,
                                                 .adapters = adapters_of(now, first, 2 * i + 1),
                                                 .out = space->outputs + first * now->stride + now->part->hidden_start,
                                                 .out_stride = now->stride});
        tiles += most_packed_bytes(counts[i], larger_of(gate_up->inputs, down->inputs));
        packed += packed_bytes(counts[i], down->inputs);
    }
}

/* ---- a layer ---- */

static void activate_task(void *work, int64_t pair) {
    const expert_pass *now = work;
    const expert_space *space = now->space;
    const expert_layer *layer = now->layer;
    const int is_shared = pair >= now->num_tokens * layer->choose.num_chosen; /* these come last */
    const linear *gate_up = layer->gate_up[is_shared ? layer->choose.num_experts : 0];
    const float *limit = layer->activation == LIMITED_SILU ? layer->limits + is_shared : NULL;
    activate_row((enum activation)layer->activation, layer->is_gated != 0, limit,
                 space->gate_up + pair * 2 * widest_inner(layer), gate_up->outputs / (layer->is_gated ? 2 : 1),
                 activations_of(now, pair) + (is_shared ? layer->shared_start : layer->inner_start));
}

/* The sum of the chosen experts and what the shared one gives, each normalised. */
static void add_normalised_task(void *work, int64_t token) {
    const expert_pass *now = work;
    const expert_layer *layer = now->layer;
    const int64_t each = per_token(layer), routed = layer->choose.num_chosen, width = layer->router->inputs;
    const int32_t *places = now->space->places + token * each;
    const float *weights = now->space->weights + token * each;
    const norm_weights of_experts = {.weight = layer->norms.experts_post},
                       of_shared = {.weight = layer->norms.shared_post};
    float *to = now->part->added + token * now->stride, *shared = now->space->outputs + places[routed] * now->stride;
    memset(to, 0, (size_t)width * sizeof *to);
    for (int64_t i = 0; i < routed; i++) add_row(to, now->space->outputs + places[i] * now->stride, width, weights[i]);
    normalise_row(NORM_RMS, of_experts, now->norm.eps, to, width, to);
    normalise_row(NORM_RMS, of_shared, now->norm.eps, shared, width, shared);
    add_row(to, shared, width, 1.0f);
}

static void add_task(void *work, int64_t token) {
    const expert_pass *now = work;
    const expert_space *space = now->space;
    const int64_t each = per_token(now->layer);
    const int32_t *places = space->places + token * each;
    const float *weights = space->weights + token * each;
    float *added = now->part->added;
    float *to = (added == NULL ? now->hidden : added) + token * now->stride;
    const int64_t start = now->part->hidden_start, end = start + now->layer->down[0]->num_panels * PANEL;
    for (int64_t column = start; column < end; column += LANES) {
        vec sum = {0};
        for (int64_t i = 0; i < each; i++) sum += weights[i] * load(space->outputs + places[i] * now->stride + column);
        store(to + column, added == NULL ? load(to + column) + sum : sum);
    }
}

void run_experts(member *self, expert_space *space, const expert_layer *layer, int64_t number, float *hidden,
                 int64_t stride, int64_t num_tokens, rms_norm norm, const expert_part *part) {
    expert_products *products = &space->products[number];
    expert_pass now = {layer, space, products, hidden, stride, num_tokens, team_size(self->of), norm, part};
    const rms_norm of_router = {layer->norms.router == NULL ? norm.weight : layer->norms.router, norm.eps};
    product router = product_of(&space->inputs, layer->router, num_tokens, hidden, stride, of_router, STORE,
                                space->scores, score_stride(layer));
    router.adapters = part->adapters;
    router.adapters.added = (added_rows){space->inputs.additions, space->inputs.downs, space->inputs.most_rank};
    run_product(self, &router, NULL);
    team_phase(self, choose_task, &now, num_tokens);
    team_phase(self, sort_task, &now, 1);
    run_grouped(self, &products->gate_up, &products->down);
    if (!in_products(layer)) team_phase(self, activate_task, &now, num_tokens * per_token(layer));
    if (part->meet != NULL) part->meet(self, part->context, num_tokens);
    run_grouped(self, &products->down, NULL);
    team_phase(self, layer->norms.router == NULL ? add_task : add_normalised_task, &now, num_tokens);
}

/* ---- memory ---- */

expert_sizes larger_sizes(expert_sizes sizes, const expert_layer *layer) {
    return (expert_sizes){larger_of(sizes.hidden, layer->router->inputs),
                          larger_of(sizes.experts, experts_of(layer)),
                          larger_of(sizes.per_token, per_token(layer)),
                          larger_of(sizes.inner, widest_inner(layer)),
                          sizes.layers,
                          sizes.activates || !in_products(layer),
                          sizes.shares};
}

void free_expert_space(expert_space *space) {
    free_products(&space->inputs);
    free(space->scores);
    free(space->chosen);
    free(space->weights);
    free(space->of_inputs);
    free(space->places);
    free(space->tokens);
    free(space->gate_up);
    free(space->activations);
    free(space->outputs);
    free(space->groups);
    free(space->products);
    *space = (expert_space){0};
}

static int reserve_tokens(expert_space *space, const expert_sizes *sizes, int64_t num_tokens) {
    if (num_tokens <= space->num_tokens) return 1;
    free_expert_space(space);
    const int64_t num_pairs = num_tokens * sizes->per_token, hidden = (sizes->hidden + PANEL - 1) / PANEL * PANEL;
    /* Every expert may have one tile that is not full. */
    const int64_t most_tiles = num_pairs / INPUT_ROWS + sizes->experts;
    const int64_t num_rows = INPUT_ROWS * (num_pairs < most_tiles ? num_pairs : most_tiles);
    const int has_inputs = reserve_products(&space->inputs, num_rows, larger_of(sizes->hidden, sizes->inner));
    space->scores = stream_alloc(num_tokens * padded_outputs(sizes->experts) * 4);
    space->chosen = stream_alloc(num_pairs * 4);
    space->weights = stream_alloc(num_pairs * 4);
    space->of_inputs = stream_alloc(num_pairs * 4);
    space->places = stream_alloc(num_pairs * 4);
    space->tokens = stream_alloc(num_pairs * 4);
    const int64_t inner_bytes = larger_of(num_pairs * sizes->inner * 4, packed_bytes(num_rows, sizes->inner));
    space->activations = stream_alloc(sizes->shares ? 0 : inner_bytes);
    space->gate_up = stream_alloc(sizes->activates ? num_pairs * 2 * sizes->inner * 4 : 0);
    space->outputs = stream_alloc(num_pairs * hidden * 4);
    space->groups = stream_alloc(sizes->layers * 2 * sizes->experts * (int64_t)sizeof *space->groups);
    space->products = stream_alloc(sizes->layers * (int64_t)sizeof *space->products);
    if (!has_inputs || !space->scores || !space->chosen || !space->weights || !space->of_inputs || !space->places ||
        !space->tokens || !space->gate_up || !space->activations || !space->outputs || !space->groups ||
        !space->products) {
        free_expert_space(space);
        return 0;
    }
    for (int64_t i = 0; i < sizes->layers; i++) space->products[i].groups = space->groups + 2 * sizes->experts * i;
    space->num_tokens = num_tokens;
    return 1;
}

int reserve_expert_space(expert_space *space, const expert_sizes *sizes, int64_t num_tokens, int64_t most_rank) {
    return reserve_tokens(space, sizes, num_tokens) &&
           (most_rank == 0 || reserve_additions(&space->inputs, space->num_tokens * sizes->per_token, most_rank));
}

/* ---- one layer alone ---- */

static void run_alone(void *work, member *self) {
    const expert_pass *now = work;
    run_experts(self, now->space, now->layer, 0, now->hidden, now->stride, now->num_tokens, now->norm, now->part);
}

int headway_experts_run(const expert_layer *layer, team *with, float *hidden, int64_t stride, int64_t num_tokens,
                        const float *norm_weight, float norm_eps) {
    expert_space space = {0};
    const expert_sizes sizes = larger_sizes((expert_sizes){.layers = 1}, layer);
    if (!reserve_expert_space(&space, &sizes, num_tokens, 0)) return 0;
    const expert_part whole = {0};
    expert_pass alone = {layer, &space, NULL, hidden, stride, num_tokens, team_size(with), {norm_weight, norm_eps},
                         &whole};
    int done = team_run(with, run_alone, &alone, EXPERT_PHASES);
    free_expert_space(&space);
    return done;
}
