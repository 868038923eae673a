#define _GNU_SOURCE
#include "team.h"
#include "pause.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SPINS_BEFORE_YIELD 4096

/* On cache lines of their own: members write them all the time. */
typedef struct {
    _Alignas(64) atomic_int_least64_t next;
    atomic_int_least64_t done;
} phase_state;

/* The arguments of a worker. */
typedef struct {
    team *of;
    int64_t number;
} seat;

struct team {
    int64_t num_threads;
    pthread_t *workers;
    seat *seats;
    int64_t num_workers;

    phase_state *phases;
    int64_t num_phases;

    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_cond_t left;
    /* Under the lock. A worker joins a job only while `body` is set. */
    uint64_t job;
    job_body body;
    void *work;
    int64_t active;
    int closing;
};

static void *worker(void *argument) {
    const seat *mine = argument;
    team *self = mine->of;
    uint64_t seen = 0;
    pthread_mutex_lock(&self->lock);
    for (;;) {
        while (!self->closing && (self->job == seen || self->body == NULL)) pthread_cond_wait(&self->wake, &self->lock);
        if (self->closing) break;
        seen = self->job;
        job_body body = self->body;
        void *work = self->work;
        self->active++;
        pthread_mutex_unlock(&self->lock);
        member me = {self, mine->number, 0};
        body(work, &me);
        pthread_mutex_lock(&self->lock);
        if (--self->active == 0) pthread_cond_signal(&self->left);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

team *team_new(int64_t num_threads) {
    team *made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->num_threads = num_threads;
    made->workers = calloc((size_t)num_threads, sizeof *made->workers);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->wake, NULL);
    pthread_cond_init(&made->left, NULL);
    made->seats = calloc((size_t)num_threads, sizeof *made->seats);
    const int has_room = made->workers != NULL && made->seats != NULL;
    while (has_room && made->num_workers < num_threads - 1) {
        seat *next = &made->seats[made->num_workers];
        *next = (seat){made, made->num_workers + 1};
        if (pthread_create(&made->workers[made->num_workers], NULL, worker, next) != 0) break;
        made->num_workers++;
    }
    if (!has_room || made->num_workers < num_threads - 1) {
        team_free(made);
        return NULL;
    }
    return made;
}

void team_free(team *the_team) {
    if (the_team == NULL) return;
    pthread_mutex_lock(&the_team->lock);
    the_team->closing = 1;
    pthread_cond_broadcast(&the_team->wake);
    pthread_mutex_unlock(&the_team->lock);
    for (int64_t i = 0; i < the_team->num_workers; i++) pthread_join(the_team->workers[i], NULL);
    pthread_cond_destroy(&the_team->left);
    pthread_cond_destroy(&the_team->wake);
    pthread_mutex_destroy(&the_team->lock);
    free(the_team->phases);
    free(the_team->workers);
    free(the_team->seats);
    free(the_team);
}

int64_t team_size(const team *the_team) { return the_team->num_threads; }

static int reserve_phases(team *the_team, int64_t num_phases) {
    if (num_phases > the_team->num_phases) {
        phase_state *more = aligned_alloc(64, (size_t)num_phases * sizeof *more);
        if (more == NULL) return 0;
        free(the_team->phases);
        the_team->phases = more;
        the_team->num_phases = num_phases;
    }
    for (int64_t i = 0; i < num_phases; i++) {
        atomic_init(&the_team->phases[i].next, 0);
        atomic_init(&the_team->phases[i].done, 0);
    }
    return 1;
}

int team_run(team *the_team, job_body body, void *work, int64_t num_phases) {
    if (!reserve_phases(the_team, num_phases)) return 0;
    if (the_team->num_workers > 0) {
        pthread_mutex_lock(&the_team->lock);
        the_team->job++;
        the_team->body = body;
        the_team->work = work;
        pthread_cond_broadcast(&the_team->wake);
        pthread_mutex_unlock(&the_team->lock);
    }
    member me = {the_team, 0, 0};
    body(work, &me);
    if (the_team->num_workers > 0) {
        /* The work is done; a worker that still sleeps need not wake. The phases may be reused when all have left. */
        pthread_mutex_lock(&the_team->lock);
        the_team->body = NULL;
        while (the_team->active > 0) pthread_cond_wait(&the_team->left, &the_team->lock);
        pthread_mutex_unlock(&the_team->lock);
    }
    return 1;
}

void team_phase(member *self, task_body body, void *work, int64_t num_tasks) {
    team_take(self, body, work, num_tasks);
    team_wait(self, num_tasks);
}

void team_take(member *self, task_body body, void *work, int64_t num_tasks) {
    assert(self->phase < self->of->num_phases);
    phase_state *phase = &self->of->phases[self->phase];
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&phase->next, 1, memory_order_relaxed);
        if (task >= num_tasks) break;
        body(work, task);
        atomic_fetch_add_explicit(&phase->done, 1, memory_order_release);
    }
}

void team_wait(member *self, int64_t num_tasks) {
    phase_state *phase = &self->of->phases[self->phase++];
    for (int64_t spins = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < num_tasks; spins++) {
        if (spins < SPINS_BEFORE_YIELD)
            pause_briefly();
        else
            sched_yield();
    }
}
