#include "step.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>

#include "instruction_sets.h"
#include "ops/kernels/pool.h"
#include "ops/kernels/update.h"
#include "thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t PREFETCH_DISTANCE = 4;  // in rows

// Calls body(row) for every unique row. For each range of rows, calls add(begin, end, how many results were true).
template <class Body, class Add>
void count_rows_if(const Batch& batch, const Body& body, const Add& add) {
    parallel_ranges(batch.num_unique, ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        std::size_t count = 0;
        for (std::size_t row = begin; row < end; ++row) {
            if (row + PREFETCH_DISTANCE < end) prefetch(floats(batch.lines[row + PREFETCH_DISTANCE]));
            count += body(row);
        }
        add(begin, end, count);
    });
}

// Gives `rows` new lines owned by the batch, filled by fill(line, row). Sets these lines in `lines` and returns them.
template <class Fill>
std::vector<u64> add_lines(Batch& batch, const std::vector<std::size_t>& rows, const LineShape& shape,
                           Buffer<u64>& lines, const Fill& fill) {
    std::vector<u64> new_lines = batch.allocate_lines(rows.size(), shape);
    parallel_ranges(rows.size(), ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            fill(new_lines[i], rows[i]);
            lines[rows[i]] = new_lines[i];
        }
    });
    return new_lines;
}

GatherJob make_gather_job(const Batch& batch, const Layout& layout, std::size_t lookup) {
    const Batch::LookupSpan& span = batch.lookups.at(lookup);
    GatherJob job{};
    job.lines = batch.lookup_lines.size() ? batch.lookup_lines.data() : batch.lines.data();
    job.inverse = batch.inverse.data() + span.first_position;
    job.n = span.arrays.num_ids;
    job.bags = span.arrays.bags;
    job.dim = layout.shape.dim;
    job.row_type = batch.has_float32_lines ? FloatType::float32 : layout.shape.embedding;
    job.is_pooled = span.arrays.is_pooled;
    return job;
}

// Returns how many bags have about ROWS_PER_TASK ids in total.
std::size_t count_bags_per_task(const LookupArrays& arrays) {
    const std::size_t size = std::max<std::size_t>({arrays.num_ids, arrays.num_bags, 1});
    return std::max<std::size_t>(ROWS_PER_TASK * arrays.num_bags / size, 1);
}

// Counts a batch's first writes. Adds each table's count to first_write_counts [layout.num_tables], unless it is null.
struct FirstWriteCounter {
    const Batch& batch;
    const Layout& layout;
    u64* const first_write_counts;
    std::size_t total = 0;
    std::mutex mutex{};

    // Adds a range of rows, [begin, end), with `count` first writes. Thread-safe.
    void add(std::size_t begin, std::size_t end, std::size_t count) {
        if (count == 0) return;
        const std::lock_guard lock(mutex);
        total += count;
        for (std::size_t row = begin; first_write_counts && row < end; ++row)
            if (row_counters(batch.lines[row], layout.shape)->updates == 1 && batch.tables[row] < layout.num_tables)
                ++first_write_counts[batch.tables[row]];
    }
};

}  // namespace

void gather(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling, void* out) {
    GatherJob job = make_gather_job(batch, layout, lookup);
    job.is_mean = pooling.is_mean;
    job.weights = pooling.weights;
    job.out = out;
    const auto run = loops().gather[static_cast<u32>(pooling.output_type)];
    const LookupArrays& arrays = batch.lookups[lookup].arrays;
    parallel_ranges(arrays.num_bags, count_bags_per_task(arrays),
                    [&](std::size_t begin, std::size_t end) { run(job, begin, end); });
}

void compute_weights_grad(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling,
                          const void* grads, float* out) {
    WeightsGradJob job{make_gather_job(batch, layout, lookup), grads, out};
    job.lookup.is_mean = pooling.is_mean;
    const auto run = loops().compute_weights_grad[static_cast<u32>(pooling.output_type)];
    const LookupArrays& arrays = batch.lookups[lookup].arrays;
    parallel_ranges(arrays.num_bags, count_bags_per_task(arrays),
                    [&](std::size_t begin, std::size_t end) { run(job, begin, end); });
}

std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step, u64* first_write_counts) {
    FirstWriteCounter first_writes{batch, layout, first_write_counts};
    const auto write = [&](std::size_t row) {
        const u32 last = batch.occurrences[batch.occurrence_offsets[row + 1] - 1];
        set_embedding(THREAD, batch.lines[row], values + static_cast<std::size_t>(last) * layout.shape.dim,
                      layout.shape);
        RowCounters* counters = row_counters(batch.lines[row], layout.shape);
        const bool is_first_write = counters->updates == 0;
        if (counters->updates != 0xFFFFFFFFu) counters->updates += 1;
        counters->step = step;
        return is_first_write;
    };
    count_rows_if(batch, write,
                  [&](std::size_t begin, std::size_t end, std::size_t count) { first_writes.add(begin, end, count); });
    return first_writes.total;
}

std::size_t count_new_rows(const Batch& batch, const Layout& layout) {
    std::atomic<std::size_t> total{0};
    const auto is_new = [&](std::size_t row) {
        return !batch.lines[row] || row_counters(batch.lines[row], layout.shape)->updates == 0;
    };
    count_rows_if(batch, is_new, [&](std::size_t, std::size_t, std::size_t count) { total += count; });
    return total;
}

void count_written(const Batch& batch, const Layout& layout, u64* row_counts) {
    for (std::size_t row = 0; row < batch.num_unique; ++row)
        if (batch.lines[row] && row_counters(batch.lines[row], layout.shape)->updates > 0 &&
            batch.tables[row] < layout.num_tables)
            ++row_counts[batch.tables[row]];
}

void use_float32_lines(Batch& batch, const Layout& layout, const std::vector<std::size_t>& rows) {
    add_lines(batch, rows, make_float32_shape(layout.shape), batch.lines,
              [&](u64 line, std::size_t row) { decode_line(THREAD, line, batch.lines[row], layout.shape); });
    batch.has_float32_lines = true;
}

void initialise_missing(Batch& batch, const Layout& layout) {
    std::vector<std::size_t> missing;
    for (std::size_t row = 0; row < batch.num_unique; ++row)
        if (!batch.lines[row]) missing.push_back(row);
    add_lines(batch, missing, layout.shape, batch.lines,
              [&](u64 line, std::size_t row) { layout.initialise(line, batch.tables[row], batch.key(row)); });
}

namespace {

const RuleLoops& find_rule(const std::string& name) {
    const Loops& all = loops();
    for (u32 i = 0; i < all.num_rules; ++i)
        if (name == all.rules[i].name) return all.rules[i];
    throw std::invalid_argument("rule '" + name + "' does not exist");
}

// Returns the factors for occurrences' gradients, or nothing if all are 1.
Buffer<float> compute_occurrence_scales(const Batch& batch, const std::vector<LookupGradient>& grads) {
    bool has_scales = false;
    for (const LookupGradient& grad : grads) has_scales = has_scales || grad.pooling.is_mean || grad.pooling.weights;
    if (!has_scales) return {};
    Buffer<float> position_scales(batch.num_positions);
    for (std::size_t k = 0; k < grads.size(); ++k) {
        const Batch::LookupSpan& lookup = batch.lookups[k];
        const Pooling& pooling = grads[k].pooling;
        const Bags& bags = lookup.arrays.bags;
        parallel_ranges(lookup.arrays.num_bags, ROWS_PER_TASK, [&](std::size_t from, std::size_t to) {
            for (std::size_t bag = from; bag < to; ++bag) {
                const std::size_t begin = bags.begin(bag), end = bags.end(bag);
                const Bag rows{&batch.inverse[lookup.first_position + begin], nullptr, static_cast<u32>(end - begin),
                               true, nullptr};
                const float factor = pooling.is_mean ? 1.0f / static_cast<float>(count_rows(rows)) : 1.0f;
                for (std::size_t i = begin; i < end; ++i)
                    position_scales[lookup.first_position + i] = pooling.weights ? pooling.weights[i] * factor : factor;
            }
        });
    }
    Buffer<float> scales(batch.occurrences.size());
    parallel_ranges(scales.size(), 4096, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) scales[i] = position_scales[batch.occurrences[i]];
    });
    return scales;
}

// An update job's batch and gradients, with the memory that the job refers to.
struct GradientJob {
    std::vector<OutputGradient> outputs;
    Buffer<float> scales;
    UpdateJob job{};

    GradientJob(const Batch& batch, u32 dim, const std::vector<LookupGradient>& grads)
        : scales(compute_occurrence_scales(batch, grads)) {
        for (std::size_t k = 0; k < grads.size(); ++k)
            outputs.push_back({grads[k].rows, static_cast<u32>(batch.lookups[k].first_output_row)});
        job.lines = batch.lines.data();
        job.offsets = batch.occurrence_offsets.data();
        const Buffer<u32>& output_rows = batch.is_pooled ? batch.occurrence_output_rows : batch.occurrences;
        job.output_rows = output_rows.data();
        job.output_rows_end = output_rows.data() + output_rows.size();
        job.scales = scales.size() ? scales.data() : nullptr;
        job.gradients = {outputs.data(), static_cast<u32>(outputs.size()), dim};
        job.type = grads.empty() ? FloatType::float32 : grads[0].pooling.output_type;
    }
};

// Decodes lines of 16-bit floats to float32, a few at a time, in one thread's memory.
class DecodedLines {
public:
    DecodedLines(const Layout& layout, const u64* lines)
        : job_{lines, layout.shape, 0, nullptr, nullptr, layout.seed, 0},
          capacity_(std::clamp<std::size_t>(MEMORY / shape().line_bytes, 4, MAX_LINES)),
          memory_(capacity_ * shape().line_bytes) {
        job_.float32_lines = reinterpret_cast<u64>(memory_.data());
        for (std::size_t i = 0; i < capacity_; ++i) addresses[i] = job_.float32_lines + i * shape().line_bytes;
    }

    LineShape shape() const { return make_float32_shape(job_.shape); }

    // Decodes lines [begin, end) block by block, calls body(first, n) for each block [first, first + n), and writes the
    // block back. Rounds to nearest if `batch` is null, otherwise stochastically: `step` and row seed the noise.
    template <class Body>
    void change(std::size_t begin, std::size_t end, const Batch* batch, u32 step, const Body& body) {
        job_.tables = batch ? batch->tables.data() : nullptr;
        job_.hashes = batch ? batch->hashes.data() : nullptr;
        job_.step = step;
        for (std::size_t first = begin; first < end; first += capacity_) {
            const std::size_t last = std::min(first + capacity_, end);
            for (std::size_t i = last; i < std::min(last + capacity_, end); ++i)
                prefetch_to_write(job_.lines[i], job_.shape.line_bytes);
            loops().decode(job_, first, last);
            body(first, last - first);
            loops().encode(job_, first, last);
        }
    }

private:
    static constexpr std::size_t MAX_LINES = 32, MEMORY = 4096;  // MEMORY is in bytes, and fits in the L1 cache

    CodecJob job_;
    std::size_t capacity_;
    Buffer<u8> memory_;

public:
    u64 addresses[MAX_LINES];  // the decoded lines' addresses
};

std::size_t update_16bit_lines(const Batch& batch, const Layout& layout, const BoundRule& rule, const UpdateJob& stored,
                               std::size_t begin, std::size_t end, float* memory) {
    DecodedLines decoded(layout, stored.lines);
    UpdateJob job = stored;
    job.lines = decoded.addresses;
    job.shape = decoded.shape();
    std::size_t written = 0;
    decoded.change(begin, end, &batch, stored.step, [&](std::size_t first, std::size_t n) {
        job.offsets = stored.offsets + first;
        job.last_steps = stored.last_steps + first;
        written += rule.loops.update(job, 0, n, memory);
    });
    return written;
}

}  // namespace

BoundRule::BoundRule(const Layout& layout, const std::string& name, std::vector<double> numbers)
    : loops(find_rule(name)), hyperparams(std::move(numbers)) {
    const std::size_t count = loops.num_hyperparams;
    bool fits = hyperparams.size() == count;
    if (loops.catch_up) {
        if (fits) hyperparams.push_back(0.0);  // no past rates
        const double num_rates = static_cast<double>(hyperparams.size() - count);
        fits = hyperparams.size() > count && hyperparams[count] * 2 + 1 == num_rates;
    }
    if (!fits) throw std::invalid_argument("rule " + name + " needs " + std::to_string(count) + " hyper-parameters");
    const LineShape& shape = layout.shape;
    if (make_float32_shape(shape).width != shape.dim * (1 + loops.num_element_states) + loops.num_row_states ||
        (shape.num_16bit_states > 0 && shape.num_16bit_states != loops.num_element_states))
        throw std::invalid_argument("the rows are too narrow for the optimizer state of rule " + name);
}

std::size_t update(Batch& batch, const Layout& layout, const std::vector<LookupGradient>& grads, const BoundRule& rule,
                   u32 step, float scale, u64* first_write_counts) {
    const GradientJob gradients(batch, layout.shape.dim, grads);
    UpdateJob job = gradients.job;
    job.scale = scale;
    job.shape = layout.shape;
    job.hyperparams = rule.hyperparams.data();
    job.step = step;
    batch.last_steps = Buffer<u32>(batch.num_unique);
    job.last_steps = batch.last_steps.data();
    FirstWriteCounter first_writes{batch, layout, first_write_counts};
    parallel_ranges(batch.num_unique, ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        Buffer<float> memory(3 * std::size_t{layout.shape.dim});
        const std::size_t written = layout.shape.has_16bit_floats()
                                        ? update_16bit_lines(batch, layout, rule, job, begin, end, memory.data())
                                        : rule.loops.update(job, begin, end, memory.data());
        first_writes.add(begin, end, written);
    });
    return first_writes.total;
}

void compute_squared_norms(const Batch& batch, u32 dim, const std::vector<LookupGradient>& grads, float* out) {
    const GradientJob gradients(batch, dim, grads);
    const auto run = loops().compute_squared_norms[static_cast<u32>(gradients.job.type)];
    parallel_ranges(batch.num_unique, ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        Buffer<float> memory(dim);
        run(gradients.job, begin, end, memory.data(), out);
    });
}

void sum_gradients(const Batch& batch, u32 dim, const std::vector<LookupGradient>& grads, const i64* indices,
                   float* out) {
    const GradientJob gradients(batch, dim, grads);
    const auto run = loops().sum_gradients[static_cast<u32>(gradients.job.type)];
    parallel_ranges(batch.num_unique, ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        Buffer<float> memory(dim);
        run(gradients.job, begin, end, memory.data(), indices, out);
    });
}

void catch_up(const Layout& layout, const u64* lines, std::size_t n, const BoundRule& rule, u32 step) {
    if (!rule.loops.catch_up) return;
    const CatchUpJob job{lines, layout.shape, rule.hyperparams.data(), step};
    parallel_ranges(n, ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        if (!layout.shape.has_16bit_floats()) return rule.loops.catch_up(job, begin, end);
        DecodedLines decoded(layout, lines);
        const CatchUpJob part{decoded.addresses, decoded.shape(), job.hyperparams, step};
        decoded.change(begin, end, nullptr, step, [&](std::size_t, std::size_t n) { rule.loops.catch_up(part, 0, n); });
    });
}

void preview_catch_up(Batch& batch, const Layout& layout, const BoundRule& rule, u32 step) {
    if (!rule.loops.catch_up) return;
    std::vector<std::size_t> stale_rows;
    for (std::size_t row = 0; row < batch.num_unique; ++row) {
        const RowCounters& counters = *row_counters(batch.lines[row], layout.shape);
        if (is_behind(counters, step, rule.loops.misses_unwritten)) stale_rows.push_back(row);
    }
    if (batch.lookup_lines.size() != batch.num_unique)
        batch.lookup_lines = Buffer<u64>(batch.num_unique);  // allocated once, because Python may hold a view
    std::copy_n(batch.lines.data(), batch.num_unique, batch.lookup_lines.data());
    const std::vector<u64> copies =
        add_lines(batch, stale_rows, layout.shape, batch.lookup_lines,
                  [&](u64 line, std::size_t row) { copy_line(THREAD, line, batch.lines[row], layout.shape); });
    catch_up(layout, copies.data(), copies.size(), rule, step);
}

}  // namespace tierbed
