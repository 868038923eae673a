/* A team of threads that work through phases.
 *
 * Owns: the threads, waking them, and handing out tasks.
 * Must not know: what a task does.
 *
 * A job is a function that every member runs; in it, members meet in phases. They take the tasks of a phase one by one.
 * A phase ends when all its tasks are done, even if a member has not arrived: a member that the operating system stops
 * delays the others only while it holds a task.
 */
#ifndef HEADWAY_TEAM_H
#define HEADWAY_TEAM_H

#include <stdint.h>

typedef struct team team;

/* The state of a member in a job: its number (0 is the caller) and its phase. */
typedef struct {
    team *of;
    int64_t number;
    int64_t phase;
} member;

typedef void (*task_body)(void *work, int64_t task);
typedef void (*job_body)(void *work, member *self);

/* num_threads counts the caller of team_run. NULL if memory or threads are short. */
team *team_new(int64_t num_threads);
void team_free(team *the_team);
int64_t team_size(const team *the_team);

/* Run `body` on all members, the caller included, in at most `num_phases` phases; returns when it is done.
 * 0 when memory is short, else 1. One job at a time. */
int team_run(team *the_team, job_body body, void *work, int64_t num_phases);

/* Do the next phase: tasks 0 to num_tasks - 1, each once, by any member. All members must ask for the same phases. */
void team_phase(member *self, task_body body, void *work, int64_t num_tasks);

/* The two halves of a phase: take tasks while there are any; wait for the tasks of others. */
void team_take(member *self, task_body body, void *work, int64_t num_tasks);
void team_wait(member *self, int64_t num_tasks);

#endif
