#define _GNU_SOURCE
#include "linear.h"

#include <stdatomic.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define HUGE_PAGE (2 << 20)
#define MOST_FETCHED (128 << 10)

static void *huge_alloc(int64_t bytes, int is_zeroed) {
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    size_t rounded = ((size_t)bytes + alignment - 1) / alignment * alignment;
    void *made = aligned_alloc(alignment, rounded > 0 ? rounded : alignment);
    if (made == NULL) return NULL;
#if defined(__linux__)
    if (alignment == HUGE_PAGE) madvise(made, rounded, MADV_HUGEPAGE);
#endif
    if (is_zeroed) memset(made, 0, rounded);
    return made;
}

void *stream_alloc(int64_t bytes) { return huge_alloc(bytes, 1); }

linear *linear_empty(const float *bias, int64_t outputs, int64_t inputs, int64_t form, int64_t gated) {
    linear *made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->form = form;
    made->outputs = outputs;
    made->inputs = inputs;
    made->is_gated = gated;
    made->num_panels = gated ? (outputs / 2 + LANES - 1) / LANES : (outputs + PANEL - 1) / PANEL;
    made->bias = stream_alloc(made->num_panels * PANEL * 4);
    made->scales = stream_alloc(made->num_panels * PANEL * 4);
    if (made->bias == NULL || made->scales == NULL) {
        linear_free(made);
        return NULL;
    }
    for (int64_t place = 0; bias != NULL && place < made->num_panels * PANEL; place++) {
        const int64_t output = output_at(made, place / PANEL, place % PANEL);
        if (output >= 0) made->bias[place] = bias[output];
    }
    return made;
}

linear *linear_with_panels(linear *of, int64_t panel_bytes, int is_zeroed) {
    if (of == NULL) return NULL;
    of->panel_bytes = panel_bytes;
    of->panels = huge_alloc(of->num_panels * panel_bytes, is_zeroed);
    if (of->panels != NULL) return of;
    linear_free(of);
    return NULL;
}

/* The beginning of memory that several products share; panels follow. */
struct shared_memory {
    _Alignas(LINE) atomic_int_least64_t holders;
};

static void free_panels(linear *of) {
    if (of->memory == NULL)
        free(of->panels);
    else if (atomic_fetch_sub(&of->memory->holders, 1) == 1)
        free(of->memory);
}

void linears_join(linear *const *which, int64_t count) {
    int64_t bytes = sizeof(shared_memory), holders = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = which[i]->num_panels * which[i]->panel_bytes;
        if (own < HUGE_PAGE && which[i]->memory == NULL) bytes += own, holders++;
    }
    shared_memory *memory = holders > 1 ? stream_alloc(bytes) : NULL;
    if (memory == NULL) return;
    atomic_init(&memory->holders, holders);
    char *to = (char *)(memory + 1);
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = which[i]->num_panels * which[i]->panel_bytes;
        if (own >= HUGE_PAGE || which[i]->memory != NULL) continue;
        memcpy(to, which[i]->panels, (size_t)own);
        free(which[i]->panels);
        which[i]->panels = to;
        which[i]->memory = memory;
        to += own;
    }
}

void linear_free(linear *the_linear) {
    if (the_linear == NULL) return;
    free_panels(the_linear);
    free(the_linear->bias);
    free(the_linear->scales);
    free(the_linear->group_of);
    free(the_linear);
}

void fetch_panel(const linear *from, int64_t panel) {
    const char *start = panel_at(from, panel);
    const int64_t bytes = from->panel_bytes < MOST_FETCHED ? from->panel_bytes : MOST_FETCHED;
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(start + at, 0, 2);
}
