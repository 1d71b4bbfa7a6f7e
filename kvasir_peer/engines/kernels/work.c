#include "work.h"

#include <stdlib.h>

#include "exponential.h"

/* Weights that a thread takes at a time: much longer to read than the thread takes to be given them. */
#define SHARE_BYTES (48 << 10)
#define MOST_SHARES 64
/* Fewer activations than these are rounded before another thread would have been woken. */
#define ROUND_ALONE 32768
/* Rows of results of a panel that stay in a core's own cache. */
#define ROWS_AT_ONCE 64
/* Weights that are fetched before their turn. */
#define FETCH_BYTES 2048

static size_t panel_count(const struct matrix *w) { return (w->rows + PANEL_ROWS - 1) / PANEL_ROWS; }

static size_t bytes_of_panel(const struct matrix *w) { return panel_bytes(w->kind->bits, w->kind->scales, w->columns); }

static size_t shares_of(size_t units, size_t bytes_of_unit, size_t rows) {
    /* Where many rows share the weights it is arithmetic that takes the time. */
    size_t work = units * bytes_of_unit * (1 + rows / 4), shares = work / SHARE_BYTES;
    shares = shares > MOST_SHARES ? MOST_SHARES : shares;
    return shares > units ? units : shares ? shares : 1;
}

/* ------------------------------------------------------------------------------------------------ rounding */

/* Where activations stay floats, "rounding" only adds them up. */
static size_t bytes_for(bool exact, size_t n, size_t columns) {
    return exact ? summed_bytes(n, columns) : rounded_bytes(n, columns);
}

static struct activations placed_at(bool exact, void *memory, const float *x, size_t n, size_t columns) {
    return exact ? summed_at(memory, x, columns) : rounded_at(memory, n, columns);
}

struct rounding {
    const float *x;
    struct activations to;
    size_t rows, shares;
};

static void round_share(void *data, size_t share) {
    const struct rounding *r = data;
    for (size_t i = r->rows * share / r->shares; i < r->rows * (share + 1) / r->shares; i++)
        (r->to.floats ? sum_row : round_row)(r->x + i * r->to.columns, &r->to, i);
}

static bool round_rows(const struct threads *threads, const float *x, size_t n, struct activations to) {
    struct rounding r = {x, to, n, 1};
    if (n * to.columns > ROUND_ALONE)
        r.shares = n < 16 ? n : 16;
    return in_shares(threads, round_share, r.shares, &r);
}

/* ------------------------------------------------------------------------------------------------ one matrix */

struct product {
    const struct matrix *w;
    const float *bias;
    struct activations x;
    size_t n, panel_bytes, panels, shares;
    float *y;
};

static void product_share(void *data, size_t share) {
    const struct product *p = data;
    const size_t rows = p->w->rows;
    float out[ROWS_AT_ONCE * PANEL_ROWS];
    int32_t which[ROWS_AT_ONCE];
    for (size_t panel = p->panels * share / p->shares; panel < p->panels * (share + 1) / p->shares; panel++) {
        const size_t begin = panel * PANEL_ROWS, wide = rows - begin < PANEL_ROWS ? rows - begin : PANEL_ROWS;
        for (size_t first = 0; first < p->n; first += ROWS_AT_ONCE) {
            const size_t now = p->n - first < ROWS_AT_ONCE ? p->n - first : ROWS_AT_ONCE;
            for (size_t i = 0; i < now; i++)
                which[i] = (int32_t)(first + i);
            multiply(p->w->kind, p->w->panels + panel * p->panel_bytes, &p->x, which, now, out);
            for (size_t i = 0; i < now; i++) {
                float *y = p->y + (first + i) * rows + begin;
                for (size_t j = 0; j < wide; j++)
                    y[j] = out[i * PANEL_ROWS + j] + (p->bias ? p->bias[begin + j] : 0.0f);
            }
        }
    }
}

bool linear(const struct threads *threads, const struct matrix *w, const float *bias, const float *x, size_t n,
            bool exact, float *y) {
    if (n == 0)
        return true;
    void *memory = malloc(bytes_for(exact, n, w->columns));
    if (!memory)
        return false;
    const struct activations placed = placed_at(exact, memory, x, n, w->columns);
    struct product p = {w, bias, placed, n, bytes_of_panel(w), panel_count(w), 1, y};
    p.shares = shares_of(p.panels, p.panel_bytes, n);
    bool done = round_rows(threads, x, n, p.x) && in_shares(threads, product_share, p.shares, &p);
    free(memory);
    return done;
}

/* ------------------------------------------------------------------------------------------------ rows */

/* Rows that are looked up at a time. */
#define ROWS_OF_SHARE 8

struct lookup {
    const struct matrix *w;
    float scale;
    const int32_t *tokens;
    size_t n, panel_bytes;
    float *y;
};

static void lookup_share(void *data, size_t share) {
    const struct lookup *l = data;
    for (size_t i = share * ROWS_OF_SHARE; i < l->n && i < (share + 1) * ROWS_OF_SHARE; i++) {
        const size_t row = (size_t)l->tokens[i];
        float *y = l->y + i * l->w->columns;
        unpack_row(l->w->kind, l->w->panels + row / PANEL_ROWS * l->panel_bytes, (int)(row % PANEL_ROWS),
                   l->w->columns, y);
        for (size_t j = 0; j < l->w->columns; j++)
            y[j] *= l->scale;
    }
}

bool look_up(const struct threads *threads, const struct matrix *w, float scale, const int32_t *tokens, size_t n,
             float *y) {
    struct lookup l = {w, scale, tokens, n, bytes_of_panel(w), y};
    return n == 0 || in_shares(threads, lookup_share, (n + ROWS_OF_SHARE - 1) / ROWS_OF_SHARE, &l);
}

/* ------------------------------------------------------------------------------------------------ feed-forward */

static void gate_row(enum activation activation, const float *gate, const float *up, float *h, size_t n) {
    switch (activation) {
    case SILU:
        for (size_t i = 0; i < n; i++)
            h[i] = gate[i] * sigmoid(gate[i]) * up[i];
        break;
    case GELU_TANH:
        /* (1 + tanh(z)) / 2 is the sigmoid of 2z. */
        for (size_t i = 0; i < n; i++) {
            float g = gate[i];
            h[i] = g * sigmoid(1.5957691216f * (g + 0.044715f * g * g * g)) * up[i];
        }
        break;
    case SWIGLU_OAI:
        for (size_t i = 0; i < n; i++) {
            float g = gate[i] > 7.0f ? 7.0f : gate[i];
            float u = up[i] > 7.0f ? 7.0f : up[i] < -7.0f ? -7.0f : up[i];
            h[i] = g * sigmoid(1.702f * g) * (u + 1.0f);
        }
    }
}

/* One choice of one row. */
struct pair {
    int32_t row;
    float mix;
};

struct forward {
    const struct experts *e;
    struct activations x, hidden;
    const struct pair *pairs;     /* by expert, rows in order */
    const int32_t *which;         /* 0, 1, 2, ... */
    const int32_t *rows;          /* of each pair */
    const size_t *first;          /* first pair of each used expert, and the end */
    const size_t *used;           /* which experts */
    size_t experts, pairs_count, width;
    size_t gate_bytes, up_bytes, down_bytes, panels, out_panels, shares;
    size_t n;
    float *h, *y;
};

static void add_bias(float *out, const float *bias, size_t n, size_t wide) {
    if (bias)
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < wide; j++)
                out[i * PANEL_ROWS + j] += bias[j];
}

/* Bring the begin of weights near that come next and lie elsewhere: the processor's own prefetching begins anew there. */
static void fetch(const uint8_t *at, size_t bytes) {
    for (size_t i = 0; i < bytes && i < FETCH_BYTES; i += 64)
        __builtin_prefetch(at + i);
}

/* Gate and up of some panels of some experts. */
static void hidden_share(void *data, size_t share) {
    const struct forward *f = data;
    const size_t units = f->experts * f->panels, rows = f->e->gate.rows;
    float gate[ROWS_AT_ONCE * PANEL_ROWS], up[ROWS_AT_ONCE * PANEL_ROWS], h[PANEL_ROWS];
    for (size_t unit = units * share / f->shares; unit < units * (share + 1) / f->shares; unit++) {
        const size_t place = unit / f->panels, panel = unit % f->panels, expert = f->used[place];
        const size_t begin = panel * PANEL_ROWS, wide = rows - begin < PANEL_ROWS ? rows - begin : PANEL_ROWS;
        const size_t at = expert * f->panels + panel;
        for (size_t first = f->first[place]; first < f->first[place + 1]; first += ROWS_AT_ONCE) {
            const size_t left = f->first[place + 1] - first, now = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
            multiply(f->e->gate.kind, f->e->gate.panels + at * f->gate_bytes, &f->x, f->rows + first, now, gate);
            multiply(f->e->up.kind, f->e->up.panels + at * f->up_bytes, &f->x, f->rows + first, now, up);
            add_bias(gate, f->e->gate_bias ? f->e->gate_bias + expert * rows + begin : NULL, now, wide);
            add_bias(up, f->e->up_bias ? f->e->up_bias + expert * rows + begin : NULL, now, wide);
            for (size_t i = 0; i < now; i++) {
                gate_row(f->e->activation, gate + i * PANEL_ROWS, up + i * PANEL_ROWS, h, PANEL_ROWS);
                memcpy(f->h + (first + i) * f->width + begin, h, wide * sizeof(float));
            }
        }
    }
}

/* Some panels of the result, over all experts, always in their order. */
static void result_share(void *data, size_t share) {
    const struct forward *f = data;
    const size_t rows = f->e->down.rows;
    float out[ROWS_AT_ONCE * PANEL_ROWS];
    const size_t from = f->out_panels * share / f->shares, to = f->out_panels * (share + 1) / f->shares;
    const size_t left_edge = from * PANEL_ROWS, right_edge = to * PANEL_ROWS < rows ? to * PANEL_ROWS : rows;
    for (size_t i = 0; i < f->n; i++)
        memset(f->y + i * rows + left_edge, 0, (right_edge - left_edge) * sizeof(float));
    for (size_t place = 0; place < f->experts; place++) {
        const size_t expert = f->used[place];
        const uint8_t *weights = f->e->down.panels + expert * f->out_panels * f->down_bytes;
        if (place + 1 < f->experts)
            fetch(f->e->down.panels + (f->used[place + 1] * f->out_panels + from) * f->down_bytes, f->down_bytes);
        for (size_t panel = from; panel < to; panel++) {
            const size_t begin = panel * PANEL_ROWS, wide = rows - begin < PANEL_ROWS ? rows - begin : PANEL_ROWS;
            for (size_t first = f->first[place]; first < f->first[place + 1]; first += ROWS_AT_ONCE) {
                const size_t left = f->first[place + 1] - first, now = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
                multiply(f->e->down.kind, weights + panel * f->down_bytes, &f->hidden, f->which + first, now, out);
                add_bias(out, f->e->down_bias ? f->e->down_bias + expert * rows + begin : NULL, now, wide);
                for (size_t i = 0; i < now; i++) {
                    const struct pair *pair = f->pairs + first + i;
                    float *y = f->y + (size_t)pair->row * rows + begin;
                    for (size_t j = 0; j < wide; j++)
                        y[j] = __builtin_fmaf(pair->mix, out[i * PANEL_ROWS + j], y[j]);
                }
            }
        }
    }
}

/* Sort the choices by expert; returns how many there are. */
static size_t sort_pairs(const struct experts *e, const int32_t *places, const float *mix, size_t n, size_t k,
                         size_t *counts, size_t *used, size_t *first, struct pair *pairs, size_t *experts) {
    memset(counts, 0, e->count * sizeof *counts);
    for (size_t i = 0; i < n * k; i++) {
        const size_t place = places ? (size_t)(uint32_t)places[i] : 0;
        if (place < e->count)
            counts[place]++;
    }
    size_t total = 0;
    *experts = 0;
    for (size_t place = 0; place < e->count; place++)
        if (counts[place]) {
            used[*experts] = place;
            first[(*experts)++] = total;
            const size_t here = counts[place];
            counts[place] = total;
            total += here;
        }
    first[*experts] = total;
    for (size_t i = 0; i < n * k; i++) {
        const size_t place = places ? (size_t)(uint32_t)places[i] : 0;
        if (place < e->count)
            pairs[counts[place]++] = (struct pair){(int32_t)(i / k), mix ? mix[i] : 1.0f};
    }
    return total;
}

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

bool feed_forward(const struct threads *threads, const struct experts *e, const float *x, const int32_t *places,
                  const float *mix, size_t n, size_t k, float *y, int32_t done[2]) {
    if (done)
        done[0] = done[1] = 0;
    if (n == 0)
        return true;
    const size_t most = n * k, width = e->down.columns;
    const size_t sizes[] = {
        aligned(e->count * sizeof(size_t)),       aligned((e->count + 1) * sizeof(size_t)),
        aligned((e->count + 1) * sizeof(size_t)), aligned(most * sizeof(struct pair)),
        aligned(most * sizeof(int32_t)),          aligned(most * sizeof(int32_t)),
        aligned(bytes_for(e->exact, n, e->gate.columns)), aligned(most * width * sizeof(float)),
        aligned(bytes_for(e->exact, most, width)),
    };
    enum { PARTS = sizeof sizes / sizeof *sizes };
    size_t bytes = 0;
    for (int i = 0; i < PARTS; i++)
        bytes += sizes[i];
    uint8_t *memory = malloc(bytes), *parts[PARTS];
    if (!memory)
        return false;
    bytes = 0;
    for (int i = 0; i < PARTS; i++) {
        parts[i] = memory + bytes;
        bytes += sizes[i];
    }
    size_t *used = (size_t *)parts[1], *first = (size_t *)parts[2];
    struct pair *pairs = (struct pair *)parts[3];
    int32_t *rows = (int32_t *)parts[4], *which = (int32_t *)parts[5];
    struct forward f = {.e = e, .x = placed_at(e->exact, parts[6], x, n, e->gate.columns), .pairs = pairs,
                        .which = which, .rows = rows, .first = first, .used = used, .width = width, .n = n, .y = y,
                        .gate_bytes = bytes_of_panel(&e->gate), .up_bytes = bytes_of_panel(&e->up),
                        .down_bytes = bytes_of_panel(&e->down), .panels = panel_count(&e->gate),
                        .out_panels = panel_count(&e->down), .h = (float *)parts[7]};
    f.pairs_count = sort_pairs(e, places, mix, n, k, (size_t *)parts[0], used, first, pairs, &f.experts);
    for (size_t i = 0; i < f.pairs_count; i++) {
        rows[i] = pairs[i].row;
        which[i] = (int32_t)i;
    }
    f.hidden = placed_at(e->exact, parts[8], f.h, f.pairs_count, width);
    bool well = true;
    if (f.pairs_count == 0) {
        memset(y, 0, n * e->down.rows * sizeof(float));
    } else {
        const size_t each = f.pairs_count / f.experts;
        f.shares = shares_of(f.experts * f.panels, f.gate_bytes + f.up_bytes, each);
        well = round_rows(threads, x, n, f.x) && in_shares(threads, hidden_share, f.shares, &f) &&
               round_rows(threads, f.h, f.pairs_count, f.hidden);
        f.shares = shares_of(f.out_panels, f.experts * f.down_bytes, each);
        well = well && in_shares(threads, result_share, f.shares, &f);
    }
    if (done) {
        done[0] = (int32_t)f.experts;
        done[1] = (int32_t)f.pairs_count;
    }
    free(memory);
    return well;
}
