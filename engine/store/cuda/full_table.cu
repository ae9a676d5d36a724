// The full table: one open-addressing index in device memory, lines in segments that double in size and never move, in
// device memory or in page-locked memory of the host, which kernels read and write by its address.
//
// Rows of one call are distinct, so inserting them races for slots alone, and a slot is claimed by its `row`. New rows
// are numbered by their rank among the missing: neither numbers nor values depend on the order of threads.
#include "segments.h"
#include "ops/cuda/items.h"

using namespace tierbed;

namespace {

// counts [3]: lines in use or erased, erased ones; what was inserted
enum Count : u32 { USED, ERASED, INSERTIONS };

TIERBED_FN void claim_slot(const IndexView& index, const Slot& slot) {
    u32 at = home_slot(index, slot.hash);
    while (atomicCAS(&index.slots[at].row, 0u, slot.row) != 0) at = (at + 1) & index.mask;
    index.slots[at].hash = slot.hash;
    index.slots[at].table = slot.table;
}

}  // namespace

// lines [n]: where each of the first `count` rows is, 0 where it is absent; missing [n]: 1 where it is absent, else 0;
// numbers [n], unless null: its number, -1 where it is absent
extern "C" __global__ void find_rows(LineIndex index, const u64* hashes, const u32* tables, const u32* count,
                                     u64 n, u64* lines, i32* missing, i64* numbers) {
    const u64 rows = *count;
    for_each_item<PROBE_LANES>(n, [&](Tile tile, u64 i) {
        const u32 row = i < rows ? find_row(tile, index.view, hashes[i], tables[i]) : 0;
        if (tile.lane != 0) return;
        lines[i] = row ? index.memory.address(row - 1) : 0;
        missing[i] = i < rows && row == 0;
        if (numbers) numbers[i] = static_cast<i64>(row) - 1;
    });
}

// ranks [n], the running sum of `missing`: gives each missing row the line of an erased row, the latest first, or one
// behind all lines in use, and initialises it, or with `record_only` says there that it was never written. Where they
// do not all fit, or after a fault, none comes and `nowhere` is the line of each. erased: where the number + 1
// of each is.
extern "C" __global__ void insert_rows(LineIndex index, const u64* counts, const u32* const* erased,
                                       const u64* hashes, const u32* tables, const u32* count, const i32* ranks, u64 n,
                                       u64* lines, InitialRow initial, const __grid_constant__ SlotHash slot_hash,
                                       u32 record_only, u64 nowhere, u32* faults) {
    const u64 used = counts[USED], free = counts[ERASED];
    const bool fits = used + static_cast<u32>(ranks[n - 1]) <= index.memory.room + free;
    if (*faults || !fits) {
        if (!fits && blockIdx.x == 0 && threadIdx.x == 0) atomicOr(faults, NO_ROOM);
        for_each(*count, [&](u64 i) {
            if (lines[i] == 0) lines[i] = nowhere;
        });
        return;
    }
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        if (lines[i]) return;
        synchronise(tile);  // every lane has read `lines`
        const u64 rank = static_cast<u32>(ranks[i]);
        const u64 row = rank <= free ? (*erased)[free - rank] - 1 : used + rank - free - 1;
        const u64 line = index.memory.address(row);
        if (tile.lane == 0) {
            claim_slot(index.view, Slot{hashes[i], tables[i], static_cast<u32>(row + 1)});
            lines[i] = line;
        }
        if (!record_only)
            initialise_line(tile, line, SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
        else if (tile.lane == 0)
            *record(line, SHAPE) = Record{0, 0};
    });
}

// After `insert_rows`.
extern "C" __global__ void count_inserted(const i32* ranks, u64 n, u64* counts, const u32* faults) {
    if (blockIdx.x != 0 || threadIdx.x != 0 || *faults) return;
    const u64 inserted = static_cast<u32>(ranks[n - 1]);
    const u64 again = inserted < counts[ERASED] ? inserted : counts[ERASED];
    counts[ERASED] -= again;
    counts[USED] += inserted - again;
    counts[INSERTIONS] += inserted;
}

// asked [tables, 2]: of the first `count` rows, those that were found are hits, where `ranks` grows is a miss.
extern "C" __global__ void count_asked(const u32* tables, const u32* count, const i32* ranks, Counters asked) {
    Tally counted(asked);
    for_each(*count, [&](u64 i) { counted.add(place_of(tables[i], ranks[i] != (i ? ranks[i - 1] : 0))); });
    counted.end();
}

// clusters [n]: the free slot before the run of slots that a row is in, for the first `count` whose line is not 0;
// for the others more than any.
extern "C" __global__ void find_clusters(LineIndex index, const u64* hashes, const u64* lines,
                                         const u32* count, u64 n, i64* clusters) {
    for_each(n, [&](u64 i) {
        u32 at = home_slot(index.view, hashes[i]);
        const bool is_stored = i < *count && lines[i];
        while (is_stored && index.view.slots[at].row) at = (at - 1) & index.view.mask;
        clusters[i] = is_stored ? static_cast<i64>(at) : static_cast<i64>(index.view.mask) + 1;
    });
}

// clusters [n], sorted, and order [n], the rows in that order: one thread takes all rows of a run out of the index.
// erased [n]: number + 1 of each row, 0 for those that were not in it.
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

// Puts the rows of an index into a larger one, empty before.
extern "C" __global__ void move_rows(const Slot* slots, u64 n, Slot* larger, u32 mask) {
    for_each(n, [&](u64 i) {
        if (slots[i].row) claim_slot(IndexView{larger, mask}, slots[i]);
    });
}

// Every row by its number: hashes, tables and lines [used], and how often it was written; erased rows have no line
extern "C" __global__ void list_rows(LineIndex index, u64* hashes, u32* tables, u64* lines, u32* updates) {
    for_each(u64{index.view.mask} + 1, [&](u64 i) {
        const Slot& slot = index.view.slots[i];
        if (slot.row == 0) return;
        const u32 row = slot.row - 1;
        hashes[row] = slot.hash;
        tables[row] = slot.table;
        lines[row] = index.memory.address(row);
        updates[row] = record(lines[row], SHAPE)->updates;
    });
}
