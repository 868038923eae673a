/* The phases of a layer with a state, between its two products.
 *
 * Owns: their tasks. Must not know: how a state is computed, the order of a step's phases.
 */
#ifndef HEADWAY_RECURRENCE_PHASES_H
#define HEADWAY_RECURRENCE_PHASES_H

#include "step_pass.h"
#include "team.h"

/* The inputs of all tokens are in the workspace's `qkv`; the results go to `attended`. */
void run_recurrence_phases(member *self, pass *now);

#endif
