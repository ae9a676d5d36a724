// The full table on a GPU. One open-addressing index is in device memory. Lines are in segments that double in size and
// never move, in device memory or in page-locked host memory; kernels access lines by address.
//
// The rows of a call are distinct, so inserts only race for slots; setting `row` claims a slot. New rows get line
// numbers by their rank among the missing rows. So neither numbers nor values depend on the order of threads.
#include "segments.h"
#include "ops/cuda/items.h"

using namespace tierbed;

namespace {

// counts [3]: lines ever used, erased lines, insertions
enum Count : u32 { USED, ERASED, INSERTIONS };

TIERBED_FN void claim_slot(const IndexView& index, const Slot& slot) {
    u32 position = get_home_slot(index, slot.hash);
    while (atomicCAS(&index.slots[position].value, 0u, slot.value) != 0) position = (position + 1) & index.mask;
    index.slots[position].hash = slot.hash;
    index.slots[position].table = slot.table;
}

}  // namespace

// Looks up the first `count` rows. lines [n] gets the line's address, or 0 if the row is absent. missing [n] gets 1 if
// the row is absent, otherwise 0. If `numbers` is not null, it gets the line number, or -1 if the row is absent.
extern "C" __global__ void find_rows(LineIndex index, const u64* hashes, const u32* tables, const u32* count, u64 n,
                                     u64* lines, i32* missing, i64* numbers) {
    const u64 rows = *count;
    for_each_item<PROBE_LANES>(n, [&](Tile tile, u64 i) {
        const u32 row = i < rows ? find_value(tile, index.view, hashes[i], tables[i]) : 0;
        if (tile.lane != 0) return;
        lines[i] = row ? index.segments.address(row - 1) : 0;
        missing[i] = i < rows && row == 0;
        if (numbers) numbers[i] = static_cast<i64>(row) - 1;
    });
}

// Gives each missing row a line: the most recently erased lines first, then unused lines. prefix_sums [n]: the running
// sum of `missing`. Initialises new lines. If `record_only` is set, only marks new lines as never written. The array
// `*erased` holds erased lines' numbers + 1. After a fault, or without room for all, missing rows just get `zero_line`.
extern "C" __global__ void insert_rows(LineIndex index, const u64* counts, const u32* const* erased, const u64* hashes,
                                       const u32* tables, const u32* count, const i32* prefix_sums, u64 n, u64* lines,
                                       InitialRow initial, const __grid_constant__ SlotHash slot_hash, u32 record_only,
                                       u64 zero_line, u32* faults) {
    const u64 used = counts[USED], free = counts[ERASED];
    const bool fits = used + static_cast<u32>(prefix_sums[n - 1]) <= index.segments.num_lines + free;
    if (*faults || !fits) {
        if (!fits && blockIdx.x == 0 && threadIdx.x == 0) atomicOr(faults, FAULT_NO_ROOM);
        for_each(*count, [&](u64 i) {
            if (lines[i] == 0) lines[i] = zero_line;
        });
        return;
    }
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        if (lines[i]) return;
        synchronise(tile);  // until every lane has read `lines`
        const u64 number = static_cast<u32>(prefix_sums[i]);
        const u64 row = number <= free ? (*erased)[free - number] - 1 : used + number - free - 1;
        const u64 line = index.segments.address(row);
        if (tile.lane == 0) {
            claim_slot(index.view, Slot{hashes[i], tables[i], static_cast<u32>(row + 1)});
            lines[i] = line;
        }
        if (!record_only)
            initialise_line(tile, line, SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
        else if (tile.lane == 0)
            *row_counters(line, SHAPE) = RowCounters{0, 0};
    });
}

// Updates `counts` after `insert_rows`.
extern "C" __global__ void count_inserted(const i32* prefix_sums, u64 n, u64* counts, const u32* faults) {
    if (blockIdx.x != 0 || threadIdx.x != 0 || *faults) return;
    const u64 inserted = static_cast<u32>(prefix_sums[n - 1]);
    const u64 reused = inserted < counts[ERASED] ? inserted : counts[ERASED];
    counts[ERASED] -= reused;
    counts[USED] += inserted - reused;
    counts[INSERTIONS] += inserted;
}

// Adds the first `count` rows' hits and misses to counts [tables, 2]. Row i is a miss if prefix_sums increases there.
extern "C" __global__ void count_lookups(const u32* tables, const u32* count, const i32* prefix_sums,
                                         DeviceCounters hit_counters) {
    CoalescingCounter counter(hit_counters);
    for_each(*count, [&](u64 i) { counter.add(hit_index(tables[i], prefix_sums[i] == (i ? prefix_sums[i - 1] : 0))); });
    counter.flush();
}

// Writes clusters [n]: the number of the nearest free slot before each row. So rows in one run of used slots have the
// same cluster. A row beyond `count`, or a row with line 0, gets a value larger than any slot number.
extern "C" __global__ void find_clusters(LineIndex index, const u64* hashes, const u64* lines, const u32* count, u64 n,
                                         i64* clusters) {
    for_each(n, [&](u64 i) {
        u32 position = get_home_slot(index.view, hashes[i]);
        const bool is_stored = i < *count && lines[i];
        while (is_stored && index.view.slots[position].value) position = (position - 1) & index.view.mask;
        clusters[i] = is_stored ? static_cast<i64>(position) : static_cast<i64>(index.view.mask) + 1;
    });
}

// Erases rows. clusters [n] is the sorted output of `find_clusters`. order [n]: the row of each cluster. One thread
// erases all rows with the same cluster. Writes erased [n]: line number + 1, or 0 if the row was absent.
extern "C" __global__ void erase_rows(LineIndex index, const u64* hashes, const u32* tables, const i64* clusters,
                                      const i64* order, u64 n, u32* erased) {
    for_each(n, [&](u64 first) {
        const i64 cluster = clusters[first];
        if (cluster > index.view.mask) erased[order[first]] = 0;
        if (cluster > index.view.mask || (first > 0 && clusters[first - 1] == cluster)) return;
        for (u64 i = first; i < n && clusters[i] == cluster; ++i)
            erased[order[i]] = erase_row(index.view, hashes[order[i]], tables[order[i]]);
    });
}

// Inserts the rows of an index into a larger, empty one.
extern "C" __global__ void move_rows(const Slot* slots, u64 n, Slot* larger, u32 mask) {
    for_each(n, [&](u64 i) {
        if (slots[i].value) claim_slot(IndexView{larger, mask}, slots[i]);
    });
}

// Lists rows by line number: hashes, tables, lines and update counts [used]. Erased lines are left out.
extern "C" __global__ void list_rows(LineIndex index, u64* hashes, u32* tables, u64* lines, u32* updates) {
    for_each(u64{index.view.mask} + 1, [&](u64 i) {
        const Slot& slot = index.view.slots[i];
        if (slot.value == 0) return;
        const u32 row = slot.value - 1;
        hashes[row] = slot.hash;
        tables[row] = slot.table;
        lines[row] = index.segments.address(row);
        updates[row] = row_counters(lines[row], SHAPE)->updates;
    });
}
