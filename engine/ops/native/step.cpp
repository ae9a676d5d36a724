#include "step.h"

#include <atomic>
#include <stdexcept>

#include "instruction_sets.h"
#include "workers/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t AHEAD = 4;

// Calls body(row) -> "counts" for every unique row, and counted(begin, end, how many of them do) for ranges of rows.
template <class Body, class Counted>
void count_rows(const Batch& batch, const Body& body, const Counted& counted) {
    parallel_ranges(batch.unique, ROWS, [&](std::size_t begin, std::size_t end) {
        std::size_t count = 0;
        for (std::size_t row = begin; row < end; ++row) {
            if (row + AHEAD < end) prefetch(floats(batch.lines[row + AHEAD]));
            count += body(row);
        }
        counted(begin, end, count);
    });
}

GatherJob job_of(const Batch& batch, const Layout& layout, std::size_t lookup) {
    const Batch::LookupSpan& of = batch.lookups.at(lookup);
    GatherJob job{};
    job.lines = batch.views.size() ? batch.views.data() : batch.lines.data();
    job.inverse = batch.inverse.data() + of.begin;
    job.n = of.segment.n;
    job.bags = of.segment.bags;
    job.dim = layout.shape.dim;
    job.row_type = batch.has_wide_lines ? FloatType::float32 : layout.shape.embedding;
    job.pooled = of.segment.pooled;
    return job;
}

}  // namespace

void FirstWrites::add(std::size_t begin, std::size_t end, std::size_t count) {
    if (count == 0) return;
    const std::lock_guard lock(mutex_);
    total_ += count;
    if (!by_table_) return;
    for (std::size_t row = begin; row < end; ++row)
        if (record(batch_.lines[row], layout_.shape)->updates == 1 && batch_.tables[row] < layout_.tables)
            ++by_table_[batch_.tables[row]];
}

void gather(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling, void* out) {
    GatherJob job = job_of(batch, layout, lookup);
    job.mean = pooling.mean;
    job.weights = pooling.weights;
    job.out = out;
    const auto run = loops().gather[static_cast<u32>(pooling.type)];
    parallel_ranges(batch.lookups[lookup].segment.count, ROWS,
                    [&](std::size_t begin, std::size_t end) { run(job, begin, end); });
}

void weights_grad(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling,
                  const void* grads, float* out) {
    WeightsGradJob job{job_of(batch, layout, lookup), grads, out};
    job.lookup.mean = pooling.mean;
    const auto run = loops().weights_grad[static_cast<u32>(pooling.type)];
    parallel_ranges(batch.lookups[lookup].segment.count, ROWS,
                    [&](std::size_t begin, std::size_t end) { run(job, begin, end); });
}

std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step, u64* by_table) {
    FirstWrites first_writes(batch, layout, by_table);
    const auto write = [&](std::size_t row) {
        const u32 last = batch.occurrences[batch.offsets[row + 1] - 1];
        set_embedding(THREAD, batch.lines[row], values + static_cast<std::size_t>(last) * layout.shape.dim,
                      layout.shape);
        Record* lifecycle = record(batch.lines[row], layout.shape);
        const bool first = lifecycle->updates == 0;
        if (lifecycle->updates != 0xFFFFFFFFu) lifecycle->updates += 1;
        lifecycle->step = step;
        return first;
    };
    count_rows(batch, write,
               [&](std::size_t begin, std::size_t end, std::size_t count) { first_writes.add(begin, end, count); });
    return first_writes.total();
}

std::size_t count_new(const Batch& batch, const Layout& layout) {
    std::atomic<std::size_t> total{0};
    const auto is_new = [&](std::size_t row) {
        return !batch.lines[row] || record(batch.lines[row], layout.shape)->updates == 0;
    };
    count_rows(batch, is_new, [&](std::size_t, std::size_t, std::size_t count) { total += count; });
    return total;
}

void count_written(const Batch& batch, const Layout& layout, u64* by_table) {
    for (std::size_t row = 0; row < batch.unique; ++row)
        if (batch.lines[row] && record(batch.lines[row], layout.shape)->updates > 0 &&
            batch.tables[row] < layout.tables)
            ++by_table[batch.tables[row]];
}

void initialise_lines(const Layout& layout, const u32* tables, const u64* keys, const u64* lines, std::size_t n) {
    parallel_ranges(n, ROWS, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) layout.initialise(lines[i], tables[i], keys[i]);
    });
}

void use_wide_lines(Batch& batch, const Layout& layout, const std::vector<std::size_t>& rows) {
    const std::vector<u64> lines = batch.allocate(rows.size(), widened(layout.shape));
    parallel_ranges(rows.size(), ROWS, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            decode_line(THREAD, lines[i], batch.lines[rows[i]], layout.shape);
            batch.lines[rows[i]] = lines[i];
        }
    });
    batch.has_wide_lines = true;
}

void initialise_missing(Batch& batch, const Layout& layout) {
    std::vector<std::size_t> missing;
    for (std::size_t row = 0; row < batch.unique; ++row)
        if (!batch.lines[row]) missing.push_back(row);
    const std::vector<u64> lines = batch.allocate(missing.size(), layout.shape);
    parallel_ranges(missing.size(), ROWS, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            layout.initialise(lines[i], batch.tables[missing[i]], batch.key(missing[i]));
            batch.lines[missing[i]] = lines[i];
        }
    });
}

}  // namespace tierbed
