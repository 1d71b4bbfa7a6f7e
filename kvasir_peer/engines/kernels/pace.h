/* Whether waking other threads pays for a small piece of work, found by trying both now and then.
 *
 * Between two runs threads sleep. To wake one takes from 5 us to 60 us, and a core may stream weights at nearly the
 * memory's rate or at a third of it: both differ from machine to machine, and with what else runs there.
 */
#ifndef KVASIR_PACE_H
#define KVASIR_PACE_H

#include <stdbool.h>
#include <stddef.h>

/* More bytes of weights than these are for all threads in any case. */
#define ALONE_BYTES ((size_t)8 << 20)
/* Calls by turns at first, and how often afterwards the other way is tried. */
#define FIRST_CALLS 32
#define TRY_EVERY 32

struct pace {
    double seconds[2]; /* for a byte: together, alone */
    unsigned calls;
};

/* Whether the next piece of work is for this thread alone. */
static inline bool go_alone(struct pace *p, size_t bytes) {
    if (bytes > ALONE_BYTES)
        return false;
    const unsigned call = p->calls++;
    if (call < FIRST_CALLS)
        return call & 1;
    return (p->seconds[1] < p->seconds[0]) != (call % TRY_EVERY == 0);
}

/* Take note of how long it took. At first the shortest time counts, since the first calls touch memory that nobody has
 * touched; later a mean, which one call that was interrupted moves by a fraction of it only. */
static inline void note_pace(struct pace *p, bool alone, size_t bytes, double seconds) {
    if (bytes == 0 || bytes > ALONE_BYTES)
        return;
    double *mean = &p->seconds[alone], found = seconds / (double)bytes;
    if (*mean == 0.0 || p->calls <= FIRST_CALLS) {
        if (*mean == 0.0 || found < *mean)
            *mean = found;
    } else
        *mean += (found > 1.5 * *mean ? 0.5 * *mean : found - *mean) / 8;
}

#endif
