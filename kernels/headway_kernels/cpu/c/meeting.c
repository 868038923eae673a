#define _GNU_SOURCE
#include "meeting.h"
#include "pause.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#define SPINS 2000
#define YIELDS 200
#define SLEEP_NS 50000

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void headway_post(post *at, int64_t count) { atomic_store_explicit(&at->count, count, memory_order_release); }

void headway_await(post *at, int64_t count) {
    const struct timespec nap = {0, SLEEP_NS};
    for (int64_t tries = 0; atomic_load_explicit(&at->count, memory_order_acquire) < count; tries++) {
        if (tries < SPINS)
            pause_briefly();
        else if (tries < SPINS + YIELDS)
            sched_yield();
        else
            nanosleep(&nap, NULL);
    }
}

void headway_meet(void *context, int64_t about, int64_t num_rows) {
    meeting_place *place = context;
    post *own = &place->posts[place->rank];
    int64_t count = atomic_load_explicit(&own->count, memory_order_relaxed) + 1;
    atomic_store_explicit(&own->num_rows, num_rows, memory_order_relaxed);
    int64_t since = now_ns();
    headway_post(own, count);
    for (int64_t i = 0; i < place->size; i++) {
        if (i != place->rank) headway_await(&place->posts[i], count);
    }
    place->num_meetings++;
    place->waited_ns += now_ns() - since;
    if (about != MEET_START) return;
    /* Nobody begins another step before this rank is at the next meeting. */
    for (int64_t i = 0; i < place->size; i++) {
        if (atomic_load_explicit(&place->posts[i].num_rows, memory_order_relaxed) != num_rows) place->differs = 1;
    }
}
