/* Waiting for a moment without leaving the processor.
 *
 * Owns: the instruction for it.
 * Must not know: who waits, or for what.
 */
#ifndef HEADWAY_PAUSE_H
#define HEADWAY_PAUSE_H

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
