#include "step.h"

#include <atomic>
#include <stdexcept>

#include "../kernels/update.h"
#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t ROWS = 512;  // rows or positions a task
constexpr std::size_t AHEAD = 4;

// Calls body(row) -> "written for the first time" for every unique row; returns how many were.
template <class Body>
std::size_t count_rows(const Batch& batch, const Body& body) {
    std::atomic<std::size_t> total{0};
    parallel_ranges(batch.keys.size(), ROWS, [&](std::size_t begin, std::size_t end) {
        std::size_t count = 0;
        for (std::size_t row = begin; row < end; ++row) {
            if (row + AHEAD < end) prefetch(floats(batch.lines[row + AHEAD]));
            count += body(row);
        }
        total += count;
    });
    return total;
}

template <class Rule>
std::size_t update_with(Batch& batch, const Layout& layout, const float* grads, const std::vector<float>& hyper,
                        u32 step) {
    if (hyper.size() != Rule::HYPERS)
        throw std::invalid_argument("the rule takes " + std::to_string(Rule::HYPERS) + " hyper-parameters");
    if (layout.shape.width != layout.shape.dim * (1 + Rule::STATES))
        throw std::invalid_argument("the line has no room for the rule's state");
    const Rule rule(hyper.data());
    return count_rows(batch, [&](std::size_t row) {
        const u32 begin = batch.offsets[row];
        const RowGradients gradients{grads, &batch.occurrences[begin], batch.offsets[row + 1] - begin};
        return update_row(THREAD, batch.lines[row], layout.shape, gradients, rule, step);
    });
}

}  // namespace

void gather(const Batch& batch, const Layout& layout, std::size_t begin, std::size_t n, float* out) {
    const auto line_at = [&](std::size_t position) {
        const i32 row = batch.inverse[position];
        return row < 0 ? u64{0} : batch.lines[static_cast<std::size_t>(row)];
    };
    parallel_ranges(n, ROWS, [&](std::size_t from, std::size_t to) {
        for (std::size_t i = from; i < to; ++i) {
            if (i + 2 * AHEAD < to) prefetch(floats(line_at(begin + i + 2 * AHEAD)));
            gather_row(THREAD, out + i * layout.shape.dim, line_at(begin + i), layout.shape);
        }
    });
}

std::size_t update(Batch& batch, const Layout& layout, const float* grads, const std::string& rule,
                   const std::vector<float>& hyper, u32 step) {
    if (rule == "sgd") return update_with<Sgd>(batch, layout, grads, hyper, step);
    if (rule == "sgd_momentum") return update_with<SgdMomentum>(batch, layout, grads, hyper, step);
    if (rule == "adagrad") return update_with<Adagrad>(batch, layout, grads, hyper, step);
    if (rule == "adam" || rule == "adamw") return update_with<Adam>(batch, layout, grads, hyper, step);
    throw std::invalid_argument("no rule is called " + rule);
}

std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step) {
    return count_rows(batch, [&](std::size_t row) {
        const u32 last = batch.occurrences[batch.offsets[row + 1] - 1];
        copy_bytes(THREAD, floats(batch.lines[row]), values + static_cast<std::size_t>(last) * layout.shape.dim,
                   layout.shape.dim * 4);
        Record* lifecycle = record(batch.lines[row], layout.shape);
        const bool first = lifecycle->updates == 0;
        if (lifecycle->updates != 0xFFFFFFFFu) lifecycle->updates += 1;
        lifecycle->step = step;
        return first;
    });
}

std::size_t count_new(const Batch& batch, const Layout& layout) {
    return count_rows(batch, [&](std::size_t row) {
        return !batch.lines[row] || record(batch.lines[row], layout.shape)->updates == 0;
    });
}

void initialise_lines(const Layout& layout, const u32* tables, const u64* keys, const u64* lines, std::size_t n) {
    parallel_ranges(n, ROWS, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) layout.initialise(lines[i], tables[i], keys[i]);
    });
}

void initialise_missing(Batch& batch, const Layout& layout) {
    std::vector<std::size_t> missing;
    for (std::size_t row = 0; row < batch.lines.size(); ++row)
        if (!batch.lines[row]) missing.push_back(row);
    const std::vector<u64> lines = batch.allocate(missing.size(), layout.shape);
    parallel_ranges(missing.size(), ROWS, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            layout.initialise(lines[i], batch.tables[missing[i]], batch.keys[missing[i]]);
            batch.lines[missing[i]] = lines[i];
        }
    });
}

}  // namespace tierbed
