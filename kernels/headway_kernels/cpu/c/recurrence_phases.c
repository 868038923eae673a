#include "recurrence_phases.h"

#define CHANNELS_OF_TASK 256

/* Beside attention, the columns of a state follow those of its heads. */
float *inputs_of_state(const pass *now) {
    return now->of->space.qkv + (attends(now->layer) ? qkv_columns(&now->of->shape, now->layer, now->attention) : 0);
}

float *results_of_state(const pass *now) {
    return now->of->rows.attended +
           (attends(now->layer) ? attended_columns(&now->of->shape, now->layer, now->attention) : 0);
}

static token_run tokens_of(const pass *now, int64_t row) {
    const decoder_step *step = now->step;
    const int64_t stride = now->of->strides.qkv;
    return (token_run){inputs_of_state(now) + step->row_starts[row] * stride, stride, step->row_tokens[row],
                       step->row_numbers[row], step->row_positions[row] == 0};
}

static int64_t parts_of(const recurrence *of) { return (channels_of(of) + CHANNELS_OF_TASK - 1) / CHANNELS_OF_TASK; }

static void convolve_task(void *work, int64_t task) {
    const pass *now = work;
    const recurrence *of = now->layer->recurrence;
    const int64_t first = task % parts_of(of) * CHANNELS_OF_TASK, rest = channels_of(of) - first;
    convolve(of, tokens_of(now, task / parts_of(of)), first, rest < CHANNELS_OF_TASK ? rest : CHANNELS_OF_TASK);
}

static float *results_of(const pass *now, int64_t token) {
    return results_of_state(now) + token * now->of->strides.attended;
}

static void head_task(void *work, int64_t task) {
    const pass *now = work;
    const recurrence *of = now->layer->recurrence;
    const int64_t row = task / of->num_heads, head = task % of->num_heads;
    float *out = results_of(now, now->step->row_starts[row]) + head * of->value_dim;
    run_head(of, tokens_of(now, row), head, out, now->of->strides.attended);
}

static void gate_task(void *work, int64_t token) {
    const pass *now = work;
    const decoder *of = now->of;
    gate_token(now->layer->recurrence, inputs_of_state(now) + token * of->strides.qkv, results_of(now, token));
}

static void selection_task(void *work, int64_t token) {
    const pass *now = work;
    normalise_selected(now->layer->recurrence, inputs_of_state(now) + token * now->of->strides.qkv);
}

static void scan_task(void *work, int64_t task) {
    const pass *now = work;
    const recurrence *of = now->layer->recurrence;
    const int64_t row = task / parts_of(of), first = task % parts_of(of) * CHANNELS_OF_TASK;
    const int64_t rest = channels_of(of) - first;
    scan_channels(of, tokens_of(now, row), first, rest < CHANNELS_OF_TASK ? rest : CHANNELS_OF_TASK,
                  results_of(now, now->step->row_starts[row]), now->of->strides.attended);
}

static void block_task(void *work, int64_t task) {
    const pass *now = work;
    const recurrence *of = now->layer->recurrence;
    const int64_t row = task / of->num_blocks;
    run_block(of, tokens_of(now, row), task % of->num_blocks, results_of(now, now->step->row_starts[row]),
              now->of->strides.attended);
}

void run_convolution(member *self, pass *now) {
    team_phase(self, convolve_task, now, now->step->num_rows * parts_of(now->layer->recurrence));
}

void normalise_selection(member *self, pass *now) { team_phase(self, selection_task, now, now->step->num_tokens); }

void run_heads(member *self, pass *now) {
    const recurrence *of = now->layer->recurrence;
    if (of->kind == SCANNED)
        team_phase(self, scan_task, now, now->step->num_rows * parts_of(of));
    else if (of->kind == UNIT)
        team_phase(self, block_task, now, now->step->num_rows * of->num_blocks);
    else if (of->kind != GATED_CONVOLUTION)
        team_phase(self, head_task, now, now->step->num_rows * of->num_heads);
    team_phase(self, gate_task, now, now->step->num_tokens);
}
