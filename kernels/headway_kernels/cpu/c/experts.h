/* Feed-forward by a few of many experts (Shazeer et al. 2017, arXiv 1701.06538).
 *
 * Owns: choosing each token's experts, sorting a step's tokens by expert, adding what the experts give.
 * Must not know: layers, attention, or where weights come from.
 *
 * A step multiplies each expert's weights once, with all tokens that chose it. What the experts of a token give is
 * added in the order of the experts, the shared one last. So a token's result has the same bits in any company.
 */
#ifndef HEADWAY_EXPERTS_H
#define HEADWAY_EXPERTS_H

#include <stdint.h>

#include "grouped.h"
#include "product_phases.h"
#include "rows.h"

#define MOST_EXPERTS 1024

enum scoring { SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_NEAR };

/* How a token's scores choose. Each expert's score is a softmax over all, or a sigmoid. `correction` ([num_experts] or
 * NULL) is added to choose, but not to weigh: to scores, or if it `corrects_outputs` to the router's. With several
 * groups of equal size, a group's score is the sum of its `scores_per_group` largest, and only the best
 * `num_open_groups` take part (DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437). A chosen expert's weight is its
 * score, of all chosen ones if `is_normalised`, times `scaling`. It multiplies what the expert gives, or with
 * `weighs_inputs` what it gets (Llama 4). SCORE_NEAR: the best expert's score is its share of a softmax over those
 * whose outputs are near its own, by `tolerance` of the larger one; the next best's the same of those that are left,
 * and so on (Liu et al. 2024, arXiv 2409.12136). */
typedef struct {
    int64_t num_experts;
    int64_t num_chosen;
    int64_t scoring;
    int64_t num_groups;
    int64_t num_open_groups;
    int64_t scores_per_group;
    int64_t is_normalised;
    int64_t weighs_inputs;
    float scaling;
    float tolerance;
    int64_t corrects_outputs;
    const float *correction;
} routing;

/* Where router, chosen experts and shared one normalise what they read by themselves, and what they give: the weights
 * of root mean squares, [hidden]. `factors` multiply the weight of each expert. Else, all are NULL. Then `added` is
 * asked for. */
typedef struct {
    const float *router;
    const float *experts;
    const float *experts_post;
    const float *shared;
    const float *shared_post;
    const float *factors;
} expert_norms;

/* The weights of one layer. With `has_shared`, there is one more expert, which every token goes through; with
 * `has_gate`, its weight is the sigmoid of one more output of the router, else 1. `gate_up` and `down`: one of each
 * expert, the shared one last; the inputs of `down` are a multiple of PANEL. With an activation other than SILU, or
 * without a gate, `gate_up` is not packed with `gated`. A rank of several has some outputs of each
 * product but the router's; its activations begin at `inner_start`, the shared expert's at `shared_start`. */
typedef struct {
    routing choose;
    int64_t has_shared;
    int64_t has_gate;
    int64_t activation;
    int64_t is_gated;
    int64_t inner_start;
    int64_t shared_start;
    const linear *router;
    const linear *const *gate_up;
    const linear *const *down;
    expert_norms norms;
    const float *limits; /* [2], with LIMITED_SILU: of chosen experts, and of the shared one */
} expert_layer;

/* What a rank of several shares with the others: activations of pairs, and those of the shared expert by token, both in
 * rows of the widest expert. It adds to the hidden state from `hidden_start` on. `meet` waits until the activations of
 * `num_tokens` tokens are complete. Of a rank that is alone, all is 0. `adapters` are those of the router, in whatever
 * room; behind an adapter's addition to the router are two to each expert: to `gate_up`, to `down`. With `added`, rows
 * as those of the hidden state get what would be added to it. */
typedef struct {
    float *pairs;
    float *of_shared;
    int64_t hidden_start;
    void (*meet)(member *self, void *context, int64_t num_tokens);
    void *context;
    row_adapters adapters;
    float *added;
} expert_part;

/* The products of one layer in a step. A member may be layers behind the others, without a task: it still reads how
 * many tasks its layer had, so each layer has its own, written once in a step. */
typedef struct {
    product_group *groups;
    grouped_product gate_up;
    grouped_product down;
} expert_products;

/* Working memory for a number of tokens. A token with one of its experts is a pair; pairs are sorted by expert. */
typedef struct {
    int64_t num_tokens;
    product_space inputs; /* of pairs */
    float *scores;        /* [tokens, panels of the router] */
    int32_t *chosen;      /* [tokens, experts of each]: ascending */
    float *weights;       /* the same */
    float *of_inputs;     /* [pairs]: weights of what experts get */
    int32_t *places;      /* the same: which pair */
    int32_t *tokens;      /* [pairs] */
    float *gate_up;       /* of pairs, in rows: not if products activate */
    float *activations;   /* of pairs, in rows or packed: not of a rank of several */
    float *outputs;       /* of pairs, in rows */
    product_group *groups;
    expert_products *products; /* [layers] */
} expert_space;

/* What the layers of a model need at most. */
typedef struct {
    int64_t hidden;
    int64_t experts; /* the shared one included */
    int64_t per_token;
    int64_t inner;
    int64_t layers;
    int64_t activates; /* by rows */
    int64_t shares;    /* activations, with other ranks */
} expert_sizes;

/* The larger of `sizes` and what a layer needs; `layers` stays. */
expert_sizes larger_sizes(expert_sizes sizes, const expert_layer *layer);

/* `most_rank`: of the additions to routers and experts, 0: a step has none. 0 when memory is short. */
int reserve_expert_space(expert_space *space, const expert_sizes *sizes, int64_t num_tokens, int64_t most_rank);
void free_expert_space(expert_space *space);

#define EXPERT_PHASES 10

/* hidden += what the experts make of its normalised rows, whole panels `stride` apart, or `added` = that. All members
 * call this for layer `number`, in at most EXPERT_PHASES phases beside those of `meet`. */
void run_experts(member *self, expert_space *space, const expert_layer *layer, int64_t number, float *hidden,
                 int64_t stride, int64_t num_tokens, rms_norm norm, const expert_part *part);

/* One layer alone, for tests and measurements. 0 when memory is short. */
__attribute__((visibility("default"))) int headway_experts_run(const expert_layer *layer, team *with, float *hidden,
                                                               int64_t stride, int64_t num_tokens,
                                                               const float *norm_weight, float norm_eps);

#endif
