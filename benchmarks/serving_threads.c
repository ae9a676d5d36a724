/* Counts lookups by threads through the C interface: FOLDER EMBEDDING ROWS FACTOR TABLES BATCH. A call pools one id of
 * each table for each sample; ids are FACTOR times the numbers below ROWS. Runs with one thread and with two take turns.
 * Prints the best rates: ids per second with one thread, then with two. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "tierbed_serving.h"

enum { RUNS = 8, POOL = 100 };
static const double SECONDS = 0.5;

static const tierbed_served* served;
static int64_t* pool;
static int64_t* offsets;
static uint32_t* tables;
static uint64_t num_ids;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void look_up(uint64_t number, float* out) {
    tierbed_lookup lookup = {.ids = pool + number % POOL * num_ids, .num_ids = num_ids, .table_ids = tables};
    lookup.offsets = offsets;
    lookup.num_bags = num_ids;
    lookup.pooling = TIERBED_SUM;
    if (tierbed_serving_lookup(served, &lookup, out)) {
        fprintf(stderr, "%s\n", tierbed_serving_last_error());
        exit(1);
    }
}

static void* count(void* first) {
    const double end = now() + SECONDS;
    const uint64_t begin = *(uint64_t*)first;
    float* out = malloc(num_ids * tierbed_serving_dim(served) * sizeof *out);
    uint64_t number = begin;
    while (now() < end) look_up(number++, out);
    free(out);
    *(uint64_t*)first = number - begin;
    return NULL;
}

int main(int argc, char** argv) {
    if (argc < 7) return 2;
    tierbed_served* opened = tierbed_serving_open(argv[1], argv[2], 1);
    if (!opened) {
        fprintf(stderr, "%s\n", tierbed_serving_last_error());
        return 1;
    }
    served = opened;
    const uint64_t rows = strtoull(argv[3], NULL, 10), factor = strtoull(argv[4], NULL, 10);
    const uint64_t batch = strtoull(argv[6], NULL, 10);
    num_ids = batch * strtoull(argv[5], NULL, 10);
    pool = malloc(POOL * num_ids * sizeof *pool);
    offsets = malloc((num_ids + 1) * sizeof *offsets);
    tables = malloc(num_ids * sizeof *tables);
    for (uint64_t i = 0, state = 1; i < POOL * num_ids; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        pool[i] = (int64_t)((state >> 24) % rows * factor);
    }
    for (uint64_t i = 0; i <= num_ids; ++i) offsets[i] = (int64_t)i;
    for (uint64_t i = 0; i < num_ids; ++i) tables[i] = (uint32_t)(i / batch);
    float* out = malloc(num_ids * tierbed_serving_dim(served) * sizeof *out);
    for (uint64_t number = 0; number < POOL; ++number) look_up(number, out); /* maps the pages */
    free(out);
    double best[2] = {0, 0};
    for (int run = 0; run < RUNS; ++run) {
        for (int more = 0; more < 2; ++more) {
            uint64_t counts[2] = {0, POOL / 2};
            pthread_t thread;
            const double begin = now();
            if (more && pthread_create(&thread, NULL, count, &counts[1])) return 1;
            count(&counts[0]);
            if (more) pthread_join(thread, NULL);
            const double rate = (double)((counts[0] + (more ? counts[1] : 0)) * num_ids) / (now() - begin);
            if (rate > best[more]) best[more] = rate;
        }
    }
    printf("%.0f %.0f\n", best[0], best[1]);
    free(tables);
    free(offsets);
    free(pool);
    tierbed_serving_close(opened);
    return 0;
}
