/* The phases of a layer with a state, between its two products.
 *
 * Owns: their tasks. Must not know: how a state is computed, the order of a step's phases.
 */
#ifndef HEADWAY_RECURRENCE_PHASES_H
#define HEADWAY_RECURRENCE_PHASES_H

#include "step_pass.h"
#include "team.h"

/* Where the first token's inputs and results are, in rows of the workspace's `qkv` and of `attended`. */
float *inputs_of_state(const pass *now);
float *results_of_state(const pass *now);

/* The convolution of all tokens; then, if their values give keys and queries, the norms of these; then the rest, from
 * there to results. */
void run_convolution(member *self, pass *now);
void normalise_selection(member *self, pass *now);
void run_heads(member *self, pass *now);

#endif
