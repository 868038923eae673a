/* Latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1) on rows that stay compressed.
 *
 * Owns: the products of single heads, and what is stored of a token.
 * Must not know: products of all heads, or how tokens attend.
 *
 * A key of a head is a product with the token's compressed row. So its score is that of the query times the same
 * product, with the row itself; and what values add up to is the product of what rows add up to. One row of a token
 * then serves all heads, as key and as value: its compressed part, normalised, and the channels that keys share.
 */
#ifndef HEADWAY_LATENT_PHASES_H
#define HEADWAY_LATENT_PHASES_H

#include "step_pass.h"

/* From the queries of `space.queries` to those that compressed rows are multiplied with, in `space.qkv`. */
void absorb_keys(member *self, const pass *now);

/* The shared channels of a token's queries; then its row is stored. */
void place_latent_token(const pass *now, const attention_tile *tile, int64_t which);

/* From the sums of rows, where queries were, to what the heads give. */
void expand_values(member *self, const pass *now);

#endif
