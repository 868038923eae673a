/* Layers with a state instead of keys and values: what happens to the rows between their two products.
 *
 * Owns: the kinds of states, and these functions of one row.
 * Must not know: products, layers, threads.
 *
 * A token's inputs are, side by side: channels, which a causal convolution runs over: queries, keys, values; then gates
 * of all values; then numbers of heads. GATED_CONVOLUTION (LFM2, Liquid AI 2025, arXiv 2511.23404) has values alone,
 * and gates before and behind the convolution. DELTA (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464) and SELECTIVE
 * (Mamba 2, Dao & Gu 2024, arXiv 2405.21060) keep a matrix for each head; see `recurrence.py` of the executor's models.
 * DELTA may have a step for each channel of a key, and so a decay (Kimi Delta Attention, Kimi Team 2025, arXiv
 * 2510.26692). SCANNED (Mamba, Gu & Dao 2023, arXiv 2312.00752) has values of one head, and gates; its values give,
 * behind the convolution, `step_rank` numbers, a key and a query, and the numbers a step for each channel. Where the
 * parts of a token's inputs are, the struct says: what further products give lies behind the rest, up to `columns`.
 * UNIT (RG-LRU, De et al. 2024, arXiv 2402.19427) has a number for each channel; two matrices of each of `num_blocks`
 * blocks of channels say how much of a value is taken, and how much stays.
 *
 * Tokens go one after the other, so a result has the same bits however they are cut into steps.
 */
#ifndef HEADWAY_RECURRENCE_H
#define HEADWAY_RECURRENCE_H

#include <stdint.h>

enum recurrence_kind { GATED_CONVOLUTION = 0, DELTA = 1, SELECTIVE = 2, SCANNED = 3, UNIT = 4 };

enum state_gate { GATE_SILU = 0, GATE_SIGMOID = 1, GATE_GELU_TANH = 2 };

#define MOST_TAPS 8

/* `taps_of` [taps, channels], oldest first; `taps_bias` [channels] or NULL. Of each head: `decay`, `step_bias`, and
 * `skip`, or NULL. Without `step_bias` there are no steps, and `decay` is the logarithm of what stays. Of SCANNED:
 * `decay` [key_dim, channels], the others [channels], `selection_norm` [step_rank + 2 key_dim], or NULL. Of UNIT:
 * `decay` [channels], `blocks` [2, num_blocks, width, width], inputs before outputs, `block_bias` [2, channels]. `norm`
 * [inner], over `norm_dim` each, or NULL. The states of rows: `past` [rows, taps - 1, channels] inputs of the
 * convolution, and `heads` [rows, num_heads, key_dim, value_dim]. */
typedef struct {
    int64_t kind;
    int64_t gate;
    int64_t taps;
    int64_t num_heads;
    int64_t num_key_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t norm_dim;
    int64_t keys_take_turns;   /* a key head serves every num_key_heads'th head, not heads that follow each other */
    int64_t gates_behind;      /* of SELECTIVE, whose gates else stand before the norm */
    int64_t doubles_strengths; /* of DELTA */
    int64_t decays_channels;   /* of DELTA: `step_bias` is [num_heads, key_dim] */
    int64_t step_rank;         /* numbers that a product makes steps of, or 0 */
    int64_t gate_rank;         /* the same of gates */
    int64_t num_blocks;        /* of UNIT */
    int64_t gates_at;
    int64_t strengths_at; /* of DELTA */
    int64_t selected_at;  /* of SCANNED */
    int64_t steps_at;
    int64_t columns;
    const float *selection_norm;
    const float *blocks;
    const float *block_bias;
    const float *taps_of;
    const float *taps_bias;
    const float *decay;
    const float *step_bias;
    const float *skip;
    const float *norm;
    float norm_eps;
    float decay_bound; /* no logarithm of a decay is beyond this one; 0: there is no bound */
    float *past;
    float *heads;
} recurrence;

/* Consecutive tokens of one row, `stride` floats apart; `number`: of its state. A row that `begins` has none yet. */
typedef struct {
    float *inputs;
    int64_t stride;
    int64_t count;
    int64_t number;
    int begins;
} token_run;

int64_t inner_of(const recurrence *of);
int64_t channels_of(const recurrence *of);

/* Replace some channels, from `first` on, by what the convolution gives. */
void convolve(const recurrence *of, token_run tokens, int64_t first, int64_t count);

/* One head, behind the convolution: `out` is its first value of the first token. */
void run_head(const recurrence *of, token_run tokens, int64_t head, float *out, int64_t out_stride);

/* Of SCANNED, behind the convolution: normalise what a token's values give. */
void normalise_selected(const recurrence *of, float *inputs);

/* Some channels of SCANNED, from `first` on, behind the product that gives steps; `out` is the first token's. */
void scan_channels(const recurrence *of, token_run tokens, int64_t first, int64_t count, float *out,
                   int64_t out_stride);

/* One block of UNIT. */
void run_block(const recurrence *of, token_run tokens, int64_t block, float *out, int64_t out_stride);

/* The gates and the norm of one token; `out` [inner] has what heads gave, if there are any. */
void gate_token(const recurrence *of, const float *inputs, float *out);

#endif
