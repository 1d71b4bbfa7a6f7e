/* The C kernels without onnxruntime, for processors and checks that it does not run on.
 *
 * Reads jobs from standard input, numbers as int32 and arrays one after another, and writes what they come to to
 * standard output (see kernel_jobs.py). Arrays are exactly as long as what is in them, so that reading past their end
 * can be found. Shares of work are done backwards.
 */
#include <stdio.h>
#include <stdlib.h>

#include "attention.h"
#include "work.h"

size_t kvasir_panel_bytes(int type, size_t rows, size_t columns);
void kvasir_pack(int type, const uint8_t *raw, size_t rows, size_t columns, size_t first, size_t end, uint8_t *out);
const char *kvasir_instructions(void);

static void *memory(size_t bytes) {
    void *made = malloc(bytes ? bytes : 1);
    if (!made)
        exit(3);
    return made;
}

static void *take(size_t bytes) {
    void *made = memory(bytes);
    if (fread(made, 1, bytes, stdin) != bytes)
        exit(4);
    return made;
}

static void take_numbers(int32_t *numbers, size_t count) {
    if (fread(numbers, sizeof *numbers, count, stdin) != count)
        exit(4);
}

static float *take_floats(size_t count) { return take(count * sizeof(float)); }

static void give(const void *data, size_t bytes) {
    if (bytes && fwrite(data, 1, bytes, stdout) != bytes)
        exit(5);
}

static bool backwards(const void *self, void (*part)(void *, size_t), size_t count, void *data) {
    (void)self;
    while (count--)
        part(data, count);
    return true;
}
static const struct threads THREADS = {backwards, NULL};

/* A matrix of each of `count` experts, from blocks as the file has them. */
static struct matrix take_matrix(int type, size_t rows, size_t columns, size_t count) {
    const struct kind *kind = find_kind(type);
    if (!kind)
        exit(6);
    const size_t raw_bytes = rows * (columns / (size_t)kind->block) * (size_t)kind->block_bytes;
    const size_t bytes = kvasir_panel_bytes(type, rows, columns), panels = (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    uint8_t *laid = memory(count * bytes);
    for (size_t i = 0; i < count; i++) {
        uint8_t *raw = take(raw_bytes);
        kvasir_pack(type, raw, rows, columns, 0, panels / 2, laid + i * bytes);
        kvasir_pack(type, raw, rows, columns, panels / 2, panels, laid + i * bytes);
        free(raw);
    }
    return (struct matrix){kind, laid, rows, columns};
}

static void do_linear(void) {
    int32_t v[6]; /* type, rows, columns, n, biased, exact */
    take_numbers(v, 6);
    const size_t rows = (size_t)v[1], columns = (size_t)v[2], n = (size_t)v[3];
    struct matrix w = take_matrix(v[0], rows, columns, 1);
    float *bias = v[4] ? take_floats(rows) : NULL, *x = take_floats(n * columns);
    float *y = memory(n * rows * sizeof(float)), *all = memory(rows * columns * sizeof(float));
    int32_t *tokens = memory(rows * sizeof *tokens);
    for (size_t i = 0; i < rows; i++)
        tokens[i] = (int32_t)i;
    if (!linear(&THREADS, &w, bias, x, n, v[5], y) || !look_up(&THREADS, &w, 1.0f, tokens, rows, all))
        exit(7);
    give(w.panels, kvasir_panel_bytes(v[0], rows, columns));
    give(y, n * rows * sizeof(float));
    give(all, rows * columns * sizeof(float));
    free((void *)w.panels);
    free(bias);
    free(x);
    free(y);
    free(all);
    free(tokens);
}

static void do_experts(void) {
    int32_t v[11]; /* types of gate, up and down, columns, width, experts, activation, biased, n, k, exact */
    take_numbers(v, 11);
    const size_t columns = (size_t)v[3], width = (size_t)v[4], count = (size_t)v[5], n = (size_t)v[8], k = (size_t)v[9];
    struct experts e = {.gate = take_matrix(v[0], width, columns, count),
                        .up = take_matrix(v[1], width, columns, count),
                        .down = take_matrix(v[2], columns, width, count),
                        .count = count,
                        .activation = (enum activation)v[6],
                        .exact = v[10]};
    float *biases[3] = {NULL, NULL, NULL};
    if (v[7])
        for (int i = 0; i < 3; i++)
            biases[i] = take_floats(count * (i < 2 ? width : columns));
    e.gate_bias = biases[0];
    e.up_bias = biases[1];
    e.down_bias = biases[2];
    float *x = take_floats(n * columns);
    int32_t *places = take(n * k * sizeof(int32_t)), done[2];
    float *mix = take_floats(n * k), *y = memory(n * columns * sizeof(float));
    if (!feed_forward(&THREADS, &e, x, places, mix, n, k, y, done))
        exit(7);
    give(y, n * columns * sizeof(float));
    give(done, sizeof done);
    free((void *)e.gate.panels);
    free((void *)e.up.panels);
    free((void *)e.down.panels);
    for (int i = 0; i < 3; i++)
        free(biases[i]);
    free(x);
    free(places);
    free(mix);
    free(y);
}

static void do_attention(void) {
    int32_t v[13]; /* the whole numbers of struct attention in their order, has sinks, n */
    take_numbers(v, 13);
    float *numbers = take_floats(2); /* scale, cap */
    const struct attention a = {
        .heads = (size_t)v[0], .kv_heads = (size_t)v[1], .key = (size_t)v[2], .value = (size_t)v[3],
        .slots = (size_t)v[4], .context = (size_t)v[5], .rotated = (size_t)v[6], .from = (size_t)v[7],
        .adjacent = v[8], .latent = v[9], .window = (size_t)v[10], .scale = numbers[0], .cap = numbers[1]};
    const size_t n = (size_t)v[12], table = a.context * (a.rotated / 2);
    const size_t q = a.heads * a.key, k = a.kv_heads * a.key, values = a.latent ? 0 : a.kv_heads * a.value;
    struct attended c = {.n = n, .q_step = q, .k_step = k, .v_step = values};
    float *arrays[] = {take_floats(n * q), take_floats(n * k), take_floats(n * values), take_floats(table),
                       take_floats(table), v[11] ? take_floats(a.heads) : NULL};
    int32_t *slots = take(n * sizeof *slots), *positions = take(n * sizeof *positions);
    c.q = arrays[0];
    c.k = arrays[1];
    c.v = a.latent ? NULL : arrays[2];
    c.cos = arrays[3];
    c.sin = arrays[4];
    c.sinks = arrays[5];
    c.slots = slots;
    c.positions = positions;
    c.keys = take_floats(keys_size(&a));
    c.values = a.latent ? NULL : take_floats(values_size(&a));
    c.out = memory(n * a.heads * a.value * sizeof(float));
    if (!attend(&THREADS, &a, &c))
        exit(7);
    give(c.out, n * a.heads * a.value * sizeof(float));
    give(c.keys, keys_size(&a) * sizeof(float));
    give(c.values, values_size(&a) * sizeof(float));
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    free(slots);
    free(positions);
    free(c.keys);
    free(c.values);
    free(c.out);
    free(numbers);
}

int main(void) {
    fprintf(stderr, "%s\n", kvasir_instructions());
    int job;
    while ((job = getchar()) != EOF)
        switch (job) {
        case 'L': do_linear(); break;
        case 'E': do_experts(); break;
        case 'A': do_attention(); break;
        default: return 2;
        }
    return fflush(stdout) ? 5 : 0;
}
