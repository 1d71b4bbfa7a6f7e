#include "attention.h"

#include <math.h>
#include <stdlib.h>

#include "exponential.h"

/* Queries that share a pass over keys and values: their sums stay in registers. */
#define MOST_QUERIES (MOST_ROWS > 4 ? 8 : 4)
/* Vectors of values that are summed up at a time. */
#define WIDE 4
/* Fewer rows than these are put into the cache before another thread would have been woken. */
#define STORE_ALONE 8
/* Multiplications of a share: some 2 us, and ten times that where the cache has to come from memory. */
#define SHARE_WORK (1 << 15)
#define MOST_SHARES 64
/* Floats of all shares' scores together, but enough shares for some threads. */
#define SCORES ((size_t)1 << 20)
#define LEAST_SHARES 8

/* Rows of one slot within one block of positions. */
struct group {
    size_t first, end;
};

/* Rows of one slot. */
struct run {
    size_t first, end;
    size_t units; /* before this run: pieces of work */
};

struct job {
    const struct attention *a;
    const struct attended *c;
    float *rotated; /* [n, heads, key], times the scale */
    const struct group *groups;
    size_t group_count;
    const struct run *runs;
    size_t run_count, units, shares;
    size_t group;    /* query heads that share a key head */
    size_t span;     /* most positions of a unit's scores */
    float *scores;   /* [shares, MOST_QUERIES, span] */
};

static void rotate(const struct attention *a, float *x, const float *cos, const float *sin) {
    const size_t half = a->rotated / 2;
    float *r = x + a->from;
    if (a->adjacent)
        for (size_t i = 0; i < half; i++) {
            float even = r[2 * i], odd = r[2 * i + 1];
            r[2 * i] = even * cos[i] - odd * sin[i];
            r[2 * i + 1] = odd * cos[i] + even * sin[i];
        }
    else
        for (size_t i = 0; i < half; i++) {
            float low = r[i], high = r[half + i];
            r[i] = low * cos[i] - high * sin[i];
            r[half + i] = high * cos[i] + low * sin[i];
        }
}

/* ------------------------------------------------------------------------------------------------ the cache */

static void store_row(const struct job *j, size_t row) {
    const struct attention *a = j->a;
    const struct attended *c = j->c;
    const size_t slot = (size_t)c->slots[row], position = (size_t)c->positions[row];
    const size_t lane = position % BLOCK, wide = value_wide(a);
    const float *cos = c->cos + position * (a->rotated / 2), *sin = c->sin + position * (a->rotated / 2);
    float *q = j->rotated + row * a->heads * a->key;
    memcpy(q, c->q + row * c->q_step, a->heads * a->key * sizeof(float));
    for (size_t h = 0; h < a->heads; h++)
        rotate(a, q + h * a->key, cos, sin);
    for (size_t i = 0; i < a->heads * a->key; i++)
        q[i] *= a->scale;
    for (size_t h = 0; h < a->kv_heads; h++) {
        const float *k = c->k + row * c->k_step + h * a->key;
        const size_t at = slot * a->kv_heads + h;
        float *to = c->keys + (at * a->context + position - lane) * a->key;
        /* The rotated part goes through a copy that is small enough for every head in use. */
        float turned[WIDEST_KEY];
        memcpy(turned, k, a->key * sizeof(float));
        rotate(a, turned, cos, sin);
        for (size_t d = 0; d < a->key; d++)
            to[d * BLOCK + lane] = turned[d];
        if (a->latent) {
            /* Later lanes are multiplied by zero where values are read from keys: they must be numbers. */
            for (size_t d = 0; d < a->key; d++)
                for (size_t l = lane + 1; l < BLOCK; l++)
                    to[d * BLOCK + l] = 0.0f;
        } else {
            float *values = c->values + (at * a->context + position) * wide;
            memcpy(values, c->v + row * c->v_step + h * a->value, a->value * sizeof(float));
        }
    }
}

static void store_share(void *data, size_t share) {
    const struct job *j = data;
    for (size_t g = j->group_count * share / j->shares; g < j->group_count * (share + 1) / j->shares; g++)
        for (size_t row = j->groups[g].first; row < j->groups[g].end; row++)
            store_row(j, row);
}

/* ------------------------------------------------------------------------------------------------ attending */

/* N queries of one key head, which see positions up to different ones. */
struct queries {
    const float *q[MOST_QUERIES];
    float *out[MOST_QUERIES];
    size_t low[MOST_QUERIES], high[MOST_QUERIES]; /* what each sees: [low, high) */
    float sink[MOST_QUERIES];
    const float *keys, *values;
    size_t begin, end; /* what any of them sees, whole blocks */
};

/* scores[i * span + t - begin] = query i times key t. */
INLINE void score(const struct attention *a, const struct queries *s, float *scores, size_t span, const int N) {
    for (size_t t = s->begin; t < s->end; t += BLOCK) {
        const float *keys = s->keys + t * a->key;
        /* With few queries it is the way of the next block from memory that takes the time. */
        if (t + BLOCK < s->end)
            for (size_t i = 0; i < BLOCK * a->key; i += BLOCK)
                __builtin_prefetch(keys + BLOCK * a->key + i);
        F sum[MOST_QUERIES][NV];
        for (int i = 0; i < N; i++)
            for (int h = 0; h < NV; h++)
                sum[i][h] = f_zero();
        for (size_t d = 0; d < a->key; d++)
            for (int h = 0; h < NV; h++) {
                F k = f_load(keys + d * BLOCK + h * LANES);
                for (int i = 0; i < N; i++)
                    sum[i][h] = f_fma(k, f_all(s->q[i][d]), sum[i][h]);
            }
        for (int i = 0; i < N; i++)
            for (int h = 0; h < NV; h++)
                f_store(scores + (size_t)i * span + t - s->begin + h * LANES, sum[i][h]);
    }
}

static float folded(const float *lanes) {
    float eight[8], four[4];
    for (int i = 0; i < 8; i++)
        eight[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; i++)
        four[i] = eight[i] + eight[i + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Scores of one query to weights, zero for what it does not see; returns one over their sum. */
static float soften(const struct attention *a, const struct queries *s, int i, float *w, bool sinks) {
    const size_t count = s->end - s->begin, low = s->low[i] - s->begin, high = s->high[i] - s->begin;
    if (a->cap != 0.0f)
        for (size_t t = 0; t < count; t++)
            w[t] = a->cap * (1.0f - 2.0f / (1.0f + exponential(2.0f * (w[t] / a->cap))));
    for (size_t t = 0; t < low; t++)
        w[t] = -INFINITY;
    for (size_t t = high; t < count; t++)
        w[t] = -INFINITY;
    float most[BLOCK], sum[BLOCK] = {0};
    for (int l = 0; l < BLOCK; l++)
        most[l] = -INFINITY;
    for (size_t t = 0; t < count; t += BLOCK)
        for (int l = 0; l < BLOCK; l++)
            most[l] = w[t + (size_t)l] > most[l] ? w[t + (size_t)l] : most[l];
    float top = sinks ? s->sink[i] : -INFINITY;
    for (int l = 0; l < BLOCK; l++)
        top = most[l] > top ? most[l] : top;
    for (size_t t = 0; t < count; t += BLOCK)
        for (int l = 0; l < BLOCK; l++) {
            float weight = w[t + (size_t)l] == -INFINITY ? 0.0f : exponential(w[t + (size_t)l] - top);
            w[t + (size_t)l] = weight;
            sum[l] += weight;
        }
    return 1.0f / (folded(sum) + (sinks ? exponential(s->sink[i] - top) : 0.0f));
}

/* out[i] = weights of query i times the values. */
INLINE void mix(const struct attention *a, const struct queries *s, const float *w, size_t span, const float *inverse,
                const int N) {
    const size_t wide = value_wide(a);
    size_t begin = s->low[0], end = s->high[0];
    for (int i = 1; i < N; i++) {
        begin = s->low[i] < begin ? s->low[i] : begin;
        end = s->high[i] > end ? s->high[i] : end;
    }
    for (size_t d = 0; d < wide; d += WIDE * LANES) {
        const size_t left = (wide - d) / LANES;
        const int columns = left < WIDE ? (int)left : WIDE;
        F sum[MOST_QUERIES][WIDE];
        for (int i = 0; i < N; i++)
            for (int v = 0; v < WIDE; v++)
                sum[i][v] = f_zero();
        if (columns == WIDE)
            for (size_t t = begin; t < end; t++) {
                const float *values = s->values + t * wide + d;
                F v[WIDE];
                for (int k = 0; k < WIDE; k++)
                    v[k] = f_load(values + k * LANES);
                for (int i = 0; i < N; i++) {
                    F weight = f_all(w[(size_t)i * span + t - s->begin]);
                    for (int k = 0; k < WIDE; k++)
                        sum[i][k] = f_fma(weight, v[k], sum[i][k]);
                }
            }
        else
            for (size_t t = begin; t < end; t++)
                for (int k = 0; k < columns; k++) {
                    F v = f_load(s->values + t * wide + d + (size_t)k * LANES);
                    for (int i = 0; i < N; i++)
                        sum[i][k] = f_fma(f_all(w[(size_t)i * span + t - s->begin]), v, sum[i][k]);
                }
        for (int i = 0; i < N; i++) {
            float out[WIDE * LANES];
            for (int k = 0; k < WIDE; k++)
                f_store(out + k * LANES, f_mul(sum[i][k], f_all(inverse[i])));
            const size_t here = d + WIDE * LANES > a->value ? a->value - d : WIDE * LANES;
            memcpy(s->out[i] + d, out, here * sizeof(float));
        }
    }
}

/* The same, with the first dimensions of the keys as values. */
INLINE void mix_keys(const struct attention *a, const struct queries *s, const float *w, size_t span,
                     const float *inverse, const int N) {
    for (size_t d = 0; d < a->value; d++) {
        F sum[MOST_QUERIES][NV];
        for (int i = 0; i < N; i++)
            for (int h = 0; h < NV; h++)
                sum[i][h] = f_zero();
        for (size_t t = s->begin; t < s->end; t += BLOCK)
            for (int h = 0; h < NV; h++) {
                F k = f_load(s->keys + t * a->key + d * BLOCK + h * LANES);
                for (int i = 0; i < N; i++)
                    sum[i][h] = f_fma(f_load(w + (size_t)i * span + t - s->begin + h * LANES), k, sum[i][h]);
            }
        for (int i = 0; i < N; i++) {
            float lanes[BLOCK];
            for (int h = 0; h < NV; h++)
                f_store(lanes + h * LANES, sum[i][h]);
            s->out[i][d] = folded(lanes) * inverse[i];
        }
    }
}

INLINE void attend_to(const struct attention *a, const struct queries *s, float *scores, size_t span, bool sinks,
                      const int N) {
    float inverse[MOST_QUERIES];
    score(a, s, scores, span, N);
    for (int i = 0; i < N; i++)
        inverse[i] = soften(a, s, i, scores + (size_t)i * span, sinks);
    if (a->latent)
        mix_keys(a, s, scores, span, inverse, N);
    else
        mix(a, s, scores, span, inverse, N);
}

#define VERSION(N)                                                                                                \
    static __attribute__((noinline)) void attend_##N(const struct attention *a, const struct queries *s,          \
                                                     float *scores, size_t span, bool sinks) {                    \
        attend_to(a, s, scores, span, sinks, (N) <= MOST_QUERIES ? (N) : 1);                                      \
    }
VERSION(1)
VERSION(2)
VERSION(3)
VERSION(4)
VERSION(8)

static void (*const VERSIONS[])(const struct attention *, const struct queries *, float *, size_t, bool) = {
    attend_1, attend_2, attend_3, attend_4, attend_8};
static const size_t VERSION_QUERIES[] = {1, 2, 3, 4, 8};

/* Queries of a run are counted row by row, and within a row over the heads of one key head. */
static size_t units_of(const struct job *j, const struct run *r) {
    return j->a->kv_heads * (((r->end - r->first) * j->group + MOST_QUERIES - 1) / MOST_QUERIES);
}

static void attend_unit(const struct job *j, const struct run *r, size_t unit, float *scores) {
    const struct attention *a = j->a;
    const struct attended *c = j->c;
    const size_t per_head = units_of(j, r) / a->kv_heads, head = unit / per_head, queries = (r->end - r->first) * j->group;
    const size_t slot = (size_t)c->slots[r->first], at = slot * a->kv_heads + head;
    size_t next = unit % per_head * MOST_QUERIES;
    const size_t end = next + MOST_QUERIES < queries ? next + MOST_QUERIES : queries;
    while (next < end) {
        int version = 4;
        while (VERSION_QUERIES[version] > end - next || VERSION_QUERIES[version] > MOST_QUERIES)
            version--;
        const size_t now = VERSION_QUERIES[version];
        struct queries s = {.keys = c->keys + at * a->context * a->key,
                            .values = a->latent ? NULL : c->values + at * a->context * value_wide(a),
                            .begin = SIZE_MAX,
                            .end = 0};
        for (size_t i = 0; i < now; i++) {
            const size_t row = r->first + (next + i) / j->group, h = head * j->group + (next + i) % j->group;
            s.q[i] = j->rotated + (row * a->heads + h) * a->key;
            s.out[i] = c->out + (row * a->heads + h) * a->value;
            s.high[i] = (size_t)c->positions[row] + 1;
            s.low[i] = a->window && s.high[i] > a->window ? s.high[i] - a->window : 0;
            s.sink[i] = c->sinks ? c->sinks[h] : 0.0f;
            s.begin = s.low[i] / BLOCK * BLOCK < s.begin ? s.low[i] / BLOCK * BLOCK : s.begin;
            s.end = s.high[i] > s.end ? s.high[i] : s.end;
        }
        s.end = (s.end + BLOCK - 1) / BLOCK * BLOCK;
        VERSIONS[version](a, &s, scores, j->span, c->sinks != NULL);
        next += now;
    }
}

static void attend_share(void *data, size_t share) {
    const struct job *j = data;
    float *scores = j->scores + share * MOST_QUERIES * j->span;
    size_t run = 0;
    for (size_t unit = j->units * share / j->shares; unit < j->units * (share + 1) / j->shares; unit++) {
        while (run + 1 < j->run_count && j->runs[run + 1].units <= unit)
            run++;
        attend_unit(j, &j->runs[run], unit - j->runs[run].units, scores);
    }
}

/* Say which rows belong together; returns the multiplications that there are to do. */
static size_t plan(struct job *j, struct group *groups, struct run *runs) {
    const struct attended *c = j->c;
    size_t work = 0, longest = 0;
    for (size_t row = 0; row < c->n; row++) {
        const bool same = row && c->slots[row] == c->slots[row - 1];
        if (!same || c->positions[row] / BLOCK != c->positions[row - 1] / BLOCK)
            groups[j->group_count++] = (struct group){row, row};
        groups[j->group_count - 1].end = row + 1;
        /* Where positions jump, too: what rows of a run see must fit j->span. */
        if (!same || c->positions[row] != c->positions[row - 1] + 1)
            runs[j->run_count++] = (struct run){row, row, 0};
        runs[j->run_count - 1].end = row + 1;
        size_t seen = (size_t)c->positions[row] + 1;
        if (seen > longest)
            longest = seen;
        if (j->a->window && seen > j->a->window)
            seen = j->a->window;
        work += seen * j->a->heads * (j->a->key + j->a->value);
    }
    for (size_t r = 0; r < j->run_count; r++) {
        runs[r].units = j->units;
        j->units += units_of(j, &runs[r]);
    }
    j->span = (longest + 2 * BLOCK - 1) / BLOCK * BLOCK;
    if (j->a->window) {
        /* Rows that share a pass are at most MOST_QUERIES apart. */
        const size_t wide = (j->a->window + MOST_QUERIES + 3 * BLOCK) / BLOCK * BLOCK;
        j->span = wide < j->span ? wide : j->span;
    }
    return work;
}

bool attend(const struct threads *threads, const struct attention *a, const struct attended *c) {
    if (c->n == 0)
        return true;
    struct job j = {.a = a, .c = c, .group = a->heads / a->kv_heads};
    const size_t rotated = (c->n * a->heads * a->key * sizeof(float) + 63) / 64 * 64;
    float *memory = malloc(rotated + c->n * (sizeof(struct group) + sizeof(struct run)));
    if (!memory)
        return false;
    struct group *groups = (struct group *)((char *)memory + rotated);
    struct run *runs = (struct run *)(groups + c->n);
    j.rotated = memory;
    j.groups = groups;
    j.runs = runs;
    const size_t work = plan(&j, groups, runs);
    j.shares = c->n <= STORE_ALONE ? 1 : j.group_count < 16 ? j.group_count : 16;
    bool done = in_shares(threads, store_share, j.shares, &j);
    size_t most = SCORES / (MOST_QUERIES * j.span);
    most = most > MOST_SHARES ? MOST_SHARES : most < LEAST_SHARES ? LEAST_SHARES : most;
    j.shares = work / SHARE_WORK < most ? work / SHARE_WORK : most;
    j.shares = j.shares > j.units ? j.units : j.shares ? j.shares : 1;
    j.scores = malloc(j.shares * MOST_QUERIES * j.span * sizeof(float));
    done = done && j.scores && in_shares(threads, attend_share, j.shares, &j);
    free(j.scores);
    free(memory);
    return done;
}
