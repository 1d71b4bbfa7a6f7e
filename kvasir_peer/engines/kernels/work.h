/* What operators compute, apart from who calls them and on which threads. */
#ifndef KVASIR_WORK_H
#define KVASIR_WORK_H

#include <stdbool.h>

#include "panels.h"

/* Runs `part(data, i)` for all i < count, maybe on several threads; false where that could not be begun. */
struct threads {
    bool (*run)(const void *self, void (*part)(void *, size_t), size_t count, void *data);
    const void *self;
};

/* One share is done here and now. */
INLINE bool in_shares(const struct threads *threads, void (*part)(void *, size_t), size_t shares, void *data) {
    if (shares == 1) {
        part(data, 0);
        return true;
    }
    return threads->run(threads->self, part, shares, data);
}

/* A matrix in panels. */
struct matrix {
    const struct kind *kind;
    const uint8_t *panels;
    size_t rows, columns;
};

/* y[n, rows] = x[n, columns] times the matrix, plus a bias [rows] if there is one. With `exact` x is not
 * rounded to int8. False without memory. */
bool linear(const struct threads *threads, const struct matrix *w, const float *bias, const float *x, size_t n,
            bool exact, float *y);

/* y[n, columns] = rows `tokens` [n] of the matrix, times a scale. False without memory. */
bool look_up(const struct threads *threads, const struct matrix *w, float scale, const int32_t *tokens, size_t n,
             float *y);

enum activation { SILU, GELU_TANH, SWIGLU_OAI };

/* Feed-forward parts of a layer: experts, or one that takes every row. Matrices of all experts follow each other,
 * each a whole number of panels. Biases [experts, rows] may be NULL. */
struct experts {
    struct matrix gate, up, down; /* of one expert; panels of the first */
    const float *gate_bias, *up_bias, *down_bias;
    size_t count;
    enum activation activation;
    bool exact; /* nothing is rounded to int8 */
};

/* y[n, down.rows] = the weighted sum over each row's experts. `places` [n, k]: which expert, or one that is out of
 * range for none; `mix` [n, k]: its weight. NULL for both takes the first expert for every row. `done` is told how many
 * experts were computed, and how many rows of all of them; it may be NULL. False without memory. */
bool feed_forward(const struct threads *threads, const struct experts *e, const float *x, const int32_t *places,
                  const float *mix, size_t n, size_t k, float *y, int32_t done[2]);

#endif
