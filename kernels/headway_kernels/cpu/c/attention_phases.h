/* Attention as phases of a step: keys and values are stored, then tokens attend.
 *
 * Owns: how a step is cut into tiles and tasks, and what happens to queries and keys before.
 * Must not know: products, or what follows attention.
 */
#ifndef HEADWAY_ATTENTION_PHASES_H
#define HEADWAY_ATTENTION_PHASES_H

#include "step_pass.h"

/* The tokens of each row as tiles, and each sampled token as one of its own. */
void cut_into_tiles(decoder *of, const decoder_step *step);

/* All phases, for queries, keys and values that lie side by side in the workspace. */
void run_attention_phases(member *self, pass *now);

#endif
