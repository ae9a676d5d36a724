/* Looks up rows of a serving folder by the C interface: FOLDER EMBEDDING IDS. Prints the version, the table's width, the
 * rows' sum of each half of the ids as 32 bits in hex, and what errors say. Before it ends it waits for a line of input
 * and refreshes, once for each line. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tierbed_serving.h"

static void print_rows(const tierbed_served* served, const int64_t* ids, uint64_t count) {
    const uint32_t dim = tierbed_serving_dim(served);
    const int64_t offsets[3] = {0, (int64_t)count / 2, (int64_t)count};
    const uint32_t tables[2] = {0, 1};
    tierbed_lookup lookup = {.ids = ids, .num_ids = count, .table_ids = tables};
    lookup.offsets = offsets;
    lookup.num_bags = 2;
    lookup.pooling = TIERBED_SUM;
    float* out = malloc(2 * dim * sizeof *out);
    printf("%" PRIu64 " %" PRIu32, tierbed_serving_version(served), dim);
    if (tierbed_serving_lookup(served, &lookup, out)) printf(" %s", tierbed_serving_last_error());
    for (uint32_t i = 0; i < 2 * dim; ++i) {
        uint32_t bits;
        memcpy(&bits, out + i, sizeof bits);
        printf(" %08" PRIx32, bits);
    }
    printf("\n");
    free(out);
}

int main(int argc, char** argv) {
    if (argc < 4) return 2;
    tierbed_served* served = tierbed_serving_open(argv[1], argv[2], 1);
    if (!served) {
        printf("%s\n", tierbed_serving_last_error());
        return 1;
    }
    const uint64_t count = (uint64_t)argc - 3;
    int64_t* ids = malloc(count * sizeof *ids);
    for (uint64_t i = 0; i < count; ++i) ids[i] = strtoll(argv[3 + i], NULL, 10);
    print_rows(served, ids, count);
    const uint32_t table = 9;
    float row[64];
    const tierbed_lookup wrong = {.ids = ids, .num_ids = 1, .table_ids = &table};
    if (tierbed_serving_lookup(served, &wrong, row)) printf("%s\n", tierbed_serving_last_error());
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof line, stdin)) {
        tierbed_served* newer = tierbed_serving_refresh(served);
        if (!newer) {
            printf("%s\n", tierbed_serving_last_error());
        } else {
            tierbed_serving_close(served);
            served = newer;
            print_rows(served, ids, count);
        }
        fflush(stdout);
    }
    free(ids);
    tierbed_serving_close(served);
    return 0;
}
