/* Waiting for other processes of this host, at counters in memory that they share.
 *
 * Owns: arriving, and waiting for arrivals.
 * Must not know: what is shared, or why.
 *
 * Whoever waits spins for a while, then lets other threads run, then sleeps: all of it without the operating system's
 * help, so that nothing is left behind when a process dies. Who ends the others then is not decided here.
 */
#ifndef HEADWAY_MEETING_H
#define HEADWAY_MEETING_H

#include <stdint.h>

/* What ranks meet for: the start of a step, or columns that are complete from then on. */
enum meeting {
    MEET_START,
    MEET_HIDDEN,
    MEET_ATTENDED,
    MEET_MOVED,
    MEET_ACTIVATIONS,
    MEET_LOGITS,
    MEET_PAIRS,
    MEET_SHARED_EXPERT
};

typedef void (*meet_others)(void *context, int64_t about, int64_t num_rows);

/* A counter that one process writes, on a cache line of its own. */
typedef struct {
    _Alignas(64) _Atomic int64_t count;
    _Atomic int64_t num_rows;
} post;

/* Rank `rank` of `size` ranks with a post each. `differs` becomes 1 when a rank begins a step of other rows. */
typedef struct {
    post *posts;
    int64_t rank;
    int64_t size;
    int64_t differs;
    int64_t num_meetings;
    int64_t waited_ns;
} meeting_place;

/* A `meet_others`: arrive, and wait for all others. What they wrote before is visible afterwards. */
__attribute__((visibility("default"))) void headway_meet(void *place, int64_t about, int64_t num_rows);

/* Let a count be seen, and everything written before it. */
__attribute__((visibility("default"))) void headway_post(post *at, int64_t count);

/* Wait until a count is reached. */
__attribute__((visibility("default"))) void headway_await(post *at, int64_t count);

#endif
